"""Whole data sets: the shipped one, the published ones' wiring, a user's own, validation splits."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pcdeq.data import Dataset, Split, dataset_names, datasets, formats, load_dataset, split_validation
from pcdeq.errors import DataError, UsageError


def toy_split(*labels: int) -> Split:
    """Images whose only pixel is their own position."""
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    return Split(images, torch.tensor(labels))


# --------------------------------------------------------------------------------------- mnist-mini


def test_mini_is_the_default_and_balanced():
    mini = load_dataset()
    assert (mini.name, mini.mean, mini.std) == ("mnist-mini", (0.0,), (1.0,))
    assert mini.train.images.shape == (4000, 1, 28, 28)
    assert mini.test.images.shape == (1000, 1, 28, 28)
    assert mini.train.labels.bincount().tolist() == [400] * 10
    assert mini.test.labels.bincount().tolist() == [100] * 10
    assert mini.classes == tuple("0123456789")
    # The file is fixed: numbers that were reported on it must stay true.
    assert (mini.train.images.sum(), mini.test.images.sum()) == (104_816_604, 26_450_498)
    assert mini.train.labels[:10].tolist() == [4, 3, 9, 9, 0, 9, 6, 5, 7, 7]


def test_mini_train_and_test_are_disjoint_and_small():
    mini = load_dataset()
    train = {image.numpy().tobytes() for image in mini.train.images}
    test = {image.numpy().tobytes() for image in mini.test.images}
    assert (len(train), len(test), len(train & test)) == (4000, 1000, 0)
    assert datasets.MINI_FILE.stat().st_size < 1_000_000


# ---------------------------------------------------------------------------------------- published


def write_idx(path: Path, *shape: int) -> None:
    """Write zeros, as a hole in the file: it takes no room and no time."""
    with path.open("wb") as file:
        file.write(bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape))
        file.truncate(file.tell() + int(np.prod(shape)))


def write_mnist_like(folder: Path, train: int = 60_000) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", 10_000)):
        write_idx(folder / f"{part}-images-idx3-ubyte", count, 28, 28)
        write_idx(folder / f"{part}-labels-idx1-ubyte", count)


@pytest.mark.parametrize(
    ("name", "folder", "first"),
    [("mnist", "MNIST/raw", "0"), ("fashion-mnist", "FashionMNIST/raw", "T-shirt/top"), ("kmnist", "kmnist", "o")],
)
def test_mnist_likes_of_the_published_size(tmp_path: Path, name, folder, first):
    write_mnist_like(tmp_path / folder)
    data = load_dataset(name, data_dir=tmp_path)
    assert data.describe() == f"{name}: 60,000 training and 10,000 test images, 1 x 28 x 28, 10 classes"
    assert (data.mean, data.std, data.num_classes, data.classes[0]) == ((0.0,), (1.0,), 10, first)


def test_part_of_mnist_is_not_mnist(tmp_path: Path):
    write_mnist_like(tmp_path / "mnist", train=59_999)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte holds .* \(59999, 28, 28\), not \(60000, 28, 28\)"):
        load_dataset("mnist", data_dir=tmp_path)


def test_cifar10_of_the_published_size(tmp_path: Path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in (*formats.CIFAR10_TRAIN, formats.CIFAR10_TEST):
        with (folder / name).open("wb") as file:
            file.truncate(10_000 * 3073)
    monkeypatch.setenv("PCDEQ_DATA", str(tmp_path))
    data = load_dataset("cifar10")
    assert (len(data.train), len(data.test), data.image_shape) == (50_000, 10_000, (3, 32, 32))
    assert (data.mean, data.std) == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    assert (data.classes[0], data.classes[9]) == ("airplane", "truck")


def test_svhn_asks_for_the_published_sizes(tmp_path: Path, monkeypatch):
    asked = []

    def read(path: Path, *, count: int) -> formats.Arrays:
        asked.append((path.name, count))
        return np.zeros((2, 3, 32, 32), np.uint8), np.zeros(2, np.int64)

    monkeypatch.setattr(formats, "read_svhn", read)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (tmp_path / name).touch()
    data = load_dataset("svhn", data_dir=tmp_path)
    assert asked == [("train_32x32.mat", 73_257), ("test_32x32.mat", 26_032)]
    assert (data.mean, data.std) == ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
    assert data.classes == tuple("0123456789")


def test_unknown_names_get_a_hint(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no data set 'CIFAR-10': did you mean 'cifar10'.*mnist-mini, mnist"):
        load_dataset("CIFAR-10")
    with pytest.raises(UsageError, match="no data set 'xyz': give one of"):
        load_dataset("xyz")
    assert dataset_names()[0] == "mnist-mini"


# ----------------------------------------------------------------------------------------- own data


def test_own_npz_has_the_statistics_of_its_training_split(tmp_path: Path):
    generator = np.random.default_rng(0)
    train = generator.integers(0, 256, (30, 5, 4, 3), dtype=np.uint8)
    train[..., 2] = 51
    test = np.full((4, 5, 4, 3), 255, np.uint8)
    labels = np.arange(30) % 3
    np.savez(tmp_path / "own.npz", x_train=train, y_train=labels, x_test=test, y_test=labels[:4])
    data = load_dataset(tmp_path / "own.npz")
    pixels = train.reshape(-1, 3) / 255
    np.testing.assert_allclose(data.mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(data.std[:2], pixels.std(0)[:2], rtol=1e-12)
    assert data.std[2] == 1.0  # a constant channel is not divided by 0
    assert data.describe() == "own: 30 training and 4 test images, 3 x 5 x 4, 3 classes"


def test_own_folder_without_test_split_has_a_fifth_of_each_class_held_out(tmp_path: Path):
    for name, count in (("a", 10), ("b", 20), ("c", 1)):
        (tmp_path / "shapes" / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (3, 2), i).save(tmp_path / "shapes" / name / f"{i:02}.png")
    data = load_dataset(str(tmp_path / "shapes"))
    assert data.train.labels.bincount().tolist() == [8, 16, 1]
    assert data.test.labels.bincount(minlength=3).tolist() == [2, 4, 0]
    assert data.describe() == (
        "shapes: 25 training and 6 test images, 1 x 2 x 3, 3 classes; "
        "no test split was given: 20% of each class held out as one"
    )
    again = load_dataset(str(tmp_path / "shapes"))
    assert torch.equal(data.test.images, again.test.images)
    assert data.mean == (data.train.images.double().mean().item() / 255,)


def test_own_data_too_few_to_hold_any_out_are_refused(tmp_path: Path):
    np.savez(tmp_path / "own.npz", images=np.zeros((4, 2, 2), np.uint8), labels=np.array([0, 1, 0, 1]))
    with pytest.raises(DataError, match=r"own\.npz has no test split, and too few images per class"):
        load_dataset(tmp_path / "own.npz")


# ------------------------------------------------------------------------------- splits and objects


def test_validation_is_stratified_disjoint_and_ordered():
    labels = [0] * 50 + [1] * 30 + [2] * 7 + [3]
    train = toy_split(*labels)
    rest, validation = split_validation(train, 0.2, seed=3)
    assert validation.labels.bincount(minlength=4).tolist() == [10, 6, 1, 0]
    assert rest.labels.bincount().tolist() == [40, 24, 6, 1]
    positions = [split.images.flatten().tolist() for split in (rest, validation)]
    assert sorted(positions[0] + positions[1]) == list(range(88))
    for split, where in zip((rest, validation), positions, strict=True):
        assert where == sorted(where)
        assert split.labels.tolist() == [labels[i] for i in where]


def test_validation_leaves_an_image_of_each_class_for_training():
    rest, validation = split_validation(toy_split(0, 1, 1), 0.99, seed=0)
    assert (rest.labels.tolist(), validation.labels.tolist()) == ([0, 1], [1])


def test_validation_depends_on_the_seed_alone():
    train = toy_split(*([0, 1] * 50))
    first, again, other = (split_validation(train, 0.1, seed)[1].images.flatten().tolist() for seed in (0, 0, 1))
    torch.rand(1)
    assert first == again
    assert first != other


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, 0.001])
def test_useless_fractions_are_refused(fraction):
    with pytest.raises(UsageError, match="fraction"):
        split_validation(toy_split(0, 1, 0, 1), fraction, seed=0)


def test_splits_check_types_and_shapes():
    images, labels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    assert len(Split(images, labels)) == 3
    assert repr(Split(images, labels)) == "Split(3 images, 1 x 2 x 2)"
    for wrong in (images.float(), images[:, 0]):
        with pytest.raises(UsageError, match=r"images must be uint8 \(n, c, h, w\)"):
            Split(wrong, labels)
    for wrong in (labels.int(), labels[:2], labels[:, None]):
        with pytest.raises(UsageError, match=r"labels must be int64 \(3,\)"):
            Split(images, wrong)


def test_dataset_properties():
    split = Split(torch.zeros(3, 2, 5, 7, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    data = Dataset("x", split, split, ("a", "b"), (0.0, 0.0), (1.0, 1.0))
    assert data.image_shape == (2, 5, 7)
    assert data.num_classes == 2
    assert repr(data) == "Dataset(x: 3 training and 3 test images, 2 x 5 x 7, 2 classes)"


def test_import_is_light():
    code = "import pcdeq.data, sys; print(*{'scipy', 'pooch', 'PIL', 'rich'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert run.stdout.split() == []
