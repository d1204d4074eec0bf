"""Eigenvalues of monotone maps: the nonlinear spectral radius and conditional eigenvectors.

The spectral radius of a monotone, positively homogeneous f is the largest λ with f(z) = λz for some z >= 0
other than 0 (Definition A.3). Every vector brackets it (Collatz and Wielandt):

    min fᵢ(z)/zᵢ over the zᵢ > 0   <=   ρ(f)   <=   max fᵢ(z)/zᵢ over all i, if z > 0,

so that an iteration needs no trust: what it returns are the best bounds it met.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.layers import PcDEQ
from pcdeq.theory.asymptotic import AsymptoticMapping, vanishes
from pcdeq.theory.mappings import Like, Map, origin, rounding, value_of

# Positive maps added to one that may be reducible, relative to its size, one after another.
PERTURBATIONS = (0.0, 1e-4, 1e-6, 1e-9, 1e-12)
# At most so many sets of components are tried in search of the best lower bound.
SUPPORTS = 64


@dataclass(frozen=True, eq=False)
class Eigenpair:
    """An eigenvalue with bounds, and a vector that belongs to it.

    Attributes:
        value: the eigenvalue: the middle of its bounds if they agree, else the upper one, to be safe.
        lower, upper: proved bounds, up to the map's own errors; they include the rounding of a sum (T9).
        vector: positive, its largest component (or its norm) 1, an eigenvector to the accuracy of the bounds;
            None for a layer, whose asymptotic mapping is 0 at every point.
        converged: whether the bounds agree to the tolerance.
    """

    lower: float
    upper: float
    vector: Tensor | None
    converged: bool

    @property
    def value(self) -> float:
        return (self.lower + self.upper) / 2 if self.converged else self.upper

    def __str__(self) -> str:
        note = "" if self.converged else ", not converged"
        return f"{self.value:.9g} (between {self.lower:.12g} and {self.upper:.12g}{note})"


@torch.no_grad()
def spectral_radius(
    mapping: Map | Tensor | PcDEQ, like: Like | None = None, *, rtol: float = 1e-9, max_steps: int = 500
) -> Eigenpair:
    """The spectral radius of a monotone, positively homogeneous map, with bounds.

    Closed forms: 0 for a pcDEQ layer or its equation (Corollary 4.5), and the Perron root for a nonnegative
    matrix, class by class of its graph, so that reducible ones are as exact as others. Any other map goes
    through the power iteration. A reducible map may have no positive eigenvector; then f + ε is used, whose
    eigenvectors are positive and whose spectral radius falls to that of f with ε. The bounds are always f's.

    Args:
        mapping: a matrix, a layer, or a map. For a scalable map that is not homogeneous, ask for the radius
            of its `asymptotic_mapping`.
        like: for a map, the number of components or a tensor like a point.
        rtol: at which the bounds count as equal.
        max_steps: of the power iteration, for each ε.

    >>> import torch
    >>> matrix = torch.tensor([[0.0, 2.0, 9.0], [2.0, 0.0, 9.0], [0.0, 0.0, 1.0]]).double()
    >>> print(f"{spectral_radius(matrix).value:.6f}")
    2.000000
    >>> print(f"{spectral_radius(lambda z: torch.maximum(matrix @ z, 3 * z), 3).value:.6f}")
    3.000000
    """
    if isinstance(mapping, Tensor):
        return _matrix_radius(mapping, rtol)
    if vanishes(mapping):
        return Eigenpair(0.0, 0.0, None, True)
    if like is None:
        raise UsageError("for a map, give the number of components or a tensor like a point")
    zero = origin(like)
    _require_homogeneous(mapping, zero + 1)
    best = _Bracket(zero + 1, rtol)
    for eps in PERTURBATIONS:
        settled = _power_iteration(mapping, eps, best, max_steps)
        if best.tight or (eps > 0 and not settled):  # with a smaller ε it would only be slower
            break
    return _trusted(mapping, best)


@torch.no_grad()
def conditional_eigenvector(
    fn: Map,
    like: Like,
    *,
    norm: float | Callable[[Tensor], Tensor] = math.inf,
    rtol: float = 1e-12,
    max_steps: int = 1000,
) -> Eigenpair:
    """The one λ and x > 0 with fn(x) = λx and ‖x‖ = 1, for a standard interference mapping.

    Found by x <- fn(x)/‖fn(x)‖, which converges for every monotone norm (Nuzman 2007, Contraction approach to
    power control, with non-monotonic applications). Then min xᵢ/fnᵢ(x) = 1/λ is the largest possible under
    ‖x‖ <= 1: the fairest powers within a budget. For every x > 0 of norm 1, min fnᵢ(x)/xᵢ <= λ <= max fnᵢ(x)/xᵢ.
    *Proof.* Let x* be the eigenvector, fn(x) >= ax, and t the least number with x <= tx*; the norm is monotone,
    so t >= 1. Then ax <= fn(tx*) <= t fn(x*) = tλx*, and t is the least only if a <= λ. Above likewise. ∎

    Args:
        norm: the order of a p-norm (1 is a total, inf a largest component), or any monotone norm.

    >>> import torch
    >>> pair = conditional_eigenvector(lambda x: x.sum() + torch.tensor([1.0, 3.0]).double(), 2)
    >>> round(pair.value, 9), round((5 + 17**0.5) / 2, 9)  # by hand: x₁² + 3x₁ = 2, x₂ = 1, λ = x₁ + 4
    (4.561552813, 4.561552813)
    """
    x = torch.ones_like(origin(like))
    x = x / _norm(x, norm)
    margin = rounding(x)
    pair = Eigenpair(0.0, math.inf, x, False)
    for _ in range(max_steps):
        value = value_of(fn, x)
        if not bool((value > 0).all() & value.isfinite().all()):
            raise UsageError("fn(x) has a component that is not a positive number: fn is not positive")
        lower, upper = _outward(value / x, margin)
        pair = Eigenpair(lower, upper, x, upper - lower <= (rtol + 2 * margin) * upper)
        if pair.converged:
            break
        x = value / _norm(value, norm)
    return pair


class _Bracket:
    """The best bounds met so far, and the vector of the upper one."""

    def __init__(self, start: Tensor, rtol: float) -> None:
        self.start, self.vector, self.rtol = start, start, rtol
        self.lower, self.upper = 0.0, math.inf
        self.margin = rounding(start)

    def meet(self, z: Tensor, value: Tensor) -> None:
        """Take the bounds that a positive z and its image give."""
        lower, upper = _outward(value / z, self.margin)
        if upper < self.upper:
            self.upper, self.vector = upper, z
        self.lower = max(self.lower, lower)

    def meet_supports(self, fn: Map, z: Tensor) -> None:
        """Take the lower bounds that z gives with its smaller components replaced by 0."""
        sizes = z.flatten().sort().values
        for least in sizes[:: -(-len(sizes) // SUPPORTS)]:
            kept = z >= least
            part = torch.where(kept, z, 0.0)
            self.lower = max(self.lower, _outward((value_of(fn, part) / z)[kept], self.margin)[0])

    @property
    def tight(self) -> bool:
        return self.upper - self.lower <= (self.rtol + 2 * self.margin) * self.upper

    def eigenpair(self) -> Eigenpair:
        return Eigenpair(self.lower, self.upper, self.vector, self.tight)


def _power_iteration(fn: Map, eps: float, best: _Bracket, max_steps: int) -> bool:
    """Iterate z <- f(z) + ε max f(z) + cz, normalised, and tell whether it settled.

    The shift by c = max f(z)/2 keeps it from cycling.
    """
    z, settled = best.start, False
    for _ in range(max_steps):
        value = value_of(fn, z)
        if not bool((value >= 0).all()):
            raise UsageError("the map leaves the nonnegative cone")
        best.meet(z, value)
        growth = value.max()  # z.max() is 1
        lifted = value + eps * growth
        low, high = _outward(lifted / z, 0.0)
        settled = best.tight or high - low <= 0.01 * best.rtol * high
        if settled:
            break
        z = lifted + 0.5 * growth * z
        z = z / z.max()
        if float(z.min()) < torch.finfo(z.dtype).tiny ** 0.5:  # reducible: leave it to the next ε
            return False
    best.meet_supports(fn, z)
    return settled


def _trusted(mapping: Map, best: _Bracket) -> Eigenpair:
    """The bounds, wider by what a numerical limit may be off; of one that has not converged only the upper bound."""
    if not isinstance(mapping, AsymptoticMapping):
        return best.eigenpair()
    limit = mapping.limit(best.vector)
    if limit.converged:
        slack = limit.change * max(1.0, best.upper)
        return Eigenpair(max(best.lower - slack, 0.0), best.upper + slack, best.vector, best.tight)
    upper = _outward(limit.upper / best.vector, best.margin)[1]
    return Eigenpair(0.0, max(upper, best.upper), best.vector, converged=False)


def _matrix_radius(matrix: Tensor, rtol: float) -> Eigenpair:
    """The Perron root: the largest of those of the matrix's strongly connected classes."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise UsageError(f"a matrix must be square, got shape {tuple(matrix.shape)}")
    if not bool((matrix >= 0).all() & matrix.isfinite().all()):
        raise UsageError("a matrix must be nonnegative and finite")
    matrix = matrix.detach().double()
    classes = [_noda(matrix[members][:, members], rtol) for members in _classes(matrix)]
    lower, upper = max(pair.lower for pair in classes), max(pair.upper for pair in classes)
    # A positive matrix next to it has a positive eigenvector, which tends to one of the matrix.
    vector = _noda(matrix + 1e-12 * matrix.max(), rtol).vector
    return Eigenpair(lower, upper, vector, all(pair.converged for pair in classes))


def _classes(matrix: Tensor) -> list[Tensor]:
    """The sets of indices that can reach each other, by repeated squaring of the graph."""
    n = matrix.shape[0]
    reach = ((matrix > 0) | torch.eye(n, dtype=torch.bool, device=matrix.device)).float()
    for _ in range(max(n - 1, 1).bit_length()):
        reach = (reach @ reach > 0).float()
    label = (reach * reach.T).argmax(1)
    return [(label == first).nonzero()[:, 0] for first in label.unique()]


def _noda(matrix: Tensor, rtol: float) -> Eigenpair:
    """Noda's iteration for an irreducible matrix: (μI - A) y = x with μ = max (Ax)ᵢ/xᵢ, quadratic and positive.

    T. Noda, Note on the computation of the maximal eigenvalue of a non-negative irreducible matrix, 1971.
    """
    best = _Bracket(torch.ones_like(matrix[0]), rtol)
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    x = best.start
    for _ in range(100):
        best.meet(x, matrix @ x)
        if best.tight:
            break
        x, failed = torch.linalg.solve_ex(best.upper * identity - matrix, x)
        x = x / x.max()
        if bool(failed) or not bool((x > 0).all()):
            break
    return best.eigenpair()


def _require_homogeneous(fn: Map, z: Tensor) -> None:
    value, rtol = value_of(fn, z), torch.finfo(z.dtype).eps ** 0.5
    for scale in (2.0**-10, 2.0**10):
        if not torch.allclose(value_of(fn, scale * z), scale * value, rtol=rtol, atol=0.0):
            raise UsageError("the map is not positively homogeneous; ask for the radius of asymptotic_mapping(fn)")


def _outward(ratio: Tensor, margin: float) -> tuple[float, float]:
    """The least and the largest ratio, moved apart by the margin of rounding."""
    return float(ratio.min()) * (1 - margin), float(ratio.max()) * (1 + margin)


def _norm(x: Tensor, norm: float | Callable[[Tensor], Tensor]) -> Tensor:
    return norm(x) if callable(norm) else torch.linalg.vector_norm(x, norm)
