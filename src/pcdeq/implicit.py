"""An equilibrium with its gradient: the implicit one, which `pcdeq.derivatives` has, or a cheap variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from pcdeq.autograd import ReplacedGradient
from pcdeq.derivatives import EquilibriumFunction, TransformedEquilibriumFunction, Words, apply_without_backward, traced
from pcdeq.equation import Adjoint, Equation
from pcdeq.errors import UsageError
from pcdeq.operations import SOLVERS, AnySolver, is_traced, no_autocast, solve_adjoint, solve_equation
from pcdeq.operators import LinearMap
from pcdeq.parametrisation import is_transformed
from pcdeq.solvers import EachStats, Picard, SolveStats, run

Gradient = Literal["implicit", "phantom", "jacobian-free", "unrolled"]
GRADIENTS = get_args(Gradient)


class Plan(NamedTuple):
    """How an equilibrium and its gradient are found, in words and numbers.

    ``told`` hears, after the adjoint solve, how it went, and of which equilibria with which weight it was.
    """

    solver: AnySolver
    adjoint_solver: AnySolver
    gradient: Gradient
    gradient_steps: int
    told: Callable[[SolveStats, Tensor, LinearMap], None]


def equilibrium(equation: Equation, plan: Plan, guess: Tensor | None = None) -> tuple[Tensor, SolveStats | EachStats]:
    """The fixed point of z = s(Wz + x), differentiable with respect to x and the weight, and how the solve went."""
    recorded = torch.is_grad_enabled() or is_transformed()
    if plan.gradient == "unrolled" and recorded:
        return _unrolled(equation, plan)
    linear, x = equation.map, equation.x
    if _is_ours(equation, plan):
        weight = linear.weight
        if plan.gradient != "implicit":  # the other gradients begin where the solve ends
            x, weight = x.detach(), weight.detach()
        words = Words(linear.kind, equation.activation.name, plan.solver, plan.adjoint_solver, plan.told)  # pyright: ignore[reportArgumentType]
        if is_traced(x):
            z, *each = traced(x, weight, guess, words)
            stats = EachStats(*each)
        else:
            function = TransformedEquilibriumFunction if is_transformed() else EquilibriumFunction
            solve = function.apply if recorded else apply_without_backward
            z, summary = solve(x, weight, guess, words)  # pyright: ignore[reportGeneralTypeIssues]
            stats = SolveStats.of(summary, z)
    else:
        if is_transformed():
            raise UsageError(
                "a layer with an operator, activation or solver of your own takes part in torch.func and forward-mode "
                'AD only with gradient="unrolled"'
            )
        solution = solve_equation(equation, plan.solver, guess)
        z, stats = solution.value, solution.stats
        if plan.gradient == "implicit" and recorded:
            z = _with_gradient(equation, plan, z)
    if plan.gradient != "implicit" and recorded:
        for _ in range(1 if plan.gradient == "jacobian-free" else plan.gradient_steps):
            z = equation(z)
    return z, stats


def _is_ours(equation: Equation, plan: Plan) -> bool:
    """Whether tensors, words and numbers say it all: maps, activations and solvers of the package."""
    solvers = is_known_solver(plan.solver) and is_known_solver(plan.adjoint_solver)
    return solvers and equation.map.kind is not None and equation.activation.builtin


def is_known_solver(solver: AnySolver) -> bool:
    """Whether an operator of torch can be told of it."""
    return SOLVERS.get(type(solver).__name__) is type(solver)


def _unrolled(equation: Equation, plan: Plan) -> tuple[Tensor, SolveStats]:
    if any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ()):
        raise UsageError('vmap cannot differentiate a loop: use gradient="implicit", or give the layer a larger batch')
    solution = run(equation.problem(), Picard(tol=plan.solver.tol, max_steps=plan.solver.max_steps))
    return solution.value, solution.stats


def _with_gradient(equation: Equation, plan: Plan, z: Tensor) -> Tensor:
    """z with the implicit gradient, where parts of the equation are a user's own."""
    weight = equation.map.weight

    def gradients(grad: Tensor) -> tuple[Tensor, Tensor | None]:
        with no_autocast(grad.device.type):
            solution = solve_adjoint(Adjoint(equation.map, equation.slope(z), grad), plan.adjoint_solver)
            plan.told(solution.stats, z, equation.map)
            u = solution.value
            return u, equation.map.weight_gradient(z, u) if weight.requires_grad else None

    return ReplacedGradient.apply(z, gradients, equation.x, weight)  # pyright: ignore[reportReturnType]
