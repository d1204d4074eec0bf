"""Bounds on the fixed point and on the gradient of a map of yours, proved by the one order test.

The candidates are those of `proofs.order` with the derivative by autograd in place of a layer's: z ± d, where d is a
Neumann series of J at z applied to the residual and a little more; after them multiples of z, which need no
derivative. What is claimed is what the test has shown: nothing depends on where a candidate came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pcdeq.concave.bound import BoundMap
from pcdeq.proofs.gradient import MOST_TERMS
from pcdeq.proofs.order import (
    ATTEMPTS,
    ROUNDING_SLACK,
    Enclosure,
    is_lower,
    is_upper,
    largest,
    rounded_down,
    rounded_up,
)
from pcdeq.proofs.precision import full_precision
from pcdeq.solvers import per_sample

# How far from its point multiples are tried: a factor of 1 + 4^10.
WIDEST = 4.0**10
# Plain steps from either side, where bounds are still wider than asked for.
MOST_STEPS = 50


def _series(bound: BoundMap, z: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """z ± d for longer and longer series (T3); slack and rounding are relative to each component."""
    value, margin, push = bound(z), bound.margin(z), bound.tangent(z)
    residual = (value - z).abs()
    least = ROUNDING_SLACK * margin * value
    for terms, slack in ATTEMPTS:
        source = term = residual + slack * largest(residual / value) * value + least
        distance = torch.zeros_like(z)
        for _ in range(terms):
            distance, term = distance + term, push(term)
        scale = torch.where(source > term, (residual + least) / (source - term), torch.inf)
        distance = distance * largest(scale).clamp(min=1)
        distance = torch.where(distance.isfinite(), distance, torch.nan)  # too few terms: this is no candidate
        yield (z - distance).clamp(min=0), z + distance


def _multiples(bound: BoundMap, z: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    delta = 4 * float(torch.nan_to_num(bound.margin(z), nan=0.0, posinf=0.0).max().clamp(min=torch.finfo(z.dtype).eps))
    while delta <= WIDEST:
        yield z / (1 + delta), z * (1 + delta)
        delta *= 4


@torch.no_grad()
@full_precision()
def enclose_near(bound: BoundMap, z: Tensor) -> Enclosure:
    """Bounds on z* from a point near it; each side is the first candidate that passes, one step closer."""
    z = torch.where(z.isfinite(), z, 0.0).clamp(min=0)
    lower, upper = rounded_down(bound, torch.zeros_like(z)), torch.full_like(z, torch.inf)
    below = above = passed = torch.zeros(z.shape[:1], dtype=torch.bool, device=z.device)
    for candidates in (_series, _multiples):
        for low, high in candidates(bound, z):
            low_holds, high_holds = is_lower(bound, low) & ~below, is_upper(bound, high) & ~above
            if bool(low_holds.any()):  # g is monotone: a step from either side stays there, and is closer
                raised = torch.maximum(rounded_down(bound, low), low)
                lower = torch.where(per_sample(low_holds, z), torch.maximum(lower, raised), lower)
            if bool(high_holds.any()):
                lowered = torch.minimum(rounded_up(bound, high), high)
                upper = torch.where(per_sample(high_holds, z), lowered, upper)
            # One that reached 0 is a bound, but a later one may be better.
            below, above = below | (low_holds & (low > 0).flatten(1).all(1)), above | high_holds
            passed = passed | low_holds
            if bool((below & above).all()):
                break
    ordered = (lower <= upper).flatten(1).all(1)
    return Enclosure(lower, upper, passed & above & ordered)


@torch.no_grad()
@full_precision()
def tighten(bound: BoundMap, box: Enclosure, width: Tensor) -> Enclosure:
    """Plain steps from either side until no component is wider or nothing is gained; what is wide is not certified."""
    lower, upper = box.lower, box.upper
    for _ in range(MOST_STEPS):
        if not bool((box.certified & ~_narrow(lower, upper, width)).any()):
            break
        closer = torch.maximum(lower, rounded_down(bound, lower)), torch.minimum(upper, rounded_up(bound, upper))
        if torch.equal(closer[0], lower) and torch.equal(closer[1], upper):
            break
        lower, upper = closer
    return Enclosure(lower, upper, box.certified & _narrow(lower, upper, width))


def _narrow(lower: Tensor, upper: Tensor, width: Tensor) -> Tensor:
    return (upper - lower <= width).flatten(1).all(1)


class AdjointBound(NamedTuple):
    """A solution of y = J(z)ᵀy + grad, and how far it can be from the exact one.

    Attributes:
        value: y, which is the gradient with respect to fn's value.
        error: it is at most so far from the exact one, componentwise, for the J of this z; infinite where not proved.
        certified: for which samples that is proved.
    """

    value: Tensor
    error: Tensor
    certified: Tensor


@torch.no_grad()
@full_precision()
def adjoint_bound(bound: BoundMap, z: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    """A bound on |y - y*|, componentwise, for y* = Jᵀy* + grad at z (T5), rounding of the products included.

    J >= 0, as the map is monotone; a w > 0 with Jᵀw <= cw, c < 1, found as a Neumann series, bounds the rest.
    """
    pull, exactly = bound.pullback(z), bound.pullback_with_error(z)
    eps = torch.finfo(z.dtype).eps
    term = weights = torch.ones_like(z)
    for _ in range(MOST_TERMS):
        term = pull(term)
        if bool((largest(term) < 0.5).all()) or not bool(term.isfinite().all()):
            break
        weights = weights + term
    image, off = exactly(weights)
    factor = largest((image + off) / weights) * (1 + 4 * eps)
    pulled, error = exactly(y)
    residual = (pulled + grad - y).abs() + error + 4 * eps * (pulled.abs() + grad.abs() + y.abs())
    worst = largest(residual / weights) * (1 + 8 * eps)
    return torch.where(factor < 1, weights * worst / (1 - factor) * (1 + 8 * eps), torch.inf)
