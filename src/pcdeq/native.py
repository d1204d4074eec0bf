"""A small dense layer in two calls of C: forward and backward.

Same numbers as the general way of implicit.py, which remains the reference; but there the calls of a layer of 80 units,
twenty of them, take longer than its arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.injection import BETA, Softplus
from pcdeq.kernels import KERNELS, in_memory, is_plain
from pcdeq.rule import Rule
from pcdeq.solvers import Anderson, Solution, Solver, fused

# Above so many numbers a batch, calls do not matter, and a matrix product of torch is better for the weight's gradient.
LARGEST_BATCH = 65_536


def applies(rule: Rule, x: Tensor, *parameters: Tensor) -> bool:
    """Whether the kernel can make the forward pass, from the input before the injection and the weight's parameters."""
    if len(parameters) != 2:  # without weight norm
        return False
    v, g = parameters
    return solves(rule, x, v) and is_plain(g) and g.numel() == v.shape[0]


def solves(rule: Rule, x: Tensor, weight: Tensor) -> bool:
    """Whether it can solve for the input before the injection and a weight like this."""
    return (
        KERNELS is not None
        and rule.dense
        and rule.activation.builtin
        and rule.activation.name in fused.CODES
        and is_usual(rule.solver)
        and is_plain(x)
        and 0 < x.numel() <= LARGEST_BATCH
        and is_plain(weight)
        and weight.shape == (x.shape[1], x.shape[1])
        and len(weight) <= fused.LARGEST_DENSE
    )


def applies_backward(rule: Rule, grad: Tensor, z: Tensor, weight: Tensor, x: Tensor, v: Tensor, g: Tensor) -> bool:
    """Whether it can go back, too, where it has made the forward pass."""
    return (
        is_usual(rule.adjoint_solver)
        and in_memory(grad)
        # Hooks for saved tensors may give back others than they were given.
        and all(map(is_plain, (z, weight, x, v, g)))
        and z.shape == x.shape
        and weight.shape == v.shape
        and not torch.is_grad_enabled()  # with create_graph the general way says that there is no second derivative
        and not torch.is_autocast_enabled("cpu")
    )


def is_usual(solver: Solver) -> bool:
    """Whether it is the one that the kernel has."""
    return isinstance(solver, Anderson) and solver.can_be_fused and solver.max_steps > 1


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
        (x.data_ptr(), *parameters, _address(base), _address(mean), _address(response)),
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
    """How the adjoint solve went, the gradient with respect to x, and those with respect to v and g.

    The first has the second as its value: u itself, before the injection's slope, stays in C.
    """
    assert KERNELS is not None and isinstance(rule.adjoint_solver, Anderson)
    samples, features = x.shape
    grad_x, grad_v, grad_g = torch.empty_like(x), torch.empty_like(v), torch.empty_like(g)
    record = fused.Record.empty(samples)
    _, _, slope, response = _learned(rule, x)
    inputs = (x, v, g, weight, z, grad.contiguous(), slope, response)
    summary = KERNELS.dense_backward(
        samples,
        features,
        tuple(map(_address, inputs)),
        (grad_x.data_ptr(), grad_v.data_ptr(), grad_g.data_ptr(), *record.addresses()),
        fused.CODES[rule.activation.name],
        _beta(rule),
        rule.adjoint_solver.tol,
        rule.adjoint_solver.decay,
        rule.adjoint_solver.max_steps,
        fused.threads(samples * v.numel()),
    )
    return fused.solution(rule.adjoint_solver, grad_x, record, summary), grad_x, (grad_v, grad_g)


def _learned(rule: Rule, x: Tensor) -> tuple[Tensor | None, ...]:
    """What a warm start goes by: means of Wz*, of z* and of its slope, and the response; None for what there is not."""
    known = () if rule.warm is None else rule.warm.learned(x.shape[1:], torch.float32)
    return (*(known if all(map(is_plain, known)) else ()), None, None, None, None)[:4]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _beta(rule: Rule) -> float:
    return BETA if rule.injection_form is Softplus else 0.0
