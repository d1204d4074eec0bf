"""Is a map positive, monotone, scalable, concave? Numerical tests that answer with a counterexample.

The definitions are the paper's (section 3.2), for g on the whole nonnegative cone, 0 included:

    positive    g(x) > 0 in every component
    monotone    x <= y implies g(x) <= g(y)
    scalable    g(λx) < λ g(x) in every component, for every λ > 1
    concave     g(tx + (1 - t)y) >= t g(x) + (1 - t) g(y), for 0 < t < 1

Positive, monotone and scalable make a standard interference mapping, which has at most one fixed point;
positive and concave a positive concave one, which is a standard interference mapping as well.

**Passing is evidence, not proof**: some hundred inequalities held, at points of many magnitudes, on the
boundary of the cone and close to each other. **Failing is proof** up to the rounding of the map itself: the
points are there to be checked, and a violation counts only if it is far above the rounding of its component and
above that of the largest one (a sum from which a term is subtracted again is no more exact). One exception:
equality in the strict inequality of scalability is reported too (``amount`` 0), because a map such as max(1, z)
differs from a scalable one in nothing else; but in z + 1e-30 the equality is rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.theory.mappings import Like, Map, origin, rounding, value_of

# Factors by which floating point multiplies without rounding, so that equality is not blurred.
EXACT_FACTORS = (2.0, 16.0, 1024.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Counterexample:
    """Where a property fails.

    Attributes:
        claim: the inequality ``left <= right`` that the property demands, in words.
        x, y: the points; y is None where the claim has only one.
        factor: the λ of scalability or the t of concavity.
        index: the component in which the claim fails, counted in the flattened point.
        left, right: the two sides there.
    """

    claim: str
    x: Tensor
    y: Tensor | None = None
    factor: float | None = None
    index: int
    left: float
    right: float

    @property
    def amount(self) -> float:
        """By how much the claim fails, relative to the larger side.

        0, or within rounding of it, for an equality that should be strict; infinite if a side is not finite.
        """
        excess, size = self.left - self.right, max(abs(self.left), abs(self.right))
        if not math.isfinite(excess):
            return math.inf
        return excess / size if size else 0.0

    def __str__(self) -> str:
        factor = "" if self.factor is None else f" with factor {self.factor:.6g}"
        how = f"by {self.amount:.2g} of the larger side" if self.amount else "equality"
        return f"{self.claim} fails in component {self.index}{factor}: {self.left:.9g} against {self.right:.9g} ({how})"


@dataclass(frozen=True, eq=False)
class Verdict:
    """The answer of a test: true in a condition if the property was never seen to fail.

    Attributes:
        name: the property.
        holds: whether every inequality held. True is evidence, False is proof (up to rounding).
        tested: how many inequalities between vectors were tried.
        counterexample: the worst violation, if there was one.
    """

    name: str
    holds: bool
    tested: int
    counterexample: Counterexample | None = None

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        if self.counterexample is None:
            return f"{self.name}: held in all {self.tested} tests (evidence, not proof)"
        return f"not {self.name}: {self.counterexample}"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Where a test looks and what it overlooks.

    Args:
        samples: how many inequalities to try.
        scales: the smallest and the largest magnitude of a point. Set them to the map's own units: powers
            of 1e-13 W are out of sight of the default.
        rtol: a violation below this share of the larger side counts as rounding; by default sqrt(eps)/16.
        seed: of the random points.
    """

    samples: int = 200
    scales: tuple[float, float] = (1e-6, 1e6)
    rtol: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"samples must be at least 1, got {self.samples}")
        if not 0 < self.scales[0] <= self.scales[1] < float("inf"):
            raise UsageError(f"scales must be two numbers 0 < low <= high, got {self.scales}")


DEFAULT = Sampling()


@torch.no_grad()
def check_positive(fn: Map, like: Like, sampling: Sampling = DEFAULT) -> Verdict:
    """Test whether fn(x) > 0 in every component, for x >= 0.

    >>> import torch
    >>> print(check_positive(torch.sqrt, 3))
    not positive: 0 < fn(x) fails in component 0: 0 against 0 (equality)
    """
    test = _Test(fn, origin(like), "positive", sampling)
    for x in test.points:
        test.demand("0 < fn(x)", torch.zeros_like(x), test(x), strict=True, x=x)
    return test.verdict()


@torch.no_grad()
def check_monotone(fn: Map, like: Like, sampling: Sampling = DEFAULT) -> Verdict:
    """Test whether x <= y implies fn(x) <= fn(y), for x >= 0.

    Args:
        fn: the map. It sees one point at a time, so it may be written for vectors.
        like: the number of components, or a tensor like a point (shape, dtype, device).
        sampling: where to look.

    >>> verdict = check_monotone(lambda z: 1 / (1 + z), 2)
    >>> bool(verdict), bool(verdict.counterexample.x.le(verdict.counterexample.y).all())
    (False, True)
    """
    test = _Test(fn, origin(like), "monotone", sampling)
    for x, step in zip(test.points, test.steps(), strict=True):
        y = x + step
        test.demand("fn(x) <= fn(y) for x <= y", test(x), test(y), x=x, y=y)
    return test.verdict()


@torch.no_grad()
def check_scalable(fn: Map, like: Like, sampling: Sampling = DEFAULT) -> Verdict:
    """Test whether fn(λx) < λ fn(x) in every component, for x >= 0 and λ > 1.

    At x = 0 this says that fn(0) > 0. Equality counts as a failure where λ is a power of 2, by which
    floating point multiplies exactly; see the module's text for when that is rounding.

    >>> import torch
    >>> print(check_scalable(lambda z: 1 + z.sqrt(), 3))
    scalable: held in all 200 tests (evidence, not proof)
    >>> check_scalable(lambda z: torch.clamp(z, min=1.0), 3).counterexample.amount
    0.0
    """
    test = _Test(fn, origin(like), "scalable", sampling)
    for k, x in enumerate(test.points):
        strict = k % 2 == 0
        factor = EXACT_FACTORS[k // 2 % 3] if strict else 1 + float(10 ** test.uniform(-4, 3))
        test.demand("fn(λx) < λ fn(x)", test(factor * x), factor * test(x), strict, x=x, factor=factor)
    return test.verdict()


@torch.no_grad()
def check_concave(fn: Map, like: Like, sampling: Sampling = DEFAULT) -> Verdict:
    """Test whether fn(tx + (1 - t)y) >= t fn(x) + (1 - t) fn(y), for x, y >= 0 and 0 < t < 1.

    A nonnegative concave map of the cone is monotone as well (the paper's Corollary A.5).

    >>> import torch
    >>> bool(check_concave(torch.sqrt, 3)), bool(check_concave(torch.square, 3))
    (True, False)
    """
    test = _Test(fn, origin(like), "concave", sampling)
    for k, (x, step) in enumerate(zip(test.points, test.steps(), strict=True)):
        y = x + step if k % 2 else test.points[-1 - k]
        t = 0.5 if k % 4 < 2 else float(test.uniform(0.01, 0.99))
        chord, arc = t * test(x) + (1 - t) * test(y), test(t * x + (1 - t) * y)
        test.demand("t fn(x) + (1 - t) fn(y) <= fn(tx + (1 - t)y)", chord, arc, x=x, y=y, factor=t)
    return test.verdict()


class _Test:
    """One run of a test: the points, the count of inequalities, the worst violation so far."""

    def __init__(self, fn: Map, zero: Tensor, name: str, sampling: Sampling) -> None:
        self.fn, self.zero, self.name, self.sampling = fn, zero, name, sampling
        eps = torch.finfo(zero.dtype).eps
        self.rtol = eps**0.5 / 16 if sampling.rtol is None else sampling.rtol
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.tested = 0
        self.worst: Counterexample | None = None
        self.worst_amount = -1.0
        self.points = self._points()

    def __call__(self, z: Tensor) -> Tensor:
        return value_of(self.fn, z)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        random = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (low + (high - low) * random).to(self.zero)

    def magnitudes(self, *shape: int) -> Tensor:
        """Log-uniform numbers within the scales."""
        low, high = torch.tensor(self.sampling.scales).double().log10().tolist()
        return 10 ** self.uniform(low, high, *shape)

    def _points(self) -> list[Tensor]:
        """0, the corners of the scales, then random points: even, of mixed magnitudes, with zeros."""
        low, high = (torch.full_like(self.zero, scale) for scale in self.sampling.scales)
        points = [self.zero, low, high, *(self.one_component(scale) for scale in self.sampling.scales)]
        for k in range(len(points), self.sampling.samples):
            even = self.magnitudes() * self.uniform(0.5, 2.0, *self.zero.shape)
            point = self.magnitudes(*self.zero.shape) if k % 2 else even
            points.append(point * (self.uniform(0, 1, *self.zero.shape) > 0.4) if k % 3 == 0 else point)
        return [point.clamp(max=self.sampling.scales[1]) for point in points[: self.sampling.samples]]

    def steps(self) -> list[Tensor]:
        """For each point a step up: near or far, in one component or in all."""
        steps = []
        for k, point in enumerate(self.points):
            size = torch.where(point > 0, point, self.sampling.scales[0])
            near = size * 10 ** self.uniform(-5, 1)
            step = near if k % 2 else self.magnitudes() * self.uniform(0, 1, *point.shape)
            steps.append(self.one_component(step) if k % 4 > 1 else step)
        return steps

    def one_component(self, value: Tensor | float) -> Tensor:
        """The value in one random component, 0 in the others."""
        chosen = torch.zeros_like(self.zero).flatten()
        chosen[int(torch.randint(chosen.numel(), (), generator=self.generator))] = 1.0
        return chosen.reshape(self.zero.shape) * value

    def demand(self, claim: str, left: Tensor, right: Tensor, strict: bool = False, **where: Any) -> None:
        """Count left <= right (left < right if strict) and remember the worst violation, with the points ``where``."""
        self.tested += 1
        excess = left - right
        size = torch.maximum(left.abs(), right.abs())
        finite = torch.where(size.isfinite(), size, 0.0)
        margin = self.rtol * finite + rounding(self.zero) * finite.max()
        broken = (excess > margin) | ((excess >= 0) & strict) | left.isnan() | right.isnan()
        if not bool(broken.any()):
            return
        relative = excess / size.clamp(min=torch.finfo(size.dtype).tiny)
        relative = torch.where(excess.isfinite(), relative, 0.0)  # what is not finite tells less
        relative = torch.where(broken, relative, -1.0)
        index, amount = int(relative.argmax()), float(relative.max())
        if amount > self.worst_amount:
            sides = {"left": float(left.flatten()[index]), "right": float(right.flatten()[index])}
            self.worst, self.worst_amount = Counterexample(claim=claim, index=index, **sides, **where), amount

    def verdict(self) -> Verdict:
        return Verdict(self.name, self.worst is None, self.tested, self.worst)
