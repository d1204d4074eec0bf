"""Measurements of one case: time, products, memory and true error of every method, interleaved in one process."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf

import torch
from cases import Batch, Case
from peers import PEERS, Peer, with_peer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import pcdeq

TOL = 1e-4
TOLERANCES = (1e-4, 7e-5, 5e-5, 3e-5, 2e-5, 1e-5, 5e-6, 2e-6, 1e-6)  # that pcdeq may choose from
ERROR_IMAGES = {"l": 64, "mc": 64, "sc": 16}  # that the errors are taken on: float64 is slow
TURN = 0.02  # seconds that a method goes on before the next one has its turn
OURS = ("pcdeq", "without-c")  # with C kernels where there are some, and as on machines without
METHODS = (*OURS, *PEERS)


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
    forward_products: float  # with W, a layer and a sample
    backward_products: float
    peak_bytes: int
    value_error: float  # ‖z - z*‖ / ‖z*‖ over the batch, worst layer, z* in float64
    gradient_error: float  # the same for dz/dx applied to a fixed vector


class Contestant:
    """A network with one way to compute its equilibria, ready to train and to infer."""

    def __init__(
        self, method: str, case: Case, batches: list[Batch], layout: torch.memory_format = torch.channels_last
    ) -> None:
        self.method = method
        self.is_ours = method in OURS
        self.kernels = without_kernels if method == "without-c" else nullcontext
        model = case.model()
        dtype = next(model.parameters()).dtype
        self.batches = [(images.to(dtype).contiguous(memory_format=layout), labels) for images, labels in batches]
        self.turns = itertools.cycle(self.batches)
        self.model = model if self.is_ours else with_peer(model, method, TOL, layout)
        # The same optimiser for all. A rate of nearly 0: the weights stay those that were trained, the work is that of
        # a step.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-12, weight_decay=0.0, fused=True)

    def train(self) -> None:
        """One training step."""
        with self.kernels():
            self._train()

    def _train(self) -> None:
        images, labels = next(self.turns)
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.is_ours:
            pcdeq.project_(self.model)
        else:
            for layer in peers_of(self.model):
                layer.project_()

    def deploy(self) -> None:
        """Make ready for inference: peers switch to evaluation, ours are frozen, as the documentation advises."""
        self.model.eval()
        self.deployed = pcdeq.freeze(self.model) if self.is_ours or self.method == "explicit" else self.model

    @torch.inference_mode()
    def infer(self) -> None:
        """One forward pass."""
        with self.kernels():
            self.deployed(next(self.turns)[0])

    def tighten(self, referee: Referee, limits: tuple[float, float]) -> tuple[float, float]:
        """Choose the tolerances of pcdeq, at most the peers', so that its errors are no worse; returns the errors.

        The authors' code evaluates the layer once more after it has met its tolerance, so the same tolerance is
        not the same error.
        """
        errors = (inf, inf)
        for index in range(2):
            for tol in TOLERANCES:
                self.tolerances = (self.tolerances[0], tol) if index else (tol, self.tolerances[1])
                errors = referee.errors(self)
                if errors[index] <= limits[index]:
                    break
        return errors

    @property
    def tolerances(self) -> tuple[float, float]:
        """Those of pcdeq, forward and backward."""
        layer = layers_of(self.model)[0]
        return layer.solver.tol, layer.adjoint_solver.tol

    @tolerances.setter
    def tolerances(self, tolerances: tuple[float, float]) -> None:
        for layer in layers_of(self.model):
            for name, tol in zip(("solver", "adjoint_solver"), tolerances, strict=True):
                setattr(layer, name, replace(getattr(layer, name), tol=tol))


@contextmanager
def without_kernels() -> Iterator[None]:
    """As on a machine without a compiler."""
    binding = import_module("pcdeq.kernels.binding")  # by name: older revisions, against which this runs, lack it
    kernels, binding._KERNELS = binding._KERNELS, None  # `patch` would take 15 µs of each pass
    try:
        yield
    finally:
        binding._KERNELS = kernels


def peers_of(model: nn.Module) -> list[Peer]:
    return [module for module in model.modules() if isinstance(module, Peer)]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The equilibrium layers, whoever computes them."""
    return [module for module in model.modules() if isinstance(module, Peer | pcdeq.PcDEQ)]


def measure(
    case: Case, batches: list[Batch], methods: tuple[str, ...], seconds: float, layout: torch.memory_format
) -> list[Measurement]:
    """Measure all methods on a case, giving each about so many seconds for training and as many for inference."""
    contestants = {method: Contestant(method, case, batches, layout) for method in methods}
    referee = Referee(case, batches[0][0])
    errors = {m: referee.errors(c) for m, c in contestants.items() if m not in (*OURS, "explicit")}
    for method in contestants.keys() & OURS:
        errors[method] = contestants[method].tighten(referee, errors.get("hook", (inf, inf)))
    training = interleave({m: c.train for m, c in contestants.items()}, seconds)
    products = {m: count_products(c) for m, c in contestants.items()}
    memory = {m: peak_memory(c.train) for m, c in contestants.items()}
    for contestant in contestants.values():
        contestant.deploy()
    inference = interleave({m: c.infer for m, c in contestants.items()}, seconds)
    return [
        Measurement(m, training[m], inference[m], *products[m], memory[m], *errors.get(m, (0.0, 0.0))) for m in methods
    ]


def interleave(actions: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Timing]:
    """Time the actions in turns, so that a slow moment of the machine hits all of them.

    A turn of a short action is several in a row, the first of which is not counted: others have emptied the caches.
    A long action has fewer turns, at least two; of one that fills its time at once the first counts, too.
    """
    first = {name: seconds_of(action) for name, action in actions.items()}
    times = {name: [took] if took > seconds else [] for name, took in first.items()}
    spent = {name: sum(found) for name, found in times.items()}
    while any(spent[name] < seconds or len(times[name]) < 2 for name in actions):
        for name, action in actions.items():
            if spent[name] >= seconds and len(times[name]) > 1:
                continue
            turn: list[float] = []
            while sum(turn) < TURN:
                turn.append(seconds_of(action))
            spent[name] += sum(turn)
            times[name] += turn[1:] or turn
    return {name: Timing.of(found) for name, found in times.items()}


def seconds_of(action: Callable[[], object]) -> float:
    """How long the action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def count_products(contestant: Contestant) -> tuple[float, float]:
    """Products with W forward, and with its adjoint backward, of one training step: of a layer and sample in the mean.

    The peers' are whole batches, ours single samples. Ours begin at a step that needs no product with W.
    """
    if not contestant.is_ours:
        layers = peers_of(contestant.model)
        for layer in layers:
            layer.products = layer.pulls = 0
        contestant.train()
        return statistics.fmean(p.products for p in layers), statistics.fmean(p.pulls for p in layers)
    with contestant.kernels():
        steps = [_steps(layer, *seen) for layer, seen in _passes(contestant)]
    return statistics.fmean(forward for forward, _ in steps) - 1, statistics.fmean(backward for _, backward in steps)


def _passes(contestant: Contestant) -> list[tuple[pcdeq.PcDEQ, tuple[Tensor, Tensor]]]:
    """The equilibrium layers, what came in, and the gradient of what went out, in one training step."""
    layers = [layer for layer in contestant.model.modules() if isinstance(layer, pcdeq.PcDEQ)]
    inputs: dict[nn.Module, Tensor] = {}
    gradients: dict[nn.Module, Tensor] = {}

    def watch(layer: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> None:
        inputs[layer] = args[0].detach()
        z.register_hook(lambda grad: gradients.update({layer: grad}))

    handles = [layer.register_forward_hook(watch) for layer in layers]
    contestant.train()
    for handle in handles:
        handle.remove()
    return [(layer, (inputs[layer], gradients[layer])) for layer in layers]


def _steps(layer: pcdeq.PcDEQ, x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Steps of a sample forward and backward in the mean: a layer tells those of its slowest, so one by one."""
    layer.eval()  # so that it learns nothing here
    forward, backward = [], []
    for sample, pulled in zip(x.split(1), grad.split(1), strict=True):
        layer(sample.requires_grad_()).backward(pulled)
        assert layer.last_forward is not None and layer.last_backward is not None
        forward.append(layer.last_forward.steps)
        backward.append(layer.last_backward.steps)
    layer.zero_grad()
    layer.train()
    return statistics.fmean(forward), statistics.fmean(backward)


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


class Referee:
    """Equilibria and gradients in float64, for the inputs that the trained network gives its layers."""

    def __init__(self, case: Case, images: Tensor) -> None:
        model = case.model().eval()
        layers = layers_of(model)
        self.inputs: list[Tensor] = []
        listen = [
            layer.register_forward_hook(lambda _, args, __: self.inputs.append(args[0].detach())) for layer in layers
        ]
        with torch.no_grad():
            model(images[: ERROR_IMAGES[case.topology]].to(next(model.parameters()).dtype))
        for handle in listen:
            handle.remove()
        exact = pcdeq.Anderson(tol=1e-10, max_steps=2000)
        self.truth = []
        for layer, x in zip(layers, self.inputs, strict=True):
            layer.double().solver = layer.adjoint_solver = exact
            self.truth.append(_value_and_gradient(layer, x.double()))

    def errors(self, contestant: Contestant) -> tuple[float, float]:
        """Relative errors of the equilibria and of their gradients, at the worst layer."""
        worst = [0.0, 0.0]
        for layer, x, truth in zip(layers_of(contestant.model), self.inputs, self.truth, strict=True):
            was_training = layer.training
            layer.train(isinstance(layer, Peer))  # torchdeq has no gradients otherwise; ours learns nothing here
            with contestant.kernels():
                both = _value_and_gradient(layer, x)
            for index, (found, true) in enumerate(zip(both, truth, strict=True)):
                worst[index] = max(worst[index], float((found.double() - true).norm() / true.norm()))
            layer.train(was_training)
        return worst[0], worst[1]


def _value_and_gradient(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    z = layer(x)
    (gradient,) = torch.autograd.grad(z, x, cotangent.to(z.dtype))
    return z.detach(), gradient
