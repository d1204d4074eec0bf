"""The gradient of an equilibrium: the one autograd function of the package, and its cheap variants.

At z = s(Wz + x), with D = diag(s'(Wz + x)) and J = DW, the gradient v of a loss with respect to z
turns into D y with respect to x and D y zᵀ with respect to W, where y = Jᵀy + v. That linear equation
is solved by the same solvers; plain iteration converges because the spectral radius of J at z* is
below 1 (T5). Forward keeps z and the weight, nothing that grows with the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pcdeq import native
from pcdeq.equation import Equation, like
from pcdeq.errors import PcdeqError, UsageError
from pcdeq.operators import LinearMap
from pcdeq.proofs.gradient import adjoint_distance
from pcdeq.proofs.order import solve_certified, solve_to_bound
from pcdeq.rule import Rule
from pcdeq.solvers import Picard, Pieces, Problem, Solution, Solver, Weight, report
from pcdeq.warmstart import WarmStart


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Solve in full precision, whatever autocast the caller is in."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def solve_equation(equation: Equation, solver: Solver, warm: WarmStart | None = None) -> Solution:
    """Solve without recording a graph, by the rule that the solver names."""
    with torch.no_grad():
        if not equation.x.shape[0]:
            return Solution.empty(equation.x)
        if solver.stop == "batch":
            # The paper starts at 0 and returns one further application of g, which it does not count as a step.
            solution = solver.solve(equation.problem())
            return solution.with_value(equation(solution.value))
        guess = None if warm is None else warm.guess(equation)
        if solver.stop == "certified":
            return solve_certified(solver, equation, guess)
        if solver.stop == "decided":
            raise UsageError('stop="decided" needs a question: layer.solve(x, solver=..., decided=...)')
        return solver.solve(equation.problem(guess))


def equilibrium(x: Tensor, weight: Tensor, rule: Rule) -> Tensor:
    """The fixed point of z = s(Wz + x), differentiable with respect to x and the weight."""
    needs_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if needs_graph and rule.gradient == "implicit":
        return _Equilibrium.apply(x, rule, False, weight)  # pyright: ignore[reportReturnType]
    equation = rule.equation(x, weight)
    if needs_graph and rule.gradient == "unrolled":
        solution = Picard(tol=rule.solver.tol, max_steps=rule.solver.max_steps).solve(equation.problem())
        rule.record_forward(solution)
        return solution.value
    solution = solve_equation(equation, rule.solver, rule.warm)
    rule.record_forward(solution)
    z = solution.value
    if needs_graph:
        for _ in range(1 if rule.gradient == "jacobian-free" else rule.gradient_steps):
            z = equation(z)
    return z


def implicit_equilibrium(x: Tensor, rule: Rule, *raw: Tensor) -> Tensor:
    """The same from the input before the injection and the parameters that make up the weight, as one node."""
    return _Equilibrium.apply(x, rule, True, *raw)  # pyright: ignore[reportReturnType]


class _Equilibrium(torch.autograd.Function):
    """Solve forward, solve the adjoint backward.

    Where ``raw``, the injection of x and the weight's parametrisation are part of the node.
    """

    @staticmethod
    def forward(ctx, x: Tensor, rule: Rule, raw: bool, *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        slope = None
        ctx.native = raw and native.applies(rule, x, *parameters)
        if ctx.native:
            solution, weight = native.forward(rule, x, *parameters)
        else:
            injected = rule.injection_form.value(x, rule.floor) if raw else x
            weight = rule.weight_form.value(*parameters) if raw else parameters[0]
            equation = rule.equation(injected, weight)
            solution = solve_equation(equation, rule.solver, rule.warm)
            if rule.activation.slope_of_value is None:  # else it follows from z, and need not be stored
                slope = equation.slope(solution.value)
        rule.record_forward(solution)
        z = solution.value
        ctx.save_for_backward(z, weight, slope, x if raw else None, *(parameters if raw else ()))
        ctx.rule = rule
        return z

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        z, weight, slope, x, *parameters = ctx.saved_tensors
        rule: Rule = ctx.rule
        if ctx.native and native.applies_backward(rule, grad, z, weight, x, *parameters):
            solution, grad_x, grads = native.backward(rule, grad, z, weight, x, *parameters)
            rule.record_backward(solution)
            rule.observe(z, rule.activation.slope_of_value, rule.bind(weight))  # pyright: ignore[reportArgumentType]
            return grad_x, None, None, *grads
        with torch.no_grad(), no_autocast(grad.device.type):
            slope = rule.activation.slope_of_value(z) if slope is None else slope  # pyright: ignore[reportOptionalCall]
            linear = rule.bind(weight)
            solution = solve_adjoint(linear, slope, grad, rule.adjoint_solver, rule.warm)
            rule.record_backward(solution)
            # Not in forward, which a gradient checkpoint runs twice: its second run must equal the first.
            rule.observe(z, lambda _: slope, linear)
            grad_x, grads = solution.value, (None,) * max(1, len(parameters))
            if any(ctx.needs_input_grad[3:]):
                grads = (linear.weight_gradient(z, grad_x),)
                if parameters:
                    grads = rule.weight_form.gradients(*parameters, *grads)
            if x is not None:
                grad_x = rule.injection_form.gradient(x, grad_x) if ctx.needs_input_grad[0] else None
        grad_x, *grads = once((grad_x, *grads), z)
        return grad_x, None, None, *grads


def solve_adjoint(
    linear: LinearMap, slope: Tensor, grad: Tensor, solver: Solver, warm: WarmStart | None = None
) -> Solution:
    """u = D y for the solution of y = Jᵀy + grad, that is u = D(Wᵀu + grad), D = diag(slope).

    In u the equation has the form of the forward one, and u itself is the gradient wanted. Under the
    paper's rule the residual is that of y, started at grad.
    """

    def pull(y: Tensor) -> Tensor:
        return like(y, linear.adjoint(y))

    if not grad.shape[0]:
        return Solution.empty(grad)
    if solver.stop == "batch":
        solution = solver.solve(Problem(lambda y: pull(slope * y) + grad, start=grad))
        return solution.with_value(slope * solution.value)
    guess = None if warm is None else warm.adjoint(grad)
    weight = None if linear.native is None else Weight(linear.native, linear.weight, transposed=True)
    pieces = Pieces(pull, lambda y: slope * y, grad, "linear", slope, guess, weight)
    problem = Problem(lambda u: slope * (pull(u) + grad), pieces=pieces)
    if solver.stop == "certified":
        return solve_to_bound(solver, problem, lambda u: adjoint_distance(linear, slope, grad, u))
    return solver.solve(problem)


def once(grads: tuple[Tensor | None, ...], *sources: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients, which say, if anybody differentiates them in turn, that there is no second derivative."""
    if not torch.is_grad_enabled():
        return grads
    return tuple(_NoSecondDerivative.apply(grad, *sources) for grad in grads)  # pyright: ignore[reportReturnType]


class _NoSecondDerivative(torch.autograd.Function):
    """The identity of its first argument, whose gradient says that there is none."""

    @staticmethod
    def forward(ctx, value: Tensor | None, *sources: Tensor) -> Tensor | None:
        return None if value is None else value.view_as(value)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise PcdeqError('no second derivative with gradient="implicit"; build the layer with gradient="unrolled"')


def fixed_point(
    fn: Callable[..., Tensor],
    z0: Tensor,
    *params: Tensor,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
) -> Tensor:
    """The fixed point ``z = fn(z, *params)`` of any map of yours, with the implicit gradient.

    Gradients reach ``params`` and every tensor that ``fn`` closes over. Dimension 0 of ``z0`` counts
    samples that do not influence each other, unless ``z0`` is a vector. About a map of unknown structure
    nothing is promised: if the solver does not converge, it says so.

    >>> import torch, pcdeq
    >>> a = torch.tensor([0.5], requires_grad=True)
    >>> z = pcdeq.fixed_point(lambda z: torch.cos(a * z), torch.zeros(1), solver=pcdeq.Picard(tol=1e-6))
    >>> round(z.item(), 4), a.grad is None
    (0.9004, True)
    >>> z.backward(); round(a.grad.item(), 4)
    -0.3218
    """
    if not z0.is_floating_point():
        raise UsageError(f"z0 must be a floating point tensor, got {z0.dtype}")
    solver = Picard() if solver is None else solver
    adjoint_solver = solver if adjoint_solver is None else adjoint_solver
    for given in (solver, adjoint_solver):
        if not isinstance(given, Solver):
            raise UsageError(f"a solver is Picard(...) or Anderson(...), got {given!r}")
    if {"certified", "decided"} & {solver.stop, adjoint_solver.stop}:
        raise UsageError('stop="certified" and "decided" need the structure of a pcDEQ layer; use "sample" or "batch"')
    lift = (1, z0.numel()) if z0.ndim < 2 else tuple(z0.shape)
    if not z0.numel():
        return z0.detach()
    kind = z0.device.type
    autocast = {
        "device_type": kind, "enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)
    }  # fmt: skip

    def evaluate(z: Tensor) -> Tensor:
        result = fn(z.reshape(z0.shape), *params)
        if result.shape != z0.shape:
            raise UsageError(f"fn maps shape {tuple(z0.shape)} to {tuple(result.shape)}; it must keep the shape")
        return result.reshape(lift)

    with torch.no_grad():
        solution = solver.solve(Problem(evaluate, start=z0.detach().reshape(lift)))
    report(solution, solver, "forward")
    value = evaluate(solution.value.detach())
    if not value.requires_grad:
        return solution.value.reshape(z0.shape)

    def adjoint(grad: Tensor) -> Tensor:
        # The map is evaluated again, as in gradient checkpointing, so that no second graph is kept.
        point = solution.value.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**autocast):
            mapped = evaluate(point)

        def step(y: Tensor) -> Tensor:
            (pulled,) = torch.autograd.grad(mapped, point, y, retain_graph=True, materialize_grads=True)
            return pulled + grad

        result = adjoint_solver.solve(Problem(step, start=grad))
        report(result, adjoint_solver, "backward")
        return result.value

    return attach_gradient(value, value, adjoint).reshape(z0.shape)


def attach_gradient(source: Tensor, value: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """``value``, whose gradient, after ``adjoint``, goes where that of ``source`` would."""
    return _ReplaceGradient.apply(source, value.detach(), adjoint)  # pyright: ignore[reportReturnType]


class _ReplaceGradient(torch.autograd.Function):
    """Its second argument, whose gradient goes to the first, transformed by a given function."""

    @staticmethod
    def forward(ctx, source: Tensor, value: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.transform = transform
        ctx.save_for_backward(source)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            result = ctx.transform(grad)
        return *once((result,), *ctx.saved_tensors), None, None
