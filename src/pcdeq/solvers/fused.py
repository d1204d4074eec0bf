"""The fast path of `Anderson` with memory 1: float32 on a CPU, one call of a C kernel per step.

Same algorithm as anderson.py, which stays the reference and serves every other case. A step there
is some twenty passes over memory; here activation, residual, dot products, safeguard and next
candidate are one. Only the products Wz remain with torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.kernels import KERNELS
from pcdeq.solvers.solution import Problem, Solution, Solver

# Activations that the kernel knows, in the order of its enum; the adjoint equation is linear.
CODES = {
    name: code
    for code, name in enumerate(
        ("tanh", "softsign", "relu6", "sigmoid", "1-exp", "hard-tanh", "hard-sigmoid", "linear")
    )
}

# The kernel's struct sample_state: four floats, then four integers; all zero before the first step.
FIELDS, RELATIVE, STEPS = 8, 3, 4


def applies(problem: Problem) -> bool:
    """Whether the kernel can solve this problem."""
    pieces, start = problem.pieces, problem.start
    return (
        KERNELS is not None
        and pieces is not None
        and pieces.form in CODES
        and start.dtype == torch.float32
        and start.device.type == "cpu"
        and start.numel() > 0
        and not torch.is_grad_enabled()
        and (problem.box is None or isinstance(problem.box[0], float))
    )


def anderson(solver: Solver, decay: float, problem: Problem) -> Solution:
    """Solve by the kernel; `applies` must hold."""
    if problem.steps >= solver.max_steps:
        return solver.give_up(problem)
    pieces = problem.pieces
    assert pieces is not None and KERNELS is not None
    layout = dense_layout(problem.start)
    point = problem.start.clone(memory_format=layout)
    offset = pieces.offset.contiguous(memory_format=layout)
    slope = None if pieces.slope is None else pieces.slope.contiguous(memory_format=layout)
    best, residual = torch.empty_like(point), torch.empty_like(point)
    samples = point.shape[0]
    state = torch.zeros(samples, FIELDS, dtype=torch.int32)
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
