"""Does the package work on this machine, and how fast? Everything against float64 on the CPU, one line a question.

Weights and inputs are made on the CPU from a fixed seed and then moved, so that two reports are about the same
numbers. What is compared is the largest error, relative to the largest number of the reference.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pcdeq import _version
from pcdeq.activations import ACTIVATIONS
from pcdeq.equation import Equation
from pcdeq.errors import ConvergenceWarning
from pcdeq.kernels.binding import engine
from pcdeq.layers import PcDEQ, PcDEQConv1d, PcDEQConv2d, PcDEQConv3d, PcDEQLinear
from pcdeq.proofs.order import enclose_near
from pcdeq.proofs.precision import full_precision
from pcdeq.solvers import Anderson, Newton, Picard, Solver
from pcdeq.solvers import run as solve

HELP = """Check pcdeq on a device, in about a minute, and print a report to paste into an issue.

Layers, gradients, solvers and bounds are computed on the device and compared with float64 on the CPU; then a training
step is timed against the plain pattern (plain iteration, and a hook for the gradient). The exit code is 0 if all is
well, 1 if a check failed, 2 if there is no such device."""

LAYERS = {  # what to build, and the shape of one sample
    "dense": (PcDEQLinear, (32,)),
    "conv1d": (PcDEQConv1d, (4, 16)),
    "conv2d": (PcDEQConv2d, (4, 6, 6)),
    "conv3d": (PcDEQConv3d, (3, 4, 4, 4)),
}
SOLVERS: dict[str, Solver] = {
    "Picard": Picard(tol=1e-6),
    "Anderson, memory 1": Anderson(tol=1e-6),
    "Anderson, memory 2": Anderson(tol=1e-6, memory=2),
    "Newton": Newton(tol=1e-6),
    "Picard, batch rule": Picard(tol=1e-6, stop="batch"),
}
EXACT = Picard(tol=1e-13, max_steps=5000)
# Errors to be expected: of float32 and a residual of 1e-6; of the defaults, a residual of 1e-4 and perhaps TF32; of
# 8 or 11 bits.
SINGLE, USUAL, HALF = 5e-5, 1e-2, 5e-2
WIDTH = 1e-3  # of bounds, relative


class Check(NamedTuple):
    """One line of the report: the largest number of several cases, which must be at most the limit."""

    title: str
    limit: float
    cases: dict[str, Callable[[], float]]

    def passes(self) -> bool:
        """Run it and print its line; whatever goes wrong is a failure, never a traceback."""
        worst, where = 0.0, ""
        for case, compute in self.cases.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    warnings.simplefilter("error", ConvergenceWarning)
                    found = compute()
            except Exception as error:
                lines = str(error).splitlines() or [""]
                print(f"{self.title:<36}FAILED  {case}: {type(error).__name__}: {lines[0][:150]}", flush=True)
                return False
            found = math.inf if math.isnan(found) else found
            if found >= worst:
                worst, where = found, case
        verdict = "OK" if worst <= self.limit else f"FAILED, above {self.limit:.0e}"
        print(f"{self.title:<36}{worst:.1e}  {verdict}{f'  ({where})' if len(self.cases) > 1 else ''}", flush=True)
        return worst <= self.limit


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser("python -m pcdeq.testing", description=HELP)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    devices = "cpu, cuda, cuda:1, mps, xpu; by default the accelerator that torch finds, else the CPU"
    parser.add_argument("--device", default=None, help=devices)
    parser.add_argument("--quick", action="store_true", help="a few seconds: three activations, short timings")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks that the command line asks for, and return the exit code."""
    options = parse(arguments)
    device = _device(options.device)
    if device is None:
        print(f"torch {torch.__version__} has no device {options.device!r} here; try --device cpu")
        return 2
    for line in _versions(device):
        print(line)
    print("\nlargest error against float64 on the CPU")
    failed = sum(not check.passes() for check in _checks(device, quick=options.quick))
    print("\na training step, and how many times as long the plain pattern takes")
    for line in _speeds(device, quick=options.quick):
        print(line, flush=True)
    print(f"\n{f'{failed} FAILED' if failed else 'all OK'}")
    return 1 if failed else 0


def _device(name: str | None) -> torch.device | None:
    """The device of that name, if something can be computed there."""
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError):  # torch's, by device
        return None
    return device


def _versions(device: torch.device) -> Iterable[str]:
    yield f"pcdeq {_version.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    yield f"{platform.platform()}, {os.cpu_count()} processors, {torch.get_num_threads()} threads"
    if device.type == "cpu":
        yield f"device: cpu, {torch.backends.cpu.get_cpu_capability()}"
        yield f"engine: {engine()}"
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    yield f"device: {device}, {name}"
    yield f"engine: torch on {device} (on the CPU it would be {engine()})"
    if device.type == "cuda":
        yield f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, cuDNN {torch.backends.cudnn.version()}"


def _checks(device: torch.device, *, quick: bool) -> Iterable[Check]:
    """The lines of the report. All but the last use full float32: no TF32."""
    names = ("tanh", "relu6", "sigmoid") if quick else tuple(ACTIVATIONS)
    for kind in LAYERS:
        pairs = {name: Pair(kind, name, device) for name in names}
        several = f"{kind}, {len(names)} activations"
        yield Check(f"values, {several}", SINGLE, {name: pair.value_error for name, pair in pairs.items()})
        yield Check(f"gradients, {several}", SINGLE, {name: pair.gradient_error for name, pair in pairs.items()})
    for name, solver in SOLVERS.items():
        pairs = {kind: Pair(kind, "tanh", device, solver) for kind in ("dense", "conv2d")}
        cases = {f"{kind}, value": pair.value_error for kind, pair in pairs.items()}
        cases |= {f"{kind}, gradient": pair.gradient_error for kind, pair in pairs.items()}
        yield Check(name, SINGLE, cases)
    for kind in LAYERS:
        cases = {name: Pair(kind, name, device).width_of_bounds for name in names}
        yield Check(f"bounds hold, {kind}; their width", WIDTH, cases)
    for dtype in (torch.bfloat16, torch.float16):
        pair = Pair("conv2d", "tanh", device, autocast=dtype)
        cases = {"value": pair.value_error, "gradient": pair.gradient_error}
        yield Check(f"autocast to {str(dtype).removeprefix('torch.')}", HALF, cases)
    pair = Pair("conv2d", "tanh", device, Anderson(), as_torch_is_set=True)
    cases = {"value": pair.value_error, "gradient": pair.gradient_error}
    yield Check("all by default, TF32 if torch does", USUAL, cases)


class Pair:
    """A layer on the device, and the same in float64 on the CPU, with an input for both."""

    def __init__(
        self,
        kind: str,
        activation: str,
        device: torch.device,
        solver: Solver | None = None,
        *,
        autocast: torch.dtype | None = None,
        as_torch_is_set: bool = False,
    ) -> None:
        self.device, self.dtype = device, autocast
        self.settings = nullcontext if as_torch_is_set else full_precision
        layer, self.x, self.probe = make(kind, activation, solver or Anderson(tol=1e-6), LAYERS[kind][1], samples=8)
        if autocast is not None:  # something that autocast acts on comes before
            layer = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), layer)
        self.layer = copy.deepcopy(layer).to(device)
        self.reference = layer.double()
        for module in self.reference.modules():
            if isinstance(module, PcDEQ):
                module.solver = module.adjoint_solver = EXACT

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, dtype=self.dtype)

    def value_error(self) -> float:
        """Of the value of the layer."""
        with torch.no_grad(), self.settings(), self._autocast():
            found = self.layer(self.x.to(self.device))
        return error(found, self.reference(self.x.double()))

    def gradient_error(self) -> float:
        """Of the gradients with respect to input and parameters."""
        x, exact_x = self.x.clone().to(self.device).requires_grad_(), self.x.double().requires_grad_()
        with self.settings():
            with self._autocast():
                z = self.layer(x)
            z.backward(self.probe.to(z))
        self.reference(exact_x).backward(self.probe.double())
        found, exact = [x, *self.layer.parameters()], [exact_x, *self.reference.parameters()]
        return max(error(_grad(a), _grad(b)) for a, b in zip(found, exact, strict=True))

    @torch.no_grad()
    def width_of_bounds(self) -> float:
        """Of bounds that were found for every sample and hold the answer."""
        layer, reference, x = self.layer, self.reference, self.x.to(self.device)
        assert isinstance(layer, PcDEQ) and isinstance(reference, PcDEQ)
        equation = layer.equation(x)  # bounds are about the numbers that are in memory
        linear = reference.operator.bind(equation.map.weight.cpu().double())
        answer = solve(Equation(linear, layer.activation, equation.x.cpu().double()).problem(), EXACT).value
        # There is no float64 on mps, to which `enclose` goes over where float32 is too coarse.
        box = enclose_near(equation, layer.solve(x).value) if self.device.type == "mps" else layer.enclose(x)
        if not bool(box.certified.all()):
            raise ArithmeticError(f"no bounds for {int((~box.certified).sum())} of {len(x)} samples")
        lower, upper = box.lower.cpu().double(), box.upper.cpu().double()
        if not bool(((lower <= answer + 1e-11) & (answer - 1e-11 <= upper)).all()):  # it is as good as EXACT
            raise ArithmeticError("the answer lies outside of its bounds")
        return error(upper, lower)


def make(
    kind: str, activation: str, solver: Solver, state: tuple[int, ...], samples: int
) -> tuple[PcDEQ, Tensor, Tensor]:
    """A layer whose rows sum to 0.8, an input, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    layer = LAYERS[kind][0](state[0], activation, solver=solver)
    direction = torch.rand(layer.operator.shape, generator=generator)
    rows, norm = direction.flatten(1), layer.operator.weight_g
    with torch.no_grad():
        layer.operator.weight_v.copy_(direction)
        norm.copy_((0.8 * rows.norm(dim=1) / rows.sum(1)).reshape(norm.shape))
    x, grad = torch.randn(2, samples, *state, generator=generator)
    return layer, x, grad


def error(found: Tensor, exact: Tensor) -> float:
    """The largest error, relative to the largest number."""
    exact = exact.detach()
    return float((found.detach().cpu().double() - exact).abs().max() / exact.abs().max())


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _speeds(device: torch.device, *, quick: bool) -> Iterable[str]:
    """Forward and backward of a layer as it is by default, and of the plain pattern, in turns."""
    for kind, state, samples in (("dense", (128,), 128), ("conv2d", (16, 28, 28), 32)):
        layer, x, grad = (t.to(device) for t in make(kind, "tanh", Anderson(), state, samples))
        assert isinstance(layer, PcDEQ)
        times: dict[str, list[float]] = {"pcdeq": [], "plain": []}
        for _ in range(3 if quick else 20):
            for name, forward in (("pcdeq", layer), ("plain", lambda x, layer=layer: plain_pattern(layer, x))):
                begin = _now(device)
                forward(x).backward(grad)
                times[name].append(_now(device) - begin)
                layer.zero_grad()
        ours, plain = (statistics.median(times[name]) for name in ("pcdeq", "plain"))
        title = f"{kind}, {samples} x {' x '.join(map(str, state))}"
        yield f"{title:<36}{1e3 * ours:.2f} ms, plain {1e3 * plain:.2f} ms: {plain / ours:.2f}"


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def plain_pattern(layer: PcDEQ, x: Tensor, tol: float = 1e-4) -> Tensor:
    """The layer in the pattern of the authors' code and of the DEQ tutorial (Kolter, Duvenaud & Johnson 2020).

    Plain iteration from 0 until the whole batch is done, one more evaluation with a graph, the adjoint equation by
    autograd in a hook on the result. Unlike there, the weight is normalised once, not in each evaluation.
    """
    linear, x = layer.operator.bind(layer.operator.effective_weight()), layer.inject(x)

    def step(z: Tensor) -> Tensor:
        return layer.activation(linear.apply(z) + x)

    def iterate(fn: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        for _ in range(200):
            new = fn(z)
            residual, z = float((new - z).norm()) / (float(new.norm()) + 1e-5), new
            if residual < tol:
                break
        return z

    with torch.no_grad():
        z = iterate(step, torch.zeros_like(x))
    z = step(z)
    point = z.detach().requires_grad_()
    value = step(point)
    z.register_hook(
        lambda grad: iterate(lambda y: torch.autograd.grad(value, point, y, retain_graph=True)[0] + grad, grad)
    )
    return z
