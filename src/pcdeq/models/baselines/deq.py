"""Equilibrium layers without constraints (Bai, Kolter & Koltun 2019).

z = s(Wz + x) with the weight free in sign, under weight normalisation. Nothing is promised: there may be no
equilibrium, many, or one that the solver does not reach. Where it fails, the layer says so in its statistics,
takes the last value that it has, and its gradient falls back to that of one step (Fung et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pcdeq.autograd import attach_gradient
from pcdeq.equation import Adjoint
from pcdeq.errors import UsageError
from pcdeq.models.networks import MC, SC, L, both_solvers
from pcdeq.operations import no_autocast, solve_adjoint
from pcdeq.operators import ConvMap, DenseMap, LinearMap
from pcdeq.solvers import Anderson, Problem, Solver, SolvingLayer, per_sample, run

TensorMap = Callable[[Tensor], Tensor]
# An adjoint solve that stopped at a larger residual is no better than one step.
USABLE_RESIDUAL = 0.1


@dataclass(frozen=True)
class FreeActivation:
    """An activation on the whole line; its slope as a function of its value, and its range."""

    value: TensorMap
    slope: TensorMap
    bounds: tuple[float, float]


ACTIVATIONS = {
    "tanh": FreeActivation(torch.tanh, lambda z: 1 - z * z, (-1.0, 1.0)),
    "softsign": FreeActivation(nn.functional.softsign, lambda z: (1 - z.abs()) ** 2, (-1.0, 1.0)),
    "relu6": FreeActivation(nn.functional.relu6, lambda z: ((z > 0) & (z < 6)).to(z.dtype), (0.0, 6.0)),
    "sigmoid": FreeActivation(torch.sigmoid, lambda z: z * (1 - z), (0.0, 1.0)),
}


class FreeWeight(nn.Module):
    """A weight of any sign as directions and scales, g_i v_i / ‖v_i‖ for each output unit."""

    def __init__(self, width: int, kernel: tuple[int, ...]) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(torch.empty(width, width, *kernel))
        # torch's own start, under which plain iteration converges: a spectral radius of about 0.6.
        nn.init.kaiming_uniform_(self.weight_v, a=5**0.5)
        self.weight_g = nn.Parameter(self._norms().detach())

    def _norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.weight_v, dim=tuple(range(1, self.weight_v.ndim)), keepdim=True)

    def forward(self) -> Tensor:
        norm = self._norms()
        return self.weight_v * (self.weight_g / norm.clamp(min=torch.finfo(norm.dtype).tiny))


def bind(weight: Tensor) -> LinearMap:
    """The linear map of a weight: a matrix, or a convolution that keeps the size."""
    return DenseMap(weight) if weight.ndim == 2 else ConvMap(weight)


def free_activation(name: str) -> FreeActivation:
    """The activation of that name."""
    if name not in ACTIVATIONS:
        raise UsageError(f"unknown activation {name!r} of a free layer; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class DEQ(SolvingLayer):
    """A z with z = s(Wz + x), if the solver finds one; W is a free matrix on the last dimension.

    >>> layer = DEQ(4, activation="tanh")
    >>> z = layer(torch.randn(3, 4))
    >>> layer.last_forward.unconverged
    0
    """

    kernel: tuple[int, ...] = ()

    def __init__(self, width: int, *, activation: str = "tanh", **options: Solver | None) -> None:
        super().__init__(*both_solvers("a DEQ", options, Anderson()))
        self.weight = FreeWeight(width, self.kernel)
        self.name = activation
        self.activation = free_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        with no_autocast(x.device.type):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            weight, s = self.weight(), self.activation
            with torch.no_grad():
                linear = bind(weight)
                solution = run(Problem(lambda z: s.value(linear.apply(z) + x), s.value(x), box=s.bounds), self.solver)
            self.record_forward(solution.stats)
            # A sample without a limit may have left the numbers; its neighbours in the batch must not suffer.
            z = solution.value.nan_to_num(0.0)
            if not torch.is_grad_enabled():
                return z
            source = bind(weight).apply(z) + x
            return attach_gradient(source, z, lambda grad: self._pull(weight.detach(), z, grad))

    @torch.no_grad()
    def _pull(self, weight: Tensor, z: Tensor, grad: Tensor) -> Tensor:
        """The gradient with respect to Wz + x."""
        slope = self.activation.slope(z)
        with no_autocast(grad.device.type):
            solution = solve_adjoint(Adjoint(bind(weight), slope, grad), self.adjoint_solver)
        self.record_backward(solution.stats)
        finite = solution.value.isfinite().flatten(1).all(1)
        usable = finite & (solution.residual < USABLE_RESIDUAL)
        return torch.where(per_sample(usable, grad), solution.value, slope * grad)

    def extra_repr(self) -> str:
        return f"activation={self.name}, solver={self.solver}"


class DEQConv2d(DEQ):
    """A `DEQ` of 3x3 convolutions."""

    kernel = (3, 3)


class DEQL(L):
    """The L network with free weights."""

    dense = DEQ


class DEQSC(SC):
    """The SC network with free weights."""

    conv = DEQConv2d


class DEQMC(MC):
    """The MC network with free weights."""

    conv = DEQConv2d
