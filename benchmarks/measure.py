"""Measurements of one case: time, products, memory and true error of every method, interleaved in one process."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from cases import Case
from peers import PEERS, Peer, with_peer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import pcdeq
from pcdeq.operators import ConvMap, DenseMap

TOL = 1e-4
METHODS = ("pcdeq", *PEERS)


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median and the middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        return cls(1e3 * median, 1e3 * low, 1e3 * high)


@dataclass(frozen=True)
class Measurement:
    """What one method did on one case."""

    method: str
    training: Timing
    inference: Timing
    forward_products: float  # per equilibrium layer
    backward_products: float
    peak_bytes: int
    value_error: float  # ‖z - z*‖ / ‖z*‖ over the batch, worst layer, z* in float64
    gradient_error: float  # the same for dz/dx applied to a fixed vector


class Contestant:
    """A network with one way to compute its equilibria, ready to train and to infer."""

    def __init__(self, method: str, case: Case, images: Tensor, labels: Tensor) -> None:
        self.method, self.labels = method, labels
        model = case.model()
        # The authors' code leaves images as they come; the others get the faster format.
        layout = torch.contiguous_format if method == "hook" else torch.channels_last
        self.images = images.contiguous(memory_format=layout)
        self.model = model if method == "pcdeq" else with_peer(model, method, TOL, layout)
        fused = method == "pcdeq"  # as our trainer has it
        # A rate of nearly 0: the weights stay those that were trained, the work is that of a step.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, weight_decay=0.0, fused=fused)

    def train(self) -> None:
        """One training step."""
        loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.method == "pcdeq":
            pcdeq.project_(self.model)
        else:
            for layer in peers_of(self.model):
                layer.project_()

    @torch.inference_mode()
    def infer(self) -> None:
        """One forward pass."""
        self.model(self.images)


def peers_of(model: nn.Module) -> list[Peer]:
    return [module for module in model.modules() if isinstance(module, Peer)]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The equilibrium layers, whoever computes them."""
    return [module for module in model.modules() if isinstance(module, Peer | pcdeq.PcDEQ)]


def measure(case: Case, methods: tuple[str, ...], rounds: int) -> list[Measurement]:
    """Measure all methods on a case."""
    images, labels, _ = case.batch()
    contestants = {method: Contestant(method, case, images, labels) for method in methods}
    training = interleave({m: c.train for m, c in contestants.items()}, rounds)
    products = {m: count_products(c) for m, c in contestants.items()}
    memory = {m: peak_memory(c.train) for m, c in contestants.items()}
    for contestant in contestants.values():
        contestant.model.eval()
    inference = interleave({m: c.infer for m, c in contestants.items()}, rounds)
    errors = {m: (0.0, 0.0) if m == "explicit" else true_errors(c) for m, c in contestants.items()}
    return [Measurement(m, training[m], inference[m], *products[m], memory[m], *errors[m]) for m in methods]


def interleave(actions: dict[str, Callable[[], None]], rounds: int) -> dict[str, Timing]:
    """Time the actions in turns, so that a slow moment of the machine hits all of them."""
    for action in actions.values():
        action()
        action()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing.of(times) for name, times in seconds.items()}


def count_products(contestant: Contestant) -> tuple[float, float]:
    """Products with W forward, and with its adjoint backward, of one training step, per layer."""
    layers = len(layers_of(contestant.model))
    if contestant.method != "pcdeq":
        for layer in peers_of(contestant.model):
            layer.products = layer.pulls = 0
        contestant.train()
        forward = sum(layer.products for layer in peers_of(contestant.model))
        pulls = sum(layer.pulls for layer in peers_of(contestant.model))
        return forward / layers, pulls / layers
    counts = {"apply": 0, "adjoint": 0}
    with _counting(counts):
        contestant.train()
    return counts["apply"] / layers, counts["adjoint"] / layers


@contextlib.contextmanager
def _counting(counts: dict[str, int]) -> Iterator[None]:
    """Count calls of apply and adjoint on images, leaving out the tiny product of the warm start's mean."""
    originals = {(kind, name): getattr(kind, name) for kind in (DenseMap, ConvMap) for name in counts}

    def counted(kind: type, name: str) -> Callable[..., Tensor]:
        def call(self: object, z: Tensor) -> Tensor:
            counts[name] += z.shape[0] > 1
            return originals[kind, name](self, z)

        return call

    for kind, name in originals:
        setattr(kind, name, counted(kind, name))
    try:
        yield
    finally:
        for (kind, name), original in originals.items():
            setattr(kind, name, original)


def peak_memory(action: Callable[[], None]) -> int:
    """The most bytes of tensors that were allocated at one time during the action."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def true_errors(contestant: Contestant) -> tuple[float, float]:
    """Relative errors of the equilibria and of their gradients against float64, at the worst layer."""
    inputs: list[tuple[nn.Module, Tensor]] = []
    handles = [
        layer.register_forward_hook(lambda module, args, _: inputs.append((module, args[0].detach())))
        for layer in layers_of(contestant.model)
    ]
    with torch.no_grad():
        contestant.model(contestant.images)
    for handle in handles:
        handle.remove()
    return tuple(max(errors) for errors in zip(*(_layer_errors(*pair) for pair in inputs), strict=True))  # pyright: ignore


def _layer_errors(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    exact = copy.deepcopy(layer.source if isinstance(layer, Peer) else layer).double()
    exact.solver = exact.adjoint_solver = pcdeq.Anderson(tol=1e-11, max_steps=2000)
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    results = []
    for module, input in ((layer, x), (exact, x.double())):
        input = input.clone().requires_grad_()
        z = module(input)
        (gradient,) = torch.autograd.grad(z, input, cotangent.to(z.dtype))
        results.append((z.detach().double(), gradient.double()))
    (z, gradient), (true_z, true_gradient) = results
    return (
        float((z - true_z).norm() / true_z.norm()),
        float((gradient - true_gradient).norm() / true_gradient.norm()),
    )
