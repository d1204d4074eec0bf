"""The gradient of an equilibrium: the one autograd function for them, and its cheap variants.

At z = s(Wz + x), with D = diag(s'(Wz + x)) and J = DW, the gradient v of a loss with respect to z
turns into u = D y with respect to x and u zᵀ with respect to W, where y = Jᵀy + v. In u that is u = D(Wᵀu + v), of the
same form as the equation itself, and solved by the same loop; plain iteration converges because the spectral radius of
J at z* is below 1 (T5). Forward keeps z and the weight, nothing that grows with the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pcdeq.activations import ACTIVATIONS
from pcdeq.autograd import ReplacedGradient, once
from pcdeq.equation import Adjoint, Equation
from pcdeq.errors import UsageError
from pcdeq.operators import MAPS, LinearMap
from pcdeq.proofs.certified import Certified
from pcdeq.solvers import Anderson, Newton, Picard, Solution, Solver, SolveStats, Summary, run

Gradient = Literal["implicit", "phantom", "jacobian-free", "unrolled"]
GRADIENTS = get_args(Gradient)
AnySolver = Solver | Certified


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Solve in full precision, whatever autocast the caller is in."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class Plan(NamedTuple):
    """How an equilibrium and its gradient are found, in words and numbers.

    ``told`` hears, after the adjoint solve, how it went, and of which equilibria with which weight it was.
    """

    solver: AnySolver
    adjoint_solver: AnySolver
    gradient: Gradient
    gradient_steps: int
    told: Callable[[SolveStats, Tensor, LinearMap], None]


@torch.no_grad()
def solve_equation(equation: Equation, solver: AnySolver, guess: Tensor | None = None) -> Solution:
    """Solve without recording a graph, by the rule that the solver names; the guess is of Wz*."""
    if isinstance(solver, Certified):
        return solver.solve(equation, guess)
    if solver.stop == "batch":
        # The paper starts at 0 and returns one further application of g, which it does not count as a step.
        solution = run(equation.problem(), solver)
        return solution.with_value(equation(solution.value))
    return run(equation.problem(guess), solver)


@torch.no_grad()
def solve_adjoint(adjoint: Adjoint, solver: AnySolver) -> Solution:
    """The u of the adjoint equation; under the paper's rule the residual is that of y, where u = D y."""
    if isinstance(solver, Solver) and solver.stop == "batch":
        solution = run(adjoint.papers_problem(), solver)
        return solution.with_value(adjoint.slope * solution.value)
    scaled, factor = adjoint.scaled()
    solution = solver.solve_adjoint(scaled) if isinstance(solver, Certified) else run(scaled.problem(), solver)
    return solution.with_value(solution.value * factor)


def equilibrium(equation: Equation, plan: Plan, guess: Tensor | None = None) -> tuple[Tensor, SolveStats]:
    """The fixed point of z = s(Wz + x), differentiable with respect to x and the weight, and how the solve went."""
    if plan.gradient == "implicit" and _is_ours(equation, plan):
        linear, name = equation.map, equation.activation.name
        z, summary = _Equilibrium.apply(equation.x, linear.weight, guess, linear.kind, name, plan)  # pyright: ignore[reportGeneralTypeIssues]
        return z, SolveStats.of(summary, z)
    if plan.gradient == "unrolled" and torch.is_grad_enabled():
        solution = run(equation.problem(), Picard(tol=plan.solver.tol, max_steps=plan.solver.max_steps))
        return solution.value, solution.stats
    solution = solve_equation(equation, plan.solver, guess)
    z = solution.value
    if not torch.is_grad_enabled():
        return z, solution.stats
    if plan.gradient == "implicit":
        return _with_gradient(equation, plan, z), solution.stats
    for _ in range(1 if plan.gradient == "jacobian-free" else plan.gradient_steps):
        z = equation(z)
    return z, solution.stats


def _is_ours(equation: Equation, plan: Plan) -> bool:
    """Whether tensors, words and numbers say it all: maps, activations and solvers of the package."""
    known = (Anderson, Picard, Newton)
    solvers = type(plan.solver) in known and type(plan.adjoint_solver) in known
    return solvers and equation.map.kind is not None and equation.activation.builtin


class _Equilibrium(torch.autograd.Function):
    """Solve forward, solve the adjoint backward: functions of tensors, words and numbers, which say what to build."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, weight: Tensor, guess: Tensor | None, kind: str, activation: str, plan: Plan
    ) -> tuple[Tensor, Summary]:
        equation = Equation(MAPS[kind](weight), ACTIVATIONS[activation], x)
        solution = solve_equation(equation, plan.solver, guess)
        ctx.save_for_backward(solution.value, weight)
        ctx.kind, ctx.activation, ctx.plan, ctx.weight_shape = kind, activation, plan, weight.shape
        return solution.value, solution.summary

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        z, weight = ctx.saved_tensors
        if z.shape != grad.shape or weight.shape != ctx.weight_shape or not z.dtype == weight.dtype == grad.dtype:
            raise UsageError("a hook for saved tensors gave back a tensor of another shape or dtype than it was given")
        with torch.no_grad(), no_autocast(grad.device.type):
            linear, slope = MAPS[ctx.kind](weight), ACTIVATIONS[ctx.activation].slope_of_value(z)  # pyright: ignore[reportOptionalCall]
            solution = solve_adjoint(Adjoint(linear, slope, grad), ctx.plan.adjoint_solver)
            # Not in forward, which a gradient checkpoint runs twice: its second run must equal the first.
            ctx.plan.told(solution.stats, z, linear)
            grad_weight = linear.weight_gradient(z, solution.value) if ctx.needs_input_grad[1] else None
        return *once((solution.value, grad_weight), z), None, None, None, None


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
