"""Batches: what they hold, in which order, for whom; augmentation against a slow reference."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from pcdeq.data import Batches, Split
from pcdeq.data.batches import crop_and_flip
from pcdeq.errors import UsageError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def numbered(count: int) -> Split:
    """Images of one pixel with their own positions as pixel and label."""
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1)
    return Split(images, torch.arange(count))


def coloured(count: int, size: int = 6) -> Split:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, size, size + 1), dtype=torch.uint8, generator=generator)
    return Split(images, torch.arange(count))


def orders(batches: Batches) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


def plain(split: Split, batch_size: int, **options) -> Batches:
    channels = split.images.shape[1]
    return Batches(split, batch_size, mean=(0.0,) * channels, std=(1.0,) * channels, **options)


# ---------------------------------------------------------------------------------------- normalising


def test_mean_0_std_1_is_exactly_pixels_over_255():
    ((images, _),) = plain(numbered(256), 256)
    assert images.dtype == torch.float32
    assert torch.equal(images.flatten(), torch.arange(256, dtype=torch.float32) / 255)


@pytest.mark.parametrize("channels_last", [False, True])
def test_mean_and_std_are_applied_per_channel(channels_last):
    split = coloured(5)
    ((images, _),) = Batches(split, 8, mean=MEAN, std=STD, channels_last=channels_last)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    assert torch.equal(images, (split.images / 255 - mean) / std)
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert images.is_contiguous() != channels_last


def test_float64_as_default_changes_nothing():
    torch.set_default_dtype(torch.float64)
    try:
        ((images, _),) = Batches(coloured(5), 8, mean=MEAN, std=STD)
    finally:
        torch.set_default_dtype(torch.float32)
    assert images.dtype == torch.float32


# ---------------------------------------------------------------------------------------------- order


def test_without_shuffle_the_order_is_kept_and_the_last_batch_too():
    batches = plain(numbered(10), 4)
    assert len(batches) == 3
    assert orders(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_labels_go_with_their_images():
    for images, labels in plain(numbered(100), 7, shuffle=True, seed=5):
        assert (images.flatten() * 255).round().long().tolist() == labels.tolist()


def test_order_is_a_pure_function_of_seed_and_epoch():
    split = numbered(50)
    batches = plain(split, 8, shuffle=True, seed=1)
    epochs = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        epochs.append(orders(batches))
        assert orders(batches) == epochs[epoch]  # a second pass is the same pass
        assert sorted(chain(*epochs[epoch])) == list(range(50))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    torch.manual_seed(123)  # the global generator plays no part
    assert orders(plain(split, 8, shuffle=True, seed=1, epoch=2)) == epochs[2]
    # (seed, epoch) is not seed + epoch
    assert orders(plain(split, 8, shuffle=True, seed=2, epoch=1)) != epochs[2]
    # The order is the same for every batch size.
    assert [*chain(*orders(plain(split, 13, shuffle=True, seed=1)))] == [*chain(*epochs[0])]


def test_order_does_not_change_between_versions():
    assert orders(plain(numbered(8), 8, shuffle=True, seed=0, epoch=0)) == [[4, 1, 3, 5, 0, 2, 6, 7]]


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_partition_each_global_batch(world_size, augment):
    options = {"shuffle": True, "seed": 4, "epoch": 2, "augment": augment}
    split = coloured(22)
    whole = list(plain(split, 8, **options))
    parts = [list(plain(split, 8, rank=rank, world_size=world_size, **options)) for rank in range(world_size)]
    assert [len(part) for part in parts] == [3] * world_size
    for step, (images, labels) in enumerate(whole):
        for rank, part in enumerate(parts):
            assert torch.equal(part[step][0], images[rank::world_size])
            assert torch.equal(part[step][1], labels[rank::world_size])


@pytest.mark.parametrize("augment", [False, True])
def test_last_part_may_be_empty(augment):
    last = list(plain(numbered(9), 4, rank=1, world_size=2, augment=augment))[-1]
    assert last[0].shape == (0, 1, 1, 1)
    assert last[1].tolist() == []


def test_batches_do_not_share_memory():
    split = numbered(8)
    first, second = plain(split, 4)
    first[0].zero_()
    assert second[0].flatten().tolist() == [value / 255 for value in torch.arange(4.0, 8.0)]
    assert split.images.flatten().tolist() == list(range(8))


# --------------------------------------------------------------------------------------- augmentation


def slow_crop_and_flip(images, shift, mirror, padding):
    """One image at a time, as one would write it first."""
    _, channels, height, width = images.shape
    results = []
    for image, (top, left), flipped in zip(images, shift.tolist(), mirror.tolist(), strict=True):
        padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=images.dtype)
        padded[:, padding : padding + height, padding : padding + width] = image
        crop = padded[:, top : top + height, left : left + width]
        results.append(crop.flip(-1) if flipped else crop)
    return torch.stack(results)


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_augmentation_is_that_of_the_slow_reference(padding):
    images = coloured(60).images
    shift = torch.randint(2 * padding + 1, (60, 2), generator=torch.Generator().manual_seed(1))
    mirror = torch.arange(60) % 2 == 0
    fast = crop_and_flip(images, shift, mirror, padding)
    assert fast.dtype == torch.uint8
    assert torch.equal(fast, slow_crop_and_flip(images, shift, mirror, padding))


def test_unshifted_unmirrored_images_are_unchanged():
    images = coloured(5).images
    assert torch.equal(crop_and_flip(images, torch.full((5, 2), 4), torch.zeros(5, dtype=torch.bool), 4), images)


def test_padding_is_black_before_normalising():
    split = Split(torch.full((200, 3, 4, 4), 255, dtype=torch.uint8), torch.zeros(200, dtype=torch.int64))
    ((images, _),) = Batches(split, 200, mean=MEAN, std=STD, augment=True)
    mean, std = (torch.tensor(values) for values in (MEAN, STD))
    for channel in range(3):
        black, white = -mean[channel] / std[channel], (1 - mean[channel]) / std[channel]
        assert images[:, channel].unique().tolist() == [black.item(), white.item()]


def test_every_shift_and_both_directions_occur_equally():
    """In 9 x 9 images with one bright pixel in the middle column, its place tells the shift."""
    count = 8100
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[0, 0, 4, 4] = 255
    split = Split(image.expand(count, -1, -1, -1).contiguous(), torch.zeros(count, dtype=torch.int64))
    ((images, _),) = plain(split, count, augment=True, flip=False, seed=7)
    counts = images.sum(0).flatten()
    assert counts.sum() == count  # no shift loses the pixel
    assert 60 < counts.min() <= counts.max() < 140  # 81 places, 100 each, standard deviation 10
    marked = Split((torch.arange(2, dtype=torch.uint8) * 255).expand(count, 1, 1, 2).contiguous(), split.labels)
    ((images, _),) = plain(marked, count, augment=True, padding=0, seed=7)
    assert 0.48 < images[:, 0, 0, 0].mean() < 0.52
    ((images, _),) = plain(marked, count, augment=True, flip=False, padding=0, seed=7)
    assert images[:, 0, 0, 0].sum() == 0


def test_augmentation_is_a_pure_function_of_seed_and_epoch():
    def epoch(number: int, seed: int = 3) -> torch.Tensor:
        batches = plain(coloured(20), 8, shuffle=True, augment=True, seed=seed, epoch=number)
        return torch.cat([images for images, _ in batches])

    assert torch.equal(epoch(0), epoch(0))
    assert not torch.equal(epoch(0), epoch(1))
    assert not torch.equal(epoch(0), epoch(0, seed=4))


def test_augmentation_does_not_change_the_order():
    split = coloured(20)
    assert orders(plain(split, 8, shuffle=True, augment=True)) == orders(plain(split, 8, shuffle=True))


# ------------------------------------------------------------------------------------ wrong arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.0,), "std": (1.0,)}, "do not fit images with 3 channels"),
        ({"rank": 2, "world_size": 2}, "rank must be 0 to world_size - 1 = 1; got 2"),
        ({"world_size": 5}, "batch_size must be at least world_size = 5; got 4"),
        ({"seed": -1}, "seed must not be negative; got -1"),
        ({"epoch": -2}, "epoch must not be negative; got -2"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        Batches(coloured(8), 4, **({"mean": MEAN, "std": STD} | options))
