"""The same networks with their equilibrium layers computed in other ways, on the same weights.

Each peer takes over the parameters of a `PcDEQ` layer, so that a benchmark compares methods and
nothing else. All stop at the same relative residual.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import cached

import pcdeq

MAX_STEPS = 200


class Peer(nn.Module):
    """A layer z = s(Wz + inject(x)) with the parameters of a pcdeq layer, counted by products."""

    def __init__(self, layer: pcdeq.PcDEQ, tol: float) -> None:
        super().__init__()
        v, g = layer.operator.weight_v, layer.operator.weight_g
        dense = v.ndim == 2
        linear = nn.Linear(*v.shape, bias=False) if dense else nn.Conv2d(*v.shape[:2], 3, padding=1, bias=False)
        self.linear = weight_norm(linear.to(v.dtype))  # torch's: the weight is normalised whenever it is used
        with torch.no_grad():
            self.norm.original0.copy_(g)
            self.norm.original1.copy_(v)
        self.inject, self.activate, self.tol = layer.inject, layer.activation.value, tol
        self.products = self.pulls = 0  # with W forward, with its adjoint backward
        object.__setattr__(self, "source", layer)  # not a submodule: its parameters are counted once

    @property
    def norm(self) -> nn.Module:
        """Where torch keeps the norm and the direction of the weight."""
        return self.linear.parametrizations.weight  # pyright: ignore

    @torch.no_grad()
    def project_(self) -> None:
        """The paper's projection after a step."""
        for parameter in self.norm.parameters():
            parameter.clamp_(min=0)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        """s(Wz + x)."""
        self.products += 1
        return self.activate(self.linear(z) + x)


class Hook(Peer):
    """The pattern of the authors' code and of the DEQ tutorial (Kolter, Duvenaud & Johnson 2020).

    Plain iteration from 0 under the whole-batch rule; one more evaluation with a graph; the adjoint by
    `torch.autograd.grad` in a hook on the output. The weight is normalised in each evaluation.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)
        with torch.no_grad():
            z = self._iterate(lambda z: self.step(z, x), torch.zeros_like(x))
        z = self.step(z, x)
        if not z.requires_grad:
            return z
        point = z.detach().clone().requires_grad_()
        value = self.step(point, x)

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
        from torchdeq import get_deq  # of the extra `bench`, which the other peers do not need

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
        x = self.inject(x)
        with cached():  # the weight is normalised once a pass: its best setting
            values, _ = self.deq(lambda z: self.step(z, x), torch.zeros_like(x))
        return values[-1]


class TorchdeqAnderson(Torchdeq):
    """The same with torchdeq's Anderson acceleration."""

    solver = "anderson"


class Explicit(Peer):
    """The explicit layer s(W s(x) + x) with these weights, one product, no injection: the floor of what we can do."""

    # On the whole line, where the input may lie.
    ACTIVATIONS: ClassVar = {"tanh": torch.tanh, "softsign": F.softsign, "relu6": F.relu6, "sigmoid": torch.sigmoid}

    def __init__(self, layer: pcdeq.PcDEQ, tol: float) -> None:
        super().__init__(layer, tol)
        self.activate = self.ACTIVATIONS[layer.activation.name]

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.activate(x), x)


PEERS: dict[str, type[Peer]] = {
    "hook": Hook,
    "torchdeq": Torchdeq,
    "torchdeq-anderson": TorchdeqAnderson,
    "explicit": Explicit,
}


def with_peer(model: nn.Module, name: str, tol: float, memory_format: torch.memory_format) -> nn.Module:
    """A copy of the model in which that peer computes every equilibrium, and torch's own layers all else.

    But what is around the explicit layer stays ours: it is to show what an equilibrium costs.
    """
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for child_name, child in list(parent.named_children()):
            if isinstance(child, pcdeq.PcDEQ):
                setattr(parent, child_name, PEERS[name](child, tol))
            elif name != "explicit" and (plain := _plain(child)) is not None:
                setattr(parent, child_name, plain)
    return model.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]


def _plain(layer: nn.Module) -> nn.Module | None:
    """torch's own layer in place of one of ours."""
    if isinstance(layer, nn.MaxPool2d) and type(layer) is not nn.MaxPool2d:
        return nn.MaxPool2d(layer.kernel_size, layer.stride, layer.padding)
    if isinstance(layer, nn.BatchNorm2d) and type(layer) is not nn.BatchNorm2d:
        plain = nn.BatchNorm2d(layer.num_features, dtype=layer.weight.dtype)
        plain.load_state_dict(layer.state_dict())
        return plain
    return None
