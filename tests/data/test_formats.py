"""The readers of published formats: exact values of good files, a named error for every kind of bad one."""

from __future__ import annotations

import gzip
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from pcdeq.data import formats
from pcdeq.errors import DataError

COUNT = 7


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def some_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


# ---------------------------------------------------------------------------------------------- IDX


@pytest.fixture
def idx_files(tmp_path: Path) -> tuple[Path, Path]:
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(idx_bytes(some_images(COUNT, 28, 28)))
    labels.write_bytes(idx_bytes(np.arange(COUNT, dtype=np.uint8)))
    return images, labels


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_is_read_plain_and_packed_whatever_its_name(tmp_path: Path, pack):
    array = some_images(3, 4, 5)
    path = tmp_path / "name-without-suffix"
    path.write_bytes(pack(idx_bytes(array)))
    read = formats.read_idx(path, array.shape)
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, array)
    read[:] = 0  # torch wants arrays that it may write to


def test_idx_split_has_one_channel_and_int64_labels(idx_files):
    images, labels = formats.read_idx_split(*idx_files, count=COUNT)
    np.testing.assert_array_equal(images[:, 0], some_images(COUNT, 28, 28))
    assert images.shape == (COUNT, 1, 28, 28)
    assert labels.dtype == np.int64
    assert labels.tolist() == list(range(COUNT))


@pytest.mark.parametrize("size", [0, 3, 11, 15, 16, 500, COUNT * 784 + 15])
def test_idx_cut_off_anywhere_is_found(idx_files, size):
    path = idx_files[0]
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"images .*delete it to have it downloaded again"):
        formats.read_idx_split(*idx_files, count=COUNT)


def test_idx_with_bytes_behind_its_end_is_found(idx_files):
    idx_files[0].write_bytes(idx_files[0].read_bytes() + b"x")
    with pytest.raises(DataError, match=r"has more bytes of data where its header, \(7, 28, 28\), says 5,488"):
        formats.read_idx_split(*idx_files, count=COUNT)


def test_gzip_cut_off_or_damaged_is_found(tmp_path: Path):
    packed = gzip.compress(idx_bytes(some_images(COUNT, 28, 28)))
    damaged = bytearray(packed)
    damaged[-6] ^= 1  # within the CRC
    for content in (packed[: len(packed) // 2], packed[:-4], packed[:5], bytes(damaged)):
        (tmp_path / "file.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"file\.gz cannot be read"):
            formats.read_idx(tmp_path / "file.gz", (COUNT, 28, 28))


def test_idx_of_another_kind_is_found(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(DataError, match="file is not an IDX file"):
        formats.read_idx(path, (1,))
    path.write_bytes(b"\0\0\x0d\x01" + struct.pack(">If", 1, 0.5))
    with pytest.raises(DataError, match="IDX type 0x0d"):
        formats.read_idx(path, (1,))


@pytest.mark.parametrize("shape", [(COUNT - 1, 28, 28), (COUNT, 27, 28), (COUNT, 784)])
def test_idx_images_of_another_shape_are_found(idx_files, shape):
    idx_files[0].write_bytes(idx_bytes(some_images(*shape)))
    with pytest.raises(DataError, match=r"images holds an array of shape .*, not \(7, 28, 28\)"):
        formats.read_idx_split(*idx_files, count=COUNT)


def test_idx_labels_and_images_swapped_are_found(idx_files):
    with pytest.raises(DataError, match=r"labels holds an array of shape \(7,\), not \(7, 28, 28\)"):
        formats.read_idx_split(*reversed(idx_files), count=COUNT)


def test_idx_labels_of_another_number_are_found(idx_files):
    idx_files[1].write_bytes(idx_bytes(np.zeros(COUNT + 1, np.uint8)))
    with pytest.raises(DataError, match=r"labels holds an array of shape \(8,\), not \(7,\)"):
        formats.read_idx_split(*idx_files, count=COUNT)


def test_idx_label_out_of_range_is_found(idx_files):
    idx_files[1].write_bytes(idx_bytes(np.array([0, 1, 2, 3, 10, 5, 6], np.uint8)))
    with pytest.raises(DataError, match="labels has the label 10 at record 4, where labels are 0 to 9"):
        formats.read_idx_split(*idx_files, count=COUNT)


# ----------------------------------------------------------------------------------------- CIFAR-10


@pytest.fixture
def cifar_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for i, name in enumerate((*formats.CIFAR10_TRAIN, formats.CIFAR10_TEST)):
        records = np.full((2, formats.CIFAR10_RECORD), i, np.uint8)
        records[1, 1:] = np.repeat([10, 20, 30], 1024)  # the planes of one red, one green, one blue level
        records[1, 1 + 32] = 99  # channel 0, row 1, column 0
        (folder / name).write_bytes(records.tobytes())
    return folder


def pack(folder: Path) -> Path:
    path = folder.with_name("cifar-10-binary.tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_folder_and_archive(cifar_folder: Path, packed):
    path = pack(cifar_folder) if packed else cifar_folder
    (images, labels), (test_images, test_labels) = formats.read_cifar10(path, per_file=2)
    assert (images.shape, test_images.shape) == ((10, 3, 32, 32), (2, 3, 32, 32))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert test_labels.tolist() == [5, 5]
    assert images[2].min() == images[2].max() == 1
    assert images[1, :, 0, 0].tolist() == [10, 20, 30]
    assert images[1, 0, 1, 0] == 99
    for array in (images, labels, test_images, test_labels):
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_wrong_member_is_named(cifar_folder: Path, packed):
    def read() -> None:
        formats.read_cifar10(pack(cifar_folder) if packed else cifar_folder, per_file=2)

    batch = cifar_folder / "data_batch_3.bin"
    content = batch.read_bytes()
    for wrong in (content[:-1], content[: formats.CIFAR10_RECORD], content + b"x"):
        batch.write_bytes(wrong)
        with pytest.raises(DataError, match=r"data_batch_3\.bin does not have the 6,146 bytes of 2 records"):
            read()
    batch.write_bytes(b"\x0a" + content[1:])
    with pytest.raises(DataError, match=r"data_batch_3\.bin has the label 10 at record 0"):
        read()
    batch.unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_3\.bin"):
        read()


def test_cifar10_archive_cut_off_or_of_another_kind_is_found(cifar_folder: Path):
    path = pack(cifar_folder)
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[-6] ^= 1  # within the CRC
    for wrong in (content[: len(content) // 2], content[:-4], b"", b"<html>404</html>", bytes(damaged)):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz (cannot be read|lacks)"):
            formats.read_cifar10(path, per_file=2)


# --------------------------------------------------------------------------------------------- SVHN


def svhn_content() -> dict[str, np.ndarray]:
    labels = np.array([1, 10, 3, 9, 2, 10, 5], np.uint8)[:, None]
    return {"X": some_images(32, 32, 3, COUNT), "y": labels}


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn_is_transposed_and_ten_means_zero(tmp_path: Path, compressed):
    content = svhn_content()
    savemat(tmp_path / "train.mat", content, do_compression=compressed)
    images, labels = formats.read_svhn(tmp_path / "train.mat", count=COUNT)
    assert labels.tolist() == [1, 0, 3, 9, 2, 0, 5]
    assert labels.dtype == np.int64
    assert images.shape == (COUNT, 3, 32, 32)
    assert images.flags.c_contiguous
    for n, channel, row, column in ((0, 0, 0, 1), (3, 2, 31, 7), (6, 1, 5, 30)):
        assert images[n, channel, row, column] == content["X"][row, column, channel, n]


@pytest.mark.parametrize("compressed", [False, True])
def test_svhn_cut_off_is_found(tmp_path: Path, compressed):
    path = tmp_path / "train.mat"
    savemat(path, svhn_content(), do_compression=compressed)
    content = path.read_bytes()
    for size in (0, 100, 128, 200, len(content) // 2, len(content) - 20):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"train\.mat cannot be read as SVHN's X and y"):
            formats.read_svhn(path, count=COUNT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.array([[1], [2], [0], [4], [5], [6], [7]])}, "has the label 0 at record 2"),
        ({"y": np.array([[1], [2]])}, r"y is \(\(2, 1\), .*\), not 7 numbers"),
        ({"X": np.zeros((32, 32, 3, 6), np.uint8)}, r"not \(32, 32, 3, 7\)"),
        ({"X": np.zeros((32, 32, 3, 7))}, "'double'\\), not .* of uint8"),
        ({"y": np.array(list("1234567"))[:, None]}, "y is .*'char'\\), not 7 numbers"),
    ],
)
def test_svhn_with_other_content_is_found(tmp_path: Path, change, message):
    savemat(tmp_path / "train.mat", svhn_content() | change)
    with pytest.raises(DataError, match=message):
        formats.read_svhn(tmp_path / "train.mat", count=COUNT)


def test_svhn_without_labels_is_found(tmp_path: Path):
    savemat(tmp_path / "train.mat", {"X": svhn_content()["X"]})
    with pytest.raises(DataError, match="KeyError: 'y'"):
        formats.read_svhn(tmp_path / "train.mat", count=COUNT)


def test_missing_files_are_named(tmp_path: Path, cifar_folder: Path):
    shutil.rmtree(cifar_folder)
    cifar_folder.mkdir()
    with pytest.raises(DataError, match=r"cifar-10-batches-bin lacks data_batch_1\.bin"):
        formats.read_cifar10(cifar_folder)
    with pytest.raises(DataError, match="nowhere cannot be read"):
        formats.read_idx(tmp_path / "nowhere", (COUNT,))
