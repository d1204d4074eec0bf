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
from typing import Protocol

import torch
from torch import Tensor

from pcdeq.equation import Equation
from pcdeq.proofs.channels import RADIUS, Single, evaluate, has_channels, largest, surround_near
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


class Rounded(Protocol):
    """A monotone map of the nonnegative cone into itself that knows its rounding."""

    def __call__(self, z: Tensor) -> Tensor: ...

    def margin(self, z: Tensor) -> float | Tensor:
        """A bound on the relative rounding error of an evaluation at a point like z, perhaps by component."""
        ...


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


@full_precision()
def enclose_tightly(to_float64: Callable[[Equation], Equation], equation: Equation, z: Tensor) -> Enclosure:
    """Enclose as tightly as the point allows: in float64 what float32 would round too much, rounded outward (T9).

    With a map and activation of ours that is one product in float64 and a few in float32 (`pcdeq.proofs.channels`); the
    test by both ends, in float64, is for the samples that it leaves, and for others' maps.
    """
    if z.device.type == "mps":  # which has no float64
        return enclose_near(equation, z)
    exact = equation if z.dtype == torch.float64 else to_float64(equation)
    point = z.to(exact.x.dtype)
    box = _surrounded(exact, point)
    left = (~box.certified).nonzero()[:, 0]
    if len(left):
        found = enclose_near(exact.select(left), point[left])
        box.lower[left], box.upper[left], box.certified[left] = found.lower, found.upper, found.certified
    return box if z.dtype == torch.float64 else _in_single_precision(box)


def _surrounded(equation: Equation, z: Tensor) -> Enclosure:
    """Bounds by distances from one point, where they are found."""
    if not has_channels(equation.map, equation.activation) or not len(z):
        nothing = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        return Enclosure(torch.zeros_like(z), torch.full_like(z, torch.inf), nothing)
    single, exact = Single.of(equation.map), torch.zeros_like(z, dtype=RADIUS)
    value, radius, proved = surround_near(equation, single.map.apply, evaluate(equation, z), exact, single)
    radius = torch.add(radius, value, alpha=2 * torch.finfo(z.dtype).eps).add_(_tiny(z))  # and of what follows
    lower, upper = (value - radius).clamp_(min=0), value + radius
    if not bool(proved.all()):
        lower[~proved], upper[~proved] = 0.0, torch.inf
    return Enclosure(lower, upper, proved)


@full_precision()
def refine(
    to_float64: Callable[[Equation], Equation], equation: Equation, z: Tensor, box: Enclosure, width: float
) -> Enclosure:
    """Tighten the bounds of those samples that are wider than asked for; what stays wider is not certified."""
    for tol in REFINEMENTS:
        wide = ~(largest(box.width) <= width).flatten()
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
    narrow = (largest(box.width) <= width).flatten() & _all(box.lower <= box.upper)
    return Enclosure(box.lower, box.upper, narrow)


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
