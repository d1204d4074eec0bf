"""What every solver is given, how it decides to stop, and what it returns."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from pcdeq.errors import ConvergenceError, ConvergenceWarning, UsageError

StopRule = Literal["sample", "batch", "certified", "decided"]

# The paper's guard against division by 0 in the relative residual. It also accepts anything whose norm
# is below 1e-9, be it growing fiftyfold a step; so only the paper's own rule uses it.
PAPER_GUARD = 1e-5
# Steps between two looks at the residuals where looking makes the host wait for an accelerator.
CHECK_EVERY = 4


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
class Weight:
    """The W of a product in a form that the C kernels know: ``"dense"`` or ``"conv3x3"``."""

    form: str
    tensor: Tensor
    transposed: bool = False


@dataclass(frozen=True)
class Guess:
    """A guess of the product at the solution, and what it is made of, for kernels that make it themselves.

    It is ``base``, one for all samples, or 0 if None. With a ``response`` B, a matrix, it is base + B (after(base +
    offset) - mean), and for a linear problem B (mean * offset).
    """

    evaluate: Callable[[], Tensor]
    base: Tensor | None = None
    mean: Tensor | None = None
    response: Tensor | None = None


@dataclass(frozen=True)
class Pieces:
    """A map taken apart, for solvers that fuse what can be fused: fn(z) = after(product(z) + offset).

    ``after`` is the activation named by ``form`` or, where that is ``"linear"``, the multiplication by ``slope``.
    ``weight`` is what the product multiplies with. The start is after(guess + offset).
    """

    product: Callable[[Tensor], Tensor]
    after: Callable[[Tensor], Tensor]
    offset: Tensor
    form: str
    slope: Tensor | None = None
    guess: Guess | None = None
    weight: Weight | None = None

    def start(self) -> Tensor:
        """after(guess + offset)."""
        return self.after(self.offset if self.guess is None else self.guess.evaluate() + self.offset)


@dataclass(frozen=True)
class Problem:
    """z = fn(z), for a batch of independent samples along dimension 0.

    Attributes:
        fn: the map.
        start: the first iterate; by default that of the pieces.
        steps: steps that ``start`` stands for already (1 where it is g(0), whose product is free).
        box: bounds within which the solution is known to lie, numbers or one tensor entry per sample;
            proposals are clamped to it.
        jacobian: the matrices of fn's derivative, (samples, n, n), for Newton's method.
        pieces: fn taken apart, where its form is known.
    """

    fn: Callable[[Tensor], Tensor]
    start: Tensor | None = None
    steps: int = 0
    box: tuple[float, float] | tuple[Tensor, Tensor] | None = None
    jacobian: Callable[[Tensor], Tensor] | None = None
    pieces: Pieces | None = None

    def first(self) -> Tensor:
        """The first iterate. Solvers that fuse the start with what follows do not ask for it."""
        if self.start is not None:
            return self.start
        if self.pieces is None:
            raise UsageError("a problem needs a start, or pieces to make one from")
        return self.pieces.start()

    def continued(self, start: Tensor, steps: int) -> Problem:
        """The same problem, to go on from where a solve stopped."""
        return replace(self, start=start, steps=steps)


@dataclass(frozen=True)
class Solution:
    """The result of a solve.

    Attributes:
        value: the last value of the map, ``(samples, *state)``.
        steps: steps taken by each sample, (samples,); a step from 0 counts although it needs no product.
        residual: the relative residual ‖g(z) - z‖ / ‖g(z)‖ at which each sample stopped. A small residual
            is not a small error (ReLU6, W = 0.999, x = 0.001 stops at 1e-4 with an error of 9 %): for that
            see ``stop="certified"``, where this is the proved bound on ‖z - z*‖ / ‖z‖.
        converged: which samples met the stopping rule, (samples,).
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
    outcome: Outcome
    summary: SolveStats | None = field(default=None, repr=False)  # where the solver has made it already

    @classmethod
    def empty(cls, value: Tensor) -> Solution:
        """The solution for a batch without samples."""
        none = value.new_zeros(0)
        return cls(value.detach(), none.long(), none, none.bool(), Outcome.CONVERGED)

    def with_value(self, value: Tensor) -> Solution:
        """The same record for another value."""
        return replace(self, value=value)


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
    def of(cls, solution: Solution) -> SolveStats:
        """Summarise a solution in plain numbers."""
        if solution.summary is not None:
            return solution.summary
        samples = solution.converged.numel()
        return cls(
            steps=int(solution.steps.max()) if samples else 0,
            samples=samples,
            unconverged=0 if solution.outcome is Outcome.CONVERGED else samples - int(solution.converged.sum()),
            residual=float(solution.residual.max()) if samples else 0.0,
            outcome=solution.outcome,
        )


@dataclass(frozen=True, kw_only=True)
class Solver:
    """What all solvers share: the stopping rule.

    Args:
        tol: the relative residual at which to stop (under ``stop="certified"``: the relative error).
        max_steps: after so many evaluations the solve gives up and says so.
        stop: ``"sample"`` stops each sample on its own residual, so that an answer does not depend on
            what else is in the batch; ``"batch"`` is the paper's rule, one norm over the whole batch;
            ``"certified"`` stops each sample on a proved error bound (T3) instead of a residual; ``"decided"``
            as soon as such bounds settle a question, which `PcDEQ.solve` is given.
        throw: raise `ConvergenceError` instead of warning when a sample does not converge.
    """

    tol: float = 1e-4
    max_steps: int = 200
    stop: StopRule = "sample"
    throw: bool = False

    def __post_init__(self) -> None:
        if not self.tol > 0:
            raise UsageError(f"tol must be above 0, got {self.tol}")
        if self.max_steps < 1:
            raise UsageError(f"max_steps must be at least 1, got {self.max_steps}")
        if self.stop not in get_args(StopRule):
            raise UsageError(f"stop must be 'sample', 'batch', 'certified' or 'decided', got {self.stop!r}")

    def solve(self, problem: Problem) -> Solution:
        """Find the fixed point of the problem's map."""
        raise NotImplementedError

    def with_options(self, **options: object) -> Self:
        """A copy with some options changed."""
        return replace(self, **options)

    def relative_residual(self, step: Tensor, value: Tensor) -> Tensor:
        """‖step‖ / ‖value‖, one per sample; under the batch rule the same number for all."""
        norm = self.norm(value)
        guard = PAPER_GUARD if self.stop == "batch" else torch.finfo(norm.dtype).tiny
        relative = self.norm(step) / (norm + guard)
        relative = torch.where(norm < torch.inf, relative, torch.nan)  # x / inf is no small residual
        return relative.to(step.dtype).expand(step.shape[0])

    def norm(self, z: Tensor) -> Tensor:
        """Euclidean norm of each sample, (samples,); of the whole batch, (), under the batch rule.

        In float64 where there is one: the square of a float32 may underflow, and 0 would look converged.
        """
        dims = None if self.stop == "batch" else tuple(range(1, z.ndim))
        dtype = None if z.device.type == "mps" else torch.float64
        return torch.linalg.vector_norm(z, dim=dims, dtype=dtype)

    def may_check(self, step: int, z: Tensor) -> bool:
        """Whether to ask now if all samples are done, for which the host must wait for the device.

        On an accelerator only every few steps: samples that are done are held, so that steps too many change
        nothing. Under the batch rule they would.
        """
        return z.device.type == "cpu" or self.stop == "batch" or step % CHECK_EVERY == 0

    def give_up(self, problem: Problem) -> Solution:
        """What remains to be said when no step is left to take."""
        start = problem.first()
        unknown = torch.full(start.shape[:1], torch.inf, dtype=start.dtype, device=start.device)
        steps = torch.full(start.shape[:1], problem.steps, device=start.device)
        return Solution(start, steps, unknown, unknown < 0, Outcome.MAX_STEPS)

    def finish(self, value: Tensor, steps: Tensor, residual: Tensor) -> Solution:
        """Name the outcome and pack the solution."""
        residual = residual.detach()
        converged = residual < self.tol
        return Solution(value, steps, residual, converged, self.outcome_of(value, residual, converged))

    def outcome_of(self, value: Tensor, residual: Tensor, converged: Tensor) -> Outcome:
        """The worst outcome over the samples."""
        if bool(converged.all()):
            return Outcome.CONVERGED
        left = residual[~converged]
        if not bool(left.isfinite().all()):
            return Outcome.NONFINITE
        resolution = 50 * torch.finfo(value.dtype).eps
        return Outcome.PRECISION if float(left.max()) < resolution else Outcome.MAX_STEPS


def report(solution: Solution, solver: Solver, direction: str) -> None:
    """Warn, or throw if the solver says so, when a solve did not converge."""
    if solution.outcome is Outcome.CONVERGED:
        return
    stats = SolveStats.of(solution)
    message = (
        f"{direction} solve: {stats.unconverged} of {stats.samples} samples not converged after {stats.steps} "
        f"steps (residual {stats.residual:.2g}, tol {solver.tol:.2g}): {solution.outcome.value}"
    )
    if solver.throw:
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=2)


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (samples,) so that it broadcasts over (samples, *state)."""
    return values.reshape(-1, *[1] * (like.ndim - 1))
