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

from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.proofs import order
from pcdeq.proofs.order import Enclosure, largest
from pcdeq.solvers import per_sample
from pcdeq.theory.mappings import Map, require_cone, rounding, value_of

# How far from its point `enclose_map` looks: a factor of 1 + 4^10.
WIDEST = 4.0**10


@dataclass(frozen=True)
class _Samples:
    """A user's map on points z as the order test wants it: samples first, and a margin for its rounding."""

    fn: Map
    z: Tensor
    rtol: float | None

    def __call__(self, z: Tensor) -> Tensor:
        return value_of(self.fn, z.reshape(self.z.shape)).reshape(z.shape)

    def margin(self, z: Tensor) -> float:
        return rounding(z[0]) if self.rtol is None else self.rtol

    @property
    def points(self) -> Tensor:
        require_cone(z=self.z)
        return self.z if self.z.ndim > 1 else self.z.reshape(1, -1)

    def answers(self, values: Tensor) -> Tensor:
        return values if self.z.ndim > 1 else values.reshape(())

    def enclosure(self, lower: Tensor, upper: Tensor, certified: Tensor) -> Enclosure:
        return Enclosure(lower.reshape(self.z.shape), upper.reshape(self.z.shape), self.answers(certified))


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
    given = _Samples(fn, z, rtol)
    return given.answers(order.is_lower(given, given.points))


@torch.no_grad()
def is_upper(fn: Map, z: Tensor, *, rtol: float | None = None) -> Tensor:
    """Whether z >= fn(z), so that a z* exists and z >= z* (T1); one answer per sample.

    Claims nothing unless fn is a standard interference mapping; see `is_lower` for an example.
    """
    given = _Samples(fn, z, rtol)
    return given.answers(order.is_upper(given, given.points))


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
    given = _Samples(fn, z, rtol)
    z = given.points
    lower, upper = torch.zeros_like(z), torch.full_like(z, torch.inf)
    below = above = torch.zeros(z.shape[:1], dtype=torch.bool, device=z.device)
    delta = 4 * given.margin(z)
    while delta <= WIDEST and not bool((below & above).all()):
        low, high = z / (1 + delta), z * (1 + delta)
        now_below, now_above = order.is_lower(given, low), order.is_upper(given, high)
        lower = torch.where(per_sample(now_below & ~below, z), low, lower)
        upper = torch.where(per_sample(now_above & ~above, z), high, upper)
        below, above = below | now_below, above | now_above
        delta *= 4
    return given.enclosure(lower, upper, below & above)


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
    given = _Samples(fn, z, rtol)
    z = given.points
    margin = 2 * given.margin(z)
    value, at_zero = given(z), given(torch.zeros_like(z)) * (1 - margin)
    require_cone(**{"fn(0)": at_zero})
    fall = largest((z - value * (1 - margin)).clamp(min=0) / at_zero)
    rise = largest((value * (1 + margin) - z).clamp(min=0) / at_zero)
    bounded = rise < 1  # not so where fn(0) is 0: then the ratio is infinite or not a number
    lower = torch.nan_to_num(z * (1 - margin) / (1 + fall), nan=0.0)
    upper = torch.where(bounded, z * (1 + margin) / (1 - rise), torch.inf)
    return given.enclosure(lower, upper, bounded.reshape(len(z)))
