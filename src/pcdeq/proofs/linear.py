"""Linear bounds on an equilibrium over a box of inputs (T10), which keep how components move together; boxes do not.

z*(x) is monotone and concave, and its derivative G(x) = (I - DW)⁻¹D, D = diag(s'(Wz*(x) + x)), falls as x rises. So
over a box [x-, x+] of injected inputs, for every weighting c >= 0 of the components,

    <c, z*(x)>  >=  <c, z*(x-)> + <g, x - x->   for g the mean over t of G(x- + tΔ)ᵀc, Δ = x+ - x-, or less,
    <c, z*(x)>  <=  <y, s(q) - Dq> + <u, x>     for any q >= 0, D = s'(q), u = D(Wᵀu + c), y = Wᵀu + c, or more.

The mean is bounded below by a sum over right ends, each with D at the upper end of an enclosure of z*; both kinds of u
are series of nonnegative terms, rounded down or up. A functional of the equilibrium so becomes <n, x> + constant, with
n of both signs, and x = softplus(y) for the raw input y of the layer. softplus is convex: where n > 0 its tangent is
below, and where n < 0 its chord is above, or its tangent and a remainder, half its largest curvature times (y - m)².
The chord is worst in the middle, where nearly all y are: an image that moves one of them to the end of its range leaves
the others near their middles. The sum of the remainders, a quadratic form of the image, knows that (`Pixels`).

All of it is in float64, and each step takes from the constant more than its rounding can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq import injection
from pcdeq.equation import Equation, product_margin
from pcdeq.proofs.gradient import _slopes as slopes
from pcdeq.proofs.gradient import contraction
from pcdeq.proofs.order import Enclosure

# Right ends of the sum that stands for the mean derivative, as parts of the way from x- to x+; tangents touch half-way.
RIGHT_ENDS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
HALF_WAY = 4  # in x- and the right ends
# How much of a series may be left out, relative to its size, and its most terms.
TOLERANCE, MOST_TERMS = 1e-6, 60
# Squarings that bring a norm near the largest eigenvalue: within 7 % for 80 rows.
SQUARINGS = 5
EPS = torch.finfo(torch.float64).eps

# From an input to its equation and bounds on its equilibrium.
Solve = Callable[[Tensor], tuple[Equation, Enclosure]]


@dataclass(frozen=True)
class Functional:
    """A lower bound on what is to be proved: <coefficient, h> + constant, less a remainder; h is a layer's output.

    Attributes:
        coefficient: (pairs, *state); a pair is an image and a class that shall not win.
        constant: (pairs,).
        image: the number of the image of each pair, (pairs,).
        remainder: k >= 0 of ½ Σ kᵢ(hᵢ - mᵢ)², which is subtracted, m being in the middle; None stands for 0.
    """

    coefficient: Tensor
    constant: Tensor
    image: Tensor
    remainder: Tensor | None = None

    def through(self, coefficient: Tensor, added: Tensor, rounding: Tensor) -> Functional:
        """The bound in terms of what goes into the layer, with what the layer adds, and the rounding of both."""
        return Functional(coefficient, self.constant + added - rounding, self.image)

    def of_box(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The least value of <coefficient, h> over the box of each image, and its rounding."""
        rising, falling = self.coefficient.clamp(min=0), self.coefficient.clamp(max=0)
        low, high = low[self.image], high[self.image]
        size = dot(self.coefficient.abs(), torch.maximum(low.abs(), high.abs())) + self.constant.abs()
        return dot(rising, low) + dot(falling, high), _sum_of(rising) * size


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product, pair by pair."""
    return (a * b).flatten(1).sum(1)


def _sum_of(terms: Tensor) -> float:
    """The relative rounding of a sum of so many products and a few more, in units of the sum of their sizes."""
    return (terms[0].numel() + 16) * EPS if len(terms) else 0.0


def split(functional: Functional, state: torch.Size) -> Functional:
    """A functional of samples that are several states as functionals of single states; `join` is the way back."""
    c = functional.coefficient.reshape(-1, *state)
    states = len(c) // max(1, len(functional.image))
    numbers = functional.image[:, None] * states + torch.arange(states, device=c.device)
    return Functional(c, c.new_zeros(len(c)), numbers.flatten())


def join(parts: Functional, whole: Functional, shape: torch.Size) -> Functional:
    """The sum of the functionals of single states, for samples of a shape, with the constant of the whole."""
    constants = parts.constant.reshape(len(whole.constant), -1)
    total, size = constants.sum(1) + whole.constant, constants.abs().sum(1) + whole.constant.abs()
    remainder = None if parts.remainder is None else parts.remainder.reshape(-1, *shape[1:])
    coefficient = parts.coefficient.reshape(-1, *shape[1:])
    return Functional(coefficient, total - _sum_of(constants) * size, whole.image, remainder)


class Corners:
    """What bounds over a box of raw inputs need of an equilibrium layer: points of the box, and bounds on z* there."""

    def __init__(self, solve: Solve, low: Tensor, high: Tensor, inject: Callable[[Tensor], Tensor], kind: int) -> None:
        self.low, self.high, self.inject, self.kind = low, high, inject, kind
        first = self._inject(low)[0]
        last = self._inject(high)[1]
        # Rounded up: at a larger x the derivative is smaller.
        points = [first, *((first + part * (last - first)) * (1 + 4 * EPS) for part in RIGHT_ENDS)]
        self.corners = [solve(point) for point in points]
        self.largest = last

    @property
    def certified(self) -> Tensor:
        """For which images all equilibria were enclosed."""
        return torch.stack([box.certified for _, box in self.corners]).all(0)

    def _inject(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on the injection; its rounding is relative, and grows with |y| for softplus."""
        value = self.inject(y)
        rounding = (16 + 8 * y.abs()) * EPS * value
        return value - rounding, value + rounding

    def pull(self, functional: Functional, middle: Tensor | None) -> Functional:
        """The bound in terms of the raw input: with a remainder about the middles, or by chords if there are none."""
        c, image = functional.coefficient, functional.image
        gained, gained_constant = self._below(c.clamp(min=0), image)
        lost, lost_constant = self._above((-c).clamp(min=0), image)
        n = gained - lost
        low, high, largest = self.low[image], self.high[image], self.largest[image]
        up = n > 0
        touch = (low + high) / 2 if middle is None else middle[image]
        slope, line = self._tangent(touch, torch.maximum(low.abs(), high.abs()))
        remainder = None
        if middle is None or self.kind == 2:
            chord, above = (part[image] for part in self._chord())
            slope, line = torch.where(up, slope, chord), torch.where(up, line, above)
        else:
            remainder = torch.where(up, 0.0, -n) * injection.largest_curvature(low, high) * (1 + 64 * EPS)
            line = torch.where(up, line, line + 2 * self._slack(touch, torch.maximum(low.abs(), high.abs())))
        size = dot(gained + lost, largest + torch.maximum(low.abs(), high.abs()) + 1)
        rounding = 4 * _sum_of(n) * (size + gained_constant.abs() + lost_constant + functional.constant.abs())
        added = gained_constant - lost_constant + dot(n, line)
        pulled = functional.through(n * slope, torch.where(self.certified[image], added, -torch.inf), rounding)
        return Functional(pulled.coefficient, pulled.constant, image, remainder)

    def _below(self, c: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """g and a constant with <c, z*(x)> >= <g, x> + constant, c >= 0."""
        (first, at_first), *ends = self.corners
        margin = product_margin(first.map, first.x)
        g = torch.zeros_like(c)
        for equation, box in ends:
            least, _, _ = slopes(equation, box, margin)
            g = g + _terms_below(equation, least[image], c, margin) / len(ends)
        g = g * (1 - 2 * margin)
        return g, dot(c, at_first.lower[image]) * (1 - _sum_of(c)) - dot(g, first.x[image]) * (1 + _sum_of(c))

    def _above(self, c: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """u and a constant with <c, z*(x)> <= <u, x> + constant, c >= 0: the tangent half-way."""
        equation, box = self.corners[HALF_WAY]
        margin = product_margin(equation.map, equation.x)
        q = equation.product(box.lower) + equation.x  # any will do
        # s(p) <= s(q) + s'(q)(p - q); with a slope that is too large by a little, the line is lowest where p = 0.
        exact = equation.activation.derivative(q)
        slope = exact * (1 + 64 * margin) + torch.finfo(q.dtype).tiny  # which may have been lost to underflow
        line = (equation.activation.value(q) * (1 + margin) - exact * (1 - 64 * margin) * q).clamp(min=0)
        weights, factor = (part[image] for part in contraction(equation.map, slope, margin))
        u = _terms_above(equation, slope[image], c, weights, factor, margin)
        y = (equation.map.adjoint(u) + c) * (1 + margin)
        constant = dot(y, line[image]) * (1 + _sum_of(c)) + torch.finfo(c.dtype).tiny
        return u, torch.where((factor < 1).flatten(), constant, torch.inf)

    def _tangent(self, touch: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Slope and constant of a line below the injection, for raw inputs within a size."""
        if self.kind == 2:  # relu(y) >= ty for every t from 0 to 1
            slope = (touch > 0).to(touch.dtype)
            return slope, self._inject(torch.zeros_like(touch))[0]
        slope = injection.slope(touch, self.kind)
        return slope, self.inject(touch) - slope * touch - self._slack(touch, size)

    def _slack(self, touch: Tensor, size: Tensor) -> Tensor:
        """The rounding of a tangent: of value and slope, which then meets another size."""
        return (64 + 32 * size) * EPS * (self.inject(touch) + 2 * size)

    def _chord(self) -> tuple[Tensor, Tensor]:
        """Slope and constant of a line above the injection: whatever its slope, it is above both ends."""
        at_low, at_high = self._inject(self.low)[1], self._inject(self.high)[1]
        slope = ((at_high - at_low) / (self.high - self.low)).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)
        line = torch.maximum(at_low - slope * self.low, at_high - slope * self.high)
        return slope, line + 16 * EPS * (at_high + self.low.abs() + self.high.abs())


def _terms_below(equation: Equation, slope: Tensor, c: Tensor, margin: float) -> Tensor:
    """At most Gᵀc: terms of its series, each rounded down."""
    total = term = slope * c * (1 - margin)
    for _ in range(MOST_TERMS):
        term = slope * equation.map.adjoint(term) * (1 - margin)
        total = total + term
        if bool((_peak(term) <= TOLERANCE * _peak(total)).all()):
            break
    return (total * (1 - margin) - _underflow(c)).clamp(min=0)


def _terms_above(
    equation: Equation, slope: Tensor, c: Tensor, weights: Tensor, factor: Tensor, margin: float
) -> Tensor:
    """At least Gᵀc: terms of its series, each rounded up, and more than those left out; where the factor is below 1."""
    factor = factor.clamp(max=1 - 1e-9)
    total = term = slope * c * (1 + margin)
    for _ in range(MOST_TERMS):
        term = slope * equation.map.adjoint(term) * (1 + margin)
        if bool((_peak(term) <= TOLERANCE * _peak(total)).all()):
            break
        total = total + term
    rest = weights * ((term / weights).flatten(1).amax(1).reshape(factor.shape) + _underflow(c)) / (1 - factor)
    return (total + rest) * (1 + margin)


def _peak(term: Tensor) -> Tensor:
    return term.flatten(1).amax(1)


def _underflow(c: Tensor) -> float:
    """What the terms of a series can lose, all together, where their products are too small for a normal number."""
    return MOST_TERMS * c[0].numel() * torch.finfo(c.dtype).tiny if len(c) else 0.0


class Pixels:
    """The box of images as a box of steps δ from its middle, and the matrix A of the affine layers behind it.

    Σ kᵢ(Aδ)ᵢ² over |δ| <= r is at most λ Σ d for every d > 0, λ the largest eigenvalue of K^½ A diag(r²/d) Aᵀ K^½:
    with B = K^½ A diag(r/√d), |Bs|² <= λ|s|² for the s of δ = rs/√d, and |s|² <= Σ d. It is also at most Σ kᵢ(|A|r)ᵢ².
    """

    def __init__(self, matrix: Tensor, radius: Tensor) -> None:
        self.matrix = matrix  # (units, pixels)
        weight = radius * torch.linalg.vector_norm(matrix, dim=0)  # a good d, (images, pixels)
        weight = weight + (weight.amax(1, keepdim=True) * 1e-9 + torch.finfo(weight.dtype).tiny)
        self.total = weight.sum(1) * (1 + _sum_of(weight))
        self.gram = torch.einsum("up,np,vp->nuv", matrix, radius * radius / weight, matrix)
        self.reach = radius @ matrix.abs().T * (1 + _sum_of(matrix))  # of each unit alone, (images, units)

    def largest_form(self, k: Tensor, image: Tensor) -> Tensor:
        """At least ½ Σ kᵢ(Aδ)ᵢ² over the box of each pair's image."""
        root = k.sqrt()
        scaled = root[:, :, None] * self.gram[image] * root[:, None, :]
        # The rounding of a Gram matrix's entry is relative to the two diagonal entries beside it.
        rounding = 4 * _sum_of(self.matrix) * scaled.diagonal(dim1=1, dim2=2).sum(1)
        together = (largest_eigenvalue(scaled) + rounding) * self.total[image]
        return 0.5 * torch.minimum(together, dot(k, self.reach[image] ** 2)) * (1 + 1e-9)


def largest_eigenvalue(matrices: Tensor) -> Tensor:
    """An upper bound: λᵏ <= ‖Sᵏ‖, the root of the sum of squares, for symmetric S and k a power of 2."""
    norm = matrices.flatten(1).norm(dim=1)
    bound, share = norm.clone(), 1.0
    for _ in range(SQUARINGS):
        matrices = matrices / torch.where(norm > 0, norm, 1.0)[:, None, None]
        matrices = matrices @ matrices
        norm, share = matrices.flatten(1).norm(dim=1), share / 2
        bound = bound * norm**share
    return bound * (1 + 1e-9)
