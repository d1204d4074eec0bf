"""Boxes of real numbers: exact ones, rounded outward, for proofs, and differentiable ones for training (T8, T9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Limits = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Box:
    """Bounds on a tensor, sample by sample; ``proved`` says for which samples they hold.

    A box holds the exact value at some place of a network: the value that the stored parameters give in real
    arithmetic. Every rule for a box keeps that true, by moving its result outward by more than its own rounding can be.
    """

    lower: Tensor
    upper: Tensor
    proved: Tensor

    @classmethod
    def of(cls, x: Tensor, radius: float | Tensor = 0.0, limits: Limits | None = None) -> Box:
        """The box of all tensors within ``radius``, which may differ by component, of x, and within the limits."""
        proved = torch.ones(len(x), dtype=torch.bool, device=x.device)
        radius = torch.as_tensor(radius, dtype=x.dtype, device=x.device)
        if not bool(radius.any()):
            return cls(x, x, proved)
        return outward(*ends(x, radius, limits), 2 * eps(x) * (x.abs() + radius), proved)

    def select(self, samples: slice | Tensor) -> Box:
        """The boxes of some of the samples."""
        return Box(self.lower[samples], self.upper[samples], self.proved[samples])

    def to(self, dtype: torch.dtype) -> Box:
        """The same box in another dtype, its ends rounded outward where it does not have their numbers."""
        lower, upper = self.lower.to(dtype), self.upper.to(dtype)
        return Box(
            torch.where(lower > self.lower, _down(lower), lower),
            torch.where(upper < self.upper, _up(upper), upper),
            self.proved,
        )

    def map(self, monotone: Callable[[Tensor], Tensor]) -> Box:
        """The image under a nondecreasing map that does not round."""
        return Box(monotone(self.lower), monotone(self.upper), self.proved)

    def ball(self) -> tuple[Tensor, Tensor]:
        """A centre, and a radius that reaches both ends."""
        centre = self.lower + (self.upper - self.lower) / 2
        radius = torch.maximum(self.upper - centre, centre - self.lower)
        return centre, radius * (1 + 2 * eps(radius))

    @property
    def wide(self) -> bool:
        """Whether the box is more than rounding, so that one linearisation will not serve both ends."""
        scale = self.upper.abs().amax() + self.lower.abs().amax()
        return bool((self.upper - self.lower).amax() > 1e-3 * scale)


def outward(lower: Tensor, upper: Tensor, error: Tensor, proved: Tensor) -> Box:
    """The box whose ends were computed with at most this error, moved out by it and by its own rounding."""
    slack = error * (1 + 4 * eps(error)) + torch.finfo(error.dtype).tiny
    return Box(_down(lower - slack), _up(upper + slack), proved)


def _up(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def _down(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, -torch.inf))


def eps(x: Tensor) -> float:
    """The distance from 1 to the next number of the tensor's dtype."""
    return torch.finfo(x.dtype).eps


def ends(x: Tensor, radius: float | Tensor, limits: Limits | None) -> tuple[Tensor, Tensor]:
    """x - radius and x + radius, or the limits where they are closer; x itself is always within."""
    lower, upper = x - radius, x + radius
    if limits is None:
        return lower, upper
    low, high = (limit.to(x) for limit in limits)
    return torch.maximum(lower, torch.minimum(low, x)), torch.minimum(upper, torch.maximum(high, x))


class Bounds(NamedTuple):
    """The values at some place of a network for a batch, and their bounds over the box of inputs, without rounding."""

    clean: Tensor
    lower: Tensor
    upper: Tensor

    @classmethod
    def around(cls, clean: Tensor, centre: Tensor, reach: Tensor) -> Bounds:
        """Those within reach of a centre, where the clean value need not be."""
        return cls(clean, centre - reach, centre + reach)

    def map(self, monotone: Callable[[Tensor], Tensor]) -> Bounds:
        """The images under a nondecreasing map of single samples, of all three in one call.

        Split by `chunk`, whose gradient is one concatenation in the layout of the parts: those of slices are three
        tensors of zeros in another layout, and a certified step of MC then takes a quarter longer.
        """
        return Bounds(*monotone(torch.cat(self)).chunk(3))

    @property
    def centre(self) -> Tensor:
        """The middle between the ends."""
        return (self.lower + self.upper) / 2

    @property
    def reach(self) -> Tensor:
        """From the middle to either end."""
        return (self.upper - self.lower) / 2
