"""The fast path of `Anderson` with memory 1: float32 on a CPU, in C.

Same algorithm as anderson.py, which stays the reference and serves every other case. A step there is
some twenty passes over memory; in the kernel, activation, residual, dot products, safeguard and next
candidate are one. Where the kernel also knows the weight, it solves each sample to its end in one call,
while the sample lies in the cache; else torch computes the products between its steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pcdeq.kernels import KERNELS, in_memory
from pcdeq.solvers.solution import Outcome, Pieces, Problem, Solution, Solver, SolveStats

# Activations that the kernel knows, in the order of its enum; the adjoint equation is linear.
CODES = {
    name: code
    for code, name in enumerate(
        ("tanh", "softsign", "relu6", "sigmoid", "1-exp", "hard-tanh", "hard-sigmoid", "linear")
    )
}

# The kernel's struct sample_state: four floats, then four integers; all zero before the first step.
FIELDS, RELATIVE, STEPS = 8, 3, 4
# The kernel multiplies a dense weight with one sample at a time: good while the weight stays in the cache.
LARGEST_DENSE = 256
# The kernel's convolutions round to some 1e-7; below this tolerance torch's plainer ones are used.
FINEST_CONV = 1e-6
# Below so many multiplications a second thread costs more than it saves.
PARALLEL_FROM = 200_000


def applies(problem: Problem) -> bool:
    """Whether the kernel can solve this problem."""
    pieces = problem.pieces
    return (
        KERNELS is not None
        and pieces is not None
        and pieces.form in CODES
        and all(t is None or in_memory(t) for t in (pieces.offset, pieces.slope, problem.start))
        and pieces.offset.numel() > 0
        and not torch.is_grad_enabled()
        and (problem.box is None or isinstance(problem.box[0], float))
    )


def anderson(solver: Solver, decay: float, problem: Problem) -> Solution:
    """Solve by the kernel; `applies` must hold."""
    if problem.steps >= solver.max_steps:
        return solver.give_up(problem)
    pieces = problem.pieces
    assert pieces is not None
    if _knows(problem, pieces, solver.tol):
        return _solve(solver, decay, problem, pieces)
    return _iterate(solver, decay, problem, pieces)


def _knows(problem: Problem, pieces: Pieces, tol: float) -> bool:
    """Whether the kernel can compute the products, too."""
    weight, offset = pieces.weight, pieces.offset
    if weight is None or not in_memory(weight.tensor):
        return False
    if weight.tensor.shape[:2] != (offset.shape[1], offset.shape[1]):
        return False
    if any(t is not None and t.shape != offset.shape for t in (problem.start, pieces.slope)):
        return False
    if problem.box is not None and problem.box[0] > 0:  # what the kernel fills up with zeros would be clamped
        return False
    if weight.form == "dense":
        return offset.ndim == 2 and offset.shape[1] <= LARGEST_DENSE
    assert KERNELS is not None
    return weight.form == "conv3x3" and offset.ndim == 4 and tol >= FINEST_CONV and bool(KERNELS.VECTORISED)


def _solve(solver: Solver, decay: float, problem: Problem, pieces: Pieces) -> Solution:
    """The whole solve in one call."""
    assert KERNELS is not None and pieces.weight is not None
    layout = dense_layout(pieces.offset)
    offset = pieces.offset.contiguous(memory_format=layout)
    slope = None if pieces.slope is None else pieces.slope.contiguous(memory_format=layout)
    start = None if problem.start is None else problem.start.contiguous(memory_format=layout)
    base = mean = response = None
    if start is None and pieces.guess is not None:
        base, mean, response = pieces.guess.base, pieces.guess.mean, pieces.guess.response
        base = None if base is None else base[None].contiguous(memory_format=layout)
    weight = pieces.weight.tensor.contiguous()
    conv, samples, width = weight.ndim > 2, offset.shape[0], weight.shape[0]
    places = offset.numel() // (samples * width)
    shape, strides = (offset.shape, offset.stride()) if conv else ((samples, width, 1, 1), (width, 1, 0, 0))
    out = torch.empty_like(offset)
    record = Record.empty(samples)
    summary = KERNELS.solve(
        conv,
        pieces.weight.transposed,
        CODES[pieces.form],
        shape,
        strides,
        tuple(0 if t is None else t.data_ptr() for t in (weight, offset, slope, start, base, mean, response)),
        (out.data_ptr(), *record.addresses()),
        solver.tol,
        decay,
        *(problem.box or (-torch.inf, torch.inf)),
        problem.steps,
        solver.max_steps,
        threads(samples * weight.numel() * places),
    )
    return solution(solver, out, record, summary)


class Record(NamedTuple):
    """What the kernel says of each sample."""

    steps: Tensor
    residual: Tensor
    converged: Tensor

    @classmethod
    def empty(cls, samples: int) -> Record:
        """One to be filled in."""
        steps = torch.empty(samples, dtype=torch.int64, device="cpu")
        return cls(
            steps, torch.empty(samples, device="cpu", dtype=torch.float32), steps.new_empty(samples, dtype=torch.bool)
        )

    def addresses(self) -> tuple[int, int, int]:
        """Where it lies in memory."""
        return self.steps.data_ptr(), self.residual.data_ptr(), self.converged.data_ptr()


def solution(solver: Solver, value: Tensor, record: Record, summary: tuple[int, int, float]) -> Solution:
    """The solution that the kernel has found, from what it says of each sample and of all."""
    failed, slowest, largest = summary
    outcome = solver.outcome_of(value, record.residual, record.converged) if failed else Outcome.CONVERGED
    return Solution(value, *record, outcome, SolveStats(slowest, value.shape[0], failed, largest, outcome))


def threads(multiplications: int) -> int:
    """How many threads are worth their while for one product with every sample."""
    return torch.get_num_threads() if multiplications > PARALLEL_FROM else 1


def _iterate(solver: Solver, decay: float, problem: Problem, pieces: Pieces) -> Solution:
    """Products by torch, steps by the kernel."""
    assert KERNELS is not None
    state = torch.zeros(len(pieces.offset), FIELDS, dtype=torch.int32, device="cpu")
    start = problem.first()
    layout = dense_layout(start)
    point = start.clone(memory_format=layout)
    offset = pieces.offset.contiguous(memory_format=layout)
    slope = None if pieces.slope is None else pieces.slope.contiguous(memory_format=layout)
    best, residual = torch.empty_like(point), torch.empty_like(point)
    samples = point.shape[0]
    low, high = problem.box or (-torch.inf, torch.inf)
    fixed = (
        offset.data_ptr(),
        0 if slope is None else slope.data_ptr(),
        point.data_ptr(),
        best.data_ptr(),
        residual.data_ptr(),
        state.data_ptr(),
        solver.tol,
        decay,
        low,
        high,
        torch.get_num_threads(),
    )
    sizes = (CODES[pieces.form], samples, point.numel() // samples)
    for _ in range(problem.steps, solver.max_steps):
        value = pieces.product(point).contiguous(memory_format=layout)
        if not KERNELS.anderson_step(*sizes, value.data_ptr(), *fixed):
            break
    return solver.finish(best, state[:, STEPS].long() + problem.steps, state.view(torch.float32)[:, RELATIVE])


def dense_layout(z: Tensor) -> torch.memory_format:
    """The memory format in which each sample of z is one block of memory."""
    if z.ndim == 4 and z.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if z.ndim == 5 and z.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format
