"""Bounds on gradients (T5): how far a computed adjoint is from the exact one, and where the exact gradient lies.

With A = D Wᵀ, D = diag(s'(Wz + x)), the gradient with respect to x of a loss whose gradient with respect to z is v
solves u = A u + D v. A is nonnegative. Any w > 0 with A w <= c w, c < 1, proves that its spectral radius is at most
c, and that |u - u*| <= w max(|residual| / w) / (1 - c), component by component. Such a w is the Neumann series of A
applied to 1, once enough terms are taken.

That is about the solve at one point z. The exact gradient is that at z*, where D differs, and near a kink that can be
everything. But l <= z* <= u bounds D from both sides, since s' falls, and u is monotone in D for v >= 0: with v split
into its positive and its negative part, four series give bounds on the exact gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.equation import Adjoint, Equation, product_margin
from pcdeq.errors import UsageError
from pcdeq.operators import LinearMap
from pcdeq.proofs.order import Enclosure, largest
from pcdeq.proofs.precision import full_precision
from pcdeq.proofs.trusted import require_nonnegative
from pcdeq.solvers import per_sample

# Terms of a series before it is given up; one with a spectral radius of 0.97 needs about so many.
MOST_TERMS = 500


@dataclass(frozen=True)
class GradientEnclosure(Enclosure):
    """lower <= gradient <= upper for the samples that are certified.

    Attributes:
        lower, upper: bounds on the exact gradient, of the input's shape; infinite where nothing is certified.
        certified: for which samples they are proved.
        kinks: components at which the activation may have a kink within the bounds on z*: its slope is one of two,
            and the bounds hold for either.
    """

    kinks: Tensor


def contraction(linear: LinearMap, slope: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """w >= 1 and c, one a sample, with A w <= c w; c is 1 or more where none was found.

    A sample whose series grows beyond all bounds, or is not a number, is left alone and spoils no other.
    """
    term = weights = torch.ones_like(slope)
    for _ in range(MOST_TERMS):
        term = slope * linear.adjoint(term) * (1 + margin)
        going = (largest(term) >= 0.5) & (largest(term) < torch.finfo(term.dtype).max ** 0.5)
        if not bool(going.any()):
            break
        term = torch.where(going, term, 0.0)
        weights = weights + term
    factor = largest(slope * linear.adjoint(weights) * (1 + margin) / weights)
    return weights, torch.where(factor.isfinite(), factor, torch.inf)


@torch.no_grad()
@full_precision()
def adjoint_distance(adjoint: Adjoint, u: Tensor) -> Tensor:
    """A proved bound on |u - u*|, componentwise, u* the solution of u = D(Wᵀu + v) for this slope; rounding covered.

    Costs two products and the terms of one series.
    """
    require_nonnegative(adjoint.map, u, adjoint=True)
    margin = product_margin(adjoint.map, u)
    # The terms have both signs, so rounding is relative to the sum of their sizes.
    rounding = margin * (adjoint.slope * (adjoint.pull(u.abs()) + adjoint.grad.abs()) + u.abs())
    weights, factor = contraction(adjoint.map, adjoint.slope, margin)
    underflow = torch.finfo(u.dtype).tiny * (adjoint.slope > 0)
    left = ((adjoint(u) - u).abs() + rounding) * (1 + margin) + underflow
    distance = torch.where(factor < 1, weights * largest(left / weights) / (1 - factor), torch.inf)
    return distance * (1 + 4 * margin)


@torch.no_grad()
@full_precision()
def enclose_gradient(equation: Equation, box: Enclosure, grad: Tensor, tol: float) -> GradientEnclosure:
    """Bounds on the exact gradient of <grad, z*> with respect to the equation's input x, in its dtype, float64.

    ``box`` encloses z*; ``tol`` is how much of the result its own series may leave out, relative to its size.
    """
    require_nonnegative(equation.map, grad, adjoint=True)
    margin = product_margin(equation.map, box.lower)
    healthy = box.certified & grad.flatten(1).isfinite().all(1)
    *slopes, kinks = _slopes(equation, box, margin)
    least, most, grad = (torch.where(per_sample(healthy, grad), numbers, 0.0) for numbers in (*slopes, grad))
    factor = _power_of_two(largest(grad.abs()))
    grad = grad / factor
    weights, shrinks = contraction(equation.map, most, margin)
    certified = healthy & (shrinks < 1).flatten()
    resolvent = weights / (1 - shrinks.clamp(max=1 - 1e-9))  # what is not certified is replaced below

    def ends(part: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on what a part >= 0 of the gradient turns into."""
        low, _, lost = _series(equation.map, least, part, weights, resolvent, tol, -margin)
        high, rest, more = _series(equation.map, most, part, weights, resolvent, tol, margin)
        return (low - lost).clamp(min=0.0), high + rest + more

    (low, high), (negative_low, negative_high) = ends(grad.clamp(min=0)), ends((-grad).clamp(min=0))
    slack = 4 * torch.finfo(grad.dtype).eps * (high + negative_high)
    lower, upper = (low - negative_high - slack) * factor, (high - negative_low + slack) * factor
    return GradientEnclosure(*_outward(lower, upper, certified), certified, kinks)


def through_slope(bounds: GradientEnclosure, slope: Tensor) -> GradientEnclosure:
    """The bounds times a number >= 0 for each component, which is known to 1e-13 of its size, or is tiny."""
    tiny = torch.finfo(slope.dtype).tiny  # below which a slope has lost its digits, or is 0
    slack = (1e-13 * slope + tiny) * torch.maximum(bounds.lower.abs(), bounds.upper.abs()) + tiny
    lower, upper = bounds.lower * slope - slack, bounds.upper * slope + slack
    return GradientEnclosure(*_outward(lower, upper, bounds.certified), bounds.certified, bounds.kinks)


def _outward(lower: Tensor, upper: Tensor, certified: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds, moved out by one rounding, and infinite where nothing is certified or a number became too large."""
    infinity, proved = torch.full_like(lower, torch.inf), per_sample(certified, lower)
    lower = torch.where(proved & ~lower.isnan(), torch.nextafter(lower, -infinity), -infinity)
    return lower, torch.where(proved & ~upper.isnan(), torch.nextafter(upper, infinity), infinity)


def _power_of_two(peak: Tensor) -> Tensor:
    """About as large as the peak, so that gradients of any size are computed with as ones of size 1, exactly scaled."""
    exponent = torch.frexp(peak).exponent.clamp(-1000, 1000)
    return ((exponent.long() + 1023) << 52).view(torch.float64)  # the bits of such a number


def _slopes(equation: Equation, box: Enclosure, margin: float) -> tuple[Tensor, Tensor, Tensor]:
    """The least and the largest slope for z* in the box, and where a kink may lie in between."""
    activation = equation.activation
    if not activation.builtin and (at := activation.slope_loses_digits_at) is not None:
        raise UsageError(
            f"the slope of activation '{activation.name}' loses digits near y = {at:.1g}: nothing can be proved with "
            "it; write it without a difference of nearly equal numbers"
        )
    tiny = torch.finfo(box.lower.dtype).tiny
    upper = torch.where(box.upper.isfinite(), box.upper, 0.0)  # no claim is made about those samples
    low = ((equation.product(box.lower) + equation.x) * (1 - margin) - tiny).clamp_(min=0)
    high = (equation.product(upper) + equation.x) * (1 + margin) + tiny
    kinks = torch.zeros_like(low, dtype=torch.bool)
    for kink in activation.kinks:
        kinks |= (low <= kink) & (kink <= high)
    least, most = activation.derivative(high) * (1 - 64 * margin), activation.derivative(low) * (1 + 64 * margin)
    return (least - tiny).clamp(min=0.0), most + tiny, kinks


def _series(
    linear: LinearMap, slope: Tensor, source: Tensor, weights: Tensor, resolvent: Tensor, tol: float, margin: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ Aᵏ D source, rounded by the margin's sign, a bound on the terms left out, and one on what underflow loses.

    That each term is off by at most the smallest normal number makes at most so much times ``resolvent`` >= Σ Aᵏ 1.
    """
    total = torch.zeros_like(source)
    term = slope * source * (1 + margin)
    rest, limits = torch.zeros_like(source), torch.finfo(source.dtype)
    count = 0
    while count < MOST_TERMS:
        count += 1
        total = total + term
        term = slope * linear.adjoint(term) * (1 + margin)
        rest = resolvent * largest(term / weights)
        if bool((largest(rest) <= tol * largest(total)).all()):
            break
    summing = count * limits.eps if margin > 0 else -count * limits.eps
    return total * (1 + margin + summing), rest * (1 + abs(margin)), 4 * (count + 2) * limits.tiny * resolvent
