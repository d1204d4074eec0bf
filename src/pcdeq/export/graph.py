"""A trained network as a graph of torch's own operations, from pixels to logits, that exporters understand.

The layers are those of `pcdeq.freeze`: batch norms folded away, weights constant. An equilibrium is found by
plain iteration, which always converges, from the start that training has learned. It comes in two forms: a fixed
number of steps, or a loop that stops each sample on its own residual.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pcdeq.errors import UsageError
from pcdeq.injection import BETA
from pcdeq.models import Network, freeze
from pcdeq.models.frozen import FrozenPcDEQ
from pcdeq.solvers.start import WarmStart


class Equilibrium(nn.Module):
    """What both forms share: the injection, the first iterate and the map g(z) = s(Wz + x)."""

    weight: Tensor

    def __init__(self, frozen: FrozenPcDEQ) -> None:
        super().__init__()
        layer = frozen.layer
        self.activation = layer.activation
        self.injection = layer.injection
        self.floor = layer.floor
        self._bind = layer.operator.bind
        self.register_buffer("weight", frozen.weight.contiguous())
        for name, buffer in _start_of(layer.warm).items():
            self.register_buffer(name, buffer)

    def inject(self, x: Tensor) -> Tensor:
        """The input of the equation, in [floor, inf)."""
        if self.injection is not None:
            return self.injection(x).relu() + self.floor  # a graph cannot refuse a negative number
        return (softplus(x) if self.activation.kind == 1 else x.relu()) + self.floor

    def start(self, x: Tensor) -> Tensor:
        """s(x + a guess of Wz* that is >= 0): the first step, from wherever, so that T4 holds for it."""
        product = self.get_buffer("product") if hasattr(self, "product") else None
        if product is None or product.shape != x.shape[1:]:
            return self.activation.value(x)
        if hasattr(self, "response"):
            residual = self.activation.value(x + product) - self.get_buffer("mean")
            product = (product + residual @ self.get_buffer("response").T).relu()
        return self.activation.value(x + product)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        """One plain step."""
        return self.activation.value(self._bind(self.weight).apply(z) + x)


def _start_of(warm: WarmStart | None) -> dict[str, Tensor]:
    """The buffers of a warm start that can be used; buffers come from files, so nothing is taken for granted."""
    if warm is None or not warm.product.numel() or not bool(warm.product.isfinite().all()):
        return {}
    buffers = {"product": warm.product.clamp(min=0.0).contiguous()}
    if warm.response.numel() and bool(warm.response.isfinite().all() & warm.mean.isfinite().all()):
        buffers |= {"mean": warm.mean.clone(), "response": warm.response.clone()}
    return buffers


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(5x)) / 5 to the last digits of a small result too.

    A runtime's own softplus may give exactly 0 below -3, and pcDEQ-1 lives on the relative size of its input. The
    quotient is the classical way to have log1p from log: the rounding of 1 + e cancels.
    """
    e = torch.exp(-BETA * x.abs())
    sum_ = 1 + e
    return x.relu() + torch.where(sum_ == 1, e, torch.log(sum_) * e / (sum_ - 1)) / BETA


class FixedSteps(Equilibrium):
    """So many plain steps, of which the start is the first."""

    def __init__(self, frozen: FrozenPcDEQ, steps: int) -> None:
        super().__init__(frozen)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)
        z = self.start(x)
        for _ in range(self.steps - 1):
            z = self.step(z, x)
        return z


class Loop(Equilibrium):
    """Plain steps until max|g(z) - z| < tol max|g(z)|, for each sample; one that is done is held as it is.

    So an answer does not depend on what else is in the batch. ``last_steps`` holds how many steps the slowest sample
    took, outside of an exported graph.
    """

    last_steps: int

    def __init__(self, frozen: FrozenPcDEQ, tol: float, max_steps: int) -> None:
        super().__init__(frozen)
        self.tol = tol
        self.max_steps = max_steps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The equilibrium, and for which samples the rule was met."""
        x = self.inject(x)
        z = self.start(x)
        state_dims = tuple(range(1, x.ndim))

        def goes_on(count: Tensor, z: Tensor, residual: Tensor) -> Tensor:
            return (count < self.max_steps) & (residual >= self.tol).any()  # a NaN stops its sample

        def advance(count: Tensor, z: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            new = self.step(z, x)
            active = residual >= self.tol
            relative = (new - z).abs().amax(state_dims) / new.abs().amax(state_dims)
            held = active.reshape(-1, *[1] * len(state_dims))
            return count + 1, torch.where(held, new, z), torch.where(active, relative, residual)

        residual = torch.full_like(z.flatten(1)[:, 0], torch.inf)
        state = (torch.ones((), dtype=torch.int64), z, residual)
        if torch.compiler.is_exporting():
            _, z, residual = torch.while_loop(goes_on, advance, state)
        else:
            while bool(goes_on(*state)):
                state = advance(*state)
            count, z, residual = state
            self.last_steps = int(count)
        return z, residual < self.tol


class Graph(nn.Module):
    """A network from pixels in [0, 1] to logits; with loops also ``converged``, one truth value per sample."""

    def __init__(self, model: Network, equilibria: Iterator[Equilibrium]) -> None:
        super().__init__()
        layers = ((name, layer) for name, layer in freeze(model).named_children())
        plain = {name: next(equilibria) if isinstance(layer, FrozenPcDEQ) else _plain(layer) for name, layer in layers}
        self.layers = nn.ModuleDict(plain)
        self.image_shape = model.image_shape
        given = model.preprocessing
        self.normalises = given is not None and (any(given.mean) or set(given.std) != {1.0})
        if given is not None and self.normalises:
            self.register_buffer("mean", torch.tensor(given.mean).view(-1, 1, 1))
            self.register_buffer("std", torch.tensor(given.std).view(-1, 1, 1))
        self.requires_grad_(False).eval()
        self.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]

    def forward(self, pixels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = (pixels - self.get_buffer("mean")) / self.get_buffer("std") if self.normalises else pixels
        converged: Tensor | None = None
        for layer in self.layers.values():
            if isinstance(layer, Loop):
                x, done = layer(x)
                converged = done if converged is None else converged & done
            else:
                x = layer(x)
        return x if converged is None else (x, converged)

    @property
    def equilibria(self) -> list[Equilibrium]:
        """Its equilibrium layers, in order."""
        return [layer for layer in self.layers.values() if isinstance(layer, Equilibrium)]


def fixed_graph(model: Network, steps: tuple[int, ...]) -> Graph:
    """The network with so many steps in each equilibrium layer."""
    return Graph(model, (FixedSteps(*pair) for pair in zip(_frozen(model), steps, strict=True)))


def loop_graph(model: Network, tol: float, max_steps: int) -> Graph:
    """The network that stops by its residuals."""
    return Graph(model, (Loop(layer, tol, max_steps) for layer in _frozen(model)))


def _frozen(model: Network) -> list[FrozenPcDEQ]:
    layers = [layer for layer in freeze(model) if isinstance(layer, FrozenPcDEQ)]
    if not layers:
        raise UsageError("only pcDEQ networks can be exported, and this one has no pcDEQ layer")
    return layers


def _plain(layer: nn.Module) -> nn.Module:
    """A layer without kernels of ours, which exporters cannot look into."""
    if isinstance(layer, nn.MaxPool2d):
        return nn.MaxPool2d(layer.kernel_size, layer.stride, layer.padding, layer.dilation, ceil_mode=layer.ceil_mode)
    if isinstance(layer, nn.BatchNorm2d):
        norm = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine)
        norm.load_state_dict(layer.state_dict())
        return norm
    return layer
