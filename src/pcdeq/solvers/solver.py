"""What all solvers share: a stopping rule, and the two functions that the loop calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, get_args

from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.solvers.numbers import rows
from pcdeq.solvers.problem import Problem

StopRule = Literal["sample", "batch"]
Norm = Callable[[Tensor], Tensor]  # of each sample, or of the whole batch: see `loop`


class State(NamedTuple):
    """Where a solve is after a step.

    Attributes:
        point: where to evaluate the map next.
        value: the map at the point before it.
        residual: that value minus its point.
        length: the norm of the residual.
        memory: what else a solver remembers.
    """

    point: Tensor
    value: Tensor
    residual: Tensor
    length: Tensor
    memory: Any = ()


class Stopping(Protocol):
    """What may stand for a solver where one is reported on: a solver, or a proof around one."""

    @property
    def tol(self) -> float: ...

    @property
    def throw(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Solver:
    """What all solvers share: the stopping rule.

    A solver says where to start and how to go on; when to stop, and all else, is up to the loop. It is a frozen
    dataclass whose two functions are pure: tensors in, tensors out.

    Args:
        tol: the relative residual at which to stop.
        max_steps: after so many evaluations the solve gives up and says so.
        stop: ``"sample"`` stops each sample on its own residual, so that an answer does not depend on
            what else is in the batch; ``"batch"`` is the paper's rule, one norm over the whole batch.
        throw: raise `ConvergenceError` instead of warning when a sample does not converge.
    """

    tol: float = 1e-4
    max_steps: int = 200
    stop: StopRule = "sample"
    throw: bool = False

    begins_at_start: ClassVar[bool] = True  # so that the steps which the start stands for count

    def __post_init__(self) -> None:
        if not self.tol > 0:
            raise UsageError(f"tol must be above 0, got {self.tol}")
        if not 1 <= self.max_steps < 2**31:  # what C counts with
            raise UsageError(f"max_steps must be at least 1 and below 2^31, got {self.max_steps}")
        if self.stop not in get_args(StopRule):
            raise UsageError(
                f"stop must be 'sample' or 'batch', got {self.stop!r}; for a proof wrap it: Certified(...)"
            )

    def init(self, problem: Problem) -> Tensor:
        """The first point."""
        return problem.first()

    def step(self, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
        """Evaluate the map at the point, and say where to go next; there is no state before the first step."""
        raise NotImplementedError

    def step_on(self, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
        """The same step for the loop, which needs neither state nor point again: their memory may be used."""
        return self.step(problem, state, point, norm)

    def step_from_afar(self, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
        """The same step on a device that the host would have to wait for: the loop keeps values until it looks."""
        return self.step(problem, state, point, norm)

    def select(self, state: State, samples: Tensor) -> State | None:
        """The state of some of the samples, by which a solve goes on with them alone; None: it goes on with all."""
        return None if state.memory != () else pick(state, samples)

    @property
    def kernel_decay(self) -> float | None:
        """The safeguard's factor, if this is the solver that the kernels have."""
        return None

    def with_options(self, **options: object) -> Self:
        """A copy with some options changed."""
        return replace(self, **options)


def pick(thing: Any, samples: Tensor) -> Any:
    """Some of the samples in each tensor and array of a tuple of tuples."""
    if isinstance(thing, Tensor):
        return rows(thing, samples)
    if not isinstance(thing, tuple):
        return thing[samples.numpy()]
    parts = [pick(part, samples) for part in thing]
    return type(thing)(*parts) if hasattr(thing, "_fields") else tuple(parts)


def require_solver(given: object, name: str) -> None:
    """Refuse what is no solver."""
    if not isinstance(given, Solver):
        raise UsageError(f"{name} must be Picard(...), Anderson(...) or Newton(...), got {given!r}")
