"""Affine layers by a weight: matrices, convolutions, and batch norm by running statistics."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.convolution import convolve
from pcdeq.proofs.balls import TINY, Ball, as_radius
from pcdeq.proofs.channels import RADIUS
from pcdeq.proofs.intervals import Bounds, eps
from pcdeq.proofs.rules import Affine, Layer, PerChannel, constant, kind


class Numbers(NamedTuple):
    """A weight and a bias in float64, and the size of what the bias is a sum of, (outputs,)."""

    weight: Tensor
    bias: Tensor
    size: Tensor


class Prepared(NamedTuple):
    """A weight A and a bias b in a dtype, and in that of radii what bounds on the outputs need of them."""

    weight: Tensor
    bias: Tensor
    size: Tensor  # |A|
    sums: Tensor  # of |A| over the places of the kernel, (outputs, inputs)
    lengths: Tensor  # of the rows of A, (outputs,)
    rest: Tensor  # more than the rounding of b, when it was made, and when it is added


class Weighted(Affine):
    """An affine layer by a weight, whose first two axes are outputs and inputs, and a bias or none."""

    tensors = ("weight", "bias")

    def __init__(self, module: Any, path: str, plain: type[nn.Module], known: type[nn.Module]) -> None:
        super().__init__(module, path, plain, known)
        self.exact: Numbers | None = None  # of a layer that has taken over others, before they are rounded
        self._made: dict[torch.dtype, Prepared] = {}

    @abstractmethod
    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product, as the module would make it of its own weight and bias."""

    def value(self, x: Tensor) -> Tensor:
        bias = None if self.module.bias is None else self.module.bias.to(x.dtype)
        return self.apply(x, self.module.weight.to(x.dtype), bias)

    def magnify(self, x: Tensor, bias: float = 0.0) -> Tensor:
        size = None if self.module.bias is None or not bias else bias * self.module.bias.abs().to(x.dtype)
        return self.apply(x, self.module.weight.abs().to(x.dtype), size)

    @property
    def summed(self) -> int:
        """How many numbers are summed up in one output."""
        return self.module.weight[0].numel()

    def terms(self, shape: torch.Size) -> int:
        return self.summed

    def terms_back(self, shape: torch.Size) -> int:
        return self.module.weight[:, 0].numel()

    @torch.no_grad()
    def followed_by(self, other: PerChannel, rank: int | None) -> Layer | None:
        weight, bias, size = self.numbers()
        if rank != self._channels_first() or len(other.scale) != len(weight):
            return None
        bias, size = bias * other.scale + other.shift, size * other.scale.abs() + other.size
        return self._with(Numbers(weight * _along(0, other.scale, weight), bias, size))

    @torch.no_grad()
    def preceded_by(self, other: PerChannel, rank: int | None) -> Layer | None:
        weight, bias, size = self.numbers()
        inputs = weight.shape[1]
        if rank != self._channels_first() or inputs % len(other.scale):
            return None
        # Behind a flattening, each channel is so many inputs, one after the other.
        scale, shift, more = (_along(1, numbers.repeat_interleave(inputs // len(numbers)), weight) for numbers in other)
        bias, size = (bias + (weight * shift).flatten(1).sum(1), size + (weight.abs() * more).flatten(1).sum(1))
        return self._with(Numbers(weight * scale, bias, size))

    @abstractmethod
    def _channels_first(self) -> int:
        """How many dimensions a tensor has whose dimension 1 is what the weight's axes count."""

    def numbers(self) -> Numbers:
        """Weight and bias in float64, each right to a few of its roundings of what it was made from."""
        if self.exact is not None:
            return self.exact
        weight = self.module.weight.double()
        bias = weight.new_zeros(len(weight)) if self.module.bias is None else self.module.bias.double()
        return Numbers(weight, bias, bias.abs())

    def _with(self, numbers: Numbers) -> Layer:
        dtype = self.module.weight.dtype
        clone: Any = constant(self.module, self.plain, self.tensors)
        pair = (numbers.weight, numbers.bias)
        clone.weight, clone.bias = (nn.Parameter(t.to(dtype), requires_grad=False) for t in pair)
        layer = type(self)(clone, self.path, self.plain, self.plain)
        layer.exact = numbers
        return layer

    def prepared(self, dtype: torch.dtype) -> Prepared:
        """What balls need in a dtype, made once."""
        if dtype not in self._made:
            weight, bias, size = self.numbers()
            rounding, tiny = self.rounding(dtype), torch.finfo(dtype).tiny
            lost = 2 * self.summed * tiny / rounding  # numbers that a dtype takes for 0
            absolute = weight.abs()
            sums = absolute if weight.ndim == 2 else absolute.flatten(2).sum(2)
            lengths = weight.flatten(1).norm(dim=1)
            rest = rounding * bias.abs() + 1e-12 * size + 2 * TINY
            radii = (absolute + lost, sums + lost, lengths + lost, rest)
            self._made[dtype] = Prepared(weight.to(dtype), bias.to(dtype), *(numbers.to(RADIUS) for numbers in radii))
        return self._made[dtype]

    def rounding(self, dtype: torch.dtype) -> float:
        """The relative rounding of a product with A, of its numbers, and of what little follows."""
        return (self.summed + 16) * torch.finfo(dtype).eps


def _along(axis: int, numbers: Tensor, weight: Tensor) -> Tensor:
    return numbers.view(*(-1 if place == axis else 1 for place in range(weight.ndim)))


@kind(nn.Linear)
class Linear(Weighted):
    """A matrix on the last dimension."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def surround(self, ball: Ball, tol: float) -> Ball:
        """By |A| and, for rounding, by lengths: (|A| |x|)_i is at most that of the row times that of x."""
        centre, radius = ball.centre, ball.radius
        if centre.ndim != 2:
            return super().surround(ball, tol)
        made, rounding = self.prepared(centre.dtype), self.rounding(centre.dtype)
        # Squares may underflow: each number counts at least as one whose square does not.
        least = (torch.finfo(centre.dtype).tiny * centre.shape[1]) ** 0.5
        length = torch.linalg.vector_norm(centre, dim=1, keepdim=True).to(RADIUS) + least
        moved = radius * made.sums.sum(1) if radius.shape[1] == 1 else radius @ made.sums.T
        reach = (moved + rounding * length * made.lengths + made.rest) * (1 + 2 * self.rounding(RADIUS))
        return ball.moved(self.apply(centre, made.weight, made.bias), reach)

    def _channels_first(self) -> int:
        return 2


@kind(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Convolution(Weighted):
    """A convolution of images, rows or volumes, padded with zeros."""

    @classmethod
    def why_not(cls, module: nn.Conv2d, training: bool) -> str | None:
        known = module.padding_mode == "zeros"
        return None if known else f"it is padded by {module.padding_mode!r}: only zeros are known"

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.ndim != weight.ndim:
            what = ("rows, (n, channels, length)", "images, (n, channels, height, width)", "volumes, of 5 dimensions")
            self.refuse(f"its input must be a batch of {what[weight.ndim - 3]}, not {tuple(x.shape)}")
        module, dims = self.module, weight.ndim - 2
        if x.dtype is torch.float64 and module.groups == 1 and {*module.dilation} == {1} and module.padding != "same":
            padding = [0] * dims if module.padding == "valid" else module.padding
            found = convolve(x, weight, None, module.stride, padding)
            return found if bias is None else found.add_(bias.reshape(-1, *[1] * dims))
        plain = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        return plain(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)

    def preceded_by(self, other: PerChannel, rank: int | None) -> Layer | None:
        # What is padded stays 0, whatever the map makes of 0.
        padded = self.module.padding != "valid" and any(map(bool, self.module.padding))
        if padded or self.module.groups != 1 or self.module.weight.shape[1] != len(other.scale):
            return None
        return super().preceded_by(other, rank)

    def surround(self, ball: Ball, tol: float) -> Ball:
        if self.module.groups != 1:
            return super().surround(ball, tol)
        made, rounding = self.prepared(ball.centre.dtype), self.rounding(ball.centre.dtype)
        radius = ball.radii() + rounding * ball.sizes()
        value = self.apply(ball.centre, made.weight, made.bias)
        if ball.by_place:
            reach = self.apply(radius, made.size, made.rest)
        else:
            reach = as_radius(radius @ made.sums.T + made.rest, value)
        return ball.moved(value, reach * (1 + 2 * self.rounding(RADIUS)))

    def _channels_first(self) -> int:
        return self.module.weight.ndim


@kind(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNorm(Affine):
    """x * scale + shift for each channel, by running statistics; in training, by those of the clean batch."""

    varies = True
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

    @classmethod
    def why_not(cls, module: nn.BatchNorm1d, training: bool) -> str | None:
        if training or not (module.running_mean is None or module.running_var is None):
            return None
        return "what it computes depends on the batch: it needs running statistics"

    def per_channel(self) -> PerChannel:
        """Both numbers made in float64 from the stored statistics."""
        module = self.module
        scale = torch.rsqrt(module.running_var.double() + module.eps)
        scale = scale if module.weight is None else scale * module.weight.double()
        shift = module.running_mean.double() * scale
        bias = torch.zeros_like(shift) if module.bias is None else module.bias.double()
        return PerChannel(scale, bias - shift, bias.abs() + shift.abs())

    def value(self, x: Tensor) -> Tensor:
        scale, shift, _ = (_along(1, numbers.to(x.dtype), x) for numbers in self.per_channel())
        return x * scale + shift

    def surround(self, ball: Ball, tol: float) -> Ball:
        rounding = 8 * eps(ball.centre)
        scale, _, size = (numbers.abs().to(RADIUS) for numbers in self.per_channel())
        radius = ball.radii()
        scale, size = (_along(1, numbers, radius) for numbers in (scale + TINY / rounding, size))
        reach = scale * (radius + rounding * ball.sizes()) + rounding * size
        reach = reach * (1 + 16 * torch.finfo(RADIUS).eps) + 2 * TINY
        return ball.moved(self.value(ball.centre), as_radius(reach, ball.centre))

    def magnify(self, x: Tensor, bias: float = 0.0) -> Tensor:
        scale, _, size = self.per_channel()
        # The cancellation in shift is of float64 numbers; what it loses is relative to this size.
        size = bias * 2 * size
        return x * _along(1, scale.abs().to(x.dtype), x) + _along(1, size.to(x.dtype), x)

    def terms(self, shape: torch.Size) -> int:
        return 4  # roundings: of scale, of shift, of product and sum

    def bound(self, bounds: Bounds) -> Bounds:
        """The module sees the clean values only; the bounds lie around its output, scaled as it scales."""
        module, clean = self.module, self.module(bounds.clean)
        by_batch = module.training or module.running_var is None
        variance = bounds.clean.var([0, *range(2, clean.ndim)], correction=0) if by_batch else module.running_var
        scale = torch.rsqrt(variance + module.eps)
        scale = _along(1, scale if module.weight is None else scale * module.weight, clean)
        return Bounds.around(clean, clean + scale * (bounds.centre - bounds.clean), scale.abs() * bounds.reach)

    def rank(self, before: int | None) -> int | None:
        return {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}.get(self.plain, before)
