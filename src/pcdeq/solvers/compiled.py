"""A solver's step through `torch.compile`, so that all that is beside the product becomes a few kernels of a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pcdeq.solvers.problem import Problem
from pcdeq.solvers.solver import Norm, Solver, State

BACKEND = "inductor"


def compiled_step(solver: Solver, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
    """The solver's step, compiled when it is first made: once a kind of map and direction, for batches of all sizes."""
    # The first two steps have fewer tensors, so that each would be a graph of its own.
    if state is None or point is state.value or torch.is_grad_enabled():
        return solver.step(problem, state, point, norm)
    return _compiler(BACKEND)(solver, problem, state, point, norm)


@cache
def _compiler(backend: str) -> Callable[[Solver, Problem, State, Tensor, Norm], State]:
    return torch.compile(_step, dynamic=True, backend=backend)


def _step(solver: Solver, problem: Problem, state: State, point: Tensor, norm: Norm) -> State:
    return solver.step(problem, state, point, norm)
