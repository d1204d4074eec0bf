"""Neural ODEs (Chen et al. 2018) and augmented ones (Dupont, Doucet & Teh 2019), for images.

The image is the state at time 0 of dz/dt = f(t, z), the state at time 1 is classified. As in the image experiments
of Dupont et al., f is a 1x1, a 3x3 and a 1x1 convolution with ReLU between them, each of which sees the time as
one more channel; an ANODE starts with some channels of zeros besides those of the image. Solved by dopri5 of
torchdiffeq at a tolerance of 1e-3, with the gradient by the adjoint ODE.

Steps of a solve are evaluations of f, backward those that the adjoint ODE needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pcdeq.errors import ConvergenceError, UsageError
from pcdeq.extras import needing
from pcdeq.models.networks import LayerOptions, Named, Network, Widths, both_solvers
from pcdeq.operations import no_autocast
from pcdeq.recipes import ImageShape
from pcdeq.solvers import Outcome, Solver, SolveStats, SolvingLayer


@dataclass(frozen=True, kw_only=True)
class Dopri5(Solver):
    """Dormand and Prince's adaptive method of order 5: ``tol`` is its relative and absolute tolerance.

    ``max_steps`` bounds its time steps, of 6 evaluations each.
    """

    tol: float = 1e-3
    max_steps: int = 1000


class VectorField(nn.Module):
    """f(t, z), which counts how often it is evaluated."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.inwards = nn.Conv2d(channels + 1, filters, 1)
        self.across = nn.Conv2d(filters + 1, filters, 3, padding=1)
        self.outwards = nn.Conv2d(filters + 1, channels, 1)
        self.evaluations = 0

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        self.evaluations += 1
        z = torch.relu(self.inwards(with_time(t, z)))
        z = torch.relu(self.across(with_time(t, z)))
        return self.outwards(with_time(t, z))


def with_time(t: Tensor, z: Tensor) -> Tensor:
    """The image with the time as one more channel."""
    samples, _, height, width = z.shape
    return torch.cat([t.to(z.dtype).expand(samples, 1, height, width), z], dim=1)


class ODEBlock(SolvingLayer):
    """From the state at time 0, the image and some channels of zeros, to the state at time 1.

    >>> block = ODEBlock(1, filters=4, extra=2)
    >>> block(torch.rand(2, 1, 8, 8)).shape, block.last_forward.steps >= 8
    (torch.Size([2, 3, 8, 8]), True)
    """

    def __init__(self, channels: int, filters: int, extra: int = 0, **options: Unpack[LayerOptions]) -> None:
        solvers = both_solvers("an ODE", options, Dopri5())
        if not all(isinstance(solver, Dopri5) for solver in solvers):
            raise UsageError("an ODE is integrated by dopri5: leave the solver at its default; tol can be chosen")
        super().__init__(*solvers)
        with needing("baselines", "a neural ODE"):  # here, not in the midst of training
            from torchdiffeq import odeint

        self.odeint = odeint
        self.extra = extra
        self.field = VectorField(channels + extra, filters)

    def forward(self, x: Tensor) -> Tensor:
        with no_autocast(x.device.type):
            start = F.pad(x.to(torch.promote_types(x.dtype, torch.float32)), (0, 0, 0, 0, 0, self.extra))
            return _Flow.apply(self, start, *self.field.parameters())  # pyright: ignore[reportReturnType]

    def integrate(self, field: Callable[..., Any], start: tuple[Tensor, ...], backward: bool) -> list[Tensor]:
        """The state at time 1, or from there back at time 0."""
        way, solver = ("backward", self.adjoint_solver) if backward else ("forward", self.solver)
        times = start[0].new_tensor([1.0, 0.0] if backward else [0.0, 1.0])
        options = {"max_num_steps": solver.max_steps}
        self.field.evaluations = 0
        try:
            states = self.odeint(
                field, start, times, rtol=solver.tol, atol=solver.tol, method="dopri5", options=options
            )
        except AssertionError as error:  # torchdiffeq's way to say that it gave up
            raise ConvergenceError(f"the ODE cannot be integrated {way}: {error}; lower lr, or raise tol") from error
        stats = SolveStats(self.field.evaluations, len(start[0]), 0, 0.0, Outcome.CONVERGED)
        if backward:
            self.record_backward(stats)
        else:
            self.record_forward(stats)
            self.last_backward = None
        return [state[-1] for state in states]


class _Flow(torch.autograd.Function):
    """The state at time 1; backward by the adjoint ODE, which keeps nothing of the way (Chen et al. 2018, Alg. 1).

    With a = dL/dz(t), back in time from 1: dz/dt = f, da/dt = -aᵀ ∂f/∂z, and -aᵀ ∂f/∂θ adds up to dL/dθ.
    """

    @staticmethod
    def forward(ctx: Any, block: ODEBlock, start: Tensor, *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (end,) = block.integrate(lambda t, state: (block.field(t, *state),), (start,), backward=False)
        ctx.block = block
        ctx.save_for_backward(end, *parameters)
        return end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        end, *parameters = ctx.saved_tensors
        block: ODEBlock = ctx.block

        def adjoint(t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                z = state[0].detach().requires_grad_()
                speed = block.field(t, z)
                pulled = torch.autograd.grad(speed, (z, *parameters), -state[1], allow_unused=True)
            zeros = (torch.zeros_like(like) for like in state[1:])
            return speed.detach(), *(zero if p is None else p for p, zero in zip(pulled, zeros, strict=True))

        start = (end, grad.contiguous(), *map(torch.zeros_like, parameters))
        with no_autocast(grad.device.type):
            _, grad_start, *grads = block.integrate(adjoint, start, backward=True)
        return None, grad_start, *grads


class NODE(Network):
    """An ODE on the image, and a classifier. ``channels`` are the filters of f.

    >>> NODE((4,))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    widths = 1

    @classmethod
    def layers(cls, channels: Widths, image_shape: ImageShape, num_classes: int, options: LayerOptions) -> Named:
        filters, extra = (*channels, 0)[:2]
        block = ODEBlock(image_shape[0], filters, extra, **options)
        features = (image_shape[0] + extra) * math.prod(image_shape[1:])
        return {"ode": block, "flatten": nn.Flatten(), "classifier": nn.Linear(features, num_classes)}


class ANODE(NODE):
    """An augmented NODE. ``channels`` are the filters of f and the extra channels.

    >>> ANODE((4, 2))(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    widths = 2

    @classmethod
    def check_channels(cls, channels: Widths) -> None:
        if len(channels) != 2 or channels[0] < 1 or channels[1] < 0:
            raise UsageError(f"channels of ANODE must be its filters and its extra channels, got {channels}")
