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
from pcdeq.proofs.order import Enclosure, full_precision, largest
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
    """w > 0 and c, one a sample, with A w <= c w; c is 1 or more where none was found."""
    term = weights = torch.ones_like(slope)
    for _ in range(MOST_TERMS):
        term = slope * linear.adjoint(term) * (1 + margin)
        if bool((largest(term) < 0.5).all()) or not bool(term.isfinite().all()):
            break
        weights = weights + term
    factor = largest(slope * linear.adjoint(weights) * (1 + margin) / weights)
    return weights, torch.where(factor.isfinite(), factor, torch.inf)


@torch.no_grad()
@full_precision()
def adjoint_distance(adjoint: Adjoint, u: Tensor) -> Tensor:
    """A proved bound on |u - u*|, componentwise, u* the solution of u = D(Wᵀu + v) for this slope; rounding covered.

    Costs two products and the terms of one series.
    """
    margin = product_margin(adjoint.map, u)
    # The terms have both signs, so rounding is relative to the sum of their sizes.
    rounding = margin * (adjoint.slope * (adjoint.pull(u.abs()) + adjoint.grad.abs()) + u.abs())
    weights, factor = contraction(adjoint.map, adjoint.slope, margin)
    worst = largest(((adjoint(u) - u).abs() + rounding) * (1 + margin) / weights)
    return torch.where(factor < 1, weights * worst / (1 - factor), torch.inf) * (1 + 4 * margin)


@torch.no_grad()
@full_precision()
def enclose_gradient(equation: Equation, box: Enclosure, grad: Tensor, tol: float) -> GradientEnclosure:
    """Bounds on the exact gradient of <grad, z*> with respect to the equation's input x, in its dtype.

    ``box`` encloses z*; ``tol`` is how much of the result its own series may leave out, relative to its size.
    """
    margin = product_margin(equation.map, box.lower)
    least, most, kinks = _slopes(equation, box, margin)
    weights, factor = contraction(equation.map, most, margin)
    certified = box.certified & (factor < 1).flatten()
    factor = factor.clamp(max=1 - 1e-9)  # what is not certified is replaced below

    def ends(part: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on what a part >= 0 of the gradient turns into."""
        low, _ = _series(equation.map, least, part, weights, factor, tol, -margin)
        high, rest = _series(equation.map, most, part, weights, factor, tol, margin)
        return low, high + rest

    (low, high), (negative_low, negative_high) = ends(grad.clamp(min=0)), ends((-grad).clamp(min=0))
    slack = 4 * torch.finfo(grad.dtype).eps * (high + negative_high)
    proved = per_sample(certified, grad)
    lower = torch.where(proved, low - negative_high - slack, -torch.inf)
    upper = torch.where(proved, high - negative_low + slack, torch.inf)
    return GradientEnclosure(lower, upper, certified, kinks)


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
    return activation.derivative(high) * (1 - 64 * margin), activation.derivative(low) * (1 + 64 * margin), kinks


def _series(
    linear: LinearMap, slope: Tensor, source: Tensor, weights: Tensor, factor: Tensor, tol: float, margin: float
) -> tuple[Tensor, Tensor]:
    """Σ Aᵏ D source, rounded by the margin's sign, and a bound on the terms left out."""
    total = torch.zeros_like(source)
    term = slope * source * (1 + margin)
    rest = torch.zeros_like(source)
    for _ in range(MOST_TERMS):
        total = total + term
        term = slope * linear.adjoint(term) * (1 + margin)
        rest = weights * largest(term / weights) / (1 - factor)
        if bool((largest(rest) <= tol * largest(total)).all()):
            break
    return total * (1 + margin), rest * (1 + abs(margin))
