"""Solves that end with a proof: until an error bound is met (T3, T5), or until bounds settle a question.

A proof wraps a solver, it is not one of its options: the solver makes points, the proof decides which is good enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.equation import Adjoint, Equation
from pcdeq.errors import UsageError
from pcdeq.proofs.gradient import adjoint_distance
from pcdeq.proofs.order import Enclosure, Question, enclose_until
from pcdeq.solvers import Anderson, Outcome, Problem, Solution, Solver, per_sample, run
from pcdeq.solvers.loop import careful_norm_of_each
from pcdeq.solvers.solver import require_solver

# The first tolerance at which `solve_until` looks.
COARSEST = 1e-1
# So many plain steps are taken before the next proof is tried, and then twice as many each time.
PLAIN_STEPS = 8


@dataclass(frozen=True)
class Certified:
    """A solver whose tolerance is a proved bound on the relative error ‖z - z*‖ / ‖z‖, not a residual.

    For layers, which know their rounding: in place of a solver, forward, backward, or both.

    Args:
        solver: what makes the points; by default `Anderson`.

    >>> import torch, pcdeq
    >>> layer = pcdeq.PcDEQLinear(4, solver=pcdeq.Certified(pcdeq.Anderson(tol=1e-3)))
    >>> solution = layer.solve(torch.randn(2, 4))
    >>> bool(solution.converged.all()), bool((solution.residual < 1e-3).all())
    (True, True)
    """

    solver: Solver = Anderson()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        require_solver(self.solver, "the solver of Certified")
        if self.solver.stop != "sample":
            raise UsageError("a proof is about each sample: Certified takes a solver with stop='sample'")

    @property
    def tol(self) -> float:
        """The relative error."""
        return self.solver.tol

    @property
    def max_steps(self) -> int:
        """After so many evaluations the solve gives up and says so."""
        return self.solver.max_steps

    @property
    def throw(self) -> bool:
        """Whether it raises where it cannot prove its bound."""
        return self.solver.throw

    def with_options(self, **options: object) -> Certified:
        """A copy with some options of its solver changed."""
        return Certified(self.solver.with_options(**options))

    def solve(self, equation: Equation, guess: Tensor | None = None) -> Solution:
        """The equilibrium, with ``residual`` the proved bound on the relative error of each sample."""

        def distance(z: Tensor) -> Tensor:
            return _farthest(enclose_until(lambda box: _relative(_farthest(box, z), z) < self.tol, equation, z), z)

        return solve_to_bound(self.solver, equation.problem(guess), distance)

    def solve_adjoint(self, adjoint: Adjoint) -> Solution:
        """The same for the adjoint equation at a given slope."""
        return solve_to_bound(self.solver, adjoint.problem(), lambda u: adjoint_distance(adjoint, u))


def solve_to_bound(solver: Solver, problem: Problem, distance: Callable[[Tensor], Tensor]) -> Solution:
    """Solve until ``distance``, a proved bound on the error of a point, is below the solver's tol times its norm.

    Residual and error differ by a factor that only the bound reveals, so the residual's tolerance is tightened by what
    was missing until the bound is met or the steps are used up, each sample by itself: what is proved is kept, and
    neither a sample that is not a number nor one that is out of steps ends the others. Residuals too small for their
    dtype tell nothing of components that still grow beside large ones: from there on plain steps are taken.
    """
    inner = solver.with_options(throw=False)
    solution = run(problem, inner)
    if not len(solution.value):
        return solution
    finest = 4 * torch.finfo(solution.value.dtype).eps
    value, steps, bound = solution.value, solution.steps, _relative(distance(solution.value), solution.value)
    while True:
        converged = bound < solver.tol
        going = ~(converged | bound.isnan()) & (steps < solver.max_steps)
        if inner.tol <= finest or not bool(going.any()):
            value, steps, bound = _creep(problem.fn, value, steps, bound, going, solver, distance)
            return _with_proofs(Solution.of(value, steps, bound, bound < solver.tol), solution.outcome)
        missing = float((bound[going] / solver.tol).clamp(2.0, 100.0).max())
        inner = inner.with_options(tol=max(inner.tol / missing, finest))
        solution = run(problem.continued(value, int(steps[going].max())), inner)
        value = torch.where(per_sample(going, value), solution.value, value)
        steps = torch.where(going, solution.steps, steps)
        bound = torch.where(going, _relative(distance(value), value), bound)


def _creep(
    fn: Callable[[Tensor], Tensor],
    value: Tensor,
    steps: Tensor,
    bound: Tensor,
    going: Tensor,
    solver: Solver,
    distance: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, steps and bound after plain steps of the samples that go on, until proved, at rest, or out of steps."""
    point, count = value, PLAIN_STEPS
    going = going & (steps + count <= solver.max_steps)
    while bool(going.any()):
        before = point
        for _ in range(count):
            point = fn(point)
        steps, count = torch.where(going, steps + count, steps), 2 * count
        found = _relative(distance(point), point)
        better = going & (found < bound)
        value, bound = torch.where(per_sample(better, value), point, value), torch.where(better, found, bound)
        moved = (point != before).flatten(1).any(1)
        going = going & moved & (bound >= solver.tol) & (steps + count <= solver.max_steps)
    return value, steps, bound


def _farthest(box: Enclosure, z: Tensor) -> Tensor:
    """A bound on |z* - z|, infinite where none was found."""
    return torch.where(per_sample(box.certified, z), torch.maximum(box.upper - z, z - box.lower), torch.inf)


def _relative(error: Tensor, value: Tensor) -> Tensor:
    """‖error‖ / ‖value‖ for each sample, infinite where an error is; NaN where a value is not a number."""
    error, size = careful_norm_of_each(error), careful_norm_of_each(value)
    # A point that is exactly 0, and proved to be right, is right; a NaN proves nothing.
    return torch.where(error == 0, 0.0, error / size).to(value.dtype)


def _with_proofs(solution: Solution, found: Outcome) -> Solution:
    """The solution with the outcome where a proof decides, not the residual."""
    if solution.outcome is Outcome.CONVERGED:
        return solution
    outcome = Outcome.NOT_CERTIFIED if found in (Outcome.CONVERGED, Outcome.PRECISION) else found
    return solution.with_outcome(outcome)


def solve_until(question: Question, solver: Solver, equation: Equation, guess: Tensor | None = None) -> Solution:
    """Solve each sample only until the question is settled by bounds on z*.

    Tolerances from coarse to the solver's own are tried in turn, on the samples that are left.
    """
    if not len(equation.x):
        return Solution.empty(equation.x)
    inner = solver.with_options(throw=False, tol=max(COARSEST, solver.tol))
    solution = run(equation.problem(guess), inner)
    value, steps, residual = solution.value.clone(), solution.steps.clone(), solution.residual.clone()
    done = _answers(question, equation, value).clone()
    while inner.tol > solver.tol:
        left = ~done & (steps < solver.max_steps) & ~residual.isnan()
        if not bool(left.any()):
            break
        part = equation.select(left)
        inner = inner.with_options(tol=max(inner.tol / 10, solver.tol))
        solution = run(part.problem().continued(value[left], int(steps[left].max())), inner)
        value[left], steps[left], residual[left] = solution.value, solution.steps, solution.residual
        done[left] = _answers(question, part, solution.value)
    return _with_proofs(Solution.of(value, steps, residual, done), solution.outcome)


def _answers(question: Question, equation: Equation, z: Tensor) -> Tensor:
    """For which samples bounds around a point settle the question."""

    def answers(box: Enclosure) -> Tensor:
        found = question(box)
        if found.shape != z.shape[:1] or found.dtype != torch.bool:
            raise UsageError(
                f"a question must be answered by one truth value a sample, shape ({len(z)},), not {found.dtype} of "
                f"shape {tuple(found.shape)}"
            )
        return found

    return answers(enclose_until(answers, equation, z))
