"""How far a graph that stops its iterations is from the exact equilibrium network, in its logits.

Proved, where T4 gives a rate c < 1 that is of use: with sigmoid, or with a floor under the input. After N steps an
equilibrium is within c^(N-1) D of z* in Thompson's metric max|log(z / z*)|. Let its input be wrong by η, because the
layers before it were truncated too. The log of s(p) then moves by at most η s'(δ)/s(δ), δ the floor, since s'/s falls;
so z*, the fixed point of a map that contracts by c, moves by at most that over 1 - c. The sum d of the two makes
an absolute error of at most b (1 - e^-d), b the supremum of s, as both z and z* are below b. Between equilibria errors
are nonnegative vectors that |W| maps, and pooling and injections do not enlarge. All this is about the numbers in the
graph, in exact arithmetic, and holds for every input.

Measured, where it does not: the largest difference from a float64 solve on some images.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pcdeq.errors import PcdeqError
from pcdeq.export.graph import Graph, Loop, fixed_graph, loop_graph
from pcdeq.models import Network, freeze, pcdeq_layers
from pcdeq.proofs.composed import Unknown
from pcdeq.proofs.network import all_layers
from pcdeq.proofs.rates import a_priori_rate
from pcdeq.proofs.rules import ROUNDING, enlarge
from pcdeq.solvers import Anderson
from pcdeq.unrolling import DEEPEST, Equilibrium, FixedSteps

# With a slower rate than this, T4 asks for more steps than anybody wants.
SLOWEST_RATE = 0.98
EXACT = Anderson(tol=1e-9, max_steps=5000)
BATCH = 250


@dataclass(frozen=True)
class Contraction:
    """What T4 knows about an equilibrium layer, whatever its weights."""

    factor: float  # c
    distance: float  # D, after the first step
    lowest: float  # s(floor) <= z
    supremum: float
    sensitivity: float  # s'(floor) / s(floor)

    @classmethod
    def of(cls, layer: Equilibrium) -> Contraction | None:
        """None where T4 gives nothing of use."""
        rate = a_priori_rate(layer.activation, layer.floor, tol=1e-4)
        if rate.steps is None or rate.factor > SLOWEST_RATE:
            return None
        floor = torch.tensor(layer.floor, dtype=torch.float64)
        lowest, slope = float(layer.activation.value(floor)), float(layer.activation.derivative(floor))
        supremum = layer.activation.supremum
        return cls(rate.factor * ROUNDING, math.log(supremum / lowest), lowest, supremum, slope / lowest)

    def own(self, layer: Equilibrium) -> float:
        """How far from z* the layer stops: after so many steps, of which the first is the start, or at its tolerance.

        Where max|g(z) - z| < tol max|g(z)|, the last step was no longer than log(1 + tol b / lowest).
        """
        if isinstance(layer, FixedSteps):
            return self.distance * self.factor ** (layer.steps - 1)
        assert isinstance(layer, Loop)
        return self.factor / (1 - self.factor) * math.log1p(layer.tol * self.supremum / self.lowest)

    def error(self, layer: Equilibrium, input_error: Tensor) -> Tensor:
        """That of an equilibrium which stops early, and whose input is wrong, with which z* moves."""
        moved = float(input_error.max()) * self.sensitivity / (1 - self.factor)
        distance = self.own(layer) + moved
        return torch.full_like(input_error, -self.supremum * math.expm1(-distance))


def contractions(graph: Graph) -> list[Contraction] | None:
    """Those of all equilibrium layers.

    None if one has none, or takes its input by an injection that is not ours, or if a layer is not known.
    """
    found = [Contraction.of(layer) for layer in graph.equilibria]
    known = all(layer.injection is None for layer in graph.equilibria[1:])
    known = known and not any(isinstance(layer, Unknown) for layer in all_layers(graph.known))
    return [item for item in found if item is not None] if known and None not in found else None


def proved_error(graph: Graph, rates: list[Contraction]) -> float:
    """A bound on the error of every logit, for every input, in exact arithmetic."""
    truncated = (partial(rate.error, layer) for layer, rate in zip(graph.equilibria, rates, strict=True))
    error = torch.zeros(1, *graph.image_shape, dtype=torch.float64)
    return float(enlarge(graph.known, error, truncated).max())


def proved_depth(model: Network, rates: list[Contraction], wanted: float) -> Graph | None:
    """The graph of the fewest steps, about, whose proved error is at most ``wanted``; None if it is too deep."""
    graph = fixed_graph(model, (1,) * len(rates))
    layers = [layer for layer in graph.equilibria if isinstance(layer, FixedSteps)]
    while proved_error(graph, rates) > wanted:
        if max(layer.steps for layer in layers) >= DEEPEST:
            return None
        # One step more where it helps most.
        gains = []
        for layer in layers:
            layer.steps += 1
            gains.append(proved_error(graph, rates))
            layer.steps -= 1
        layers[gains.index(min(gains))].steps += 1
    return graph


def measured_depth(model: Network, pixels: Tensor, wanted: float) -> tuple[Graph, float]:
    """A fixed graph with at most half the ``wanted`` error on these images, as others may be worse; and its error."""
    exact = exact_logits(model, pixels)
    tol = 0.03
    while tol > 1e-7:
        loop = loop_graph(model, tol, DEEPEST)
        deepest = [0] * len(loop.equilibria)
        for batch in pixels.split(BATCH):
            loop(batch)
            counts = [layer.last_steps for layer in loop.equilibria if isinstance(layer, Loop)]
            deepest = [max(pair) for pair in zip(deepest, counts, strict=True)]
        graph = fixed_graph(model, tuple(deepest))
        error = measured_error(graph, pixels, exact)
        if error <= wanted / 2:
            return graph, error
        if max(deepest) >= DEEPEST:
            break
        tol /= 2
    raise PcdeqError(f"no depth up to {DEEPEST} brings the measured error to {wanted / 2:.2g}; use the loop form")


@torch.no_grad()
def exact_logits(model: Network, pixels: Tensor) -> Tensor:
    """What the network says when its equilibria are solved in float64, as far as that goes."""
    network = copy.deepcopy(freeze(model)).double()
    for layer in pcdeq_layers(network):
        layer.solver = EXACT
    inputs = pixels.double() if model.preprocessing is None else model.preprocessing.normalise(pixels.double())
    return torch.cat([network(batch) for batch in inputs.split(BATCH)])


@torch.no_grad()
def measured_error(graph: Graph, pixels: Tensor, exact: Tensor) -> float:
    """The largest difference of a logit from the exact ones, on those of these images that converge."""
    errors = []
    for batch, right in zip(pixels.split(BATCH), exact.split(BATCH), strict=True):
        output = graph(batch)
        logits, converged = output if isinstance(output, tuple) else (output, slice(None))
        errors.append((logits - right)[converged].abs())
    found = torch.cat(errors)
    if not len(found):
        raise PcdeqError("no image converged within max_steps: allow more, or a larger tol")
    worst = float(found.max())
    if not math.isfinite(worst):
        raise PcdeqError("the network gives infinite or NaN logits: check its weights and the images")
    return worst
