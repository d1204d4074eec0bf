"""Bounds on the equilibrium that are proved, not estimated (T1, T3, T9).

The order test (T1): l <= g(l) implies l <= z*, and u >= g(u) implies u >= z*. A candidate may come
from anywhere. Ours is z ± d around a computed point z, where d is a Neumann series of the Jacobian
J = diag(s'(Wz + x)) W at z, applied to the residual r and a little more (T3, with one series in place of
two). With r' = r + δ and D = Σ_{k<=K} Jᵏ r', d = λD satisfies d - Jd = λ (r' - J^{K+1} r') >= r for the λ that
makes it so, and then z + d passes the test because g is concave. The little more, δ, also covers the
rounding of the test (T9). What is claimed in the end is only what the test itself has shown, with a
margin for the rounding of its own products: nothing depends on how the candidate was found.

The test is about any monotone map that can say by how much it rounds (`Rounded`); the candidate needs a concave one
whose slope is known, such as the equation of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pcdeq.equation import Equation
from pcdeq.proofs.channels import RADIUS, Single, channel_sums, evaluate, has_channels, largest, surround_near
from pcdeq.proofs.precision import full_precision
from pcdeq.proofs.trusted import require_nonnegative
from pcdeq.solvers import Anderson, run

# (terms of the series, slack δ as a fraction of the largest residual) of the first attempt and the next ones.
ATTEMPTS = ((5, 0.05), (10, 0.3), (20, 1.0), (40, 4.0))
# Tolerances by which bounds are tightened to a width; below the second number float32 is of no use.
REFINEMENTS = (1e-5, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14)
SINGLE_PRECISION = 1e-6
# Slack for rounding, in units of the test's margin: one is used up by the test itself.
ROUNDING_SLACK = 2.5


@dataclass(frozen=True)
class Enclosure:
    """lower <= z* <= upper, proved.

    Attributes:
        lower, upper: the bounds, ``(samples, *state)``; where none was found, 0 and infinity.
        certified: for which samples there are bounds and, if a width was asked for, they are no wider, (samples,).

    >>> import torch, pcdeq
    >>> box = pcdeq.PcDEQLinear(4).enclose(torch.zeros(2, 4))
    >>> bool(box.certified.all()), bool((box.upper - box.lower < 1e-3).all())
    (True, True)
    """

    lower: Tensor
    upper: Tensor
    certified: Tensor

    @property
    def width(self) -> Tensor:
        """upper - lower, componentwise."""
        return self.upper - self.lower

    def put(self, samples: Tensor, found: Enclosure) -> None:
        """Write the bounds of some samples."""
        self.lower[samples], self.upper[samples], self.certified[samples] = found.lower, found.upper, found.certified


class Rounded(Protocol):
    """A monotone map of the nonnegative cone into itself that knows its rounding."""

    def __call__(self, z: Tensor) -> Tensor: ...

    def margin(self, z: Tensor) -> float | Tensor:
        """A bound on the relative rounding error of an evaluation at a point like z, perhaps by component."""
        ...


# Given bounds on z*: for which samples do they settle the matter?
Question = Callable[[Enclosure], Tensor]
# The same equation in float64, where that can be had.
Widening = Callable[[Equation], Equation]


@torch.no_grad()
@full_precision()
def enclose_near(equation: Equation, z: Tensor, above: Equation | None = None) -> Enclosure:
    """Enclose z* from a point z >= 0 near it (any point is safe; from a far one nothing is certified).

    With ``above``, the same equation for an input that is nowhere smaller, the box holds the
    equilibria of all inputs in between, because z* rises with the input (T8).
    """
    require_nonnegative(equation.map, z)
    above = equation if above is None else above
    lower, upper = torch.zeros_like(z), torch.full_like(z, torch.inf)
    certified = torch.zeros(z.shape[:1], dtype=torch.bool, device=z.device)
    left = torch.arange(len(z), device=z.device)
    for terms, slack in ATTEMPTS:
        low, high, proved = _attempt(equation.select(left), above.select(left), z[left], terms, slack)
        done = left[proved]
        lower[done], upper[done], certified[done] = low[proved], high[proved], True
        left = left[~proved]
        if not len(left):
            break
    return Enclosure(lower, upper, certified)


def in_float64(equation: Equation) -> Equation:
    """The same numbers as float64, if the map has a kind, which says how any weight acts; else as they are."""
    if equation.map.kind is None or equation.x.dtype == torch.float64:
        return equation
    return Equation(type(equation.map)(equation.map.weight.double()), equation.activation, equation.x.double())


@full_precision()
def enclose_tightly(equation: Equation, z: Tensor, to_float64: Widening = in_float64) -> Enclosure:
    """Enclose as tightly as the point allows: in float64 what float32 would round too much, rounded outward (T9).

    With a map and activation of ours that is one product in float64 and a few in float32 (`pcdeq.proofs.channels`); the
    test by both ends, in float64, is for the samples that it leaves, and for others' maps.
    """
    if z.device.type == "mps":  # which has no float64
        return enclose_near(equation, z)
    exact = to_float64(equation)
    point = z.to(exact.x.dtype)
    box = _surrounded(exact, point, by_place=True)
    left = (~box.certified).nonzero()[:, 0]
    if len(left):
        box.put(left, enclose_near(exact.select(left), point[left]))
    return box if point.dtype == z.dtype else _in_single_precision(box)


@full_precision()
def enclose_until(settled: Question, equation: Equation, z: Tensor, to_float64: Widening = in_float64) -> Enclosure:
    """Bounds by channel where they settle the matter, and else tight ones, each sample by itself.

    Those by channel cost one product in the dtype at hand, and are some ten times as wide as the solve is good.
    """
    box = _surrounded(equation, z, by_place=False)
    left = (~settled(box)).nonzero()[:, 0]
    if len(left):
        box.put(left, enclose_tightly(equation.select(left), z[left], to_float64))
    return box


@full_precision()
def enclose_within(width: float, equation: Equation, z: Tensor, to_float64: Widening = in_float64) -> Enclosure:
    """Enclose no wider than this; what stays wider is not certified."""
    box = enclose_until(partial(_within, width), equation, z, to_float64)
    box = _refine(width, equation, z, box, to_float64)
    return Enclosure(box.lower, box.upper, _within(width, box) & _all(box.lower <= box.upper))


def _surrounded(equation: Equation, z: Tensor, *, by_place: bool) -> Enclosure:
    """Bounds by distances from one point, each of a place or of all places of a channel, where they are found."""
    if not has_channels(equation.map, equation.activation) or not len(z):
        nothing = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        return Enclosure(torch.zeros_like(z), torch.full_like(z, torch.inf), nothing)
    point = evaluate(equation, z)
    if by_place:
        single, exact = Single.of(equation.map), torch.zeros_like(z, dtype=RADIUS)
        value, radius, proved = surround_near(equation, single.map.apply, point, exact, single)
    else:
        sums, exact = channel_sums(equation.map), z.new_zeros(z.shape[:2], dtype=RADIUS)
        value, radius, proved = surround_near(equation, lambda distance: distance @ sums.T, point, exact)
        radius = radius.view(*radius.shape, *[1] * (z.ndim - 2))
    radius = torch.add(radius, value, alpha=2 * torch.finfo(z.dtype).eps).add_(_tiny(z))  # and of what follows
    lower, upper = (value - radius).clamp_(min=0), value + radius
    if not bool(proved.all()):
        lower[~proved], upper[~proved] = 0.0, torch.inf
    return Enclosure(lower, upper, proved)


def _refine(width: float, equation: Equation, z: Tensor, box: Enclosure, to_float64: Widening) -> Enclosure:
    """Tighten the bounds of those samples that are wider than asked for, around better points."""
    for tol in REFINEMENTS:
        wide = ~_within(width, box)
        if not bool(wide.any()):
            break
        if equation.x.dtype != torch.float64 and tol < SINGLE_PRECISION:
            equation, z = to_float64(equation), z.double()
            box = Enclosure(box.lower.double(), box.upper.double(), box.certified)
        part = equation.select(wide)
        # Plain steps would do as well; Anderson needs fewer.
        better = run(part.problem().continued(z[wide], 1), Anderson(tol=tol, max_steps=1000)).value
        found = enclose_near(part, better)
        z[wide] = better
        # Both are bounds, so the better of the two is.
        box.lower[wide] = torch.maximum(box.lower[wide], found.lower)
        box.upper[wide] = torch.minimum(box.upper[wide], found.upper)
    return box


def _within(width: float, box: Enclosure) -> Tensor:
    """For which samples the bounds are no wider."""
    return (largest(box.width) <= width).flatten()


def _attempt(below: Equation, above: Equation, z: Tensor, terms: int, slack: float) -> tuple[Tensor, Tensor, Tensor]:
    """z - d, z + d, and for which samples both pass the order test."""
    margin = below.margin(z)
    product = below.product(z)
    low_value, low_slope = below.value_and_slope(product)
    high_value = low_value if above is below else above.activation.value(product + above.x)
    residual = torch.maximum(high_value - z, z - low_value).clamp_(min=0)
    # The slope at the lower input is the larger one, so it serves for both sides.
    rounding = margin * high_value
    source = term = residual + slack * largest(residual) + ROUNDING_SLACK * rounding
    distance = torch.zeros_like(z)
    for _ in range(terms):
        distance = distance + term
        term = low_slope * below.product(term)
    scale = (residual + (ROUNDING_SLACK - 1) * rounding) / (source - term)
    scale = torch.where(source > term, scale, torch.inf)
    distance = distance * largest(scale).clamp(min=1)
    high = z + distance
    low = torch.maximum(z - distance, below.at_zero() * (1 - ROUNDING_SLACK * margin))
    raised, lowered = rounded_down(below, low), rounded_up(above, high)
    proved = _is_lower(low, raised) & _is_upper(high, lowered) & _all(raised <= lowered)
    # One more step from either side stays on its side (g is monotone) and comes closer, for free.
    return torch.maximum(raised, low), lowered, proved


def rounded_up(fn: Rounded, u: Tensor) -> Tensor:
    """A number that is at least g(u) in real arithmetic."""
    return fn(u) * (1 + fn.margin(u)) + _tiny(u)


def rounded_down(fn: Rounded, low: Tensor) -> Tensor:
    """A number >= 0 that is at most g(l) in real arithmetic."""
    return (fn(low) * (1 - fn.margin(low)) - _tiny(low)).clamp(min=0)


@full_precision()
def is_upper(fn: Rounded, u: Tensor) -> Tensor:
    """T1 for each sample: 0 <= u and g(u) <= u in real numbers, hence z* <= u."""
    return _is_upper(u, rounded_up(fn, u))


@full_precision()
def is_lower(fn: Rounded, low: Tensor) -> Tensor:
    """T1 for each sample: 0 <= l <= g(l) in real numbers, hence l <= z*."""
    return _is_lower(low, rounded_down(fn, low))


def _is_upper(u: Tensor, image: Tensor) -> Tensor:
    return _all((image <= u) & (u >= 0) & (u < torch.inf))


def _is_lower(low: Tensor, image: Tensor) -> Tensor:
    return _all((image >= low) & (low >= 0))


def _in_single_precision(box: Enclosure) -> Enclosure:
    """The same bounds in float32, rounded outward."""
    lower, upper = box.lower.float(), box.upper.float()
    lower = torch.nextafter(lower, lower.new_tensor(-torch.inf)).clamp_(min=0)
    return Enclosure(lower, torch.nextafter(upper, upper.new_tensor(torch.inf)), box.certified)


def _all(condition: Tensor) -> Tensor:
    return condition.flatten(1).all(1)


def _tiny(z: Tensor) -> float:
    return torch.finfo(z.dtype).tiny
