"""Bounds on the fixed point of any monotone map, by comparing a point with its image (T1, T2).

For a standard interference mapping g (positive, monotone, scalable) with fixed point z*:

    l <= g(l) implies l <= z*;    u >= g(u) implies that z* exists and z* <= u.

*Proof.* The iterates of l rise and, from every start, converge to z*. Those of u fall, stay above
g(0) > 0, and so have a limit, which is a fixed point. ∎ The candidates may come from anywhere.

As in `pcdeq.fixed_point`, dimension 0 counts samples that do not influence each other, unless the point is
a vector. The comparisons leave a margin for the rounding of g (T9): by default what a sum of nonnegative
terms needs, one for each component. Give ``rtol`` for a map that rounds worse. Nothing here can see whether
g is monotone and scalable; `check_monotone` and `check_scalable` look for the contrary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.proofs.order import Enclosure
from pcdeq.theory.mappings import Map, require_cone, rounding, value_of

# How far from its point `enclose_map` looks: a factor of 1 + 4^10.
WIDEST = 4.0**10


@torch.no_grad()
def is_lower(fn: Map, z: Tensor, *, rtol: float | None = None) -> Tensor:
    """Whether z <= fn(z), so that z <= z* if there is a z* (T1); one answer per sample.

    Claims nothing unless fn is monotone with a unique fixed point to which its iterates converge, as
    those of a standard interference mapping do.

    >>> import torch
    >>> def fn(z):
    ...     return 1 + z.sqrt()
    >>> z = torch.tensor([[2.0], [3.0]]).double()  # z* = 2.618
    >>> is_lower(fn, z).tolist(), is_upper(fn, z).tolist()
    ([True, False], [False, True])
    """
    require_cone(z=z)
    return _below(z, value_of(fn, z), _margin(z, rtol))


@torch.no_grad()
def is_upper(fn: Map, z: Tensor, *, rtol: float | None = None) -> Tensor:
    """Whether z >= fn(z), so that a z* exists and z >= z* (T1); one answer per sample.

    Claims nothing unless fn is a standard interference mapping; see `is_lower` for an example.
    """
    require_cone(z=z)
    return _above(z, value_of(fn, z), _margin(z, rtol))


@torch.no_grad()
def enclose_map(fn: Map, z: Tensor, *, rtol: float | None = None) -> Enclosure:
    """Bounds z/(1 + δ) <= z* <= (1 + δ)z from a point z near z*, with δ as small as the order test allows (T1).

    For a standard interference mapping there is such a δ near every good approximation: scalability makes
    the inequality strict on the ray through z*. Each side has its own δ, found by multiplying by 4 from the
    margin of the test; a far point is not certified.

    >>> import torch
    >>> z = torch.tensor([2.618034]).double()
    >>> box = enclose_map(lambda z: 1 + z.sqrt(), z)
    >>> bool(box.certified), bool(box.lower < (3 + 5**0.5) / 2 < box.upper), box.width.item() < 1e-5
    (True, True, True)
    """
    require_cone(z=z)
    margin = _margin(z, rtol)
    lower, upper = torch.zeros_like(z), torch.full_like(z, torch.inf)
    below = above = torch.zeros(z.shape[:1] if z.ndim > 1 else (), dtype=torch.bool, device=z.device)
    delta = 4 * margin
    while delta <= WIDEST and not bool((below & above).all()):
        low, high = z / (1 + delta), z * (1 + delta)
        now_below = _below(low, value_of(fn, low), margin)
        now_above = _above(high, value_of(fn, high), margin)
        lower = torch.where(_spread(now_below & ~below, z), low, lower)
        upper = torch.where(_spread(now_above & ~above, z), high, upper)
        below, above = below | now_below, above | now_above
        delta *= 4
    return Enclosure(lower, upper, below & above)


@torch.no_grad()
def scaling_bounds(fn: Map, z: Tensor, *, rtol: float | None = None) -> Enclosure:
    """Bounds z/(1 + m) <= z* <= z/(1 - M) for a positive concave map, from one evaluation at z (T2).

    m = max (z - g(z))₊ / g(0) and M = max (g(z) - z)₊ / g(0). Without M < 1 there is no upper bound (it is
    infinite, and the sample not certified); the lower one holds in any case. Both are tight where g(0) is
    large, useless where a component of it is tiny. fn must be concave and fn(0) > 0; a merely scalable map
    needs `enclose_map`.

    >>> import torch
    >>> box = scaling_bounds(lambda z: 1 + z.sqrt(), torch.tensor([2.5]).double())
    >>> round(box.lower.item(), 4), round(box.upper.item(), 4), bool(box.certified)
    (2.5, 2.7208, True)
    """
    require_cone(z=z)
    margin = 2 * _margin(z, rtol)
    value, at_zero = value_of(fn, z), value_of(fn, torch.zeros_like(z)) * (1 - margin)
    require_cone(**{"fn(0)": at_zero})
    fall = _largest((z - value * (1 - margin)).clamp(min=0) / at_zero)
    rise = _largest((value * (1 + margin) - z).clamp(min=0) / at_zero)
    bounded = rise < 1  # not so where fn(0) is 0: then the ratio is infinite or not a number
    lower = torch.nan_to_num(z * (1 - margin) / (1 + _spread(fall, z)), nan=0.0)
    upper = torch.where(_spread(bounded, z), z * (1 + margin) / (1 - _spread(rise, z)), torch.inf)
    return Enclosure(lower, upper, bounded)


def _margin(z: Tensor, rtol: float | None) -> float:
    return rounding(z[0] if z.ndim > 1 else z) if rtol is None else rtol


def _below(z: Tensor, value: Tensor, margin: float) -> Tensor:
    """z <= value in real numbers; a component 0 is below everything."""
    return _all((value * (1 - margin) - torch.finfo(z.dtype).tiny >= z) | ((z == 0) & (value >= 0)))


def _above(z: Tensor, value: Tensor, margin: float) -> Tensor:
    """value <= z in real numbers, z finite."""
    return _all((value * (1 + margin) + torch.finfo(z.dtype).tiny <= z) & z.isfinite())


def _all(condition: Tensor) -> Tensor:
    return condition.flatten(1).all(1) if condition.ndim > 1 else condition.all()


def _largest(z: Tensor) -> Tensor:
    return z.flatten(1).amax(1) if z.ndim > 1 else z.max()


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """One value per sample, shaped so that it broadcasts over the samples' components."""
    return values.reshape(-1, *[1] * (like.ndim - 1)) if like.ndim > 1 else values
