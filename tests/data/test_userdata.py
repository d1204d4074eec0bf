"""A user's own data: folders of images and .npz files, and what is said of those that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pcdeq.data import load_dataset
from pcdeq.data.userdata import open_picture, parse_size, read_image_folder, read_npz
from pcdeq.errors import DataError, UsageError


def save(path: Path, value: int | tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(value, int) else "RGB", size, value).save(path)


@pytest.fixture
def grey_folder(tmp_path: Path) -> Path:
    root = tmp_path / "own"
    for i, name in enumerate(("cat", "ant")):
        for j in range(3):
            save(root / name / f"{j}.png", 10 * i + j)
    return root


def test_folder_of_grey_images(grey_folder: Path):
    (grey_folder / "ant" / "notes.txt").write_text("not an image")
    (grey_folder / ".git").mkdir()
    data = read_image_folder(grey_folder)
    assert data.classes == ("ant", "cat")
    assert data.test is None
    images, labels = data.train
    assert images.shape == (6, 1, 4, 6)  # 6 wide, 4 high
    assert images.dtype == np.uint8
    assert images[:, 0, 0, 0].tolist() == [10, 11, 12, 0, 1, 2]
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_one_colour_image_makes_all_rgb(grey_folder: Path):
    save(grey_folder / "cat" / "9.PNG", (1, 2, 3))
    images, _ = read_image_folder(grey_folder).train
    assert images.shape == (7, 3, 4, 6)
    assert images[0, :, 0, 0].tolist() == [10, 10, 10]
    assert images[-1, :, 3, 5].tolist() == [1, 2, 3]


def test_train_and_test_folders(tmp_path: Path):
    for split, names in (("train", ("a", "b", "c")), ("test", ("a", "c"))):
        for i, name in enumerate(names):
            save(tmp_path / split / name / "0.png", 50 + i)
    save(tmp_path / "test" / "c" / "1.png", (7, 8, 9))
    data = read_image_folder(tmp_path)
    assert data.classes == ("a", "b", "c")
    assert data.test is not None
    assert data.test[1].tolist() == [0, 2, 2]
    assert data.train[0].shape == (3, 3, 4, 6)  # colour in the test split is colour everywhere
    assert data.test[0][2, :, 0, 0].tolist() == [7, 8, 9]


def test_test_folder_may_lack_classes(tmp_path: Path):
    for name in ("train/a", "train/b", "test/b"):
        save(tmp_path / name / "0.png", 0)
    data = read_image_folder(tmp_path)
    assert data.test is not None
    assert data.test[1].tolist() == [1]


def test_camera_rotation_is_applied(grey_folder: Path):
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(6, 4))
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    image.save(grey_folder / "ant" / "a.png", exif=exif)
    images, _ = read_image_folder(grey_folder).train
    np.testing.assert_array_equal(images[3, 0], np.rot90(np.arange(24).reshape(6, 4), -1))


def test_images_of_another_size_are_named(grey_folder: Path):
    save(grey_folder / "cat" / "1.png", 0, size=(5, 4))
    with pytest.raises(DataError, match=r"\(--size 32 .*; .*ant/0\.png is 6 x 4\): .*cat/1\.png is 5 x 4 pixels$"):
        read_image_folder(grey_folder)


def test_many_sizes_are_one_thing_to_mend(grey_folder: Path):
    for number in range(7, 20):
        save(grey_folder / "cat" / f"{number}.png", 0, size=(number, 4))
    with pytest.raises(DataError, match=r"^13 of 19 pictures .*\(--size 32 .* and 10 of other sizes$") as caught:
        read_image_folder(grey_folder)
    assert len(str(caught.value)) < 600


def test_a_folder_in_place_of_a_picture_says_so(tmp_path: Path):
    with pytest.raises(DataError, match=r" is a folder: name pictures in it, such as .*/\*\.png$"):
        open_picture(tmp_path)


def test_all_bad_files_are_told_at_once(grey_folder: Path):
    save(grey_folder / "cat" / "1.png", 0, size=(5, 4))
    (grey_folder / "ant" / "1.png").write_bytes(b"no image")
    Image.fromarray(np.full((4, 6), 60_000, np.uint16)).save(grey_folder / "cat" / "2.png")
    with pytest.raises(DataError, match=r"^3 of 6 pictures cannot be used \(--size 32 ") as caught:
        read_image_folder(grey_folder)
    for part in ("ant/1.png cannot be read", "cat/1.png is 5 x 4", "cat/2.png has more than 8 bits"):
        assert part in str(caught.value)


def test_few_of_very_many_are_told(grey_folder: Path):
    for number in range(120):
        (grey_folder / "cat" / f"bad{number}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"^120 of 126 pictures cannot be used: .*; and 20 more$"):
        read_image_folder(grey_folder)


@pytest.mark.parametrize(("size", "shape"), [("8", (8, 8)), ("10x4", (4, 10))])
def test_pictures_of_any_size_are_cut_and_scaled(grey_folder: Path, size, shape):
    striped = np.zeros((40, 80), np.uint8)
    striped[:, 20:60] = 200  # the middle square
    Image.fromarray(striped).save(grey_folder / "cat" / "1.png")
    images = load_dataset(grey_folder, size=size)
    assert images.image_shape == (1, *shape)
    pixels = read_image_folder(grey_folder, parse_size(size)).train[0][4, 0]
    assert (pixels[2:6, 2:6] == 200).all() if size == "8" else {0, 200} <= set(pixels.ravel().tolist())


@pytest.mark.parametrize("size", ["", "0", "x", "32x", "32x0", "-3", "32 x 32", "99999"])
def test_sizes_that_are_none(grey_folder: Path, size):
    with pytest.raises(UsageError, match="size must be pixels like 32"):
        load_dataset(grey_folder, size=size)


@pytest.mark.parametrize("name", ["mnist-mini", "mnist", "nothing.npz"])
def test_a_size_is_for_folders(name):
    with pytest.raises(UsageError, match="for a folder of pictures"):
        load_dataset(name, size="32")


def test_test_images_of_another_size_are_named(tmp_path: Path):
    for split, width in (("train", 6), ("test", 7)):
        for name in ("a", "b"):
            save(tmp_path / split / name / "0.png", 0, size=(width, 4))
    with pytest.raises(DataError, match=r"test/a/0\.png is 7 x 4 pixels"):
        read_image_folder(tmp_path)


def test_cut_off_and_false_images_are_named(grey_folder: Path):
    path = grey_folder / "cat" / "2.png"
    content = path.read_bytes()
    for wrong in (content[:40], b"", b"no image"):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=r"cat/2\.png cannot be read as a picture"):
            read_image_folder(grey_folder)


def test_deep_images_are_refused_not_cut_off(grey_folder: Path):
    Image.fromarray(np.full((4, 6), 60_000, np.uint16)).save(grey_folder / "cat" / "2.png")
    with pytest.raises(DataError, match=r"cat/2\.png has more than 8 bits per channel"):
        read_image_folder(grey_folder)


def test_folders_without_classes_or_images_are_named(tmp_path: Path, grey_folder: Path):
    with pytest.raises(DataError, match="has 1 folder; it must have one folder"):
        read_image_folder(tmp_path)
    (grey_folder / "bee").mkdir()
    with pytest.raises(DataError, match="own/bee has no images"):
        read_image_folder(grey_folder)


def test_stray_test_class_and_stray_split_are_named(tmp_path: Path):
    for name in ("train/a", "train/b", "test/a", "test/z"):
        save(tmp_path / name / "0.png", 0)
    with pytest.raises(DataError, match="test/z: there is no class of this name"):
        read_image_folder(tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="val: beside train/, only test/ is read"):
        read_image_folder(tmp_path)


# --------------------------------------------------------------------------------------------- .npz

PIXELS = np.arange(4 * 5 * 6 * 3, dtype=np.uint16).reshape(4, 5, 6, 3).astype(np.uint8)
LABELS = np.array([0, 1, 2, 1])


def write(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return tmp_path / "own.npz"


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (PIXELS, PIXELS.transpose(0, 3, 1, 2)),
        (PIXELS.transpose(0, 3, 1, 2), PIXELS.transpose(0, 3, 1, 2)),
        (PIXELS[..., 0], PIXELS[..., 0][:, None]),
        (PIXELS[..., :1], PIXELS[..., 0][:, None]),
        (PIXELS[..., :2].transpose(0, 3, 1, 2), PIXELS[..., :2].transpose(0, 3, 1, 2)),
        (PIXELS.astype(np.int64), PIXELS.transpose(0, 3, 1, 2)),
        (PIXELS[:, :3], PIXELS[:, :3]),  # 3 at both places: channels come first
    ],
)
def test_npz_layouts(npz: Path, images, expected):
    data = read_npz(write(npz, images=images, labels=LABELS[:, None]))
    np.testing.assert_array_equal(data.train[0], expected)
    assert data.train[0].dtype == np.uint8
    assert data.train[1].tolist() == [0, 1, 2, 1]
    assert data.classes == ("0", "1", "2")
    assert data.test is None


def test_npz_with_test_split_and_names(npz: Path):
    data = read_npz(
        write(
            npz,
            x_train=PIXELS,
            y_train=LABELS,
            x_test=PIXELS[:2],
            y_test=np.array([2, 0], np.uint8),
            classes=np.array(["a", "b", "c"]),
        )
    )
    assert data.classes == ("a", "b", "c")
    assert data.test is not None
    assert data.test[0].shape == (2, 3, 5, 6)
    assert data.test[1].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": PIXELS / 255}, "x_train has type float64; pixels must be whole numbers"),
        ({"x_train": PIXELS.astype(np.int64) + 1}, "x_train has values from 1 to 256"),
        ({"x_train": PIXELS.reshape(4, -1)}, r"x_train has shape \(4, 90\)"),
        ({"y_train": LABELS[:3]}, r"y_train is int64 of shape \(3,\); it must be .* of shape \(4,\)"),
        ({"y_train": LABELS / 1}, "y_train is float64"),
        ({"y_train": LABELS - 1}, "y_train has the label -1; labels count from 0"),
        ({"y_train": LABELS + 1}, "no training image has the label 0"),
        ({"y_train": np.array([0, 1, 2**40, 1])}, "no training image has the label 2"),
        ({"y_train": 0 * LABELS}, "at least two classes"),
        ({"x_test": PIXELS[:, :4], "y_test": LABELS}, "x_test has images of shape"),
        ({"x_test": PIXELS, "y_test": LABELS + 1}, "y_test has the label 3; y_train has only 0 to 2"),
        ({"x_test": PIXELS}, "there is no y_test"),
        ({"y_test": LABELS}, "there is no x_test"),
        ({"classes": np.array(["a", "b"])}, r"classes has shape \(2,\); the labels are 0 to 2"),
    ],
)
def test_npz_that_does_not_fit_is_found(npz: Path, change, message):
    arrays = {"x_train": PIXELS, "y_train": LABELS} | change
    with pytest.raises(DataError, match=rf"own\.npz.*{message}"):
        read_npz(write(npz, **arrays))


def test_npz_without_the_arrays_is_found(npz: Path):
    with pytest.raises(DataError, match=r"of these it has \['images'\]"):
        read_npz(write(npz, a=PIXELS, images=PIXELS))


def test_npz_never_unpickles(npz: Path):
    write(npz, images=np.array([{"a": 1}], dtype=object), labels=LABELS)
    with pytest.raises(DataError, match=r"cannot be read as an \.npz file of plain arrays"):
        read_npz(npz)


def test_npz_cut_off_or_false_is_found(npz: Path):
    content = write(npz, images=PIXELS, labels=LABELS).read_bytes()
    damaged = bytearray(content)
    damaged[300] ^= 1
    for wrong in (content[:-10], content[: len(content) // 2], b"", b"no archive", bytes(damaged)):
        npz.write_bytes(wrong)
        with pytest.raises(DataError, match=r"own\.npz cannot be read as an \.npz file"):
            read_npz(npz)
    np.save(npz.with_suffix(".npy"), PIXELS)
    npz.with_suffix(".npy").rename(npz)
    with pytest.raises(DataError, match=r"own\.npz cannot be read as an \.npz file"):
        read_npz(npz)
