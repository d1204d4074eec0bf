"""Bounds on the equilibrium by one number for each channel, at the cost of one product (T1, T3, T8, T9).

Let z >= 0 be any point, v = g(z) = s(a), a = Wz + x, and let the exact input be within ρ of x. Let E be at least
|v - z|, δ > 0 a candidate and η = Mδ + ρ, each one number for all places of a channel; M_cd is the sum of W over all
places that take channel d to channel c, so that Wδ <= Mδ everywhere, because W >= 0. s is concave, so with S at least
its slope from min a - η on, s(a + η) <= v + Sη and s(max(a - η, 0)) >= v - Sη. If E + Sη <= δ, then u = z + δ has
g(u) <= u, and l = max(z - δ, 0) has g(l) >= l, for every admitted input: both pass the order test (T1) without a
product of either. So z* is within δ of z, and |z* - v| <= Sη. For vectors every component is a channel, and M = W.

The candidate is the sum of the series of SM applied to E + Sρ (T3), which are small matrices. It exists if SM, which is
above the Jacobian, has a spectral radius below 1: so it is with all trained networks that we have. Where it has not,
bounds are found by `pcdeq.proofs.order`, place by place.

The same holds place by place, with W itself for M: tighter, for a linear solve, which finds the candidate, and a
product with W, both in float32 even if z is in float64. All these numbers are >= 0, so every rounding is relative, and
covered by a factor.

A solve in float32 leaves an E of about 1e-4. Where that is too much, the point is corrected first (`evaluate`), by a
solve of the linear equation that its error fulfils, in float32 as well: what is left is of second order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pcdeq.activations import ROUNDINGS, Activation, TensorMap, overwrite
from pcdeq.equation import Adjoint, Equation
from pcdeq.operators import LinearMap
from pcdeq.proofs.trusted import require_nonnegative
from pcdeq.solvers import Anderson, run
from pcdeq.solvers.numbers import by_memory

# Candidates for δ: the share of the largest number that all get, for each time that the slopes are taken anew; the most
# terms of the series, and the share of the source at which the rest of the series is made up for by a factor.
SLACK, TERMS, REST = (0.01, 0.05, 0.2), 30, 0.35
# No equilibrium is larger, so no larger distance is of use; with a limit, what float32 takes for 0 has one, too.
LARGEST = 1024
# No number is divided by a smaller slope.
FLAT = 1e-6
# Relative tolerances of a correction, and of a candidate.
FINEST, COARSEST, CANDIDATE = 1e-4, 1e-2, 1e-3
# Radii are few digits and a size, whatever they are about.
RADIUS = torch.float32


def has_channels(linear: LinearMap, activation: Activation) -> bool:
    """Whether there is such a matrix M, and a slope that is accurate."""
    return linear.kind in ("dense", "conv") and activation.builtin


def channel_sums(linear: LinearMap) -> Tensor:
    """M, (channels, channels), of a map with a weight in float64."""
    weight = linear.weight
    return (weight if weight.ndim == 2 else weight.flatten(2).sum(2)).to(RADIUS)


def over_space(x: Tensor, extreme: Callable[..., Tensor] = torch.amax) -> Tensor:
    """The largest number of each channel, or the smallest, (samples, channels)."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        # In two steps, over rows of numbers and then over their pixels: in one, torch takes ten times as long.
        rows = x.permute(0, 2, 3, 1).flatten(2)
        return extreme(extreme(rows, 1).unflatten(1, (x.shape[3], x.shape[1])), 1)
    return x if x.ndim == 2 else extreme(x.flatten(2), 2)


class Single(NamedTuple):
    """W in float32, and transposed: for what is small, or need not be right, few digits are enough."""

    map: LinearMap
    turned: LinearMap

    @classmethod
    def of(cls, linear: LinearMap) -> Single:
        """That of a map with channels."""
        single = type(linear)(linear.weight.to(RADIUS))
        return cls(single, type(linear)(single.transposed().contiguous()))

    def solve(self, slope: Tensor, source: Tensor, tol: float) -> Tensor:
        """About the u with u = r + DWu, as that of u = D(Wu + r/D); where D is 0, or nearly, it is r.

        (By arithmetic: torch takes ten times as long to choose between numbers.)
        """
        quotient = slope.clamp(min=FLAT)
        adjoint = Adjoint(self.turned, slope, torch.div(source, quotient, out=quotient))
        found = run(adjoint.problem(), Anderson(tol=tol, max_steps=200)).value
        if bool(by_memory(slope).amin() >= FLAT):
            return found
        return found.addcmul_(source, torch.div(slope, -FLAT, out=quotient).add_(1.0).clamp_(min=0.0))


class Point(NamedTuple):
    """A point z >= 0 and what the map makes of it, up to rounding."""

    z: Tensor
    argument: Tensor  # Wz + x >= 0
    value: Tensor  # g(z)
    correction: Tensor | None  # the part of z whose product with W was made in float32


def evaluate(equation: Equation, z: Tensor, single: Single | None = None, wanted: float = 0.0) -> Point:
    """The map at a point near the equilibrium, any is safe, or at one that is nearer by a correction.

    z* - z is about the u with u = r + DWu, where r = g(z) - z and D is the slope there. Few digits of it are enough,
    because it is small; then W(z + u) + x is the argument at z, which needs many, and Wu, which does not.

    Args:
        single: what corrects, and writes over z; without, the point stays as it is.
        wanted: by so much it may be off then.
    """
    require_nonnegative(equation.map, z)
    if not bool(by_memory(z).amin() >= 0):  # which the margin of a product speaks of
        z = z.clamp(min=0)
    activation, argument = equation.activation, equation.map.apply_plus(z, equation.x)
    value = overwrite(activation, argument.clone())
    if single is None:
        return Point(z, argument, value, None)
    assert activation.slope_of_value is not None  # as it is builtin
    slope, residual = activation.slope_of_value(value.to(RADIUS)), value.sub_(z).to(RADIUS)
    # A NaN is not larger than anything, and so it is never the larger one here.
    tol = min(COARSEST, max(FINEST, wanted / max(1e-30, *map(abs, _ends(residual)))))
    correction = single.solve(slope, residual, tol)
    # From here on in the memory of the value, and then of z: memory that is new takes as long as what is done in it.
    moved = value.copy_(correction).add_(z)
    least, most = _ends(correction)
    if not (by_memory(moved).amin() >= 0 and most < LARGEST and least > -LARGEST):
        correction = torch.where((moved >= 0) & (correction.abs() < LARGEST), correction, 0.0)
        moved.copy_(correction).add_(z)
    # The exact argument is not negative, so that this only brings the computed one nearer.
    argument.add_(z.copy_(single.map.apply(correction))).clamp_(min=0)
    return Point(moved, argument, overwrite(activation, z.copy_(argument)), correction)


def surround_near(
    equation: Equation, product: TensorMap, point: Point, reach: Tensor, single: Single | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """g(z), a radius about it that holds z*, and for which samples that is proved.

    Args:
        product: Mδ for a δ >= 0 of the shape of ``reach``, right to the roundings of a product with W.
        reach: ρ, (samples, channels), or place by place, (samples, channels, *space), and then δ and M are, too.
        single: what finds candidates place by place; without, they are series.
    """
    z, argument, value, correction = point
    over = _itself if z.shape == reach.shape else over_space
    least = over(argument, torch.amin)
    facts, terms = torch.finfo(RADIUS), equation.map.terms(z.shape[1:])
    # The product, what is made of its result, and a few operations on radii.
    slop = (terms + 2 * ROUNDINGS + 2 * TERMS) * facts.eps
    lost = LARGEST * terms * facts.tiny
    if correction is not None:
        # That the argument is off by so much is as if the input were: by the rounding of Wu in float32, and of Wz.
        moved = product(over(correction.abs())) * (1 + slop) + lost
        size = over(argument).to(RADIUS) + moved
        reach = (reach + (terms + ROUNDINGS) * facts.eps * moved + 2 * equation.margin(z) * size + lost) * (1 + slop)
    rounding = (over(value).to(RADIUS) * equation.margin(z)).add_(lost)
    error = over((value - z).abs_()).to(RADIUS).add_(rounding).mul_(1 + slop)
    find = partial(_series, product=product) if single is None else partial(_solved, product=product, single=single)
    spread, proved = _spread(equation.activation, find, least.to(RADIUS), error, reach, slop)
    return value, (spread + rounding).mul_(1 + slop), proved


def _itself(x: Tensor, extreme: object = None) -> Tensor:
    """What `over_space` is for places."""
    return x


def _spread(
    activation: Activation,
    find: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    least: Tensor,
    error: Tensor,
    reach: Tensor,
    slop: float,
) -> tuple[Tensor, Tensor]:
    """Sη for a δ with E + Sη <= δ, and for which samples one was found; in the memory of what is needed no more."""

    def slope(shift: Tensor) -> Tensor:
        """At least the slope of s from min a - shift on: it falls, so before a kink it is that of the steeper side."""
        start = (least * (1 - slop)).sub_(shift).clamp_(min=0).mul_(1 - slop)
        return activation.derivative(start).mul_(1 + slop)

    steepest = slope(torch.add(reach, error, alpha=2))
    spread, proved = error, torch.zeros(len(error), dtype=torch.bool, device=error.device)
    for attempt, slack in enumerate(SLACK):
        source = torch.addcmul(error, steepest, reach)
        source.add_(slack * largest(source))
        candidate, image = find(steepest, source)
        shift = image.add_(reach).mul_(1 + slop)
        steepest = slope(shift)
        found = shift.mul_(steepest).mul_(1 + slop)
        over = (error + found).mul_(1 + slop).sub_(candidate)
        holds = ((largest(over) <= 0) & (largest(candidate) < LARGEST)).flatten()
        # What was proved stays so, whatever the samples beside it need.
        spread = torch.where(proved.view(-1, *[1] * (found.ndim - 1)), spread, found) if attempt else found
        proved = proved | holds
        if bool(proved.all()):
            break
    return spread, proved


def _solved(slope: Tensor, source: Tensor, *, product: TensorMap, single: Single) -> tuple[Tensor, Tensor]:
    """The same by a solve, for places: fewer products."""
    found = torch.maximum(single.solve(slope, source, CANDIDATE), source)
    image = product(found)
    left = torch.addcmul(found, slope, image, value=-1).clamp_(min=0)
    factor = largest(torch.div(source, left, out=left)).clamp_(min=1)
    return found.mul_(factor), image.mul_(factor)


def _series(slope: Tensor, source: Tensor, *, product: TensorMap) -> tuple[Tensor, Tensor]:
    """A δ with δ - SMδ at least about the source, or infinity, and Mδ."""
    moved = product(source)
    total, image, term = source, moved, slope * moved
    for _ in range(TERMS):
        if bool((term <= REST * source).all()):
            break
        moved = product(term)
        total, image, term = total + term, image + moved, slope * moved
    factor = largest(torch.where(term < source, source / (source - term), torch.inf))
    return total * factor, image * factor


def largest(z: Tensor) -> Tensor:
    """The largest component of each sample, broadcastable to z."""
    # In the order of memory, and so over one dimension: over several, torch takes ten times as long.
    return by_memory(z).flatten(1).amax(1).reshape(-1, *[1] * (z.ndim - 1))


def _ends(z: Tensor) -> tuple[float, float]:
    """The smallest component of all and the largest."""
    least, most = torch.aminmax(by_memory(z))
    return float(least), float(most)
