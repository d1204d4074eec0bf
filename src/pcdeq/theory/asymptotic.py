"""The asymptotic mapping g∞(z) = lim g(pz)/p, on which existence of a fixed point hangs (Definition A.2).

For a scalable map g(pz)/p falls as p grows, so every value is an upper bound and the limit exists. Numerically
p runs through powers of 2, which scale floating point numbers exactly, and each two values give an
extrapolation, (q g(qpz)/(qp) - g(pz)/p) / (q - 1): the slope of g between pz and qpz along the ray. It is
exact where g is affine; for a concave g it is itself an upper bound, and closer.

The fall is also what tells rounding: a map that subtracts (log(1 + 1/p) for large p, say) breaks down at some
p, its values rise, and the extrapolation that had changed least before that is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.equation import Equation
from pcdeq.layers import PcDEQ
from pcdeq.theory.mappings import Map, require_cone, value_of

RATIO = 2.0**8
LARGEST_SCALE = 2.0**96
# What a component of the limit is measured against where both it and that of z vanish, z having a largest one of 1.
NEGLIGIBLE = 1e-9
# A rise of g(pz)/p by more than this many eps is not the rounding of a healthy map.
NOISE = 1024


@dataclass(frozen=True, eq=False)
class Limit:
    """The value of an asymptotic mapping at one point.

    Attributes:
        value: the limit, extrapolated.
        upper: the last g(pz)/p that could be trusted, an upper bound if g is scalable.
        change: how much the last extrapolation changed the value, relative to it or to z.
        converged: whether that is below the tolerance.
    """

    value: Tensor
    upper: Tensor
    change: float
    converged: bool


@dataclass(frozen=True)
class AsymptoticMapping:
    """A callable z -> lim fn(pz)/p; `limit` also tells how well it is known.

    It sees one point at a time. For a layer or an equation of this package it is 0, in closed form.
    """

    fn: Map
    rtol: float = 1e-6

    def __call__(self, z: Tensor) -> Tensor:
        return self.limit(z).value

    @torch.no_grad()
    def limit(self, z: Tensor) -> Limit:
        """The limit at z, with an upper bound and whether it converged."""
        require_cone(z=z)
        length = float(z.max())
        if vanishes(self.fn) or length == 0:
            return Limit(torch.zeros_like(z), torch.zeros_like(z), 0.0, True)
        found = self._along(z / length)
        return Limit(found.value * length, found.upper * length, found.change, found.converged)

    def _along(self, z: Tensor) -> Limit:
        """The limit at a z whose largest component is 1."""
        slack = 1 + NOISE * torch.finfo(z.dtype).eps
        upper = value_of(self.fn, z)
        best = last = Limit(upper, upper, torch.inf, False)
        scale = RATIO
        while scale <= LARGEST_SCALE:
            new = value_of(self.fn, scale * z) / scale
            if not bool((new <= upper * slack).all()):  # rises, or is not a number
                return best
            value = ((RATIO * new - upper) / (RATIO - 1)).clamp(min=0.0)
            size = torch.maximum(value, z).clamp(min=NEGLIGIBLE)
            change = float(((value - last.value).abs() / size).max())
            last = Limit(value, new, change, change <= self.rtol)
            best = last if change <= best.change else best
            upper, scale = new, scale * RATIO
        return last


def asymptotic_mapping(fn: Map | PcDEQ, *, rtol: float = 1e-6) -> AsymptoticMapping:
    """The asymptotic mapping z -> lim fn(pz)/p of a scalable map (Definition A.2), as a callable.

    0 in closed form for a pcDEQ layer or its equation (Proposition 4.4: s(y)/y -> 0), else found numerically.

    Args:
        fn: a map of the nonnegative cone into itself, scalable (otherwise the limit need not exist).
        rtol: `Limit.converged` says whether the last extrapolation changed by less than this (by how much,
            `spectral_radius` adds to its bounds).

    >>> import torch
    >>> matrix = torch.tensor([[0.5, 0.2], [0.1, 0.4]]).double()
    >>> far = asymptotic_mapping(lambda z: matrix @ z + z.sqrt() + 3)
    >>> far(torch.ones(2).double()), far.limit(torch.ones(2).double()).converged
    (tensor([0.7000, 0.5000], dtype=torch.float64), True)
    """
    return AsymptoticMapping(fn, rtol)


def vanishes(fn: object) -> bool:
    """Whether the asymptotic mapping is known to be 0: every `pcdeq.Activation` has s(y)/y -> 0."""
    return isinstance(fn, Equation | PcDEQ)
