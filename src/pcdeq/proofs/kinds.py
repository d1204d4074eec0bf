"""The kinds of layers that proofs know: one entry a kind, with its rules for every analysis of a network."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from pcdeq.equation import Equation
from pcdeq.layers import PcDEQ
from pcdeq.operations import solve_equation
from pcdeq.proofs import trusted
from pcdeq.proofs.intervals import Bounds, Box, eps, outward
from pcdeq.proofs.linear import Corners, Functional, join, split
from pcdeq.proofs.order import SINGLE_PRECISION, Enclosure, enclose_near
from pcdeq.proofs.relaxed import pull_relu
from pcdeq.proofs.rules import Affine, Largest, Layer, PerChannel, Truncated, constant, kind
from pcdeq.solvers import Anderson


@kind(nn.Identity)
class Identity(Largest):
    """Nothing."""

    def commutes(self, rank: int | None) -> bool:
        return True

    def value(self, x: Tensor) -> Tensor:
        return x

    def pull(self, functional: Functional, box: Box) -> Functional:
        return functional


@kind(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
class Dropout(Identity):
    """Nothing in evaluation mode; in training mode one mask for the clean values and their bounds."""

    varies = True

    def bound(self, bounds: Bounds) -> Bounds:
        mask = self.module(torch.ones_like(bounds.clean))  # numbers >= 0
        return Bounds(*(part * mask for part in bounds))


@kind(nn.ReLU)
class ReLU(Largest):
    """max(x, 0)."""

    def value(self, x: Tensor) -> Tensor:
        return F.relu(x)  # never in place

    def pull(self, functional: Functional, box: Box) -> Functional:
        return pull_relu(functional, box.lower, box.upper)


@kind(nn.Flatten)
class Flatten(Largest):
    """The same numbers in another shape, one sample or one batch at a time."""

    @classmethod
    def why_not(cls, module: nn.Flatten, training: bool) -> str | None:
        return "it puts the samples of a batch into one: start at dimension 1" if module.start_dim == 0 else None

    def value(self, x: Tensor) -> Tensor:
        if x.ndim + self.module.start_dim == 0:
            self.refuse("it puts the samples of a batch into one: start at dimension 1")
        return self.module(x)

    def pull(self, functional: Functional, box: Box) -> Functional:
        shaped = functional.coefficient.reshape(-1, *box.lower.shape[1:])
        return Functional(shaped, functional.constant, functional.image)

    def commutes(self, rank: int | None) -> bool:
        return (self.module.start_dim, self.module.end_dim) == (1, -1)  # channel after channel

    def rank(self, before: int | None) -> int | None:
        return 2 if self.commutes(before) else None


@kind(nn.Unflatten)
class Unflatten(Flatten):
    """The same numbers with one dimension made into several."""

    @classmethod
    def why_not(cls, module: Any, training: bool) -> str | None:
        return None if isinstance(module.dim, int) else "named dimensions are not known"

    def value(self, x: Tensor) -> Tensor:
        if self.module.dim in (0, -x.ndim):
            self.refuse("it makes several dimensions of the samples: take dimension 1 or a later one")
        return self.module(x)

    def commutes(self, rank: int | None) -> bool:
        return False


class Weighted(Affine):
    """An affine layer by a weight, whose first two axes are outputs and inputs, and a bias or none."""

    tensors = ("weight", "bias")

    @abstractmethod
    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product, as the module would make it of its own weight and bias."""

    def value(self, x: Tensor) -> Tensor:
        bias = None if self.module.bias is None else self.module.bias.to(x.dtype)
        return self.apply(x, self.module.weight.to(x.dtype), bias)

    def magnify(self, x: Tensor, bias: float = 0.0) -> Tensor:
        size = None if self.module.bias is None or not bias else bias * self.module.bias.abs().to(x.dtype)
        return self.apply(x, self.module.weight.abs().to(x.dtype), size)

    def terms(self, shape: torch.Size) -> int:
        return self.module.weight[0].numel()

    def terms_back(self, shape: torch.Size) -> int:
        return self.module.weight[:, 0].numel()

    @torch.no_grad()
    def followed_by(self, other: PerChannel, rank: int | None) -> Layer | None:
        weight, bias = self._numbers()
        if rank != self._channels_first() or len(other.scale) != len(weight):
            return None
        return self._with(weight * _along(0, other.scale, weight), bias * other.scale + other.shift)

    @torch.no_grad()
    def preceded_by(self, other: PerChannel, rank: int | None) -> Layer | None:
        weight, bias = self._numbers()
        inputs = weight.shape[1]
        if rank != self._channels_first() or inputs % len(other.scale):
            return None
        # Behind a flattening, each channel is so many inputs, one after the other.
        scale, shift = (numbers.repeat_interleave(inputs // len(numbers)) for numbers in other)
        more = (weight * _along(1, shift, weight)).flatten(1).sum(1)
        return self._with(weight * _along(1, scale, weight), bias + more)

    @abstractmethod
    def _channels_first(self) -> int:
        """How many dimensions a tensor has whose dimension 1 is what the weight's axes count."""

    def _numbers(self) -> tuple[Tensor, Tensor]:
        weight = self.module.weight.double()
        return weight, weight.new_zeros(len(weight)) if self.module.bias is None else self.module.bias.double()

    def _with(self, weight: Tensor, bias: Tensor) -> Layer:
        dtype = self.module.weight.dtype
        clone: Any = constant(self.module, self.plain, self.tensors)
        clone.weight, clone.bias = (nn.Parameter(t.to(dtype), requires_grad=False) for t in (weight, bias))
        return type(self)(clone, self.path, self.plain, self.plain)


def _along(axis: int, numbers: Tensor, weight: Tensor) -> Tensor:
    return numbers.view(*(-1 if place == axis else 1 for place in range(weight.ndim)))


@kind(nn.Linear)
class Linear(Weighted):
    """A matrix on the last dimension."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

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
        module, convolve = self.module, (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        return convolve(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)

    def preceded_by(self, other: PerChannel, rank: int | None) -> Layer | None:
        # What is padded stays 0, whatever the map makes of 0.
        padded = self.module.padding != "valid" and any(map(bool, self.module.padding))
        if padded or self.module.groups != 1 or self.module.weight.shape[1] != len(other.scale):
            return None
        return super().preceded_by(other, rank)

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
        shift = -module.running_mean.double() * scale
        return PerChannel(scale, shift if module.bias is None else shift + module.bias.double())

    def value(self, x: Tensor) -> Tensor:
        scale, shift = (_along(1, numbers.to(x.dtype), x) for numbers in self.per_channel())
        return x * scale + shift

    def magnify(self, x: Tensor, bias: float = 0.0) -> Tensor:
        scale, shift = self.per_channel()
        # The cancellation in shift is of float64 numbers; what it loses is relative to this size.
        size = bias * ((self.module.running_mean.double() * scale).abs() + shift.abs())
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


@kind(PcDEQ)
class Equilibrium(Layer):
    """An equilibrium, which rises with its input (T8): its values at the two ends are the exact hull."""

    @classmethod
    def why_not(cls, module: PcDEQ, training: bool) -> str | None:
        return trusted.why_unknown_layer(module, PcDEQ)

    def enclose(self, box: Box, tol: float) -> Box:
        module, shape = self._with_known_injection(), box.lower.shape
        state = module.operator.state_ndim
        if len(shape) <= state:
            self.refuse(f"its input, of shape {tuple(shape)}, has no dimension of samples")
        injected = self._inject(box)
        # The effective weight in float64, rounded once: one more relative error, for which the margin has room.
        weight = module.operator.effective_weight_in(torch.float64).to(box.lower.dtype)
        linear = module.operator.bind(weight)
        samples = (math.prod(shape[:-state]), *shape[-state:])
        below, above = (
            Equation(linear, module.activation, x.reshape(samples)) for x in (injected.lower, injected.upper)
        )
        if injected.wide:
            low, high = (enclose_near(equation, self._solve(equation, tol)) for equation in (below, above))
        else:
            low = high = enclose_near(below, self._solve(below, tol), above)
        certified = (low.certified & high.certified).reshape(shape[0], math.prod(shape[1:-state])).all(1)
        return Box(low.lower.reshape(shape), high.upper.reshape(shape), box.proved & certified)

    def _with_known_injection(self) -> PcDEQ:
        if self.module.injection is not None:
            self.refuse(trusted.OWN_INJECTION)
        return self.module

    def _solve(self, equation: Equation, tol: float) -> Tensor:
        """A point near the equilibrium, from float32 where that is precise enough: where it is from is no matter."""
        module, x = self.module, equation.x
        if tol >= SINGLE_PRECISION:
            equation = Equation(module.operator.bind(equation.map.weight.float()), module.activation, x.float())
        guess = None if module.warm is None else module.warm.guess(equation.x)
        return solve_equation(equation, Anderson(tol=tol, max_steps=1000), guess).value.to(x.dtype)

    def _inject(self, box: Box) -> Box:
        """The injection is monotone; its rounding is relative, and grows with |x| for softplus: exp(5x) (T9)."""
        module = self.module
        low, high = module.inject(box.lower), module.inject(box.upper)
        relative = 2 * eps(low)
        if module.activation.kind == 1:
            relative = (16 + 8 * torch.maximum(box.lower.abs(), box.upper.abs())) * eps(low)
        return outward(low, high, relative * high, box.proved).map(lambda x: x.clamp(min=module.floor))

    def pull(self, functional: Functional, box: Box, middle: Tensor | None = None) -> Functional:
        """By tangents and chords of the injection or, about given middles of the input, with a remainder."""
        module, shape, ndim = self._with_known_injection(), box.lower.shape, self.module.operator.state_ndim
        linear = module.operator.bind(module.operator.effective_weight_in(torch.float64))

        def solve(x: Tensor) -> tuple[Equation, Enclosure]:
            equation = Equation(linear, module.activation, x)
            return equation, enclose_near(equation, self._solve(equation, SINGLE_PRECISION))

        # Further dimensions of a sample hold states of their own.
        samples = (-1, *shape[-ndim:])
        low, high = box.lower.reshape(samples), box.upper.reshape(samples)
        corners = Corners(solve, low, high, module.inject, module.activation.kind)
        return join(corners.pull(split(functional, shape[-ndim:]), middle), functional, shape)

    def bound(self, bounds: Bounds) -> Bounds:
        """All three in one solve."""
        return Bounds(*self._with_known_injection()(torch.cat(bounds)).tensor_split(3))

    def enlarge(self, error: Tensor, truncated: Truncated) -> Tensor:
        if bool(error.any()):
            self._with_known_injection()
        return next(truncated)(error)

    def freeze(self) -> nn.Module:
        layer = copy.deepcopy(self.module)
        if not parametrize.is_parametrized(layer.operator):
            layer.operator.fix_()
        return layer

    def export(self, equilibrium: Callable[[PcDEQ], nn.Module]) -> nn.Module:
        return equilibrium(self.module)
