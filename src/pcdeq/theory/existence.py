"""Does a map have a fixed point at all? If and only if the spectral radius of its asymptotic mapping is below 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.theory.asymptotic import asymptotic_mapping
from pcdeq.theory.bounds import is_upper
from pcdeq.theory.mappings import Like, Map, origin, value_of
from pcdeq.theory.spectral import Eigenpair, spectral_radius


@dataclass(frozen=True, eq=False)
class Existence:
    """Whether a map has a fixed point: true in a condition only if the answer is yes.

    Attributes:
        verdict: ``"undecided"`` where the bounds on the spectral radius have 1 between them.
        radius: the spectral radius of the asymptotic mapping.
        witness: a point u >= fn(u), if one was found: it proves existence by itself (T1), and u >= z*.
    """

    verdict: Literal["exists", "does not exist", "undecided"]
    radius: Eigenpair
    witness: Tensor | None

    def __bool__(self) -> bool:
        return self.verdict == "exists"

    def __str__(self) -> str:
        how = "" if self.witness is None else ", and a point u >= fn(u) proves it"
        return f"fixed point: {self.verdict}; spectral radius {self.radius}{how}"


@torch.no_grad()
def has_fixed_point(fn: Map, like: Like, *, asymptotic: Map | Tensor | None = None) -> Existence:
    """Whether a standard interference mapping has a fixed point: if and only if ρ(fn∞) < 1 (Proposition A.4).

    The fixed point is then unique, positive, and reached by plain iteration from everywhere. Where ρ < 1, a
    multiple u of the eigenvector with u >= fn(u) is sought, which proves existence without any limit. That
    fn is monotone and scalable is assumed; `check_monotone` and `check_scalable` look for the contrary.

    Args:
        fn: the map.
        like: the number of components, or a tensor like a point.
        asymptotic: fn∞, as a map or a nonnegative matrix, if you know it; else `asymptotic_mapping` finds it.

    >>> import torch
    >>> for size in (0.9, 1.1):
    ...     print(has_fixed_point(lambda z: size * z.flip(0) + 1, 2).verdict)
    exists
    does not exist
    """
    zero = origin(like)
    if not bool((value_of(fn, zero) > 0).all()):
        raise UsageError("fn(0) has a component that is not positive: fn is not a standard interference mapping")
    limit = asymptotic_mapping(fn) if asymptotic is None else asymptotic
    radius = spectral_radius(limit, zero)
    direction = torch.ones_like(zero) if radius.vector is None else radius.vector.to(zero).reshape(zero.shape)
    # The first multiple of the direction with u >= fn(u); for a scalable map all larger ones have it too.
    points = (2.0**power * direction for power in range(0, 240, 4)) if radius.lower < 1 else ()
    witness = next((point for point in points if bool(is_upper(fn, point).all())), None)
    if witness is not None or radius.upper < 1:
        return Existence("exists", radius, witness)
    return Existence("does not exist" if radius.lower >= 1 else "undecided", radius, None)
