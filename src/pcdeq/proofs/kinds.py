"""The kinds of layers that proofs know: one entry a kind, with its rules for every analysis of a network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from pcdeq.equation import Equation
from pcdeq.injection import BETA
from pcdeq.layers import PcDEQ
from pcdeq.operations import solve_equation
from pcdeq.operators import LinearMap
from pcdeq.proofs import trusted
from pcdeq.proofs.affine import Linear as Linear
from pcdeq.proofs.balls import TINY, Ball, as_radius
from pcdeq.proofs.channels import RADIUS, Single, channel_sums, evaluate, has_channels, over_space, surround_near
from pcdeq.proofs.intervals import Bounds, Box, eps, outward
from pcdeq.proofs.linear import Corners, Functional, join, split
from pcdeq.proofs.order import SINGLE_PRECISION, Enclosure, enclose_near
from pcdeq.proofs.relaxed import pull_relu
from pcdeq.proofs.rules import Largest, Layer, Truncated, kind
from pcdeq.solvers import Anderson

# The tolerance of a solve that a correction follows.
COARSE = 1e-4
# So many samples tell what an attempt is worth.
PROBE = 32


@kind(nn.Identity)
class Identity(Largest):
    """Nothing."""

    def commutes(self, rank: int | None) -> bool:
        return True

    def keeps_channels(self, rank: int) -> bool:
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

    def keeps_channels(self, rank: int) -> bool:
        return True

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


class Prepared(NamedTuple):
    """The map of a layer that has channels in a dtype, its sums over places, and what it is in float32."""

    linear: LinearMap
    by_channel: Callable[[Tensor], Tensor]
    single: Single


@dataclass
class Tally:
    """How often something was tried and of use."""

    tried: int = 0
    useful: int = 0

    @property
    def is_worth_it(self) -> bool:
        """Whether it is for most, as far as one can tell."""
        return self.tried < PROBE or self.useful >= self.tried / 2

    def count(self, useful: Tensor) -> None:
        self.tried, self.useful = self.tried + useful.numel(), self.useful + int(useful.sum())


@kind(PcDEQ)
class Equilibrium(Layer):
    """An equilibrium, which rises with its input (T8): its values at the two ends are the exact hull."""

    solves = True

    def __init__(self, module: Any, path: str, plain: type[nn.Module], known: type[nn.Module]) -> None:
        super().__init__(module, path, plain, known)
        self._made: dict[torch.dtype, Prepared] = {}
        self._by_channel = Tally()

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

    def surround(self, ball: Ball, tol: float) -> Ball:
        """By one number for each channel or place, and the product with W that the order test needs.

        For few digits a solve in float32; for many, one as coarse that is corrected in float64.
        """
        module, centre = self._with_known_injection(), ball.centre
        dtype = torch.float32 if tol >= SINGLE_PRECISION else centre.dtype
        made = self._prepared(dtype)
        if centre.ndim != module.operator.state_ndim + 1 or made is None:
            return super().surround(ball, tol)
        x = module.inject(centre)
        reach = self._reach(ball, x, dtype)
        equation = Equation(made.linear, module.activation, x.to(dtype))
        z = self._solve(replace(equation, map=made.single.map, x=x.float()), max(tol, COARSE)).to(dtype)
        if dtype == torch.float32 or not len(x):
            point = evaluate(equation, z)
        else:
            point = evaluate(equation, z, made.single, 0.1 * float(reach.amax()))  # the input has no more digits
        if not ball.by_place and self._by_channel.is_worth_it:
            value, radius, proved = surround_near(equation, made.by_channel, point, reach)
            self._by_channel.count(proved)
            if self._by_channel.is_worth_it:
                return ball.moved(value, as_radius(radius, value), proved)
        # Slopes of all places of a channel may be too much for it, but each for its place.
        reach = reach if ball.by_place else torch.empty_like(x, dtype=RADIUS).copy_(as_radius(reach, x))
        value, radius, proved = surround_near(equation, made.single.map.apply, point, reach, made.single)
        return ball.moved(value, radius if ball.by_place else as_radius(over_space(radius), value), proved)

    def _reach(self, ball: Ball, x: Tensor, dtype: torch.dtype) -> Tensor:
        """How far the exact injected input may be from x in a dtype."""
        radius, most = ball.radii(), ball.over(x).to(RADIUS)
        # The slope of softplus, 1 - exp(-5x), is at most 5x. Its rounding, see `_inject`, is in terms of x at most
        # 16x + 8x² + 0.12, since |y| exp(5y) is small for a raw input y < 0.
        slope = (BETA * (most + radius)).clamp_(max=1.0) if self.module.activation.kind == 1 else 1.0
        rounding = ((16 + 8 * most) * most + 0.12) * eps(x)
        if x.dtype != dtype:
            rounding = rounding + most * torch.finfo(dtype).eps
        return (slope * radius + rounding) * (1 + 32 * torch.finfo(RADIUS).eps) + TINY

    def _prepared(self, dtype: torch.dtype) -> Prepared | None:
        """What balls need in a dtype, made once; None if the layer has no channels."""
        if dtype not in self._made:
            operator = self.module.operator
            exact = operator.bind(operator.effective_weight_in(torch.float64))
            if not has_channels(exact, self.module.activation):
                return None
            by_channel = partial(F.linear, weight=channel_sums(exact))
            self._made[dtype] = Prepared(operator.bind(exact.weight.to(dtype)), by_channel, Single.of(exact))
        return self._made[dtype]

    def _with_known_injection(self) -> PcDEQ:
        if self.module.injection is not None:
            self.refuse(trusted.OWN_INJECTION)
        return self.module

    def _solve(self, equation: Equation, tol: float) -> Tensor:
        """A point near the equilibrium, from float32 where that is precise enough: where it is from is no matter."""
        module, x = self.module, equation.x
        if tol >= SINGLE_PRECISION and x.dtype != torch.float32:
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
        return bounds.map(self._with_known_injection())

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
