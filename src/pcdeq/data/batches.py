"""Normalised, optionally augmented batches of a split that lives as uint8 in the memory of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pcdeq.data.datasets import Split
from pcdeq.errors import UsageError


class Batches:
    """Iterate over the batches of a split as (float32 images, labels), normalised on their device.

    The order and the augmentation are a pure function of ``(seed, epoch)``, on every device and for every
    ``world_size``: a run that is resumed at an epoch continues bit for bit, and processes that share an epoch
    see between them what one process would see. The last, smaller batch is kept.

    >>> import torch
    >>> from pcdeq.data import Batches, load_dataset
    >>> mini = load_dataset("mnist-mini")
    >>> batches = Batches(mini.train, 64, mean=mini.mean, std=mini.std, shuffle=True, seed=0)
    >>> len(batches)
    63
    >>> images, labels = next(iter(batches))
    >>> images.shape, images.dtype, labels.shape
    (torch.Size([64, 1, 28, 28]), torch.float32, torch.Size([64]))
    >>> batches.set_epoch(1)  # another order

    Args:
        batch_size: images per global batch. Of each, process ``rank`` of ``world_size`` takes every
            ``world_size``-th: its last part can be smaller than the others' by one, and so be empty.
        mean: per channel, of pixels in [0, 1], with ``std``: images become ``(pixel / 255 - mean) / std``.
        augment: cut each image out of itself padded with ``padding`` black pixels at a random place and, if
            ``flip``, mirror it left to right with probability 1/2 (which makes no sense for digits).
        channels_last: give the images this memory format, which CUDA's convolutions prefer.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
        shuffle: bool = False,
        augment: bool = False,
        flip: bool = True,
        padding: int = 4,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        channels_last: bool = False,
    ) -> None:
        channels = split.images.shape[1]
        if not len(mean) == len(std) == channels:
            raise UsageError(f"mean {tuple(mean)} and std {tuple(std)} do not fit images with {channels} channels")
        if not 0 <= rank < world_size:
            raise UsageError(f"rank must be 0 to world_size - 1 = {world_size - 1}; got {rank}")
        if batch_size < world_size:
            raise UsageError(f"batch_size must be at least world_size = {world_size}; got {batch_size}")
        if seed < 0:
            raise UsageError(f"seed must not be negative; got {seed}")
        self.batch_size, self.seed = batch_size, seed
        self.set_epoch(epoch)
        self.shuffle, self.augment, self.flip, self.padding = shuffle, augment, flip, padding
        self.rank, self.world_size, self.channels_last = rank, world_size, channels_last
        self._images, self._labels = split.images.to(device), split.labels.to(device)
        self._mean = torch.tensor(mean, dtype=torch.float32, device=device).view(-1, 1, 1)
        self._std = torch.tensor(std, dtype=torch.float32, device=device).view(-1, 1, 1)

    def __len__(self) -> int:
        return -(-len(self._labels) // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and augmentation the next iteration uses."""
        if epoch < 0:
            raise UsageError(f"epoch must not be negative; got {epoch}")
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order, shift, mirror = self._draw()
        for start in range(0, len(self._labels), self.batch_size):
            mine = slice(start + self.rank, start + self.batch_size, self.world_size)
            chosen = order[mine]
            images = self._images.index_select(0, chosen)
            if self.augment:
                images = crop_and_flip(images, shift[mine], mirror[mine], self.padding)
            yield self._normalise(images), self._labels.index_select(0, chosen)

    def _draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the whole epoch at once, on the CPU, so that neither device nor rank changes it.

        By position in the global order: which image comes when (n,), the upper left corner of its crop in the padded
        image (n, 2), and whether it is mirrored (n,).
        """
        state = np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        count = len(self._labels)
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        shift = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        mirror = torch.rand(count, generator=generator) < (0.5 if self.flip else 0.0)
        device = self._images.device
        return order.to(device), shift.to(device), mirror.to(device)

    def _normalise(self, images: Tensor) -> Tensor:
        # Divided in this order, in place, the result is to the last bit that of torchvision's transforms.
        pixels = images.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
        return pixels.contiguous(memory_format=torch.channels_last) if self.channels_last else pixels


def crop_and_flip(images: Tensor, shift: Tensor, mirror: Tensor, padding: int) -> Tensor:
    """Cut each image out of its black-padded self at its ``shift`` and mirror it where ``mirror`` says so.

    One gather moves the whole batch: pixel ``(i, j)`` of an image is pixel ``(shift_y + i, shift_x + j)`` of
    its padded self, or ``(shift_y + i, shift_x + w - 1 - j)`` if it is mirrored.

    >>> import torch
    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> crop_and_flip(image, torch.tensor([[1, 2]]), torch.tensor([True]), padding=1).tolist()
    [[[[0, 2], [0, 4]]]]
    """
    count, channels, height, width = images.shape
    padded = functional.pad(images, (padding,) * 4)  # (b, c, h + 2p, w + 2p)
    column = torch.arange(width, device=images.device)
    rows = shift[:, :1] + torch.arange(height, device=images.device)  # (b, h)
    columns = shift[:, 1:] + torch.where(mirror[:, None], width - 1 - column, column)  # (b, w)
    source = rows[:, :, None] * padded.shape[3] + columns[:, None, :]  # (b, h, w)
    source = source.flatten(1)[:, None].expand(-1, channels, -1)
    return padded.flatten(2).gather(2, source).view(count, channels, height, width)
