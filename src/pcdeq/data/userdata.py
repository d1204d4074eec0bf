"""Readers of a user's own data: a folder with one folder of images per class, or an ``.npz`` file."""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pcdeq.data.formats import Arrays
from pcdeq.errors import DataError, UsageError
from pcdeq.extras import needing

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
# The arrays of an .npz file, of which no others are read.
NPZ_NAMES = ("x_train", "y_train", "x_test", "y_test", "images", "labels", "classes")
MOST_UNPACKED = 1100  # bytes from one, by the packing that numpy writes; others make gigabytes from a few hundred
_GREY_MODES = frozenset(("1", "L", "LA"))
_DEEP_MODES = frozenset(("I", "I;16", "I;16B", "I;16L", "F"))


Size = tuple[int, int]  # width and height
MOST_TOLD = 100  # of the pictures that cannot be used
MOST_SIZES_TOLD = 3  # for all of which there is one remedy


class UserData(NamedTuple):
    """What was read: uint8 images ``(n, c, h, w)``, int64 labels, class names; perhaps no test split."""

    train: Arrays
    test: Arrays | None
    classes: tuple[str, ...]


def parse_size(text: str) -> Size:
    """Width and height: of ``"32x24"``, or of ``"32"``, a square.

    >>> parse_size("32x24"), parse_size("32")
    ((32, 24), (32, 32))
    """
    given = re.fullmatch(r"([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?", text)
    if given is None:
        raise UsageError(f"size must be pixels like 32, or width and height like 32x24, got {text!r}")
    return int(given[1]), int(given[2] or given[1])


def read_image_folder(root: Path, size: Size | None = None) -> UserData:
    """Read ``root/CLASS/*.png`` (jpg, ...), or ``root/train/CLASS/*`` with or without ``root/test/CLASS/*``.

    The classes are the folder names in alphabetical order. All images must have one size, or get it: with ``size``,
    width and height, each is cut to its middle of these proportions and scaled, as `predict` does. They are grey if
    every one of them is, else RGB; transparency is dropped, rotation tags of cameras are applied. What cannot be used
    is told of all files at once.
    """
    splits = _subfolders(root)
    if "train" not in splits:
        splits = {"train": root}
    if unknown := splits.keys() - {"train", "test"}:
        raise DataError(f"{root / min(unknown)}: beside train/, only test/ is read; move it elsewhere")
    classes = tuple(sorted(_subfolders(splits["train"])))
    if len(classes) < 2:
        count = f"{splits['train']} has {'1 folder' if classes else '0 folders'}"
        raise DataError(f"{count}; it must have one folder of images for each class")
    if stray := sorted(_subfolders(splits["test"]).keys() - set(classes)) if "test" in splits else []:
        raise DataError(f"{splits['test'] / stray[0]}: there is no class of this name in {splits['train']}")
    pictures = _Pictures(size)
    images = [pictures.read(splits[name], classes) for name in ("train", "test") if name in splits]
    pictures.require_good()
    colour = any(pixels.ndim == 3 for split in images for pixels, _ in split)
    train, *test = (_stack(split, colour) for split in images)
    return UserData(train, test[0] if test else None, classes)


def read_npz(path: Path) -> UserData:
    """Read ``x_train``, ``y_train`` and, if present, ``x_test``, ``y_test``; or ``images``, ``labels``.

    Images are whole numbers 0 to 255 of shape ``(n, h, w)``, ``(n, c, h, w)`` or ``(n, h, w, c)``: the last
    where only the last axis is 1 or 3 long. Labels are whole numbers from 0, without gaps. An array
    ``classes`` of strings may name them.
    """
    arrays = _load_arrays(path)
    pairs = [("x_train", "y_train"), ("images", "labels")]
    pair = next((pair for pair in pairs if set(pair) <= arrays.keys()), None)
    if pair is None:
        raise DataError(
            f"{path} must have the arrays x_train and y_train (and x_test and y_test), or images and labels; of "
            f"these it has {sorted(arrays)}"
        )
    train = _npz_split(path, arrays, *pair)
    classes = _npz_classes(path, train[1], arrays.get("classes"))
    if pair[0] == "images" or not {"x_test", "y_test"} & arrays.keys():
        return UserData(train, None, classes)
    test = _npz_split(path, arrays, "x_test", "y_test")
    if test[0].shape[1:] != train[0].shape[1:]:
        raise DataError(f"{path}: x_test has images of shape {test[0].shape[1:]}, x_train of {train[0].shape[1:]}")
    if test[1].max() >= len(classes):
        raise DataError(f"{path}: y_test has the label {test[1].max()}; y_train has only 0 to {len(classes) - 1}")
    return UserData(train, test, classes)


# -------------------------------------------------------------------------------- folders of images

LabelledImages = list[tuple[np.ndarray, int]]  # each (h, w) if grey, else (h, w, 3)


def _subfolders(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}


class _Pictures:
    """Reads pictures of one size, or brings them to it, and remembers those that cannot be used."""

    def __init__(self, size: Size | None) -> None:
        self.size = size
        self.first: tuple[Path, tuple[int, ...]] | None = None
        self.count = 0
        self.bad: list[str] = []
        self.misfits: list[str] = []  # of another size than the first

    def read(self, root: Path, classes: tuple[str, ...]) -> LabelledImages:
        """The images of every class; one may be absent from the test split."""
        found: LabelledImages = []
        before = self.count
        for label, name in enumerate(classes):
            files = sorted(file for file in (root / name).glob("[!.]*") if file.suffix.lower() in IMAGE_SUFFIXES)
            if not files and not before:
                raise DataError(f"{root / name} has no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
            self.count += len(files)
            for file in files:
                if (pixels := self._pixels(file)) is not None:
                    found.append((pixels, label))
        if self.count == before:
            raise DataError(f"{root} has no images in the folders of its classes")
        return found

    def _pixels(self, file: Path) -> np.ndarray | None:
        """(h, w) if grey, else (h, w, 3); None for one that cannot be used."""
        try:
            pixels = _pixels(file, self.size)
        except DataError as error:
            self.bad.append(str(error))
            return None
        self.first = self.first or (file, pixels.shape[:2])
        if pixels.shape[:2] == self.first[1]:
            return pixels
        self.misfits.append(f"{file} is {pixels.shape[1]} x {pixels.shape[0]} pixels")
        return None

    def require_good(self) -> None:
        """Say of all pictures that cannot be used why, and what to do."""
        if not self.bad and not self.misfits:
            return
        hint = ""
        if self.misfits and self.first is not None:
            height, width = self.first[1]
            hint = f" (--size 32 or 32x24 gives all one size; {self.first[0]} is {width} x {height})"
        told = "; ".join([*_some(self.bad, MOST_TOLD, "more"), *_some(self.misfits, MOST_SIZES_TOLD, "of other sizes")])
        count = len(self.bad) + len(self.misfits)
        raise DataError(f"{count:,} of {self.count:,} pictures cannot be used{hint}: {told}")


def _some(reasons: list[str], most: int, others: str) -> list[str]:
    rest = len(reasons) - most
    return [*reasons[:most], f"and {rest:,} {others}"] if rest > 0 else reasons


def open_picture(path: Path) -> Image:
    """A picture file, read whole; a `DataError` says which one cannot be read."""
    with needing("train", "reading pictures"):
        from PIL import Image

    try:
        # Of more pixels than a camera has Pillow only warns.
        warns = warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning)
        with warns, Image.open(path) as picture:
            picture.load()
    except FileNotFoundError as error:
        raise DataError(f"there is no picture {path}") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder: name pictures in it, such as {path / '*.png'}") from error
    except Exception as error:  # Pillow has another type of error for each way in which a file can be broken
        raise DataError(f"{path} cannot be read as a picture ({type(error).__name__}: {error})") from error
    if picture.mode in _DEEP_MODES:  # Pillow would cut these off at 255: black or white
        raise DataError(f"{path} has more than 8 bits per channel (mode {picture.mode}); convert it to 8 bits first")
    return picture


def cut_and_scale(picture: Image, size: Size) -> Image:
    """The middle of a picture, in the proportions of this width and height, scaled to them."""
    from PIL import Image, ImageOps

    return ImageOps.fit(picture, size, Image.Resampling.BICUBIC)


def _pixels(path: Path, size: Size | None) -> np.ndarray:
    image = open_picture(path)
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    upright = upright.convert("L" if upright.mode in _GREY_MODES else "RGB")
    return np.asarray(upright if size is None else cut_and_scale(upright, size))


def _stack(images: LabelledImages, colour: bool) -> Arrays:
    """Put the images into one array, with three channels or one."""
    height, width = images[0][0].shape[:2]
    stacked = np.empty((len(images), 3 if colour else 1, height, width), np.uint8)
    for target, (pixels, _) in zip(stacked, images, strict=True):
        target[...] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return stacked, np.array([label for _, label in images], np.int64)


# --------------------------------------------------------------------------------------------- .npz


def _load_arrays(path: Path) -> Mapping[str, np.ndarray]:
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            most = MOST_UNPACKED * path.stat().st_size
            there = set(archive.namelist())
            return {name: _read_member(archive, f"{name}.npy", most) for name in NPZ_NAMES if f"{name}.npy" in there}
    except Exception as error:  # zipfile and numpy have another type of error for each way a file can be broken
        raise DataError(f"{path} cannot be read as an .npz file of plain arrays ({error})") from error


def _read_member(archive: zipfile.ZipFile, name: str, most: int) -> np.ndarray:
    """One array of an .npz file, if it is as long as its header says: memory is taken for what the header says."""
    member = archive.getinfo(name)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # the others are unpacked in one go
        raise ValueError(f"{name} is packed in a way that numpy does not write")
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(stream)
        size = math.prod(shape) * dtype.itemsize
        if size != member.file_size - stream.tell() or size > most:
            raise ValueError(f"{name} has the header of {shape} x {dtype}, and not the data of it")
        stream.seek(0)
        return np.lib.format.read_array(stream, allow_pickle=False)


def _npz_split(path: Path, arrays: Mapping[str, np.ndarray], *names: str) -> Arrays:
    """The images and labels of these names."""
    for name in names:
        if name not in arrays:
            raise DataError(f"{path} has the arrays {sorted(arrays)}; there is no {name}")
    images, labels = (arrays[name] for name in names)
    return _images(f"{path}: {names[0]}", images), _labels(f"{path}: {names[1]}", labels, len(images))


def _images(what: str, images: np.ndarray) -> np.ndarray:
    if not np.issubdtype(images.dtype, np.integer):
        raise DataError(f"{what} has type {images.dtype}; pixels must be whole numbers 0 to 255 (uint8)")
    if images.ndim not in (3, 4) or images.size == 0:
        raise DataError(f"{what} has shape {images.shape}; it must be (n, h, w), (n, c, h, w) or (n, h, w, c)")
    if images.dtype != np.uint8 and (images.min() < 0 or images.max() > 255):
        raise DataError(f"{what} has values from {images.min()} to {images.max()}; pixels are 0 to 255")
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[3] in (1, 3) and images.shape[1] not in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images, np.uint8)


def _labels(what: str, labels: np.ndarray, count: int) -> np.ndarray:
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape not in ((count,), (count, 1)):
        raise DataError(
            f"{what} is {labels.dtype} of shape {labels.shape}; it must be whole numbers of shape ({count},)"
        )
    if labels.min() < 0:
        raise DataError(f"{what} has the label {labels.min()}; labels count from 0")
    return labels.reshape(count).astype(np.int64)


def _npz_classes(path: Path, labels: np.ndarray, names: np.ndarray | None) -> tuple[str, ...]:
    present = np.unique(labels)
    count = len(present)
    if present[-1] != count - 1:
        missing = int((present != np.arange(count)).argmax())
        raise DataError(f"{path}: no training image has the label {missing}; labels must count from 0 without gaps")
    if count < 2:
        raise DataError(f"{path}: every training image has the label 0; there must be at least two classes")
    if names is None:
        return tuple(str(label) for label in range(count))
    if names.shape != (count,):
        raise DataError(f"{path}: classes has shape {names.shape}; the labels are 0 to {count - 1}")
    return tuple(str(name) for name in names)
