"""The one loop of all solves: who runs it, when it stops, and what is said of it.

A kernel may do the whole; else a solver makes one step after the other, here, for a large batch in pieces. Each sample
stops on its own relative residual and its value is put aside then, so that what else is in the batch changes nothing;
under the paper's rule there is one norm for all.

Norms are taken in the problem's own dtype, where squares of small numbers are 0 and those of large ones infinite. A
residual is called small only where neither can have happened; a sample where it may have is measured by its largest
component from then on, and no other. So a solve is the same for data of any scale, and 0 is an answer.
"""

from __future__ import annotations

from math import inf
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pcdeq.kernels import binding
from pcdeq.solvers.numbers import Numbers, at_hand, by_memory, host_numbers
from pcdeq.solvers.numbers import rows as rows_of
from pcdeq.solvers.problem import Problem, Solution, Summary
from pcdeq.solvers.solver import Norm, Solver, State

# The paper's guard against division by 0 in the relative residual. It also accepts anything whose norm
# is below 1e-9, be it growing fiftyfold a step; so only the paper's own rule uses it.
PAPER_GUARD = 1e-5
# Where looking makes the host wait for a device: the first look, if no earlier solve tells when, and those that follow.
FIRST_LOOK, LOOK_EVERY = 4, 3
MOST_UNSEEN = 10  # steps between two looks at most, as their values are kept
MOST_KEPT = 10  # whole values of small batches
# Batches of fewer numbers than this are solved as a whole; of larger ones, what is done is left out.
WORTH_SHRINKING = 32_768
# Numbers of a batch for each thread from which on it is solved in pieces of some samples, which stay in the cache.
PIECE = 2**18
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
    if pieces := _pieces(problem, solver):
        return _joined([run(piece, solver) for piece in pieces])
    point = solver.init(problem)
    watch = _Watch(solver, point, problem)
    step = solver.step_on if watch.at_hand else solver.step_from_afar
    count, state = problem.steps if solver.begins_at_start else 0, None
    if count and solver.stop == "batch":  # the start was a step from 0, which the paper's rule may accept
        watch.look(State(point, point, point, watch.norm(point)), count)
    while count < solver.max_steps and watch.goes_on:
        count += 1
        state = watch.look(step(problem, state, point, watch.norm), count)
        problem, state = watch.shrink(problem, solver, state)
        point = state.point
    return watch.solution(point if state is None else state.value, count)


def _pieces(problem: Problem, solver: Solver) -> list[Problem]:
    """The problem in parts of some samples each, if it is large, so that each is solved to its end in a CPU's cache."""
    form, select = problem.form, problem.select
    if form is None or select is None:
        return []
    samples, number = len(form.offset), form.offset.numel() // (PIECE * torch.get_num_threads())
    if min(samples, number) < 2 or solver.stop == "batch" or torch.is_grad_enabled() or not at_hand(form.offset):
        return []
    size = -(-samples // number)
    parts = [slice(begin, begin + size) for begin in range(0, samples, size)]
    if isinstance(start := problem.start, Tensor):
        return [select(part).continued(start[part], problem.steps) for part in parts]
    return [select(part) for part in parts]


def _joined(solutions: list[Solution]) -> Solution:
    """The solutions of parts as one."""
    value, steps, residual, converged = (
        torch.cat([getattr(solution, name) for solution in solutions])
        for name in ("value", "steps", "residual", "converged")
    )
    return Solution.of(value, steps, residual, converged)


class _Watch:
    """Looks at a solve, and takes down the samples that are done.

    After each step where that costs nothing. Where it makes the host wait for a device it looks rarely, first when
    earlier solves like this one were done, and then at all steps since the last look: their values are kept until then,
    so that each sample is taken down as it was when it was done, and steps too many change nothing.
    """

    # After how many steps the last two solves of a kind have ended; it changes nothing but when to look.
    ended: ClassVar[dict[object, tuple[int, int]]] = {}

    def __init__(self, solver: Solver, like: Tensor, problem: Problem) -> None:
        samples = len(like)
        self.tol, self.batch, self.last = solver.tol, solver.stop == "batch", solver.max_steps
        self.norm = self.usual_norm = _norm_of_all(like) if self.batch else _norm_of_each(like)
        self.careful: Numbers = np.zeros(samples, bool)  # which are measured by their largest component
        self.residual: Numbers = np.full(samples, np.inf, np.float64 if like.dtype is torch.float64 else np.float32)
        self.relative: Numbers = self.residual  # at the last look
        self.sure: tuple[Numbers, Numbers] = _sure_norms(like)
        self.usual_sure = self.sure
        self.samples: Numbers = np.arange(samples)  # that the solve goes on with
        self.active: Numbers = np.ones(samples, bool)  # those of them that are not done
        self.converged: Numbers = np.zeros(samples, bool)
        self.steps: Numbers = np.zeros(samples, np.int64)
        self.value: Tensor | None = None  # of the samples that are done
        self.device, self.at_hand = like.device, at_hand(like)
        self.small = self.at_hand and like.numel() < WORTH_SHRINKING
        self.kept: list[Tensor] = []  # whole small values in which samples are done
        self.origin: Numbers = self.samples.copy()  # where in these, one after the other, each sample is
        self.goes_on = samples > 0
        self.far = inf if self.batch or not samples else self.tol * _largest_norm(problem.box, like.numel() // samples)
        self.kind = None if self.at_hand else (solver, problem.steps, like.shape[1:], like.dtype, like.device)
        self.unseen: list[tuple[Tensor, Tensor, Tensor]] = []  # value, its residual's norm and its own, since the look
        self.next_look = 0 if self.at_hand else min(*self.ended.get(self.kind, (FIRST_LOOK,)), self.last)

    @np.errstate(all="ignore")
    def look(self, state: State, count: int) -> State:
        """Take down what is done after so many steps; the state's length is measured again where it has to be."""
        if self.at_hand:
            length = state.length.numpy()
            if self.far < inf and count < self.last and not np.count_nonzero(~(length >= self.far)):
                return state  # no value is so large that one of these residuals were small
            doubtful = self._look_at(state.value, length, self.norm(state.value).numpy(), count)
        else:
            self.unseen.append((state.value, state.length, self.norm(state.value)))
            if count < self.next_look and len(self.unseen) < MOST_UNSEEN:
                return state
            doubtful = self._look_back(count)
        return state if doubtful is None else self._measure_again(state, doubtful, count)

    def _look_back(self, count: int) -> Numbers | None:
        """Look at all steps since the last look; doubts can be settled for the last of them only."""
        values, lengths, sizes = zip(*self.unseen, strict=True)
        self.unseen, self.next_look = [], min(count + LOOK_EVERY, self.last)
        found = host_numbers(torch.stack([*lengths, *sizes])).reshape(2, len(values), -1)
        doubtful = None
        for at, (value, length, size) in enumerate(zip(values, *found, strict=True), count + 1 - len(values)):
            doubtful = self._look_at(value, length, size, at) if self.goes_on else None
        return doubtful

    def _look_at(self, value: Tensor, length: Numbers, size: Numbers, count: int) -> Numbers | None:
        """Take down what is done for certain after a step; for which samples it is not certain."""
        relative = np.broadcast_to(length / (size + PAPER_GUARD), self.active.shape) if self.batch else length / size
        self.relative, near = relative, ~(relative >= self.tol) & self.active  # or not a number
        if not np.count_nonzero(near):
            return None
        sure = relative < self.tol if self.batch else _is_sure(length, size, self.tol, *self.sure)
        self._take_down(near & sure, value, count, converged=True)
        doubtful = near & ~sure
        return doubtful if np.count_nonzero(doubtful) else None

    def _measure_again(self, state: State, doubtful: Numbers, count: int) -> State:
        """Take down which of these are done by norms that cannot under- or overflow, or lost; others keep theirs."""
        if self.batch:  # one lost sample makes every norm not a number
            if not bool(state.point.isfinite().all()):
                self._take_down(doubtful, state.value, count, converged=False)
            return state
        which = self._on_device(doubtful)
        measured = torch.where(which, careful_norm_of_each(state.residual), state.length)
        finite = state.point.isfinite().flatten(1).all(1).to(measured.dtype)
        length, size, finite = host_numbers(torch.stack([measured, careful_norm_of_each(state.value), finite]))
        self.relative = np.where(doubtful, np.where(length == 0, 0, length / size), self.relative)
        self._take_down(doubtful & (self.relative < self.tol), state.value, count, converged=True)
        # Not so a sample whose value is infinite but whose next point is not: a proposal that was refused.
        self._take_down(doubtful & self.active & (finite == 0), state.value, count, converged=False)
        self._measure_carefully(self.careful | (doubtful & self.active))
        return state._replace(length=measured)  # the next step compares it with one of these norms

    def _measure_carefully(self, which: Numbers) -> None:
        """Measure these, and only these, by their largest component from now on."""
        self.careful, self.norm, self.sure = which, self.usual_norm, self.usual_sure
        if np.count_nonzero(which):
            self.norm = _norm_with_care(self._on_device(which), self.usual_norm)
            self.sure = np.where(which, EVERY_NORM, self.sure[0]), np.where(which, np.inf, self.sure[1])

    def _take_down(self, which: Numbers, value: Tensor, count: int, *, converged: bool) -> None:
        rows = which.nonzero()[0]
        if not len(rows):
            return
        samples = self.samples[rows]
        if len(rows) == len(self.steps):
            self.value = value
        elif self.small:
            self._keep(value, rows)
        else:
            # The first that are done are so while the solve goes on with all.
            self.value = torch.empty_like(value) if self.value is None else self.value
            part = rows_of(value, self._on_device(rows))
            by_memory(self.value).index_copy_(0, self._on_device(samples), by_memory(part))
        self.steps[samples], self.residual[samples], self.converged[samples] = count, self.relative[rows], converged
        self.active = self.active & ~which
        self.goes_on = bool(np.count_nonzero(self.active))

    def _keep(self, value: Tensor, rows: Numbers) -> None:
        """Put these samples aside, for which the whole value is copied; to choose them once, at the end, is quicker."""
        if len(self.kept) == MOST_KEPT:
            self.kept, self.origin = [self._together()], np.arange(len(self.origin))
        self.origin[rows] = len(self.kept) * len(self.origin) + rows
        self.kept.append(value.clone())

    def _together(self) -> Tensor:
        return rows_of(torch.cat(self.kept), torch.from_numpy(self.origin))

    def shrink(self, problem: Problem, solver: Solver, state: State) -> tuple[Problem, State]:
        """The problem and its state without the samples that are done, if there are enough to be worth it.

        Not from afar, where kernels are chosen for the size of a batch.
        """
        if self.value is None or problem.select is None or not (self.at_hand and self.goes_on) or self.batch:
            return problem, state
        rows = self.active.nonzero()[0]
        if state.value.numel() < WORTH_SHRINKING or 4 * len(rows) > 3 * len(self.samples):
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
            failed = len(self.steps) - int(np.count_nonzero(self.converged))
            summary = Summary(failed, int(self.steps.max()), float(self.residual.max()))
        if self.kind is not None and not summary.unconverged:
            self._remember(summary.steps)
        if self.kept:
            value = self._together()
        elif self.value is not None:
            value = self.value
        steps, residual, converged = map(self._on_device, (self.steps, self.residual, self.converged))
        return Solution(value, steps, residual, converged, summary, summary.outcome(value.dtype))

    def _remember(self, steps: int) -> None:
        if len(self.ended) > MOST_REMEMBERED:
            self.ended.clear()
        self.ended[self.kind] = (steps, self.ended.get(self.kind, (steps,))[0])

    def _on_device(self, values: Numbers) -> Tensor:
        return torch.from_numpy(values) if self.at_hand else torch.from_numpy(values).to(self.device)


def _largest_norm(box: tuple[float, float] | tuple[Tensor, Tensor] | None, size: int) -> float:
    """Above the norm of any value of so many components in the box, if that starts at 0 and has one end for all."""
    return inf if box is None or isinstance(box[1], Tensor) or box[0] != 0 else 1.01 * box[1] * size**0.5


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
    dims, dtype = tuple(range(1, like.ndim)), None if like.dtype == _dtype_of_norms(like) else _dtype_of_norms(like)
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
