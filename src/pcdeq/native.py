"""A small dense layer in two calls of C: forward and backward.

Same numbers as the general way of implicit.py, which remains the reference; but there the calls of a layer of 80 units,
twenty of them, take longer than its arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.injection import BETA, Softplus
from pcdeq.kernels import KERNELS
from pcdeq.rule import Rule
from pcdeq.solvers import Anderson, Solution, Solver, fused

# Above so many numbers a batch, calls do not matter, and a matrix product of torch is better for the weight's gradient.
LARGEST_BATCH = 65_536


def applies(rule: Rule, x: Tensor, *parameters: Tensor) -> bool:
    """Whether the kernel can make the forward pass, from the input before the injection and the weight's parameters."""
    return len(parameters) == 2 and solves(rule, x, parameters[0]) and _is_plain(parameters[1])  # with weight norm


def solves(rule: Rule, x: Tensor, weight: Tensor) -> bool:
    """The same with the weight itself given."""
    return (
        KERNELS is not None
        and rule.dense
        and rule.activation.builtin
        and rule.activation.name in fused.CODES
        and _is_usual(rule.solver)
        and 0 < x.numel() <= LARGEST_BATCH
        and x.shape[1] <= fused.LARGEST_DENSE
        and _is_plain(x)
        and _is_plain(weight)
        and (rule.warm is None or rule.warm.product.dtype == torch.float32)
    )


def applies_backward(rule: Rule, grad: Tensor) -> bool:
    """Whether it can go back, too, where it has made the forward pass."""
    return (
        _is_usual(rule.adjoint_solver)
        and grad.dtype == torch.float32
        and not torch.is_grad_enabled()  # for a graph of the gradient, which must say that there is none
        and not torch.is_autocast_enabled("cpu")
    )


def _is_usual(solver: Solver) -> bool:
    return isinstance(solver, Anderson) and solver.can_be_fused and solver.max_steps > 1


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()


def forward(rule: Rule, x: Tensor, v: Tensor, g: Tensor) -> tuple[Solution, Tensor]:
    """The solution and the weight in use."""
    weight = torch.empty_like(v)
    return _solve(rule, x, weight, (v.data_ptr(), g.data_ptr())), weight


def solve(rule: Rule, x: Tensor, weight: Tensor) -> Solution:
    """The solution with this weight."""
    return _solve(rule, x, weight, (0, 0))


def _solve(rule: Rule, x: Tensor, weight: Tensor, parameters: tuple[int, int]) -> Solution:
    """The solution; the weight is made of the parameters at these addresses, or it is there already."""
    assert KERNELS is not None and isinstance(rule.solver, Anderson)
    samples, features = x.shape
    z, record = torch.empty_like(x), fused.Record.empty(samples)
    base, mean, _, response = _learned(rule, x)
    summary = KERNELS.dense_forward(
        samples,
        features,
        (x.data_ptr(), *parameters, base, mean, response),
        (weight.data_ptr(), z.data_ptr(), *record.addresses()),
        fused.CODES[rule.activation.name],
        _beta(rule),
        rule.floor,
        rule.solver.tol,
        rule.solver.decay,
        rule.activation.supremum,
        rule.solver.max_steps,
        fused.threads(samples * weight.numel()),
    )
    return fused.solution(rule.solver, z, record, summary)


def backward(
    rule: Rule, grad: Tensor, z: Tensor, weight: Tensor, x: Tensor, v: Tensor, g: Tensor
) -> tuple[Solution, Tensor, tuple[Tensor, Tensor]]:
    """How the adjoint solve went, the gradient with respect to x, and those with respect to v and g."""
    assert KERNELS is not None and isinstance(rule.adjoint_solver, Anderson)
    samples, features = x.shape
    grad_x, grad_v, grad_g = torch.empty_like(x), torch.empty_like(v), torch.empty_like(g)
    record = fused.Record.empty(samples)
    _, _, slope, response = _learned(rule, x)
    # What was saved may have passed through hooks of the user's.
    inputs = [tensor.contiguous() for tensor in (x, v, g, weight, z, grad)]
    summary = KERNELS.dense_backward(
        samples,
        features,
        (*(tensor.data_ptr() for tensor in inputs), slope, response),
        (grad_x.data_ptr(), grad_v.data_ptr(), grad_g.data_ptr(), *record.addresses()),
        fused.CODES[rule.activation.name],
        _beta(rule),
        rule.adjoint_solver.tol,
        rule.adjoint_solver.decay,
        rule.adjoint_solver.max_steps,
        fused.threads(samples * v.numel()),
    )
    return fused.solution(rule.adjoint_solver, grad_x, record, summary), grad_x, (grad_v, grad_g)


def _learned(rule: Rule, x: Tensor) -> tuple[int, ...]:
    """Where that lies in memory which a warm start goes by, 0 for what there is not."""
    known = () if rule.warm is None else rule.warm.learned(x.shape[1:], torch.float32)
    return (*(buffer.data_ptr() for buffer in known), 0, 0, 0, 0)[:4]


def _beta(rule: Rule) -> float:
    return BETA if rule.injection_form is Softplus else 0.0
