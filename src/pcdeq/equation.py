"""The equation z = s(Wz + x) and its adjoint u = D(Wᵀu + v): the same kind of map, and the same kind of problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from pcdeq.activations import ROUNDINGS, Activation, overwrite
from pcdeq.errors import UsageError
from pcdeq.kernels.binding import Form
from pcdeq.operators import LinearMap
from pcdeq.solvers import Problem
from pcdeq.solvers.numbers import at_hand, by_memory, numbers, rows
from pcdeq.solvers.problem import ANYWHERE

# Newton's method makes one matrix of this many rows per sample.
LARGEST_MATRIX = 4096
# Gradients between these are solved for as they are: squares of their residuals, too, are within float32.
SMALLEST, LARGEST = 1e-8, 1e8


@dataclass(frozen=True)
class Equation:
    """z = s(Wz + x) for a batch of inputs x >= 0 of shape (samples, *state)."""

    map: LinearMap
    activation: Activation
    x: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        if torch.is_grad_enabled() or self.map.kind is None:
            return self.activation.value(self.product(z) + self.x)
        return overwrite(self.activation, self.map.apply_plus(z, self.x))

    def product(self, z: Tensor) -> Tensor:
        """Wz, in the shape and dtype of z whatever the operator returns."""
        return like(z, self.map.apply(z))

    def select(self, samples: Tensor | slice) -> Equation:
        """The equation for some of the samples."""
        if isinstance(samples, slice) or samples.dtype is torch.bool:
            return replace(self, x=self.x[samples])
        return self if len(samples) == len(self.x) else replace(self, x=rows(self.x, samples))

    def at_zero(self) -> Tensor:
        """g(0) = s(x): a lower bound of z*, and the first Picard step, without a product."""
        return self.activation.value(self.x)

    def start(self, guess: Tensor | None) -> Tensor:
        """s(guess + x) for a guess of Wz*; g(0) without one."""
        if guess is None:
            return self.at_zero()
        activate = self.activation.value if torch.is_grad_enabled() else partial(overwrite, self.activation)
        return activate(self.x + guess)  # in the layout of x

    def problem(self, guess: Tensor | None = None) -> Problem:
        """What a solver needs, starting at s(guess + x) for a guess of Wz*, by default at g(0).

        Either start is the result of a step whose product came for free, so it counts as one.
        """
        form = None
        if self.map.kind is not None and self.activation.builtin:
            form = Form(self.map.kind, self.map.weight, False, self.activation.name, self.x)
        return Problem(
            self,
            lambda: self.start(guess),
            1,
            self.box(),
            self.jacobian,
            form,
            guess,
            lambda samples: self.select(samples).problem(guess),
        )

    def slope(self, z: Tensor) -> Tensor:
        """s'(Wz + x), where z is a value of the map."""
        if self.activation.slope_of_value is not None:
            return self.activation.slope_of_value(z)
        return self.activation.derivative(self.product(z) + self.x)

    def value_and_slope(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """s(p + x) and s'(p + x) for a product p."""
        value = self.activation.value(product + self.x)
        if self.activation.slope_of_value is not None:
            return value, self.activation.slope_of_value(value)
        return value, self.activation.derivative(product + self.x)

    def jacobian(self, z: Tensor) -> Tensor:
        """The matrices diag(s'(Wz + x)) W, (samples, n, n)."""
        n = z[0].numel()
        if n > LARGEST_MATRIX:
            raise UsageError(f"Newton would need matrices of {n} rows, one per sample; use Anderson or Picard")
        slope = self.activation.derivative(self.product(z) + self.x)
        return slope.reshape(-1, n, 1) * self.map.matrix(z.shape[1:])

    def box(self) -> tuple[Tensor, Tensor] | tuple[float, float]:
        """Bounds [0, b] within which z* and every value of the map lie; b is one number per sample if s is unbounded.

        Without a supremum, b is a t with s(‖W‖ t + max x) <= t, ‖W‖ the largest row sum: it exists
        because s(y)/y -> 0, and the box [0, t] is then mapped into itself (T6).
        """
        if self.activation.supremum < torch.inf or not len(self.x):
            return 0.0, self.activation.supremum
        with torch.no_grad():
            dims = tuple(range(1, self.x.ndim))
            norm = self.map.apply(torch.ones_like(self.x[:1])).amax()
            largest = self.x.amax(dims, keepdim=True)
            # The first power of 2, all tried at once: nobody waits for an answer.
            powers = 2.0 ** torch.arange(100, dtype=self.x.dtype, device=self.x.device)
            inside = self.activation.value(norm * powers + largest[..., None]) <= 0.99 * powers
            bound = powers[inside.int().argmax(-1)]
        return torch.zeros_like(bound), bound

    def margin(self, z: Tensor) -> float:
        """A bound on the relative rounding error of one evaluation at a point like z (T9).

        All terms of Wz + x are nonnegative, so the sum's error is relative: at most half an eps for each
        rounding. s is concave with s(0) >= 0, so it does not enlarge a relative error; its own evaluation
        is given 16 eps. A custom s that needs more is refused.
        """
        activation = self.activation
        if not activation.builtin and activation.loses_digits_at is not None:
            raise UsageError(
                f"activation '{activation.name}' loses digits near y = {activation.loses_digits_at:.1g}, so nothing "
                "can be proved with it: write it without a difference of nearly equal numbers, as -torch.expm1(-y) "
                "for 1 - exp(-y)"
            )
        return product_margin(self.map, z)


@dataclass(frozen=True)
class Adjoint:
    """u = D(Wᵀu + v), D = diag(slope): at the equilibrium z*, u is the gradient of <v, z*> with respect to x (T5)."""

    map: LinearMap
    slope: Tensor
    grad: Tensor

    def __call__(self, u: Tensor) -> Tensor:
        if torch.is_grad_enabled() or self.map.kind is None:
            return torch.addcmul(self.at_zero, self.slope, self.pull(u))
        pulled = self.map.adjoint(u)
        return torch.addcmul(self.at_zero, self.slope, pulled, out=pulled)

    @cached_property
    def at_zero(self) -> Tensor:
        """D v."""
        return self.slope * self.grad

    def select(self, samples: Tensor | slice) -> Adjoint:
        """The equation for some of the samples."""
        if isinstance(samples, slice):
            return replace(self, slope=self.slope[samples], grad=self.grad[samples])
        return replace(self, slope=rows(self.slope, samples), grad=rows(self.grad, samples))

    def pull(self, u: Tensor) -> Tensor:
        """Wᵀu."""
        return like(u, self.map.adjoint(u))

    def problem(self) -> Problem:
        """What a solver needs; the first iterate is D v."""
        form = None
        if self.map.kind is not None:
            form = Form(self.map.kind, self.map.weight, True, "linear", self.grad, self.slope)
        part = lambda samples: self.select(samples).problem()  # noqa: E731
        return Problem(self, lambda: self.at_zero, box=ANYWHERE, form=form, select=part)

    def papers_problem(self) -> Problem:
        """The same in y = Wᵀu + v, u = Dy, started at v: what the paper iterates."""
        return Problem(lambda y: self.pull(self.slope * y) + self.grad, self.grad)

    def scaled(self) -> tuple[Adjoint, Tensor | None]:
        """The equation for a v of about 1 in each sample, and the factor that takes its solution back.

        The equation is linear, so nothing changes but that numbers near the ends of the floating point range are kept
        away from them; a power of 2 rounds nothing. Where all are far from the ends, it is the equation as it is,
        without a factor.
        """
        if not self.grad.numel():
            return self, None
        near = at_hand(self.grad)
        if near and _is_usual(self.grad):
            return self, None
        samples = by_memory(self.grad).flatten(1)  # torch's norm takes twenty times as long
        peak = torch.maximum(samples.amax(1), -samples.amin(1)).reshape(-1, *[1] * (self.grad.ndim - 1))
        if near and bool(((found := numbers(peak)) > SMALLEST).all() and (found < LARGEST).all()):
            return self, None
        exponent = torch.frexp(torch.nan_to_num(peak, nan=1.0, posinf=1.0)).exponent.clamp(-126, 126)
        factor = torch.ldexp(torch.ones_like(peak), exponent)
        return replace(self, grad=self.grad / factor), factor


def _is_usual(grad: Tensor) -> bool:
    """Whether all samples' largest components are within the limits for certain, as their norms tell, in one pass."""
    norm = torch.linalg.vector_norm(grad, 2, tuple(range(1, grad.ndim))).numpy()
    return bool((norm > SMALLEST * (grad.numel() / len(grad)) ** 0.5).all() and (norm < LARGEST).all())


def product_margin(linear: LinearMap, z: Tensor) -> float:
    """The relative rounding error of one product of nonnegative numbers, and of a little that follows it."""
    return (linear.terms(z.shape[1:]) / 2 + ROUNDINGS) * torch.finfo(z.dtype).eps


def like(z: Tensor, product: Tensor) -> Tensor:
    """The result of an operator on z, checked: an operator of a user's may broadcast or promote."""
    if product.shape != z.shape:
        raise UsageError(f"the operator maps shape {tuple(z.shape)} to {tuple(product.shape)}; it must keep the shape")
    return product.to(z.dtype)
