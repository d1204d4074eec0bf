"""Where a solve starts: a guess of the equilibrium learned from earlier ones, at almost no cost.

The equilibrium is the same from every start, so a guess changes only the number of steps, and saves some where
inputs are like earlier ones. It is kept like the statistics of batch norm: updated in training, buffers of the state
dict, frozen in evaluation.

A running mean of Wz* saves about half of the steps: a solve starts at s(x + mean). For a dense layer
there is more to have. Linearised at the mean z̄, with D̄ the mean slope, z* - z̄ = (I - D̄W)⁻¹ (g(z̄) - z̄), so
that Wz* = Wz̄ + B (g(z̄) - z̄) with B = W (I - D̄W)⁻¹; one more product then gives a start from which a
ReLU6 layer, which is nearly linear, is done. As (I - D̄W)⁻¹ = I + D̄B, the same matrix starts the adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pcdeq.equation import Equation
from pcdeq.operators import DenseMap, LinearMap
from pcdeq.solvers import Guess

# After the first batches one in so many is looked at, and replaces this part of the running means.
FIRST, LOOK_EVERY = 16, 16
MOMENTUM = 0.5
# The matrix B costs n³ at each look: up to this size it is affordable.
LARGEST_RESPONSE = 1024

_MEANS = ("product", "mean", "slope", "response")


class WarmStart(nn.Module):
    """Running means over samples of Wz* and, for a dense layer, of z*, its slope, and the response B.

    The buffers are empty until the first batch shows their shape; inputs of another shape start cold.
    """

    product: Tensor
    mean: Tensor
    slope: Tensor
    response: Tensor
    observed: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in _MEANS:
            self.register_buffer(name, torch.empty(0))
        self.register_buffer("observed", torch.zeros((), dtype=torch.int64))

    def learned(self, state: torch.Size, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What is known about samples of this shape: nothing, the mean of Wz*, or that, of z*, its slope and B."""
        buffers = self._buffers  # looked up this way they are found in half the time
        known: tuple[Tensor, ...] = tuple(buffers[name] for name in _MEANS)  # pyright: ignore[reportAssignmentType]
        if known[0].shape != state:
            return ()
        vectors = len(state) == 1 and known[1].shape == known[2].shape == state
        if not vectors or known[3].shape != (*state, *state):
            known = known[:1]
        return tuple(b if b.dtype == dtype and b.is_contiguous() else b.to(dtype).contiguous() for b in known)

    def guess(self, equation: Equation) -> Guess | None:
        """A guess of Wz*, broadcastable to x and >= 0; None before anything was learned."""
        base, *more = self.learned(equation.x.shape[1:], equation.x.dtype) or (None,)
        if base is None:
            return None
        if not more:
            return Guess(lambda: _admissible(base), base)
        mean, _, response = more

        def evaluate() -> Tensor:
            product = _admissible(base)
            residual = equation.activation.value(equation.x + product) - mean
            return _admissible(torch.addmm(product, residual, response.T))

        return Guess(evaluate, base, mean, response)

    def adjoint(self, grad: Tensor) -> Guess | None:
        """A guess of Jᵀy for the solution of y = Jᵀy + grad; None where nothing is known."""
        known = self.learned(grad.shape[1:], grad.dtype)
        if len(known) < 2:
            return None
        _, _, slope, response = known

        def evaluate() -> Tensor:
            return torch.nan_to_num((grad * slope) @ response, nan=0.0, posinf=0.0, neginf=0.0)

        return Guess(evaluate, mean=slope, response=response)

    def observe(self, z: Tensor, slope: Callable[[Tensor], Tensor], linear: LinearMap) -> None:
        """Learn from a batch of equilibria, where the activation's slope is a function of them."""
        observed = self.observed
        seen = int(observed)
        observed.add_(1)
        if seen >= FIRST and seen % LOOK_EVERY:
            return
        mean = z.mean(0)  # NaN for an empty batch: it shows the shape, so that all processes of a group have it
        _blend(self.product, linear.apply(mean[None])[0])
        if isinstance(linear, DenseMap) and len(mean) <= LARGEST_RESPONSE:
            _blend(self.mean, mean)
            _blend(self.slope, slope(z).mean(0))
            self._renew(linear.weight)

    def _renew(self, weight: Tensor) -> None:
        identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        system = identity - self.slope.to(weight.dtype)[:, None] * weight
        response, _ = torch.linalg.solve_ex(system, weight, left=False)
        if bool(response.isfinite().all()):
            _resize(self.response, response.shape).copy_(response)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        if not any(prefix + name in state_dict for name, _ in self.named_buffers()):
            return  # of a layer without a warm start, or of other people's code: this one learns its own
        for name, buffer in self.named_buffers():
            if prefix + name in state_dict:
                _resize(buffer, state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _admissible(product: Tensor) -> Tensor:
    """A start from which every solver converges: the theory is about z >= 0, and buffers come from files."""
    return torch.nan_to_num(product, nan=0.0).clamp_(min=0.0)


def _blend(running: Tensor, value: Tensor) -> None:
    """Move the running mean towards a new value; the first value of its shape is taken over."""
    weight = MOMENTUM if running.shape == value.shape else 1.0
    blended = _resize(running, value.shape).lerp(value.to(running.dtype), weight)
    # One bad batch must not spoil every solve that follows.
    running.copy_(torch.where(blended.isfinite(), blended, running))


def _resize(buffer: Tensor, shape: torch.Size) -> Tensor:
    # In place: DistributedDataParallel broadcasts the buffers that it has seen when it was made.
    return buffer if buffer.shape == shape else buffer.resize_(shape).zero_()
