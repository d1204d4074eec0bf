"""A trained network as a graph of torch's own operations, from pixels to logits, that exporters understand.

The layers are those of `pcdeq.freeze`: batch norms folded away, weights constant. An equilibrium is found by
plain iteration, which always converges, from the start that training has learned. It comes in two forms: a fixed
number of steps, or a loop that stops each sample on its own residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from pcdeq import residual
from pcdeq.errors import UsageError
from pcdeq.layers import PcDEQ
from pcdeq.models import Network, freeze, pcdeq_layers
from pcdeq.proofs.composed import Unknown
from pcdeq.proofs.network import all_layers, recognise
from pcdeq.solvers import Picard, Problem, per_sample
from pcdeq.unrolling import Equilibrium, FixedSteps


class Loop(Equilibrium):
    """Plain steps until max|g(z) - z| < tol max|g(z)|, for each sample; one that is done is held as it is.

    So an answer does not depend on what else is in the batch. ``last_steps`` holds how many steps the slowest sample
    took, outside of an exported graph.
    """

    last_steps: int

    def __init__(self, layer: PcDEQ, tol: float, max_steps: int) -> None:
        super().__init__(layer)
        self.tol = tol
        self.max_steps = max_steps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The equilibrium, and for which samples the rule was met."""
        equation = self.equation(x)
        z = self.start(equation)
        problem = Problem(equation, z)

        def largest(z: Tensor) -> Tensor:
            return z.abs().amax(tuple(range(1, z.ndim)))

        def goes_on(count: Tensor, z: Tensor, residual: Tensor) -> Tensor:
            return (count < self.max_steps) & (residual >= self.tol).any()  # a NaN stops its sample

        def advance(count: Tensor, z: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            state = Picard().step(problem, None, z, largest)
            active, relative = residual >= self.tol, state.length / largest(state.value)
            value = torch.where(per_sample(active, z), state.value, z)
            return count + 1, value, torch.where(active, relative, residual)

        state = (torch.ones((), dtype=torch.int64), z, torch.full_like(z.flatten(1)[:, 0], torch.inf))
        if torch.compiler.is_exporting():
            _, z, residual = torch.while_loop(goes_on, advance, state)
        else:
            while bool(goes_on(*state)):
                state = advance(*state)
            count, z, residual = state
            self.last_steps = int(count)
        return z, residual < self.tol


class Graph(nn.Module):
    """A network from pixels in [0, 1] to logits; with loops also ``converged``, one truth value per sample.

    ``known`` are the layers of the frozen network that it was made from, for whoever wants to prove something.
    """

    def __init__(self, model: Network, equilibrium: Callable[[PcDEQ], Equilibrium]) -> None:
        super().__init__()
        self.known = recognise(freeze(model), leave_unknown=True)
        for layer in all_layers(self.known):
            if isinstance(layer, Unknown) and pcdeq_layers(layer.module):
                layer.refuse(layer.reason)
        self.layers = nn.ModuleList(layer.export(equilibrium) for layer in self.known)
        if not self.equilibria:
            raise UsageError("only pcDEQ networks can be exported, and this one has no pcDEQ layer")
        self.image_shape = model.image_shape
        given = model.preprocessing
        changes = given is not None and (any(given.mean) or set(given.std) != {1.0})
        self.preprocessing = given if changes else None
        self.requires_grad_(False).eval()
        self.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]

    def forward(self, pixels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = pixels if self.preprocessing is None else self.preprocessing.normalise(pixels)
        x, converged = _run(self.layers, x)
        return x if converged is None else (x, converged)

    @property
    def equilibria(self) -> list[Equilibrium]:
        """Its equilibrium layers, in order."""
        return [layer for layer in self.layers.modules() if isinstance(layer, Equilibrium)]


def _run(layers: Iterable[nn.Module], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the layers make of x, and where there are loops, for which samples all have converged."""
    converged: Tensor | None = None
    for layer in layers:
        done: Tensor | None = None
        if isinstance(layer, residual.Residual):
            branch, done = _run(layer, x)
            x = residual.add(x, branch)
        elif isinstance(layer, Loop):
            x, done = layer(x)
        else:
            x = layer(x)
        if done is not None:
            converged = done if converged is None else converged & done
    return x, converged


def fixed_graph(model: Network, steps: tuple[int, ...]) -> Graph:
    """The network with so many steps in each equilibrium layer."""
    remaining = iter(steps)
    graph = Graph(model, lambda layer: FixedSteps(layer, next(remaining)))
    assert len(graph.equilibria) == len(steps)
    return graph


def loop_graph(model: Network, tol: float, max_steps: int) -> Graph:
    """The network that stops by its residuals."""
    return Graph(model, lambda layer: Loop(layer, tol, max_steps))
