"""What a solver is given, and what a solve returns."""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pcdeq.errors import ConvergenceError, ConvergenceWarning
from pcdeq.kernels.binding import Form

if TYPE_CHECKING:
    from pcdeq.solvers.solver import Stopping


ANYWHERE = (-math.inf, math.inf)  # the bounds of a map that is finite wherever it is evaluated


class Outcome(enum.Enum):
    """How a solve ended; the value says what to do about it.

    >>> import torch, pcdeq
    >>> layer = pcdeq.PcDEQLinear(4, solver=pcdeq.Picard(tol=1e-12))
    >>> layer.solve(torch.zeros(1, 4).double()).outcome.name
    'CONVERGED'
    >>> pcdeq.Outcome.PRECISION.value
    'tol is below what this dtype can resolve: loosen tol or use float64'
    """

    CONVERGED = "converged"
    MAX_STEPS = "the step limit was reached: raise max_steps, loosen tol, or use Anderson"
    PRECISION = "tol is below what this dtype can resolve: loosen tol or use float64"
    NONFINITE = "values became infinite or NaN: check the input and the weights for them"
    NOT_CERTIFIED = "the residual is small but no error bound was proved: raise max_steps or use float64"


@dataclass(frozen=True)
class Problem:
    """z = fn(z), for a batch of independent samples along dimension 0.

    Attributes:
        fn: the map.
        start: the first iterate, or a function that makes it.
        steps: steps that the start stands for already (1 where it is g(0), whose product is free).
        box: bounds within which the solution is known to lie, numbers or one tensor entry per sample;
            proposals are clamped to it.
        jacobian: the matrices of fn's derivative, (samples, n, n), for Newton's method.
        form: the same map in the form that the C kernels know, where they do; they then start at s(guess + offset),
            which is what ``start`` makes, unless it is a tensor.
        guess: a guess of the product at the solution, of one sample's shape; None stands for 0.
        select: the problem of some of the samples, given by their indices or as a slice, with which a solve may go on.
    """

    fn: Callable[[Tensor], Tensor]
    start: Tensor | Callable[[], Tensor]
    steps: int = 0
    box: tuple[float, float] | tuple[Tensor, Tensor] | None = None
    jacobian: Callable[[Tensor], Tensor] | None = None
    form: Form | None = None
    guess: Tensor | None = None
    select: Callable[[Tensor | slice], Problem] | None = None

    def first(self) -> Tensor:
        """The first iterate."""
        return self.start if isinstance(self.start, Tensor) else self.start()

    def continued(self, start: Tensor, steps: int) -> Problem:
        """The same problem, to go on from where a solve stopped."""
        return replace(self, start=start, steps=steps)


class Summary(NamedTuple):
    """A solve in three plain numbers: samples not converged, steps of the slowest, the largest residual."""

    unconverged: int
    steps: int
    residual: float

    def outcome(self, dtype: torch.dtype) -> Outcome:
        """The worst outcome over the samples."""
        if not self.unconverged:
            return Outcome.CONVERGED
        if math.isnan(self.residual):  # an infinite one was never evaluated
            return Outcome.NONFINITE
        return Outcome.PRECISION if self.residual < 50 * torch.finfo(dtype).eps else Outcome.MAX_STEPS


@dataclass(frozen=True)
class Solution:
    """The result of a solve.

    Attributes:
        value: the last value of the map, ``(samples, *state)``.
        steps: steps taken by each sample, (samples,); a step from 0 counts although it needs no product.
        residual: the relative residual ‖g(z) - z‖ / ‖g(z)‖ at which each sample stopped; from a layer's ``solve`` that
            of the value itself. A small residual is not a small error (ReLU6, W = 0.999, x = 0.001 stops at 1e-4 with
            an error of 9 %): for that there is `pcdeq.Certified`, with which this is the proved bound on the relative
            error ‖z - z*‖ / ‖z‖.
        converged: which samples met the stopping rule, (samples,).
        summary: the same in three plain numbers.
        outcome: the worst outcome over the samples.

    >>> import torch, pcdeq
    >>> solution = pcdeq.PcDEQLinear(4).solve(torch.zeros(2, 4))
    >>> solution.outcome.name, bool(solution.converged.all())
    ('CONVERGED', True)
    """

    value: Tensor
    steps: Tensor
    residual: Tensor
    converged: Tensor
    summary: Summary
    outcome: Outcome

    @classmethod
    def of(cls, value: Tensor, steps: Tensor, residual: Tensor, converged: Tensor) -> Solution:
        """Pack a solution, with its summary read from the device in one go."""
        summary = Summary(0, 0, 0.0)
        if len(steps):
            facts = ((~converged).sum(), steps.max(), residual.max())
            unconverged, slowest, largest = torch.stack([fact.to(residual.dtype) for fact in facts]).tolist()
            summary = Summary(int(unconverged), int(slowest), largest)
        return cls(value, steps, residual, converged, summary, summary.outcome(value.dtype))

    @classmethod
    def empty(cls, like: Tensor) -> Solution:
        """The solution for a batch without samples."""
        none = like.new_zeros(0)
        return cls.of(torch.empty_like(like), none.long(), none, none.bool())

    def with_value(self, value: Tensor) -> Solution:
        """The same record for another value."""
        return replace(self, value=value)

    @property
    def stats(self) -> SolveStats:
        """What a layer remembers of it."""
        return SolveStats(
            self.summary.steps, len(self.value), self.summary.unconverged, self.summary.residual, self.outcome
        )

    def with_outcome(self, outcome: Outcome) -> Solution:
        """The same solution under another verdict."""
        return replace(self, outcome=outcome)


@dataclass(frozen=True)
class SolveStats:
    """What a layer remembers of its last pass in one direction.

    ``steps`` is the number of steps of the slowest sample (under ``stop="batch"``: of all).
    """

    steps: int
    samples: int
    unconverged: int
    residual: float
    outcome: Outcome

    @classmethod
    def of(cls, summary: Summary, value: Tensor) -> SolveStats:
        """From a solve's summary and its value."""
        return cls(summary.steps, len(value), summary.unconverged, summary.residual, summary.outcome(value.dtype))


class EachStats(NamedTuple):
    """How a solve went in a compiled graph, where it is not known yet: sample by sample, on its device."""

    steps: Tensor
    residual: Tensor
    converged: Tensor

    def read(self) -> SolveStats:
        """What a layer remembers of it."""
        return Solution.of(self.residual, self.steps, self.residual, self.converged).stats


def report(stats: SolveStats, solver: Stopping, direction: str) -> None:
    """Warn, or throw if the solver says so, when a solve did not converge."""
    if stats.outcome is Outcome.CONVERGED:
        return
    message = (
        f"{direction} solve: {stats.unconverged} of {stats.samples} samples not converged after {stats.steps} "
        f"steps (residual {stats.residual:.2g}, tol {solver.tol:.2g}): {stats.outcome.value}"
    )
    if solver.throw:
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=2)


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (samples,) so that it broadcasts over (samples, *state)."""
    return values.reshape(-1, *[1] * (like.ndim - 1))
