"""The same networks with their equilibrium layers computed in other ways, on the same weights.

Each peer takes over the parameters of a `PcDEQ` layer, so that a benchmark compares methods and
nothing else. All stop at the same relative residual.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchdeq import get_deq

import pcdeq

MAX_STEPS = 200


class Peer(nn.Module):
    """A layer z = s(Wz + inject(x)) with the parameters of a pcdeq layer, counted by products."""

    def __init__(self, layer: pcdeq.PcDEQ, tol: float) -> None:
        super().__init__()
        self.v, self.g = layer.operator.weight_v, layer.operator.weight_g
        self.inject, self.activate, self.tol = layer.inject, layer.activation.value, tol
        self.products = self.pulls = 0  # with W forward, with its adjoint backward
        object.__setattr__(self, "source", layer)  # not a submodule: its parameters are counted once

    def weight(self) -> Tensor:
        """The normalised weight, made anew at each call."""
        norm = torch.linalg.vector_norm(self.v, dim=tuple(range(1, self.v.ndim)), keepdim=True)
        return self.g * (self.v / norm)

    def apply_weight(self, weight: Tensor, z: Tensor) -> Tensor:
        self.products += 1
        if weight.ndim == 2:
            return z @ weight.T
        return torch.conv2d(z, weight, padding=1)


class Hook(Peer):
    """The pattern of the authors' code and of the DEQ tutorial (Kolter, Duvenaud & Johnson 2020).

    Plain iteration from 0 under the whole-batch rule; one more evaluation with a graph; the adjoint by
    `torch.autograd.grad` in a hook on the output. The weight is normalised in each evaluation.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)

        def f(z: Tensor) -> Tensor:
            return self.activate(self.apply_weight(self.weight(), z) + x)

        with torch.no_grad():
            z = self._iterate(f, torch.zeros_like(x))
        if not torch.is_grad_enabled():
            return f(z)
        z = f(z)
        point = z.detach().clone().requires_grad_()
        value = f(point)

        def hook(grad: Tensor) -> Tensor:
            def pull(y: Tensor) -> Tensor:
                self.pulls += 1
                return torch.autograd.grad(value, point, y, retain_graph=True)[0] + grad

            return self._iterate(pull, grad)

        z.register_hook(hook)
        return z

    def _iterate(self, f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        for _ in range(MAX_STEPS):
            new = f(z)
            residual = (new - z).norm().item() / (new.norm().item() + 1e-5)
            z = new
            if residual < self.tol:
                break
        return z


class Torchdeq(Peer):
    """torchdeq (Geng & Kolter 2023) with the implicit gradient, at the same relative tolerance."""

    solver = "fixed_point_iter"

    def __init__(self, layer: pcdeq.PcDEQ, tol: float) -> None:
        super().__init__(layer, tol)
        self.deq = get_deq(
            ift=True,
            f_solver=self.solver,
            b_solver=self.solver,
            f_tol=tol,
            b_tol=tol,
            f_max_iter=MAX_STEPS,
            b_max_iter=MAX_STEPS,
            f_stop_mode="rel",
            b_stop_mode="rel",
        )

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.inject(x), self.weight()  # normalised once a pass: its best setting
        values, _ = self.deq(lambda z: self.activate(self.apply_weight(weight, z) + x), torch.zeros_like(x))
        return values[-1]


class TorchdeqAnderson(Torchdeq):
    """The same with torchdeq's Anderson acceleration."""

    solver = "anderson"


class Explicit(Peer):
    """One application of the layer's map instead of its fixed point: the floor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)
        return self.activate(self.apply_weight(self.weight(), x) + x)


PEERS: dict[str, type[Peer]] = {
    "hook": Hook,
    "torchdeq": Torchdeq,
    "torchdeq-anderson": TorchdeqAnderson,
    "explicit": Explicit,
}


def with_peer(model: nn.Module, name: str, tol: float) -> nn.Module:
    """A copy of the model in which every equilibrium layer is computed by that peer."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, pcdeq.PcDEQ):
                setattr(parent, child_name, PEERS[name](child, tol))
    return model
