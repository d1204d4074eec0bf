"""Where a solve starts: a guess of the equilibrium learned from earlier ones, at almost no cost.

The equilibrium is the same from every start, so a guess can only save steps. Kept like the statistics
of batch norm: updated in training, buffers of the state dict, frozen in evaluation.

The mean of z* alone saves about half of the steps: a solve starts at s(x + Wz̄). For a dense layer
there is more to have. Linearised at the mean, with D̄ the mean slope, z* - z̄ = (I - D̄W)⁻¹ (g(z̄) - z̄),
so that Wz* = Wz̄ + B (g(z̄) - z̄) with B = W (I - D̄W)⁻¹; one more product then gives a start from which a
ReLU6 layer, which is nearly linear, is done. As (I - D̄W)⁻¹ = I + D̄B, the same matrix starts the adjoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcdeq.equation import Equation
from pcdeq.operators import LinearMap, Operator

# How much of the running means one batch replaces: batch norm's default.
MOMENTUM = 0.1
# The matrix B costs n³ to renew; every so many batches is often enough, and up to this size affordable.
RENEW_EVERY = 16
LARGEST_RESPONSE = 1024


class WarmStart(nn.Module):
    """Running means of z* and its slope by unit and, for a dense layer, the linear response B."""

    mean: Tensor
    slope: Tensor
    observed: Tensor
    response: Tensor | None

    def __init__(self, units: int, dense: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(units))
        self.register_buffer("slope", torch.zeros(units))
        self.register_buffer("observed", torch.zeros((), dtype=torch.int64))
        has_response = dense and units <= LARGEST_RESPONSE
        self.register_buffer("response", torch.zeros(units, units) if has_response else None)

    @classmethod
    def of(cls, operator: Operator) -> WarmStart | None:
        """A warm start for this operator, if its units can be averaged at all."""
        return None if operator.units is None else cls(operator.units, dense=operator.state_ndim == 1)

    def product(self, equation: Equation) -> Tensor | None:
        """A guess of Wz*, broadcastable to x and >= 0."""
        dtype = equation.x.dtype
        mean = self.mean.to(dtype)
        product = equation.map.product_of_mean(mean)
        if product is None or self.response is None:
            return product
        residual = equation.activation.value(equation.x + product) - mean
        return torch.addmm(product, residual, self.response.to(dtype).T).clamp_(min=0.0)

    def adjoint(self, grad: Tensor) -> Tensor:
        """A guess of the solution of y = Jᵀy + grad."""
        if self.response is None:
            return grad
        return torch.addmm(grad, grad * self.slope.to(grad.dtype), self.response.to(grad.dtype))

    def observe(self, z: Tensor, slope: Tensor, linear: LinearMap) -> None:
        """Learn from a batch of equilibria and their slopes."""
        dims = tuple(dim for dim in range(z.ndim) if dim != 1)
        self.mean.lerp_(z.mean(dims).to(self.mean.dtype), MOMENTUM)
        self.slope.lerp_(slope.mean(dims).to(self.slope.dtype), MOMENTUM)
        if self.response is not None and int(self.observed) % RENEW_EVERY == 0:
            weight = linear.weight
            identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
            system = identity - self.slope.to(weight.dtype)[:, None] * weight
            response, _ = torch.linalg.solve_ex(system, weight, left=False)
            if bool(response.isfinite().all()):
                self.response.copy_(response)
        self.observed += 1
