"""The equation z = s(Wz + x) itself: one map, one activation, one batch of inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pcdeq.activations import Activation
from pcdeq.errors import UsageError
from pcdeq.operators import LinearMap
from pcdeq.solvers import Guess, Pieces, Problem, Weight

# Newton's method makes one matrix of this many rows per sample.
LARGEST_MATRIX = 4096


@dataclass(frozen=True)
class Equation:
    """z = s(Wz + x) for a batch of inputs x >= 0 of shape (samples, *state)."""

    map: LinearMap
    activation: Activation
    x: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return self.activation.value(self.product(z) + self.x)

    def product(self, z: Tensor) -> Tensor:
        """Wz, in the shape and dtype of z whatever the operator returns."""
        return like(z, self.map.apply(z))

    def select(self, samples: Tensor) -> Equation:
        """The equation for some of the samples."""
        return self if samples.dtype != torch.bool and len(samples) == len(self.x) else replace(self, x=self.x[samples])

    def at_zero(self) -> Tensor:
        """g(0) = s(x): a lower bound of z*, and the first Picard step, without a product."""
        return self.activation.value(self.x)

    def problem(self, guess: Guess | None = None) -> Problem:
        """What a solver needs, starting at s(guess + x) for a guess of Wz*, by default at g(0).

        Either start is the result of a step whose product came for free, so it counts as one.
        """
        name = self.activation.name if self.activation.builtin else "custom"
        weight = None if self.map.native is None else Weight(self.map.native, self.map.weight)
        pieces = Pieces(self.product, self.activation.value, self.x, name, guess=guess, weight=weight)
        return Problem(self, steps=1, box=self.box(), jacobian=self.jacobian, pieces=pieces)

    def slope(self, z: Tensor) -> Tensor:
        """s'(Wz + x), where z is a value of the map."""
        if self.activation.slope_of_value is not None:
            return self.activation.slope_of_value(z)
        return self.activation.derivative(self.product(z) + self.x)

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
        if self.activation.supremum < torch.inf:
            return 0.0, self.activation.supremum
        with torch.no_grad():
            dims = tuple(range(1, self.x.ndim))
            norm = self.map.apply(torch.ones_like(self.x[:1])).amax()
            largest = self.x.amax(dims, keepdim=True)
            bound = torch.ones_like(largest)
            for _ in range(100):
                outside = self.activation.value(norm * bound + largest) > 0.99 * bound
                if not bool(outside.any()):
                    break
                bound = torch.where(outside, 2 * bound, bound)
        return torch.zeros_like(bound), bound


def like(z: Tensor, product: Tensor) -> Tensor:
    """The result of an operator on z, checked: an operator of a user's may broadcast or promote."""
    if product.shape != z.shape:
        raise UsageError(f"the operator maps shape {tuple(z.shape)} to {tuple(product.shape)}; it must keep the shape")
    return product.to(z.dtype)
