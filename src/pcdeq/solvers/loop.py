"""The one loop of all solves: who runs it, when it stops, and what is said of it.

A kernel may do the whole; else a solver makes one step after the other, here. Each sample stops on its own relative
residual and its value is put aside then, so that what else is in the batch changes nothing; under the paper's rule
there is one norm for all.

Norms are taken in the problem's own dtype, where squares of small numbers are 0 and those of large ones infinite. A
residual is called small only where neither can have happened; where it may have, each sample is measured by its
largest component from then on. So a solve is the same for data of any scale, and 0 is an answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.kernels import binding
from pcdeq.solvers.problem import Problem, Solution, Summary, per_sample
from pcdeq.solvers.solver import Norm, Solver, State

# The paper's guard against division by 0 in the relative residual. It also accepts anything whose norm
# is below 1e-9, be it growing fiftyfold a step; so only the paper's own rule uses it.
PAPER_GUARD = 1e-5
# Steps between two looks at the residuals where looking makes the host wait for an accelerator.
CHECK_EVERY = 4


def run(problem: Problem, solver: Solver) -> Solution:
    """Solve, by a kernel where one takes the whole problem, else step by step in torch, on any device and dtype."""
    if problem.form is not None and solver.kernel_decay is not None and problem.steps < solver.max_steps:
        solved = binding.solve(
            problem.form,
            problem.start if isinstance(problem.start, Tensor) else None,
            problem.guess,
            problem.box,
            tol=solver.tol,
            decay=solver.kernel_decay,
            steps_before=problem.steps,
            max_steps=solver.max_steps,
        )
        if solved is not None:
            summary = Summary(*solved.summary)
            outcome = summary.outcome(solved.value.dtype)
            return Solution(solved.value, solved.steps, solved.residual, solved.converged, summary, outcome)
    point = solver.init(problem)
    watch = _Watch(solver, point)
    count, state = problem.steps if solver.begins_at_start else 0, None
    if count and solver.stop == "batch":  # the start was a step from 0, which the paper's rule may accept
        watch.look(State(point, point, point, watch.norm(point)), count)
    while count < solver.max_steps and watch.goes_on:
        count += 1
        state = watch.look(solver.step(problem, state, point, watch.norm), count)
        point = state.point
    return watch.solution(point if state is None else state.value, count)


class _Watch:
    """Looks at a solve after each step, and takes down the samples that are done."""

    def __init__(self, solver: Solver, like: Tensor) -> None:
        self.tol, self.batch = solver.tol, solver.stop == "batch"
        self.waits = like.device.type != "cpu" and not self.batch
        self.norm: Norm = _norm_of_all if self.batch else _norm_of_each
        self.active = torch.ones(like.shape[:1], dtype=torch.bool, device=like.device)
        self.converged = ~self.active
        self.steps = torch.zeros_like(self.active, dtype=torch.int64)
        self.residual = torch.full(like.shape[:1], torch.inf, dtype=_dtype_of_norms(like), device=like.device)
        self.relative = self.residual  # at the last look, of samples done or not
        self.value: Tensor | None = None  # of the samples that are done
        self.goes_on = len(like) > 0

    def look(self, state: State, count: int) -> State:
        """Take down what is done after so many steps, and return the state, with its length measured again if need be.

        On an accelerator the host asks only every few steps: what is done is put aside, so that steps too many change
        nothing. Under the batch rule they would.
        """
        length, size = state.length, self.norm(state.value)
        if self.batch:
            size = size + PAPER_GUARD
        self.relative = (length / size).expand(self.active.shape)
        near = ~(length > self.tol * size)  # or not a number, or lost to underflow
        if self.waits and count % CHECK_EVERY:
            self._take_down(near & _is_sure(length, size), state.value, count)
        elif self.waits or bool((near & self.active).any()):
            if self.batch:
                self._take_down(self.relative < self.tol, state.value, count)
                self.active = self.active & state.point.isfinite().all()  # one lost sample makes every norm NaN
            elif bool((_is_sure(length, size) | ~(near & self.active)).all()):
                self._take_down(near, state.value, count)
            else:
                state = self._measure_again(state, count)
            self.goes_on = bool(self.active.any())
        return state

    def _measure_again(self, state: State, count: int) -> State:
        """Take down what is done by norms that cannot under- or overflow, from now on; give up what is lost."""
        self.norm = careful_norm_of_each
        length, size = self.norm(state.residual), self.norm(state.value)
        self.relative = torch.where(length == 0, 0.0, length / size)
        self._take_down(self.relative < self.tol, state.value, count)
        # Not so a sample whose value is infinite but whose next point is not: a proposal that was refused.
        lost = self.active & ~state.point.isfinite().flatten(1).all(1)
        self.steps, self.active = torch.where(lost, count, self.steps), self.active & ~lost
        return state._replace(length=length)  # the next step compares it with one of these norms

    def _take_down(self, done: Tensor, value: Tensor, count: int) -> None:
        done = done & self.active
        self.value = value if self.value is None else torch.where(per_sample(done, value), value, self.value)
        self.residual = torch.where(done, self.relative, self.residual)
        self.steps = torch.where(done, count, self.steps)
        self.converged, self.active = self.converged | done, self.active & ~done

    def solution(self, value: Tensor, count: int) -> Solution:
        """What is to be said after so many steps, the last of which gave this value."""
        if self.value is not None:
            value = torch.where(per_sample(self.converged, value), self.value, value)
        steps = torch.where(self.active | (self.steps == 0), count, self.steps)
        return Solution.of(value, steps, torch.where(self.converged, self.residual, self.relative), self.converged)


def _dtype_of_norms(z: Tensor) -> torch.dtype:
    return torch.float32 if z.dtype.itemsize < 4 else z.dtype


def _norm_of_each(z: Tensor) -> Tensor:
    """The Euclidean norm of each sample, (samples,)."""
    return torch.linalg.vector_norm(z.detach(), dim=tuple(range(1, z.ndim)), dtype=_dtype_of_norms(z))


def _norm_of_all(z: Tensor) -> Tensor:
    """That of the whole batch, (1,)."""
    return torch.linalg.vector_norm(z.detach(), dtype=_dtype_of_norms(z)).reshape(1)


def careful_norm_of_each(z: Tensor) -> Tensor:
    """The norm of each sample, whatever its scale."""
    z = z.detach().flatten(1).to(_dtype_of_norms(z))
    peak = z.abs().amax(1)
    return peak * torch.linalg.vector_norm(z / (peak + (peak == 0))[:, None], dim=1)


def _is_sure(length: Tensor, size: Tensor) -> Tensor:
    """Whether neither norm can have lost much to underflow, nor overflowed."""
    facts = torch.finfo(length.dtype)
    return (length > 1e4 * facts.tiny**0.5) & (size < facts.max**0.5)
