"""Kinds of layers that are one nondecreasing function of each number: activations beside ReLU."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.proofs.intervals import Bounds, Box, eps, outward
from pcdeq.proofs.linear import EPS, Functional, dot
from pcdeq.proofs.rules import Layer, Truncated, kind

# Torch has the value to a few roundings.
ROUNDINGS = 16


class Line(NamedTuple):
    """slope * x + constant."""

    slope: Tensor
    constant: Tensor

    def at(self, x: Tensor) -> Tensor:
        return self.slope * x + self.constant


class Curve(Layer):
    """A nondecreasing function f whose slope can be any number at a few known places only.

    Over a range, f(x) - kx is least and largest at an end or where the slope is k. So a line of any slope is brought
    below f, or above it, by a look at these places: whether a bound holds does not hang on how its slope was chosen.
    """

    steepest = 1.0  # the largest slope

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """f, never in place."""

    @abstractmethod
    def slope(self, x: Tensor) -> Tensor:
        """Its derivative, about."""

    @abstractmethod
    def places(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Where its slope is k: between 0 and the largest, or jumps past k."""

    def enclose(self, box: Box, tol: float) -> Box:
        lower, upper = self.value(box.lower), self.value(box.upper)
        return outward(lower, upper, ROUNDINGS * eps(lower) * torch.maximum(lower.abs(), upper.abs()), box.proved)

    def bound(self, bounds: Bounds) -> Bounds:
        return bounds.map(self.value)

    def enlarge(self, error: Tensor, truncated: Truncated) -> Tensor:
        return error * self.steepest

    def pull(self, functional: Functional, box: Box) -> Functional:
        c, image = functional.coefficient, functional.image
        below, above = self._lines(box.lower, box.upper)
        slope, constant = (torch.where(c > 0, low[image], high[image]) for low, high in zip(below, above, strict=True))
        # A place that is off by d has a value that is off by d² only: the roundings of values and lines are more.
        size = self.value(box.lower).abs() + self.value(box.upper).abs()
        size = size + self.steepest * (box.lower.abs() + box.upper.abs()) + torch.finfo(size.dtype).tiny
        rounding = 8 * ROUNDINGS * dot(c.abs(), size[image]) + (c[:1].numel() + 16) * dot(c.abs(), constant.abs())
        return functional.through(c * slope, dot(c, constant), EPS * rounding)

    def _lines(self, low: Tensor, high: Tensor) -> tuple[Line, Line]:
        """Lines below and above over a range, up to rounding: as steep as the chord or, if nearer, as in the middle."""
        middle = low + (high - low) / 2
        chord = (self.value(high) - self.value(low)) / (high - low)
        below, above = self._parallel(chord.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, self.steepest), low, high)
        other_below, other_above = self._parallel(self.slope(middle), low, high)
        return (
            _choose(other_below.at(middle) > below.at(middle), other_below, below),
            _choose(other_above.at(middle) < above.at(middle), other_above, above),
        )

    def _parallel(self, k: Tensor, low: Tensor, high: Tensor) -> tuple[Line, Line]:
        ends = (low, high, *(place.clamp(low, high) for place in self.places(k)))
        heights = torch.stack([self.value(x) - k * x for x in ends])
        return Line(k, heights.amin(0)), Line(k, heights.amax(0))


def _choose(first: Tensor, one: Line, other: Line) -> Line:
    return Line(*(torch.where(first, a, b) for a, b in zip(one, other, strict=True)))


@kind(nn.LeakyReLU)
class LeakyReLU(Curve):
    """x, or a part of it below 0."""

    @classmethod
    def why_not(cls, module: nn.LeakyReLU, training: bool) -> str | None:
        slope = module.negative_slope
        return None if 0 <= slope <= 1 else f"its negative_slope is {slope}: it must be from 0 to 1"

    def value(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.module.negative_slope)

    def slope(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, 1.0, self.module.negative_slope).to(x.dtype)

    def places(self, k: Tensor) -> tuple[Tensor, Tensor]:
        corner = torch.zeros_like(k)
        return corner, corner


@kind(nn.Hardtanh, nn.ReLU6)
class Hardtanh(Curve):
    """x, kept between two numbers."""

    def value(self, x: Tensor) -> Tensor:
        return F.hardtanh(x, self.module.min_val, self.module.max_val)

    def slope(self, x: Tensor) -> Tensor:
        return ((x > self.module.min_val) & (x < self.module.max_val)).to(x.dtype)

    def places(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(k, self.module.min_val), torch.full_like(k, self.module.max_val)


@kind(nn.Tanh)
class Tanh(Curve):
    """The hyperbolic tangent."""

    def value(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def slope(self, x: Tensor) -> Tensor:
        return 1 - torch.tanh(x).square()

    def places(self, k: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.atanh((1 - k).clamp(min=0).sqrt())
        return -place, place


@kind(nn.Sigmoid)
class Sigmoid(Curve):
    """1 / (1 + exp(-x)), which is (1 + tanh(x / 2)) / 2."""

    steepest = 0.25

    def value(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def slope(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.sigmoid(-x)

    def places(self, k: Tensor) -> tuple[Tensor, Tensor]:
        place = 2 * torch.atanh((1 - 4 * k).clamp(min=0).sqrt())
        return -place, place
