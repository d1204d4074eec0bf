"""The fast path of `Anderson` with memory 1: float32 on a CPU, in C.

Same algorithm as anderson.py, which stays the reference and serves every other case. A step there is
some twenty passes over memory; in the kernel, activation, residual, dot products, safeguard and next
candidate are one. Where the kernel also knows the weight, it solves each sample to its end in one call,
while the sample lies in the cache; else torch computes the products between its steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.kernels import KERNELS
from pcdeq.solvers.solution import Pieces, Problem, Solution, Solver, Weight

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
# Below so many multiplications a second thread costs more than it saves.
PARALLEL_FROM = 200_000


def applies(problem: Problem) -> bool:
    """Whether the kernel can solve this problem."""
    pieces = problem.pieces
    return (
        KERNELS is not None
        and pieces is not None
        and pieces.form in CODES
        and pieces.offset.dtype == torch.float32
        and pieces.offset.device.type == "cpu"
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
    state = torch.zeros(len(pieces.offset), FIELDS, dtype=torch.int32)
    if _knows(pieces.weight, pieces.offset):
        value = _solve(solver, decay, problem, pieces, state)
    else:
        value = _iterate(solver, decay, problem, pieces, state)
    return solver.finish(value, state[:, STEPS].long() + problem.steps, state.view(torch.float32)[:, RELATIVE])


def _knows(weight: Weight | None, offset: Tensor) -> bool:
    """Whether the kernel can compute the products, too."""
    if weight is None or weight.tensor.dtype != torch.float32:
        return False
    if weight.form == "dense":
        return offset.ndim == 2 and offset.shape[1] <= LARGEST_DENSE
    return weight.form == "conv3x3" and offset.ndim == 4


def _solve(solver: Solver, decay: float, problem: Problem, pieces: Pieces, state: Tensor) -> Tensor:
    """The whole solve in one call."""
    assert KERNELS is not None and pieces.weight is not None
    layout = dense_layout(pieces.offset)
    offset = pieces.offset.contiguous(memory_format=layout)
    slope = None if pieces.slope is None else pieces.slope.contiguous(memory_format=layout)
    guessed = problem.start is None
    start = pieces.guess if guessed else problem.start
    if start is not None:
        start = start.reshape(-1, *offset.shape[1:]).contiguous(memory_format=layout)
    weight, out = pieces.weight.tensor.contiguous(), torch.empty_like(offset)
    conv = weight.ndim > 2
    shape = offset.shape if conv else (len(offset), 1, 1, offset.shape[1])
    strides = offset.stride() if conv else (offset.shape[1], 0, 0, 1)
    work = len(offset) * weight.numel() * (offset[0, 0].numel() if conv else 1)
    KERNELS.solve(
        conv,
        pieces.weight.transposed,
        CODES[pieces.form],
        tuple(shape),
        strides,
        weight.data_ptr(),
        offset.data_ptr(),
        0 if slope is None else slope.data_ptr(),
        guessed,
        0 if start is None else start.data_ptr(),
        0 if start is None or len(start) < len(offset) else offset[0].numel(),
        out.data_ptr(),
        state.data_ptr(),
        solver.tol,
        decay,
        *(problem.box or (-torch.inf, torch.inf)),
        solver.max_steps - problem.steps,
        torch.get_num_threads() if work > PARALLEL_FROM else 1,
    )
    return out


def _iterate(solver: Solver, decay: float, problem: Problem, pieces: Pieces, state: Tensor) -> Tensor:
    """Products by torch, steps by the kernel."""
    assert KERNELS is not None
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
    return best


def dense_layout(z: Tensor) -> torch.memory_format:
    """The memory format in which each sample of z is one block of memory."""
    if z.ndim == 4 and z.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if z.ndim == 5 and z.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format
