"""Lines below and above the largest of some numbers, for linear bounds through ReLU and max pooling (T10)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.proofs.linear import EPS, Functional, dot


def pull_relu(functional: Functional, low: Tensor, high: Tensor) -> Functional:
    """max(x, 0) is at least x or 0, whichever is nearer over the range, and at most the chord."""
    chord, line = _chord_of_relu(low, high)
    chord, line, above = (part[functional.image] for part in (chord, line, (high > -low).to(low.dtype)))
    c = functional.coefficient
    rounding = dot(c.abs(), line) * (c[:1].numel() + 16) * EPS
    return functional.through(c * torch.where(c > 0, above, chord), dot(c.clamp(max=0), line), rounding)


def _chord_of_relu(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and constant, both >= 0, of a line above max(x, 0) between two ends, rounded up."""
    crosses = (low < 0) & (high > 0)
    slope = torch.where(crosses, (high / (high - low)) * (1 + 8 * EPS), (low >= 0).to(low.dtype))
    return slope, torch.where(crosses, -slope * low * (1 + 4 * EPS), 0.0)


def pull_max_pool(functional: Functional, low: Tensor, high: Tensor, pool: nn.MaxPool2d) -> Functional:
    """The largest of a window is at least its likeliest element w, and at most w + Σ max(x - w, 0), by chords."""
    pads, size, windows = _windows(pool, low)
    outside = torch.finfo(low.dtype).min / 4
    lows, highs = (windows(F.pad(x, pads, value=outside)) for x in (low, high))  # (n, channels, elements, places)
    there = lows > outside / 2
    winner = (lows + highs).argmax(2, keepdim=True)
    is_winner = torch.zeros_like(there).scatter_(2, winner, True)
    # Another element less the winner, from end to end.
    slack = 4 * EPS * (lows.abs() + highs.abs())
    rest = there & ~is_winner
    least = torch.where(rest, lows - highs.gather(2, winner) - slack - slack.gather(2, winner), -1.0)
    most = torch.where(rest, highs - lows.gather(2, winner) + slack + slack.gather(2, winner), 0.0)
    chord, line = _chord_of_relu(least, most)
    # Where the largest upper end, a number, is below what the chords give in the middle, it is taken.
    middle = torch.where(there, (lows + highs) / 2, 0.0)
    by_chords = middle.gather(2, winner) + (chord * (middle - middle.gather(2, winner)) + line).sum(2, keepdim=True)
    largest = highs.amax(2, keepdim=True)
    constant = (largest < by_chords) & (chord.sum(2, keepdim=True) > 0)
    above = torch.where(constant, 0.0, chord + is_winner * (1 - chord.sum(2, keepdim=True)))
    added = torch.where(constant, largest, line.sum(2, keepdim=True))

    image, c = functional.image, functional.coefficient
    flat = c.flatten(2)[:, :, None]  # (pairs, channels, 1, places)
    weights = torch.where(flat > 0, is_winner[image].to(c.dtype), above[image])
    pulled = F.fold((flat * weights).flatten(1, 2), size, pool.kernel_size, pool.dilation, 0, pool.stride)
    pulled = F.pad(pulled, [-pad for pad in pads])
    size = dot(
        flat.abs() * weights.abs().sum(2, keepdim=True),
        torch.where(there, highs.abs() + lows.abs(), 0.0).amax(2, keepdim=True)[image],
    )
    rounding = (c[:1].numel() + 64) * EPS * (size + dot(flat.abs(), added.abs()[image]))
    return functional.through(pulled, dot(flat.clamp(max=0), added[image]), rounding)


def _windows(
    pool: nn.MaxPool2d, like: Tensor
) -> tuple[tuple[int, int, int, int], tuple[int, int], Callable[[Tensor], Tensor]]:
    """How to pad so that every window is whole, the padded size, and a function that lays windows side by side."""
    kernel, stride, padding, dilation = (
        (value, value) if isinstance(value, int) else value
        for value in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    places = pool(like[:1]).shape[2:]
    # What the last windows leave out at the far ends is cut off; in ceil_mode they may reach beyond.
    height, width = ((places[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1))
    below, right = height - padding[0] - like.shape[2], width - padding[1] - like.shape[3]

    def windows(x: Tensor) -> Tensor:
        return F.unfold(x, pool.kernel_size, pool.dilation, 0, pool.stride).unflatten(1, (x.shape[1], -1))

    return (padding[1], right, padding[0], below), (height, width), windows
