"""Readers of the formats in which the data sets are published: IDX, CIFAR-10 binary, SVHN's .mat.

Each returns images as uint8 ``(n, c, h, w)`` and labels as int64 ``(n,)``, counted from 0, and checks
everything that the format lets it check: a file that is cut off, damaged or of another kind ends in a
``DataError`` that names it. None of them unpickles anything, or unpacks more than the data set has.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pcdeq.errors import DataError
from pcdeq.extras import needing
from pcdeq.files import Limited

Arrays = tuple[np.ndarray, np.ndarray]

CIFAR10_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST = "test_batch.bin"
CIFAR10 = (*CIFAR10_TRAIN, CIFAR10_TEST)
CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label byte, then the red, the green and the blue plane
_IDX_UNSIGNED_BYTES = 0x08
_GZIP_MAGIC = b"\x1f\x8b"
_UNPACKING_ERRORS = (OSError, ValueError, EOFError, zlib.error, tarfile.TarError)
_SLACK = 1 << 20  # bytes that a file may have beside its data: headers, a readme, how its arrays are called
_MAT_PACKED = 15
_MAT_NUMBERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "single", "double"}


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read an array of unsigned bytes of this shape from an IDX file, plain or gzipped.

    The header is: two zero bytes, the type code, the number of axes, then the length of each axis as a
    big-endian 32-bit integer.
    """
    with _reading(path), _open(path) as stream:
        start = stream.read(4)
        if len(start) < 4 or start[:2] != b"\0\0":
            raise _broken(path, "is not an IDX file")
        if start[2] != _IDX_UNSIGNED_BYTES:
            raise _broken(path, f"holds values of IDX type 0x{start[2]:02x}, not unsigned bytes (0x08)")
        header = stream.read(4 * start[3])
        if len(header) < 4 * start[3]:
            raise _broken(path, "ends within its header")
        _check_shape(path, struct.unpack(f">{start[3]}I", header), shape)
        raw = stream.read(math.prod(shape) + 1)
    if len(raw) != math.prod(shape):
        size = f"{len(raw):,}" if len(raw) < math.prod(shape) else "more"
        raise _broken(path, f"has {size} bytes of data where its header, {shape}, says {math.prod(shape):,}")
    return np.frombuffer(raw, np.uint8).reshape(shape).copy()


def read_idx_split(images_path: Path, labels_path: Path, *, count: int) -> Arrays:
    """Read one split of an MNIST-like data set: ``count`` square grey images and their labels."""
    images, labels = read_idx(images_path, (count, 28, 28)), read_idx(labels_path, (count,))
    _check_labels(labels_path, labels, range(10))
    return images[:, None], labels.astype(np.int64)


def read_cifar10(path: Path, *, per_file: int = 10_000) -> tuple[Arrays, Arrays]:
    """Read the training and the test split of CIFAR-10's binary version: its folder or its .tar.gz."""
    size, records = per_file * CIFAR10_RECORD, {}
    with _reading(path):
        raw = _read_folder(path, size) if path.is_dir() else _read_archive(path, size)
    for name in CIFAR10:
        if name not in raw:
            raise _broken(path, f"lacks {name}")
        if len(raw[name]) != size:
            raise _broken(path / name, f"does not have the {size:,} bytes of {per_file:,} records")
        records[name] = np.frombuffer(raw[name], np.uint8).reshape(per_file, CIFAR10_RECORD)
        _check_labels(path / name, records[name][:, 0], range(10))
    train = np.concatenate([records[name] for name in CIFAR10_TRAIN])
    return _cut_records(train), _cut_records(records[CIFAR10_TEST])


def read_svhn(path: Path, *, count: int) -> Arrays:
    """Read one split of SVHN's cropped digits: ``X`` (32, 32, 3, n), ``y`` (n, 1) with 10 for digit 0."""
    with needing("train", "reading SVHN's .mat files"):
        from scipy.io import loadmat, whosmat

    try:
        content = _unpack_mat(path, 32 * 32 * 3 * count + 8 * count)
        told = {name: (shape, kind) for name, shape, kind in whosmat(content)}  # scipy takes memory for what is told
        if told["X"] != ((32, 32, 3, count), "uint8"):
            raise ValueError(f"X is {told['X']}, not {(32, 32, 3, count)} of uint8")
        if math.prod(told["y"][0]) != count or told["y"][1] not in _MAT_NUMBERS:
            raise ValueError(f"y is {told['y']}, not {count} numbers")
        content.seek(0)
        arrays = loadmat(content, variable_names=("X", "y"))
    except Exception as error:  # scipy has another type of error for each way in which a file can be broken
        raise _broken(path, f"cannot be read as SVHN's X and y ({type(error).__name__}: {error})") from error
    images, labels = arrays["X"], arrays["y"].ravel()
    _check_labels(path, labels, range(1, 11))
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10


def _unpack_mat(path: Path, size: int) -> io.BytesIO:
    """A file of MATLAB's format 5 without its packing, which holds no more than ``size`` bytes and a little.

    After 128 bytes it is a row of elements: a type, a number of bytes, and those. Type 15 is another element, packed.
    """
    most, plain = size + _SLACK, io.BytesIO()
    with path.open("rb") as file:
        stream = Limited(file, most)  # unpacked it is no smaller
        plain.write(stream.read(128))
        while len(tag := stream.read(8)) == 8:
            kind, length = struct.unpack("<II", tag)
            content = stream.read(length)
            if kind == _MAT_PACKED:
                content, tag = zlib.decompressobj().decompress(content, most + 1 - plain.tell()), b""
            plain.write(tag + content)
            if plain.tell() > most:
                raise ValueError(f"it holds more than the {size:,} bytes of such images and labels")
    plain.seek(0)
    return plain


def _cut_records(records: np.ndarray) -> Arrays:
    images = np.ascontiguousarray(records[:, 1:])
    return images.reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into a `DataError` that names it."""
    try:
        yield
    except _UNPACKING_ERRORS as error:
        raise _broken(path, f"cannot be read ({error})") from error


def _open(path: Path) -> BinaryIO:
    """A file, unpacked as it is read where it is gzipped: its first bytes tell, not its name."""
    stream = path.open("rb")
    packed = stream.read(2) == _GZIP_MAGIC
    stream.seek(0)
    if not packed:
        return stream
    stream.close()
    return gzip.open(path)  # pyright: ignore[reportReturnType]


def _read_folder(path: Path, size: int) -> dict[str, bytes]:
    """The files of CIFAR-10 in a folder; of one that is too long a byte too many."""
    found = {}
    for name in CIFAR10:
        if (path / name).is_file():
            with _open(path / name) as stream:
                found[name] = stream.read(size + 1)
    return found


def _read_archive(path: Path, size: int) -> dict[str, bytes]:
    """The same from a packed archive; what is of another size, which may be gigabytes of holes, is left empty."""
    found = {}
    with _open(path) as stream:
        limited: Any = Limited(stream, len(CIFAR10) * size + _SLACK)
        with tarfile.open(fileobj=limited, mode="r|") as archive:
            for member in archive:
                if (name := Path(member.name).name) in CIFAR10 and member.isfile():
                    content = archive.extractfile(member) if member.size == size else None
                    found[name] = b"" if content is None else content.read()
        while limited.read(_SLACK):  # to the checksum
            pass
    return found


def _check_shape(path: Path, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        raise _broken(path, f"holds an array of shape {found}, not {shape}")


def _check_labels(path: Path, labels: np.ndarray, allowed: range) -> None:
    wrong = np.flatnonzero((labels < allowed.start) | (labels >= allowed.stop))
    if wrong.size:
        found, expected = labels[wrong[0]], f"{allowed.start} to {allowed.stop - 1}"
        raise _broken(path, f"has the label {found} at record {wrong[0]:,}, where labels are {expected}")


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}; replace the file, or delete it to have it downloaded again")
