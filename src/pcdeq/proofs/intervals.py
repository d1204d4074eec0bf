"""Boxes of real numbers pushed through the layers of a network, rounded outward (T8, T9).

A box [lower, upper] holds the exact value at some place of the network: the value that the stored
parameters give in real arithmetic. Every rule here keeps that true, by moving its result outward by
more than its own rounding can be. Affine layers use centre and radius; monotone ones map the two ends;
an equilibrium layer is monotone too (T8), and its own ends come with a proof (`pcdeq.proofs.order`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.equation import Equation
from pcdeq.errors import UsageError
from pcdeq.implicit import solve_equation
from pcdeq.layers import PcDEQ
from pcdeq.proofs.order import SINGLE_PRECISION, enclose_near
from pcdeq.solvers import Anderson


@dataclass(frozen=True)
class Box:
    """Bounds on a tensor, sample by sample; ``proved`` says for which samples they hold."""

    lower: Tensor
    upper: Tensor
    proved: Tensor

    @classmethod
    def of(cls, x: Tensor, radius: float | Tensor = 0.0, limits: tuple[Tensor, Tensor] | None = None) -> Box:
        """The box of all tensors within ``radius``, which may differ by component, of x, and within the limits."""
        proved = torch.ones(len(x), dtype=torch.bool, device=x.device)
        radius = torch.as_tensor(radius, dtype=x.dtype, device=x.device)
        if not bool(radius.any()):
            return cls(x, x, proved)
        lower, upper = x - radius, x + radius
        if limits is not None:
            low, high = (limit.to(x) for limit in limits)
            lower, upper = torch.maximum(lower, torch.minimum(low, x)), torch.minimum(upper, torch.maximum(high, x))
        return outward(lower, upper, 2 * _eps(x) * (x.abs() + radius), proved)

    def map(self, monotone: Callable[[Tensor], Tensor]) -> Box:
        """The image under a nondecreasing map that does not round."""
        return Box(monotone(self.lower), monotone(self.upper), self.proved)

    def ball(self) -> tuple[Tensor, Tensor]:
        """A centre, and a radius that reaches both ends."""
        centre = self.lower + (self.upper - self.lower) / 2
        radius = torch.maximum(self.upper - centre, centre - self.lower)
        return centre, radius * (1 + 2 * _eps(radius))

    @property
    def wide(self) -> bool:
        """Whether the box is more than rounding, so that one linearisation will not serve both ends."""
        scale = self.upper.abs().amax() + self.lower.abs().amax()
        return bool((self.upper - self.lower).amax() > 1e-3 * scale)


def outward(lower: Tensor, upper: Tensor, error: Tensor, proved: Tensor) -> Box:
    """The box whose ends were computed with at most this error, moved out by it and by its own rounding."""
    slack = error * (1 + 4 * _eps(error)) + torch.finfo(error.dtype).tiny
    return Box(_down(lower - slack), _up(upper + slack), proved)


def _up(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def _down(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, -torch.inf))


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


@singledispatch
def push(module: nn.Module, box: Box, tol: float) -> Box:
    """The box of a module's exact outputs for the inputs in a box; ``tol`` is for equilibrium layers."""
    raise UsageError(
        f"no proof passes through a {type(module).__name__}; certify knows Sequential, Flatten, Linear, Conv2d, "
        "BatchNorm, MaxPool2d, AvgPool2d, ReLU, Identity, Dropout and the layers of pcdeq"
    )


@push.register
def _sequential(module: nn.Sequential, box: Box, tol: float) -> Box:
    for child in module:
        box = push(child, box, tol)
    return box


@push.register(nn.Identity)
@push.register(nn.Dropout)
def _identity(module: nn.Module, box: Box, tol: float) -> Box:
    return box


@push.register(nn.Flatten)
@push.register(nn.MaxPool2d)
@push.register(nn.ReLU)
def _exact_and_monotone(module: nn.Module, box: Box, tol: float) -> Box:
    return box.map(module)


@push.register
def _average(module: nn.AvgPool2d, box: Box, tol: float) -> Box:
    size = module.kernel_size
    terms = size * size if isinstance(size, int) else size[0] * size[1]
    magnitude = module(torch.maximum(box.lower.abs(), box.upper.abs()))
    return outward(module(box.lower), module(box.upper), (terms + 4) * _eps(magnitude) * magnitude, box.proved)


@push.register
def _linear(module: nn.Linear, box: Box, tol: float) -> Box:
    return _affine(F.linear, module.weight, module.bias, box, module.in_features)


@push.register
def _convolution(module: nn.Conv2d, box: Box, tol: float) -> Box:
    if module.padding_mode != "zeros":
        raise UsageError(f"certify knows convolutions padded with zeros, not {module.padding_mode!r}")

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)

    return _affine(convolve, module.weight, module.bias, box, module.weight[0].numel())


def _affine(apply: Callable[..., Tensor], weight: Tensor, bias: Tensor | None, box: Box, terms: int) -> Box:
    """Centre ± |W| radius; the rounding of both products is at most (terms + 4) eps |W| |centre|, and a little."""
    weight = weight.detach().to(box.lower.dtype)
    bias = None if bias is None else bias.detach().to(box.lower.dtype)
    centre, radius = box.ball()
    rounding = (terms + 4) * _eps(centre)
    middle = apply(centre, weight, bias)
    reach = apply(radius * (1 + rounding) + rounding * centre.abs(), weight.abs()) * (1 + rounding)
    if bias is not None:
        reach = reach + rounding * bias.abs().reshape(-1, *[1] * (middle.ndim - 2))
    return outward(middle, middle, reach, box.proved)


@push.register(nn.BatchNorm1d)
@push.register(nn.BatchNorm2d)
def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d, box: Box, tol: float) -> Box:
    """x * scale + shift, with both numbers made in float64 from the stored statistics."""
    if module.running_mean is None or module.running_var is None:
        raise UsageError("certify needs batch norm with running statistics: what it computes depends on the batch")
    shape = (-1, *[1] * (box.lower.ndim - 2))
    scale = torch.rsqrt(module.running_var.double() + module.eps)
    scale = scale if module.weight is None else scale * module.weight.detach().double()
    shift = -module.running_mean.double() * scale
    shift = shift if module.bias is None else shift + module.bias.detach().double()
    # The cancellation in shift is of float64 numbers; what it loses is relative to this size.
    size = ((module.running_mean.double() * scale).abs() + shift.abs()).to(box.lower.dtype).reshape(shape)
    scale, shift = (number.to(box.lower.dtype).reshape(shape) for number in (scale, shift))
    falling = scale < 0
    low = torch.where(falling, box.upper, box.lower) * scale + shift
    high = torch.where(falling, box.lower, box.upper) * scale + shift
    error = 8 * _eps(low) * (torch.maximum(box.lower.abs(), box.upper.abs()) * scale.abs() + size)
    return outward(low, high, error, box.proved)


@push.register
def _equilibrium(module: PcDEQ, box: Box, tol: float) -> Box:
    """The exact hull of the equilibria (T8): between those of the lower and of the upper input."""
    injected = _inject(module, box)
    # The effective weight in float64, rounded once: one more relative error, for which the margin has room.
    weight = module.operator.effective_weight_in(torch.float64).to(box.lower.dtype)
    linear = module.operator.bind(weight)
    below, above = (Equation(linear, module.activation, x) for x in (injected.lower, injected.upper))
    if injected.wide:
        ends = [_solve(module, equation, tol) for equation in (below, above)]
        low, high = enclose_near(below, ends[0]), enclose_near(above, ends[1])
        return Box(low.lower, high.upper, box.proved & low.certified & high.certified)
    hull = enclose_near(below, _solve(module, below, tol), above)
    return Box(hull.lower, hull.upper, box.proved & hull.certified)


def _solve(module: PcDEQ, equation: Equation, tol: float) -> Tensor:
    """A point near the equilibrium, from float32 where that is precise enough: where it is from is no matter."""
    x = equation.x
    if tol >= SINGLE_PRECISION:
        equation = Equation(module.operator.bind(equation.map.weight.float()), module.activation, x.float())
    guess = None if module.warm is None else module.warm.guess(equation.x)
    return solve_equation(equation, Anderson(tol=tol, max_steps=1000), guess).value.to(x.dtype)


def _inject(module: PcDEQ, box: Box) -> Box:
    """The injection is monotone; its rounding is relative, and grows with |x| for softplus: exp(5x) (T9)."""
    if module.injection is not None:
        raise UsageError("certify knows the paper's injections, not one of your own")
    low, high = module.inject(box.lower), module.inject(box.upper)
    if module.activation.kind == 2:
        return outward(low, high, 2 * _eps(low) * high, box.proved).map(lambda x: x.clamp(min=module.floor))
    relative = (16 + 8 * torch.maximum(box.lower.abs(), box.upper.abs())) * _eps(low)
    return outward(low, high, relative * high, box.proved).map(lambda x: x.clamp(min=module.floor))
