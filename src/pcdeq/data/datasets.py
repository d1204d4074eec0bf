"""Whole data sets as uint8 tensors in memory: published ones, the small one shipped here, a user's own."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pcdeq.data import formats, userdata
from pcdeq.data.formats import Arrays
from pcdeq.data.sources import fetch
from pcdeq.errors import DataError, UsageError

HELD_OUT = 0.2  # of a user's data that comes without a test split
MINI_FILE = Path(__file__).with_name("mnist_mini.npz")


def size_in_words(shape: Sequence[int]) -> str:
    """Channels, height and width for people: 1 x 28 x 28."""
    return " x ".join(map(str, shape))


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """Images and their labels.

    >>> import torch
    >>> from pcdeq.data import Split
    >>> Split(torch.zeros(5, 1, 28, 28, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64))
    Split(5 images, 1 x 28 x 28)
    """

    images: Tensor  # uint8 (n, c, h, w)
    labels: Tensor  # int64 (n,)

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            got = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise UsageError(f"images must be uint8 (n, c, h, w); got {got}")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            got = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise UsageError(f"labels must be int64 ({len(self.images)},); got {got}")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self):,} images, {size_in_words(self.images.shape[1:])})"

    def select(self, index: Tensor) -> Split:
        """Return the images at the given positions, copied."""
        return Split(self.images[index], self.labels[index])


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A training and a test split, the names of the classes, and the normalisation that goes with them.

    ``mean`` and ``std`` are per channel, for pixels in [0, 1].

    >>> from pcdeq.data import load_dataset
    >>> load_dataset("mnist-mini")
    Dataset(mnist-mini: 4,000 training and 1,000 test images, 1 x 28 x 28, 10 classes)
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str = ""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def describe(self) -> str:
        """Return one line for people: counts, shape, classes, and how the test split came about if not given.

        >>> from pcdeq.data import load_dataset
        >>> load_dataset("mnist-mini").describe()
        'mnist-mini: 4,000 training and 1,000 test images, 1 x 28 x 28, 10 classes'
        """
        counts = f"{len(self.train):,} training and {len(self.test):,} test images"
        line = f"{self.name}: {counts}, {size_in_words(self.image_shape)}, {self.num_classes} classes"
        return f"{line}; {self.note}" if self.note else line

    def __repr__(self) -> str:
        return f"Dataset({self.describe()})"


_DIGITS = tuple("0123456789")
_CLASSES = {
    "mnist": _DIGITS,
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    "svhn": _DIGITS,
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}
_PIXELS_ONLY = ((0.0,), (1.0,))  # the MNIST-likes are pixels / 255 and no more, as in the paper
_MEAN_AND_STD = {
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def dataset_names() -> tuple[str, ...]:
    """Return the names that ``load_dataset`` knows, the default first.

    >>> from pcdeq.data import dataset_names
    >>> dataset_names()
    ('mnist-mini', 'mnist', 'fashion-mnist', 'kmnist', 'svhn', 'cifar10')
    """
    return ("mnist-mini", *_CLASSES)


def load_dataset(
    name_or_path: str | os.PathLike[str] = "mnist-mini",
    *,
    data_dir: str | os.PathLike[str] | None = None,
    size: str | None = None,
    quiet: bool = False,
) -> Dataset:
    """Load a data set by name, or a user's own from a folder of images or an ``.npz`` file.

    Published data sets are read from ``data_dir`` (or the environment variable ``PCDEQ_DATA``) if their files
    are there, and downloaded once otherwise. ``mnist-mini`` is part of this package. A user's own data come
    as :func:`~pcdeq.data.userdata.read_image_folder` or :func:`~pcdeq.data.userdata.read_npz` describe; their
    mean and standard deviation are those of the training split, and if they have no test split, 20 % of each
    class are held out as one, always the same.

    >>> from pcdeq.data import load_dataset
    >>> mini = load_dataset()
    >>> mini.image_shape, mini.num_classes, mini.train.images.dtype
    ((1, 28, 28), 10, torch.uint8)

    Args:
        size: cut and scale the pictures of a folder to these pixels: ``"32"``, or width and height, ``"32x24"``.
        quiet: show no progress bar.
    """
    name = os.fspath(name_or_path)
    wanted = None if size is None else userdata.parse_size(size)
    if size is not None and (name in dataset_names() or not Path(name).expanduser().is_dir()):
        raise UsageError(f"size {size} is for a folder of pictures, which {name} is not: leave it out")
    if name in _CLASSES:
        train, test = _read_published(name, fetch(name, data_dir=data_dir, quiet=quiet))
        return Dataset(name, _split(train), _split(test), _CLASSES[name], *_MEAN_AND_STD.get(name, _PIXELS_ONLY))
    if name == "mnist-mini":
        train, test, classes = userdata.read_npz(MINI_FILE)
        assert test is not None  # it is our own file
        return Dataset(name, _split(train), _split(test), classes, *_PIXELS_ONLY)
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_own(path, path.resolve().name, userdata.read_image_folder(path, wanted))
    if path.is_file() and path.suffix == ".npz":
        return _load_own(path, path.resolve().stem, userdata.read_npz(path))
    close = difflib.get_close_matches(name.lower(), dataset_names(), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UsageError(
        f"no data set {name!r}: {hint}give one of {', '.join(dataset_names())}, a folder with one folder of "
        "images per class, or an .npz file"
    )


def split_validation(train: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """Split off a part of every class for validation; return what is left and that part.

    Both keep the order of the images. The choice depends only on the labels, ``fraction`` and ``seed``.

    >>> from pcdeq.data import load_dataset, split_validation
    >>> rest, validation = split_validation(load_dataset().train, 0.1, seed=0)
    >>> len(rest), len(validation), validation.labels.bincount().tolist()
    (3600, 400, [40, 40, 40, 40, 40, 40, 40, 40, 40, 40])
    """
    if not 0 < fraction < 1:
        raise UsageError(f"the fraction for validation must be between 0 and 1; got {fraction}")
    generator = torch.Generator().manual_seed(seed)
    labels = train.labels.cpu()
    chosen = torch.zeros(len(train), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        take = min(round(fraction * len(members)), len(members) - 1)
        chosen[members[torch.randperm(len(members), generator=generator)[:take]]] = True
    if not chosen.any():
        raise UsageError(f"a fraction of {fraction} of {len(train)} images leaves no image of any class for validation")
    return train.select(~chosen), train.select(chosen)


def _read_published(name: str, files: tuple[Path, ...]) -> tuple[Arrays, Arrays]:
    if name == "cifar10":
        return formats.read_cifar10(files[0])
    if name == "svhn":
        return formats.read_svhn(files[0], count=73_257), formats.read_svhn(files[1], count=26_032)
    return formats.read_idx_split(*files[:2], count=60_000), formats.read_idx_split(*files[2:], count=10_000)


def _load_own(path: Path, name: str, own: userdata.UserData) -> Dataset:
    train, note = _split(own.train), ""
    if own.test is not None:
        test = _split(own.test)
    else:
        note = f"no test split was given: {HELD_OUT:.0%} of each class held out as one"
        try:
            train, test = split_validation(train, HELD_OUT, seed=0)
        except UsageError as error:
            raise DataError(f"{path} has no test split, and too few images per class to hold one out") from error
    return Dataset(name, train, test, own.classes, *channel_statistics(train.images), note)


def _split(arrays: Arrays) -> Split:
    images, labels = arrays
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel of uint8 images, for pixels in [0, 1].

    >>> import torch
    >>> channel_statistics(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2))
    ((0.5,), (0.5,))
    """
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]).double()
    levels, pixels = torch.arange(256).double(), counts.sum(1)
    mean = counts @ levels / pixels  # a sum of whole numbers below 2^53: exact in any order, as that of the squares
    std = (counts @ levels.square() / pixels - mean.square()).clamp(min=0).sqrt()
    std[std == 0] = 255.0  # a channel that is constant needs no scaling, and must not divide by 0
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())
