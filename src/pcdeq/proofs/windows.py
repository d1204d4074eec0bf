"""Kinds of layers that go over rows, images or volumes by windows, and padding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.proofs.balls import TINY, Ball, as_radius
from pcdeq.proofs.channels import RADIUS
from pcdeq.proofs.intervals import Box, eps
from pcdeq.proofs.linear import Functional
from pcdeq.proofs.relaxed import pull_max_pool
from pcdeq.proofs.rules import Affine, Largest, kind


@kind(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
class MaxPool(Largest):
    """The largest of each window; what it is padded with is never the largest."""

    @classmethod
    def why_not(cls, module: nn.MaxPool2d, training: bool) -> str | None:
        return "with return_indices=True it gives two tensors" if module.return_indices else None

    def value(self, x: Tensor) -> Tensor:
        module, space = self.module, _space(self.plain)
        kernel, padding = _each(module.kernel_size, space), _each(module.padding, space)
        slides = {*_each(module.stride, space), *_each(module.dilation, space)} == {1} and x.ndim == space + 2
        if slides and not torch.is_grad_enabled() and all(2 * p == k - 1 for k, p in zip(kernel, padding, strict=True)):
            return _slide(x, kernel)
        return self.module(x)

    def keeps_channels(self, rank: int) -> bool:
        return rank == _space(self.plain) + 2

    def pull(self, functional: Functional, box: Box) -> Functional:
        if box.lower.ndim != 4 or self.plain is not nn.MaxPool2d:
            return super().pull(functional, box)
        return pull_max_pool(functional, box.lower, box.upper, self.module)


@kind(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
class ZeroPad(Largest):
    """Zeros around each sample, or less of it."""

    def value(self, x: Tensor) -> Tensor:
        if 2 * x.ndim <= len(self.module.padding):
            self.refuse(f"it would pad the samples of a batch of shape {tuple(x.shape)}")
        return self.module(x)

    def pull(self, functional: Functional, box: Box) -> Functional:
        back = F.pad(functional.coefficient, [-number for number in self.module.padding])
        return Functional(back, functional.constant, functional.image)


class Averages(Affine):
    """Averages of windows: no coefficient is negative, whatever divides them."""

    def value(self, x: Tensor) -> Tensor:
        return self.module(x)

    def magnify(self, x: Tensor, bias: float = 0.0) -> Tensor:
        return self.module(x)

    def surround(self, ball: Ball, tol: float) -> Ball:
        if not self.commutes(ball.centre.ndim):
            return super().surround(ball, tol)
        value, terms = self.value(ball.centre), self.terms(ball.centre.shape) + 8
        radius = (ball.radii() + terms * eps(ball.centre) * ball.sizes()) * (1 + terms * torch.finfo(RADIUS).eps) + TINY
        return ball.moved(value, self.value(radius) if ball.by_place else as_radius(radius, value))

    def space(self) -> int:
        """How many dimensions its windows have; batch and channels come before them."""
        return _space(self.plain)


@kind(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
class Average(Averages):
    """Windows of one size."""

    @classmethod
    def why_not(cls, module: nn.AvgPool2d, training: bool) -> str | None:
        divisor = getattr(module, "divisor_override", None)
        return None if divisor is None or divisor > 0 else f"its divisor_override is {divisor}: it must be above 0"

    def terms(self, shape: torch.Size) -> int:
        return math.prod(_each(self.module.kernel_size, self.space()))

    def commutes(self, rank: int | None) -> bool:
        module = self.module  # the coefficients of each window must sum up to 1, and none lie across channels
        plain = not module.ceil_mode and getattr(module, "divisor_override", None) is None
        return plain and not any(_each(module.padding, 1)) and rank == self.space() + 2


@kind(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
class AdaptiveAverage(Averages):
    """So many windows, equal or nearly so; where there are more of them than numbers, they overlap."""

    def terms(self, shape: torch.Size) -> int:
        return math.prod(-(-size // windows) + 1 for size, windows in self._sizes(shape))

    def terms_back(self, shape: torch.Size) -> int:
        return math.prod(-(-windows // size) + 1 for size, windows in self._sizes(shape))

    def _sizes(self, shape: torch.Size) -> list[tuple[int, int]]:
        """Along each dimension, how many numbers there are and how many windows: as many, if it does not say."""
        sizes, asked = shape[-self.space() :], _each(self.module.output_size, self.space())
        return [(size, size if given is None else max(1, given)) for size, given in zip(sizes, asked, strict=True)]

    def commutes(self, rank: int | None) -> bool:
        return rank == self.space() + 2


def _slide(x: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """The largest of each window, where these keep the size, by one dimension at a time: a third of torch's time."""
    for dim, size in enumerate(kernel, start=2):
        y, length = x.clone(), x.shape[dim]
        for shift in range(1, min(size // 2 + 1, length)):
            for first, other in ((0, shift), (shift, 0)):
                part = y.narrow(dim, first, length - shift)
                torch.maximum(part, x.narrow(dim, other, length - shift), out=part)
        x = y
    return x


def _space(plain: type[nn.Module]) -> int:
    """Over how many dimensions one of torch's poolings goes, which is what it is called by: MaxPool2d."""
    return int(plain.__name__[-2])


def _each(given: Any, dims: int) -> tuple[Any, ...]:
    """An option for every dimension, of which one number stands for all."""
    return tuple(given) if isinstance(given, tuple | list) else (given,) * dims
