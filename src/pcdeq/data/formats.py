"""Readers of the formats in which the data sets are published: IDX, CIFAR-10 binary, SVHN's .mat.

Each returns images as uint8 ``(n, c, h, w)`` and labels as int64 ``(n,)``, counted from 0, and checks
everything that the format lets it check: a file that is cut off, damaged or of another kind ends in a
``DataError`` that names it. None of them unpickles anything.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np

from pcdeq.errors import DataError
from pcdeq.extras import needing

Arrays = tuple[np.ndarray, np.ndarray]

CIFAR10_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST = "test_batch.bin"
CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label byte, then the red, the green and the blue plane
_IDX_UNSIGNED_BYTES = 0x08
_GZIP_MAGIC = b"\x1f\x8b"
_UNPACKING_ERRORS = (OSError, EOFError, zlib.error, tarfile.TarError)


def read_idx(path: Path) -> np.ndarray:
    """Read an array of unsigned bytes from an IDX file, plain or gzipped.

    The header is: two zero bytes, the type code, the number of axes, then the length of each axis as a
    big-endian 32-bit integer.
    """
    raw = _read_bytes(path)
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise _broken(path, "is not an IDX file")
    if raw[2] != _IDX_UNSIGNED_BYTES:
        raise _broken(path, f"holds values of IDX type 0x{raw[2]:02x}, not unsigned bytes (0x08)")
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise _broken(path, "ends within its header")
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        size, expected = len(raw) - start, math.prod(shape)
        raise _broken(path, f"has {size:,} bytes of data where its header, {shape}, says {expected:,}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


def read_idx_split(images_path: Path, labels_path: Path, *, count: int) -> Arrays:
    """Read one split of an MNIST-like data set: ``count`` square grey images and their labels."""
    images, labels = read_idx(images_path), read_idx(labels_path)
    _check_shape(images_path, images, (count, 28, 28))
    _check_shape(labels_path, labels, (count,))
    _check_labels(labels_path, labels, range(10))
    return images[:, None], labels.astype(np.int64)


def read_cifar10(path: Path, *, per_file: int = 10_000) -> tuple[Arrays, Arrays]:
    """Read the training and the test split of CIFAR-10's binary version: its folder or its .tar.gz."""
    raw, records = _read_members(path), {}
    for name in (*CIFAR10_TRAIN, CIFAR10_TEST):
        where = path / name
        if name not in raw:
            raise _broken(path, f"lacks {name}")
        if len(raw[name]) != per_file * CIFAR10_RECORD:
            raise _broken(where, f"has {len(raw[name]):,} bytes, not {per_file:,} records of {CIFAR10_RECORD:,}")
        records[name] = np.frombuffer(raw[name], np.uint8).reshape(per_file, CIFAR10_RECORD)
        _check_labels(where, records[name][:, 0], range(10))
    train = np.concatenate([records[name] for name in CIFAR10_TRAIN])
    return _cut_records(train), _cut_records(records[CIFAR10_TEST])


def read_svhn(path: Path, *, count: int) -> Arrays:
    """Read one split of SVHN's cropped digits: ``X`` (32, 32, 3, n), ``y`` (n, 1) with 10 for digit 0."""
    with needing("train", "reading SVHN's .mat files"):
        from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=("X", "y"))
        images, labels = content["X"], content["y"].ravel()
    except Exception as error:  # scipy has another type of error for each way in which a file can be broken
        raise _broken(path, f"cannot be read as SVHN's X and y ({type(error).__name__}: {error})") from error
    _check_shape(path, images, (32, 32, 3, count))
    _check_shape(path, labels, (count,))
    if images.dtype != np.uint8 or not np.issubdtype(labels.dtype, np.number):
        raise _broken(path, f"holds images and labels of type {images.dtype} and {labels.dtype}, not of uint8")
    _check_labels(path, labels, range(1, 11))
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.astype(np.int64) % 10


def _cut_records(records: np.ndarray) -> Arrays:
    images = np.ascontiguousarray(records[:, 1:])
    return images.reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked where it is gzipped: its first bytes tell, not its name."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == _GZIP_MAGIC else raw
    except _UNPACKING_ERRORS as error:
        raise _broken(path, f"cannot be read ({error})") from error


def _read_members(path: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder, or in a packed archive of one, by its name."""
    if path.is_dir():
        return {file.name: _read_bytes(file) for file in path.glob("*.bin")}
    try:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(path.read_bytes()))) as archive:
            members = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
            return {name: content.read() for name, content in members.items() if content is not None}
    except _UNPACKING_ERRORS as error:
        raise _broken(path, f"cannot be unpacked ({error})") from error


def _check_shape(path: Path, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise _broken(path, f"holds an array of shape {array.shape}, not {shape}")


def _check_labels(path: Path, labels: np.ndarray, allowed: range) -> None:
    wrong = np.flatnonzero((labels < allowed.start) | (labels >= allowed.stop))
    if wrong.size:
        found, expected = labels[wrong[0]], f"{allowed.start} to {allowed.stop - 1}"
        raise _broken(path, f"has the label {found} at record {wrong[0]:,}, where labels are {expected}")


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}; replace the file, or delete it to have it downloaded again")
