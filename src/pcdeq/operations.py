"""The two solves of a layer, and the operators of torch that are made of them, for compilers.

An equilibrium z = s(Wz + x), and the linear equation u = D(Wᵀu + v) that all its derivatives lead to. Eager code calls
the functions; code that is traced, by a compiler or for shapes only, finds each as one operator, ``pcdeq::equilibrium``
and ``pcdeq::linear``, which makes the problem anew from tensors, words and numbers. (Through an operator every call
would go through torch's dispatcher in Python: some 25 µs, a tenth of a training step of a small dense layer.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey  # pyright: ignore[reportAttributeAccessIssue]
from torch._C import _len_torch_dispatch_stack as _modes  # pyright: ignore[reportAttributeAccessIssue]
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

from pcdeq.activations import ACTIVATIONS
from pcdeq.equation import Adjoint, Equation, product_margin
from pcdeq.errors import UsageError
from pcdeq.operators import MAPS
from pcdeq.proofs.certified import Certified
from pcdeq.proofs.precision import full_precision
from pcdeq.solvers import Anderson, Newton, Picard, Solution, Solver, report, run
from pcdeq.solvers.loop import careful_norm_of_each
from pcdeq.solvers.solver import StopRule

AnySolver = Solver | Certified
SOLVERS: dict[str, type[Solver]] = {kind.__name__: kind for kind in (Anderson, Picard, Newton)}
_OPTIONS = {name: tuple(field.name for field in fields(kind)) for name, kind in SOLVERS.items()}
# Modes of torch's own under which tensors have no numbers that could decide anything.
_TRACING = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)


def autocasts(device: str) -> bool:
    """Whether autocast is on for this kind of device."""
    return device != "meta" and torch.is_autocast_enabled(device)


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Solve in full precision, whatever autocast the caller is in."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


@torch.no_grad()
def solve_equation(equation: Equation, solver: AnySolver, guess: Tensor | None = None) -> Solution:
    """Solve without recording a graph, by the rule that the solver names; the guess is of Wz*."""
    if isinstance(solver, Certified):
        return solver.solve(equation, guess)
    if solver.stop == "batch":
        # The paper starts at 0 and returns one further application of g, which it does not count as a step.
        solution = run(equation.problem(), solver)
        return solution.with_value(equation(solution.value))
    return run(equation.problem(guess), solver)


@torch.no_grad()
def solve_and_confirm(equation: Equation, solver: AnySolver, guess: Tensor | None = None) -> Solution:
    """The same, where a sample is called converged only if the residual of the value that is returned is below tol.

    A solve stops by the residual of the point before its value, as its kernel computes it. The step between the two may
    stretch it, where small components still grow beside large ones: so it is measured again, by a plain product, up to
    whose rounding the answer is meant; samples for which it is larger go on from there.
    """
    solution = solve_equation(equation, solver, guess)
    if isinstance(solver, Certified) or solver.stop != "sample":
        return solution
    value, steps, residual, converged = (
        t.clone() for t in (solution.value, solution.steps, solution.residual, solution.converged)
    )
    left = converged.nonzero()[:, 0]
    while len(left):
        found, rounding = _residual(equation.select(left), value[left])
        residual[left], converged[left] = found.to(residual.dtype), found < solver.tol + rounding
        left = left[~converged[left] & (steps[left] < solver.max_steps)]
        for count in steps[left].unique().tolist():  # of which each has its own
            some = left[steps[left] == count]
            more = run(equation.select(some).problem().continued(value[some], count), solver)
            value[some], steps[some] = more.value, more.steps
            residual[some], converged[some] = more.residual.to(residual.dtype), more.converged
        left = left[converged[left]]
    return Solution.of(value, steps, residual, converged)


def _residual(equation: Equation, z: Tensor) -> tuple[Tensor, float]:
    """The relative residual of each sample, by plain sums whatever the surroundings, and how far these may be off."""
    with full_precision():
        value = equation(z)
    length, size = careful_norm_of_each(value - z), careful_norm_of_each(value)
    return torch.where(length == 0, 0.0, length / size), product_margin(equation.map, z)


@torch.no_grad()
def solve_adjoint(adjoint: Adjoint, solver: AnySolver) -> Solution:
    """The u of the adjoint equation; under the paper's rule the residual is that of y, where u = D y."""
    if isinstance(solver, Solver) and solver.stop == "batch":
        solution = run(adjoint.papers_problem(), solver)
        return solution.with_value(adjoint.slope * solution.value)
    scaled, factor = adjoint.scaled()
    solution = solver.solve_adjoint(scaled) if isinstance(solver, Certified) else run(scaled.problem(), solver)
    return solution if factor is None else solution.with_value(solution.value * factor)


def require_tensor(x: object, name: str) -> None:
    """Refuse what is no tensor, or one whose numbers lie elsewhere."""
    if isinstance(x, Proxy):
        raise UsageError("torch.fx.symbolic_trace cannot see a solve: use torch.compile, torch.export or pcdeq.unroll")
    if not isinstance(x, Tensor):
        raise UsageError(f"{name} must be a tensor, got {type(x).__name__}; torch.as_tensor makes one")
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise UsageError(
            f"{name} is a DTensor, but a layer solves within one process: give it x.to_local(), and share out its "
            "parameters by DistributedDataParallel or fully_shard"
        )


def is_traced(x: Tensor) -> bool:
    """Whether x has no numbers yet, so that a solve can only be written down."""
    if torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor):
        return True
    return _modes() > 0 and any(_get_dispatch_mode(mode) is not None for mode in _TRACING)


def in_words(solver: Solver) -> tuple[str, list[float]]:
    """A solver of the package as an operator takes it: its name, and its options as numbers."""
    name = type(solver).__name__
    options = [getattr(solver, option) for option in _OPTIONS[name]]
    return name, [float(value == "batch") if isinstance(value, str) else float(value) for value in options]


def from_words(name: str, options: Sequence[float]) -> Solver:
    """The solver that was put in words."""
    return _solver(name, tuple(options))


@cache
def _solver(name: str, options: tuple[float, ...]) -> Solver:
    kind, rules = SOLVERS[name], get_args(StopRule)
    values: dict[str, Any] = {}
    for field, value in zip(fields(kind), options, strict=False):  # one younger than an exported program is not there
        values[field.name] = rules[int(value)] if field.name == "stop" else type(field.default)(value)
    return kind(**values)


# What an operator returns: the value, and of each sample its steps, its residual, and whether it converged.
Solved = tuple[Tensor, Tensor, Tensor, Tensor]
_TAGS = (torch.Tag.cudagraph_unsafe,)  # it looks at residuals, and decides by them


@torch.library.custom_op("pcdeq::equilibrium", mutates_args=(), tags=_TAGS)
def equilibrium_operator(
    x: Tensor,
    weight: Tensor,
    guess: Tensor | None,
    kind: str,
    activation: str,
    solver: str,
    options: Sequence[float],
    adjoint_solver: str,
    adjoint_options: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z = s(Wz + x), from a guess of Wz; how to solve for its gradient is for whoever differentiates it."""
    with no_autocast(x.device.type):
        equation = Equation(MAPS[kind](weight), ACTIVATIONS[activation], x)
        return _reported(solve_equation(equation, from_words(solver, options), guess), solver, options, x, "forward")


@torch.library.custom_op("pcdeq::linear", mutates_args=(), tags=_TAGS)
def linear_operator(
    weight: Tensor, slope: Tensor, grad: Tensor, kind: str, solver: str, options: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u = D(Wᵀu + v)."""
    with no_autocast(grad.device.type):
        adjoint = Adjoint(MAPS[kind](weight), slope, grad)
        return _reported(solve_adjoint(adjoint, from_words(solver, options)), solver, options, grad, "backward")


@equilibrium_operator.register_fake
def _(x: Tensor, *_: object) -> Solved:
    return _shapes(x)


@linear_operator.register_fake
def _(weight: Tensor, slope: Tensor, grad: Tensor, *_: object) -> Solved:
    return _shapes(grad)


def _reported(solution: Solution, solver: str, options: Sequence[float], like: Tensor, direction: str) -> Solved:
    """The tensors of a solution; in a compiled graph nobody else can say that a solve has failed."""
    report(solution.stats, from_words(solver, options), direction)
    value = solution.value.contiguous(memory_format=_layout(like))
    return value, solution.steps, solution.residual.to(like.dtype), solution.converged


def _shapes(like: Tensor) -> Solved:
    one_each = like.new_empty(like.shape[:1])
    value = torch.empty_like(like, memory_format=_layout(like))
    return value, one_each.long(), one_each, one_each.bool()


def _layout(x: Tensor) -> torch.memory_format:
    of_images = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if of_images else torch.contiguous_format
