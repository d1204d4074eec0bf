"""The referee: equilibria, gradients and class scores to 18 digits, without a line of the package.

Written from the theory alone, in numpy's long double (64 bits of mantissa, exponents to ±4932). An equilibrium is found
by monotone Newton from above (T7), bounded from both sides, and believed only if the order test (T1) holds for both
bounds with a margin for the referee's own rounding. Gaussian elimination needs no pivots: I - J is an M-matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

Array = np.ndarray
LONG = np.longdouble
EPS = np.finfo(LONG).eps
if EPS > 1e-18:
    raise ImportError("the referee needs a long double of 64 bits: an x86 processor")


@dataclass(frozen=True)
class Curve:
    """An activation: its value, its right-hand slope, its supremum and where it has a kink."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    supremum: float = 1.0
    kink: float | None = None

    def left_slope(self, y: Array) -> Array:
        """The slope below: at a kink the larger of the two."""
        return self.slope(y) if self.kink is None else np.where(y == self.kink, self.slope(0 * y), self.slope(y))


def _bent(line: Callable[[Array], Array], slope: float, kink: float, supremum: float) -> Curve:
    return Curve(
        lambda y: np.minimum(line(y), supremum), lambda y: np.where(y < kink, LONG(slope), LONG(0)), supremum, kink
    )


def _square_of_sech(y: Array) -> Array:
    e = np.exp(-2 * y)
    return 4 * e / (1 + e) ** 2


SIXTH = float(1 / 6)  # as the package has it: the slope of hard-sigmoid is that of y / 6, not of a product
CURVES = {
    "tanh": Curve(np.tanh, _square_of_sech),
    "softsign": Curve(lambda y: y / (1 + y), lambda y: (1 + y) ** -2),
    "relu6": _bent(lambda y: y, 1, 6, 6),
    "sigmoid": Curve(lambda y: 1 / (1 + np.exp(-y)), lambda y: np.exp(-y) / (1 + np.exp(-y)) ** 2),
    "log1p": Curve(np.log1p, lambda y: 1 / (1 + y), np.inf),
    "arctan": Curve(np.arctan, lambda y: 1 / (1 + y * y), float(np.pi / 2) + 1e-15),
    "1-exp": Curve(lambda y: -np.expm1(-y), lambda y: np.exp(-y)),
    "isru": Curve(lambda y: y / np.hypot(y, LONG(1)), lambda y: (1 / np.hypot(y, LONG(1))) ** 3),
    "hard-tanh": _bent(lambda y: y, 1, 1, 1),
    "hard-sigmoid": _bent(lambda y: y / 6 + LONG(0.5), LONG(1) / 6, 3, 1),
}


def solve(jacobian: Array, right: Array) -> Array:
    """(I - J)⁻¹ right for J >= 0, sample by sample; infinite where J has a spectral radius of 1 or more."""
    n = jacobian.shape[-1]
    rows = np.concatenate([np.eye(n, dtype=LONG) - jacobian, right[..., None]], axis=-1)
    bad = np.zeros(len(rows), bool)
    for k in range(n):
        pivot = rows[:, k, k]
        bad |= ~(pivot > 0)
        rows[:, k] = rows[:, k] / np.where(pivot > 0, pivot, 1)[:, None]
        column = rows[:, :, k].copy()
        column[:, k] = 0
        rows = rows - column[:, :, None] * rows[:, k][:, None, :]
    return np.where(bad[:, None], LONG(np.inf), rows[..., -1])


@dataclass(frozen=True)
class Layer:
    """z = s(Wz + x) as plain numbers: W (n, n) >= 0, and an activation by name."""

    weight: Array
    activation: str

    @property
    def curve(self) -> Curve:
        return CURVES[self.activation]

    def argument(self, z: Array, x: Array) -> Array:
        return z @ self.weight.T + x

    def map(self, z: Array, x: Array) -> Array:
        return self.curve.value(self.argument(z, x))

    def jacobian(self, z: Array, x: Array) -> Array:
        return self.curve.slope(self.argument(z, x))[..., None] * self.weight

    def enclose(self, x: Array) -> tuple[Array, Array]:
        """z* from both sides, (samples, n) each; 0 and infinity where the referee cannot tell."""
        x = x.astype(LONG)
        z = self._from_above(x)
        lower, upper = np.zeros_like(z), np.full_like(z, np.inf)
        n = len(self.weight)
        margin = (n + 16) * EPS
        value, at_zero = self.map(z, x), self.curve.value(x) * (1 - margin)
        below = z
        for size in 4.0 ** np.arange(1, 22, 2):
            source = size * margin * value
            up = z + 2 * solve(self.jacobian(z, x), source)
            down = np.maximum(z - 2 * solve(self._steepest(below, x), source), at_zero)
            down = np.where(np.isfinite(down), down, at_zero)
            new = ~np.isfinite(upper).all(1)
            ok = new & (self.map(up, x) * (1 + margin) <= up).all(1) & np.isfinite(up).all(1)
            ok &= (self.map(down, x) * (1 - margin) >= down).all(1)
            lower[ok], upper[ok] = down[ok], up[ok]
            if np.isfinite(upper).all():
                break
            below = np.where(np.isfinite(down), down, z)
        return lower, upper

    def _steepest(self, z: Array, x: Array) -> Array:
        return self.curve.left_slope(self.argument(z, x))[..., None] * self.weight

    def _from_above(self, x: Array) -> Array:
        z = np.broadcast_to(self._top(x), x.shape).astype(LONG)
        for _ in range(300):
            value = self.map(z, x)
            step = solve(self.jacobian(z, x), z - value)
            newton = np.where(np.isfinite(step), z - step, value)
            newton = np.minimum(np.maximum(newton, self.curve.value(x)), value)  # from above all of them are above z*
            done = (np.abs(newton - z) <= 4 * EPS * z).all()
            z = newton
            if done:
                break
        return z

    def _top(self, x: Array) -> Array:
        if self.curve.supremum < np.inf:
            return LONG(self.curve.supremum)
        norm, top = self.weight.sum(1).max(), np.ones((len(x), 1), LONG)
        while (low := self.curve.value(norm * top + x.max(1, keepdims=True)) > top).any():
            top = np.where(low, 2 * top, top)
        return top

    def gradient(self, x: Array, grad: Array) -> tuple[Array, Array]:
        """Bounds on u = D(Wᵀu + grad), D = s'(Wz* + x), whichever slope a kink has (T5)."""
        lower, upper = self.enclose(x)
        known = np.isfinite(upper).all(1, keepdims=True)
        upper = np.where(known, upper, 0)
        most = self.curve.left_slope(self.argument(lower, x))
        least = np.minimum(self.curve.slope(self.argument(upper, x)), most)
        slack = 2.0**20 * len(self.weight) * EPS
        plus, minus = np.maximum(grad, 0), np.maximum(-grad, 0)
        high = [self.adjoint(most, part) for part in (plus, minus)]
        low = [self.adjoint(least, part) for part in (plus, minus)]
        width = slack * (high[0] + high[1])
        with np.errstate(invalid="ignore"):
            under, over = low[0] - high[1] - width, high[0] - low[1] + width
        return np.where(known & np.isfinite(under), under, -np.inf), np.where(known & np.isfinite(over), over, np.inf)

    def adjoint(self, slope: Array, grad: Array) -> Array:
        """u = D(Wᵀu + grad) for given slopes."""
        return solve(slope[..., None] * self.weight.T, slope * grad)


def convolution(weight: Array, space: tuple[int, ...]) -> Array:
    """The matrix of a convolution of stride 1 that keeps the size: what torch computes, tap by tap."""
    out, into, *taps = weight.shape
    matrix = np.zeros((out, *space, into, *space), LONG)
    for tap in product(*map(range, taps)):
        for place in product(*map(range, space)):
            source = tuple(p + t - k // 2 for p, t, k in zip(place, tap, taps, strict=True))
            if all(0 <= s < size for s, size in zip(source, space, strict=True)):
                matrix[(slice(None), *place, slice(None), *source)] = weight[(slice(None), slice(None), *tap)]
    return matrix.reshape(out * int(np.prod(space)), -1)


def nonnegative(v: Array, g: Array | None = None) -> Array:
    """The weight in use, from the stored parameters: max(v, 0), or g max(v, 0) / its norm by rows."""
    v = np.maximum(v.astype(LONG), 0)
    if g is None:
        return v
    norm = np.sqrt((v * v).reshape(len(v), -1).sum(1)).reshape(g.shape)
    return np.where(norm > 0, v / np.where(norm > 0, norm, 1), 0) * np.maximum(g.astype(LONG), 0)


def softplus(x: Array) -> Array:
    """log(1 + exp(5x)) / 5."""
    x = x.astype(LONG)
    return np.maximum(x, 0) + np.log1p(np.exp(-5 * np.abs(x))) / 5


def elasticity(activation: str, floor: float) -> np.longdouble:
    """A number that T4's constant, sup (y - floor) s'(y) / s(y) over y > floor, is not below."""
    curve, floor_ = CURVES[activation], LONG(floor)
    distance = 10 ** np.linspace(-12, 40, 20_001, dtype=LONG)
    if curve.kink is not None and curve.kink > floor:
        distance = np.append(distance, (curve.kink - floor_) * (1 - 4 * EPS))
    best = LONG(0)
    for _ in range(6):
        y = floor_ + distance
        found = (y - floor_) * curve.slope(y) / curve.value(y)
        index = int(np.nanargmax(found))
        best = max(best, found[index])
        near = distance[max(index - 1, 0)], distance[min(index + 1, len(distance) - 1)]
        distance = np.linspace(min(near), max(near), 2_001, dtype=LONG)
    return best
