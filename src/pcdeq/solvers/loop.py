"""The one loop of all solves: who runs it, when it stops, and what is said of it.

A kernel may do the whole; else a solver makes one step after the other, here. Each sample stops on its own relative
residual and its value is put aside then, so that what else is in the batch changes nothing; under the paper's rule
there is one norm for all.

Norms are taken in the problem's own dtype, where squares of small numbers are 0 and those of large ones infinite. A
residual is called small only where neither can have happened; a sample where it may have is measured by its largest
component from then on, and no other. So a solve is the same for data of any scale, and 0 is an answer.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pcdeq.kernels import binding
from pcdeq.solvers.numbers import Numbers, at_hand, by_memory, numbers
from pcdeq.solvers.numbers import rows as rows_of
from pcdeq.solvers.problem import Problem, Solution, Summary, per_sample
from pcdeq.solvers.solver import Norm, Solver, State

# The paper's guard against division by 0 in the relative residual. It also accepts anything whose norm
# is below 1e-9, be it growing fiftyfold a step; so only the paper's own rule uses it.
PAPER_GUARD = 1e-5
# Where looking makes the host wait for a device: the first look, if no earlier solve tells when, and those that follow.
FIRST_LOOK, LOOK_EVERY = 4, 3
# Batches of fewer numbers than this are solved as a whole; of larger ones, what is done is left out.
WORTH_SHRINKING = 32_768
MOST_REMEMBERED = 256
# A bound above which a norm is what it seems: of the careful ones all are.
EVERY_NORM = -1.0


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
    watch = _Watch(solver, point) if at_hand(point) else _WatchFromAfar(solver, point, problem.steps)
    count, state = problem.steps if solver.begins_at_start else 0, None
    if count and solver.stop == "batch":  # the start was a step from 0, which the paper's rule may accept
        watch.look(State(point, point, point, watch.norm(point)), count)
    while count < solver.max_steps and watch.goes_on:
        count += 1
        state = watch.look(solver.step_on(problem, state, point, watch.norm), count)
        problem, state = watch.shrink(problem, solver, state)
        point = state.point
    return watch.solution(point if state is None else state.value, count)


class _Watch:
    """Looks at a solve after each step, and takes down the samples that are done."""

    def __init__(self, solver: Solver, like: Tensor) -> None:
        samples = len(like)
        self.tol, self.batch = solver.tol, solver.stop == "batch"
        self.norm = self.usual_norm = _norm_of_all(like) if self.batch else _norm_of_each(like)
        self.sure = _sure_norms(like)
        self.careful: Numbers = np.zeros(samples, bool)  # which are measured by their largest component
        self.samples: Numbers = np.arange(samples)  # that the solve goes on with
        self.active: Numbers = np.ones(samples, bool)  # those of them that are not done
        self.converged: Numbers = np.zeros(samples, bool)
        self.steps: Numbers = np.zeros(samples, np.int64)
        self.residual: Numbers = np.full(samples, np.inf, np.float64 if like.dtype is torch.float64 else np.float32)
        self.relative: Numbers = self.residual  # at the last look
        self.value: Tensor | None = None  # of the samples that are done
        self.goes_on = samples > 0

    @np.errstate(all="ignore")
    def look(self, state: State, count: int) -> State:
        """Take down what is done after so many steps; the state's length is measured again where it has to be."""
        length, size = state.length.numpy(), self.norm(state.value).numpy()
        if self.batch:
            return self._look_at_all(state, length / (size + PAPER_GUARD), count)
        self.relative = length / size
        near = ~(self.relative >= self.tol) & self.active  # or not a number
        if near.any():
            smallest, largest = self.sure
            sure = np.where(self.careful, EVERY_NORM, smallest), np.where(self.careful, np.inf, largest)
            doubtful = near & ~_is_sure(length, size, self.tol, *sure)
            self._take_down(near & ~doubtful, state.value, count, converged=True)
            return self._measure_again(state, doubtful, count) if doubtful.any() else state
        return state

    def _look_at_all(self, state: State, relative: Numbers, count: int) -> State:
        self.relative = np.broadcast_to(relative, self.active.shape)
        if relative[0] < self.tol:
            self._take_down(self.active, state.value, count, converged=True)
        elif not (relative[0] >= self.tol or bool(state.point.isfinite().all())):
            self._take_down(self.active, state.value, count, converged=False)  # one lost sample makes every norm NaN
        return state

    def _measure_again(self, state: State, doubtful: Numbers, count: int) -> State:
        """Take down which of these are done by norms that cannot under- or overflow, or lost; others keep theirs."""
        measured = torch.where(torch.from_numpy(doubtful), careful_norm_of_each(state.residual), state.length)
        length, size = measured.numpy(), careful_norm_of_each(state.value).numpy()
        self.relative = np.where(doubtful, np.where(length == 0, 0, length / size), self.relative)
        self._take_down(doubtful & (self.relative < self.tol), state.value, count, converged=True)
        # Not so a sample whose value is infinite but whose next point is not: a proposal that was refused.
        lost = ~numbers(state.point.isfinite().flatten(1).all(1))
        self._take_down(doubtful & self.active & lost, state.value, count, converged=False)
        self._measure_carefully(self.careful | (doubtful & self.active))
        return state._replace(length=measured)  # the next step compares it with one of these norms

    def _measure_carefully(self, which: Numbers) -> None:
        """Measure these, and only these, by their largest component from now on."""
        self.careful = which
        if which.any():
            self.norm = _norm_with_care(torch.from_numpy(which), self.usual_norm)

    def _take_down(self, which: Numbers, value: Tensor, count: int, *, converged: bool) -> None:
        rows = which.nonzero()[0]
        if len(rows) == len(self.steps):
            self.value = value
        elif len(rows):
            # The first that are done are so while the solve goes on with all.
            self.value = torch.empty_like(value) if self.value is None else self.value
            part = rows_of(value, torch.from_numpy(rows))
            by_memory(self.value).index_copy_(0, torch.from_numpy(self.samples[rows]), by_memory(part))
        samples = self.samples[rows]
        self.steps[samples], self.residual[samples], self.converged[samples] = count, self.relative[rows], converged
        self.active = self.active & ~which
        self.goes_on = bool(self.active.any())

    def shrink(self, problem: Problem, solver: Solver, state: State) -> tuple[Problem, State]:
        """The problem and its state without the samples that are done, if there are enough to be worth it."""
        if problem.select is None or self.value is None or not self.goes_on or state.value.numel() < WORTH_SHRINKING:
            return problem, state
        rows = self.active.nonzero()[0]
        if 4 * len(rows) > 3 * len(self.samples) or self.batch:
            return problem, state
        chosen = torch.from_numpy(rows)
        part = solver.select(state, chosen)
        if part is None:
            return problem, state
        self.samples, self.relative, self.active = self.samples[rows], self.relative[rows], self.active[rows]
        self._measure_carefully(self.careful[rows])
        return problem.select(chosen), part

    def solution(self, value: Tensor, count: int) -> Solution:
        """What is to be said after so many steps, the last of which gave this value."""
        if self.goes_on:
            self._take_down(self.active, value, count, converged=False)
        summary = Summary(0, 0, 0.0)
        if len(self.steps):
            failed = len(self.steps) - int(self.converged.sum())
            summary = Summary(failed, int(self.steps.max()), float(self.residual.max()))
        value = value if self.value is None else self.value
        steps, residual, converged = map(torch.from_numpy, (self.steps, self.residual, self.converged))
        return Solution(value, steps, residual, converged, summary, summary.outcome(value.dtype))


class _WatchFromAfar:
    """The same where looking makes the host wait for a device: rarely, when earlier solves like this one were done.

    What is done is kept as it is, so that steps too many change nothing.
    """

    # After how many steps the last two solves of a kind have ended; it changes nothing but when to look.
    ended: ClassVar[dict[object, tuple[int, int]]] = {}

    def __init__(self, solver: Solver, like: Tensor, free_steps: int) -> None:
        self.tol, self.batch, self.last = solver.tol, solver.stop == "batch", solver.max_steps
        self.norm = self.usual_norm = _norm_of_all(like) if self.batch else _norm_of_each(like)
        self.smallest: float | Tensor = EVERY_NORM if self.batch else _sure_norms(like)[0]  # that is what it seems
        self.least = -1.0 if self.batch else 0.0  # a relative residual of 0 may be due to an infinite value
        self.active = torch.ones(like.shape[:1], dtype=torch.bool, device=like.device)
        self.lost = self.careful = ~self.active
        self.before, self.taken = (
            0,
            torch.zeros_like(self.active, dtype=torch.int64),
        )  # steps until the first look, since
        self.residual = torch.full(like.shape[:1], torch.inf, dtype=_dtype_of_norms(like), device=like.device)
        self.value: Tensor | None = None
        self.summary = Summary(0, 0, 0.0)
        self.goes_on = len(like) > 0
        self.kind = (solver, free_steps, like.shape[1:], like.dtype, like.device)
        self.next_look = min(self.ended.get(self.kind, (FIRST_LOOK,)))

    def look(self, state: State, count: int) -> State:
        """Keep what is done after so many steps; now and then, see whether all is."""
        size = self.norm(state.value)
        size = size + PAPER_GUARD if self.batch else size
        # Sure in the same sense as in `_is_sure`: no less than underflow may have hidden.
        relative = state.length.clip(min=self.smallest) / size
        going, active = self.active, per_sample(self.active, state.value)
        if self.value is None:
            self.before, self.value = count - 1, state.value
        self.value = torch.where(active, state.value, self.value)
        self.residual = torch.where(going, relative, self.residual)
        self.taken = self.taken + going
        self.active = going > ((relative < self.tol) & (relative > self.least))
        if count >= self.next_look or count == self.last:
            # Not a number, or so small that it may be none.
            doubtful = ~(relative >= self.tol) | (state.length <= self.smallest)
            state = self._ask(state, self.active & doubtful, count)
        return state

    def _ask(self, state: State, doubtful: Tensor, count: int) -> State:
        self.next_look = count + LOOK_EVERY
        if self._read(doubtful):
            state = self._measure_again(state, doubtful)
            self._read(doubtful)
        if not self.goes_on and not self.summary.unconverged:
            if len(self.ended) > MOST_REMEMBERED:
                self.ended.clear()
            steps = self.summary.steps
            self.ended[self.kind] = (steps, self.ended.get(self.kind, (steps,))[0])
        return state

    def _read(self, doubtful: Tensor) -> bool:
        """Wait for the device: does anything go on, and are there residuals that are not what they seem?"""
        failed = (self.active | self.lost).sum()
        facts = (self.active.any(), doubtful.any(), failed, self.taken.max(), self.residual.max())
        active, doubt, *told = torch.stack([fact.to(self.residual.dtype) for fact in facts]).tolist()
        self.goes_on, self.summary = bool(active), Summary(int(told[0]), self.before + int(told[1]), told[2])
        return bool(doubt)

    def _measure_again(self, state: State, doubtful: Tensor) -> State:
        """As in `_Watch`."""
        finite = state.point.isfinite()
        if self.batch:
            self.lost, self.active = self.lost | (self.active & ~finite.all()), self.active & finite.all()
            return state
        self.careful = careful = self.careful | doubtful
        self.norm = _norm_with_care(careful, self.usual_norm)
        length, size = self.norm(state.residual), self.norm(state.value)
        self.smallest = torch.where(careful, torch.full_like(length, EVERY_NORM), self.smallest)
        relative = torch.where(length == 0, 0.0, length / size)
        self.residual = torch.where(doubtful, relative, self.residual)
        self.active = self.active & ~(doubtful & (relative < self.tol))
        lost = doubtful & self.active & ~finite.flatten(1).all(1)
        self.lost, self.active = self.lost | lost, self.active & ~lost
        return state._replace(length=length)

    def shrink(self, problem: Problem, solver: Solver, state: State) -> tuple[Problem, State]:
        """Nothing: how many are done is known to the device only."""
        return problem, state

    def solution(self, value: Tensor, count: int) -> Solution:
        """What is to be said, all of which is known since the last look; unless no step was allowed."""
        converged = ~(self.active | self.lost)
        if self.value is None:
            return Solution.of(value, self.taken + count, self.residual, converged)
        outcome = self.summary.outcome(value.dtype)
        return Solution(self.value, self.taken + self.before, self.residual, converged, self.summary, outcome)


def _dtype_of_norms(z: Tensor) -> torch.dtype:
    return torch.float32 if z.dtype.itemsize < 4 else z.dtype


def _sure_norms(z: Tensor) -> tuple[float, float]:
    facts = torch.finfo(_dtype_of_norms(z))
    return 1e4 * facts.tiny**0.5, facts.max**0.5


def _is_sure(length: Numbers, size: Numbers, tol: float, smallest: Numbers, largest: Numbers) -> Numbers:
    """Whether a residual is small for certain: it or what underflow may have hidden, and the value did not overflow."""
    return (length.clip(min=smallest) < tol * size) & (size < largest)


def _norm_of_each(like: Tensor) -> Norm:
    """The Euclidean norm of each sample, (samples,), of tensors like this one."""
    dims, dtype = tuple(range(1, like.ndim)), _dtype_of_norms(like)
    return lambda z: torch.linalg.vector_norm(_constant(z), 2, dims, dtype=dtype)


def _norm_of_all(like: Tensor) -> Norm:
    """That of the whole batch, (1,)."""
    dtype = _dtype_of_norms(like)
    return lambda z: torch.linalg.vector_norm(_constant(z), dtype=dtype).reshape(1)


def careful_norm_of_each(z: Tensor) -> Tensor:
    """The norm of each sample, whatever its scale; that of infinite numbers is infinite."""
    z = _constant(z).flatten(1).to(_dtype_of_norms(z))
    peak = z.abs().amax(1)
    norm = peak * torch.linalg.vector_norm(z / (peak + (peak == 0))[:, None], dim=1)
    return torch.where(peak.isinf(), torch.inf, norm)


def _norm_with_care(careful: Tensor, usual: Norm) -> Norm:
    """The norm of each sample, of some of them the careful one."""
    return lambda z: torch.where(careful, careful_norm_of_each(z), usual(z))


def _constant(z: Tensor) -> Tensor:
    return z.detach() if z.requires_grad else z
