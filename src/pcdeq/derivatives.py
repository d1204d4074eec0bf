"""Derivatives of an equilibrium, of every kind that torch asks for: backward, forward, of each other, of batches.

At z = s(Wz + x), with D = diag(s'(Wz + x)), a gradient v with respect to z turns into u with respect to x and u zᵀ with
respect to W, where u = D(Wᵀu + v), of the same form as the equation itself, and solved by the same loop; plain
iteration converges because the spectral radius of DW at z* is below 1 (T5). Forward keeps z and the weight, nothing
that grows with the number of steps. Write u = L(W, D, v); then tangents go the same way through the transposed weight,

    ż = L(Wᵀ, D, Ẇz + ẋ),

and L leads only to itself: with y = Wᵀu + v, so that u = Dy, and q = L(Wᵀ, D, ū) for a gradient ū with respect to u,

    W, D and v have the gradients u qᵀ, y (Wq + ū) and q,    u̇ = Ḋy + L(W, D, v̇ + Ẇᵀu + Wᵀ(Ḋy)).

Each is an autograd function in two forms. The first is torch's oldest and quickest. The second, which costs 13 µs more
a call, is for `torch.func` and forward-mode AD only. A batch of inputs is a larger batch; where weights differ, the
members are solved one after the other. The operators for compilers share setup and backward with both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from pcdeq.activations import ACTIVATIONS
from pcdeq.equation import Adjoint, Equation
from pcdeq.errors import UsageError
from pcdeq.operations import (
    AnySolver,
    equilibrium_operator,
    from_words,
    in_words,
    is_traced,
    linear_operator,
    no_autocast,
    solve_adjoint,
    solve_equation,
)
from pcdeq.operators import MAPS, LinearMap
from pcdeq.parametrisation import is_transformed
from pcdeq.solvers import Solver, SolveStats, Summary

Told = Callable[[SolveStats, Tensor, LinearMap], None]


class Words(NamedTuple):
    """What is to be solved and how, beside the tensors.

    ``told`` hears, after the adjoint solve, how it went, and of which equilibria with which weight it was.
    """

    kind: str
    activation: str
    solver: Solver
    adjoint_solver: Solver
    told: Told | None


def linear(weight: Tensor, slope: Tensor, grad: Tensor, kind: str, solver: AnySolver) -> tuple[Tensor, Summary | None]:
    """The u of u = D(Wᵀu + v), and how the solve went, unless it was only written down."""
    if is_traced(grad) or is_legacy_batchedtensor(grad):  # which torch itself takes apart, for an operator
        return linear_operator(weight, slope, grad, kind, *in_words(solver))[0], None  # pyright: ignore[reportArgumentType]
    if is_transformed():
        return _TransformedLinear.apply(weight, slope, grad, kind, solver)  # pyright: ignore[reportReturnType]
    if torch.is_grad_enabled():
        return _Linear.apply(weight, slope, grad, kind, solver)  # pyright: ignore[reportReturnType]
    solution = solve_adjoint(Adjoint(MAPS[kind](weight), slope, grad), solver)
    return solution.value, solution.summary


class EquilibriumFunction(torch.autograd.Function):
    """Solve forward, solve the adjoint backward: functions of tensors, words and numbers, which say what to build."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, guess: Tensor | None, words: Words) -> tuple[Tensor, Summary]:  # pyright: ignore[reportIncompatibleMethodOverride]
        equation = Equation(MAPS[words.kind](weight), ACTIVATIONS[words.activation], x)
        solution = solve_equation(equation, words.solver, guess)
        _keep(ctx, solution.value, weight, words)
        return solution.value, solution.summary

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return *_pull_back(ctx, grad), None, None


class _NoBackward:
    """What a function keeps for its backward pass, where there is none: nothing."""

    def __setattr__(self, name: str, value: object) -> None: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


# The same without torch's own part of it, which takes as long as a third of a step of a small dense layer.
apply_without_backward = partial(EquilibriumFunction.forward, _NoBackward())


def _keep(ctx: Any, z: Tensor, weight: Tensor, words: Words) -> None:
    ctx.save_for_backward(z, weight)
    ctx.words, ctx.weight_shape = words, weight.shape


def _pull_back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients of the input and the weight."""
    (z, weight), words = ctx.saved_tensors, ctx.words
    if z.shape != grad.shape or weight.shape != ctx.weight_shape or not z.dtype == weight.dtype == grad.dtype:
        raise UsageError("a hook for saved tensors gave back a tensor of another shape or dtype than it was given")
    with no_autocast(grad.device.type):
        slope = ACTIVATIONS[words.activation].slope_of_value(z)  # pyright: ignore[reportOptionalCall]
        u, summary = linear(weight, slope, grad, words.kind, words.adjoint_solver)
        map_ = MAPS[words.kind](weight)
        # Not in forward, which a gradient checkpoint runs twice: its second run must equal the first.
        if summary is not None and words.told is not None:
            words.told(SolveStats.of(summary, u), z, map_)
        return u, map_.weight_gradient(z, u) if ctx.needs_input_grad[1] else None


class TransformedEquilibriumFunction(EquilibriumFunction):
    """The same for `torch.func` and forward-mode AD."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, guess: Tensor | None, words: Words) -> tuple[Tensor, Summary]:  # pyright: ignore[reportIncompatibleMethodOverride]
        equation = Equation(MAPS[words.kind](weight), ACTIVATIONS[words.activation], x)
        solution = solve_equation(equation, words.solver, guess)
        return solution.value, solution.summary

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Summary]) -> None:
        _, weight, _, words = inputs
        _keep(ctx, output[0], weight, words)
        ctx.save_for_forward(output[0], weight)

    @staticmethod
    def jvp(ctx, x: Tensor | None, weight: Tensor | None, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        (z, at), words = ctx.saved_tensors, ctx.words
        offset = torch.zeros_like(z) if x is None else x
        if weight is not None:
            offset = offset + MAPS[words.kind](weight).apply(z)
        slope = ACTIVATIONS[words.activation].slope_of_value(z)  # pyright: ignore[reportOptionalCall]
        return linear(MAPS[words.kind](at).transposed(), slope, offset, words.kind, words.adjoint_solver)[0], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        function = TransformedEquilibriumFunction if is_transformed() else EquilibriumFunction
        return _over_batch(function.apply, info.batch_size, in_dims, args, samples=(0,), solver=args[3].solver)


class _Linear(torch.autograd.Function):
    """u = D(Wᵀu + v), of weight, slope and v."""

    @staticmethod
    def forward(ctx, weight: Tensor, slope: Tensor, grad: Tensor, kind: str, solver: Solver) -> tuple[Tensor, Summary]:  # pyright: ignore[reportIncompatibleMethodOverride]
        solution = solve_adjoint(Adjoint(MAPS[kind](weight), slope, grad), solver)
        _keep_linear(ctx, weight, slope, grad, solution.value, kind, solver)
        return solution.value, solution.summary

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return *_pull_back_linear(ctx, grad), None, None


def _keep_linear(ctx: Any, weight: Tensor, slope: Tensor, grad: Tensor, u: Tensor, kind: str, solver: Solver) -> None:
    ctx.save_for_backward(weight, slope, grad, u)
    ctx.kind, ctx.solver = kind, solver


def _pull_back_linear(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weight, slope, v, u = ctx.saved_tensors
    with no_autocast(grad.device.type):
        map_ = MAPS[ctx.kind](weight)
        transposed = map_.transposed()
        q, _ = linear(transposed, slope, grad, ctx.kind, ctx.solver)
        y = MAPS[ctx.kind](transposed).apply(u) + v
        return map_.weight_gradient(q, u), y * (map_.apply(q) + grad), q


class _TransformedLinear(_Linear):
    """The same for `torch.func` and forward-mode AD."""

    @staticmethod
    def forward(weight: Tensor, slope: Tensor, grad: Tensor, kind: str, solver: Solver) -> tuple[Tensor, Summary]:  # pyright: ignore[reportIncompatibleMethodOverride]
        solution = solve_adjoint(Adjoint(MAPS[kind](weight), slope, grad), solver)
        return solution.value, solution.summary

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Summary]) -> None:
        weight, slope, grad, kind, solver = inputs
        _keep_linear(ctx, weight, slope, grad, output[0], kind, solver)
        ctx.save_for_forward(weight, slope, grad, output[0])

    @staticmethod
    def jvp(ctx, weight: Tensor | None, slope: Tensor | None, grad: Tensor | None, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        at, slope_at, v, u = ctx.saved_tensors
        transposed = MAPS[ctx.kind](MAPS[ctx.kind](at).transposed())
        offset = torch.zeros_like(v) if grad is None else grad
        moved = torch.zeros_like(v) if slope is None else slope * (transposed.apply(u) + v)
        offset = offset + transposed.apply(moved)
        if weight is not None:
            offset = offset + MAPS[ctx.kind](MAPS[ctx.kind](weight).transposed()).apply(u)
        return moved + linear(at, slope_at, offset, ctx.kind, ctx.solver)[0], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return _over_batch(linear, info.batch_size, in_dims, args, samples=(1, 2), solver=args[4])


def _over_batch(
    solve: Callable[..., tuple[Tensor, Any]],
    size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
    *,
    samples: tuple[int, ...],
    solver: Solver,
) -> tuple[tuple[Tensor, Summary], tuple[int, None]]:
    """A batch of batches: one larger batch where all share the rest and samples stop on their own, else one by one.

    ``samples`` says which arguments have samples along dimension 0.
    """
    in_dims = tuple(dim if isinstance(dim, int) else None for dim in in_dims)  # words have one for each
    shared = all(dim is None for place, dim in enumerate(in_dims) if place not in samples)
    if shared and solver.stop == "sample":
        spread = list(args)
        for place in samples:
            given, dim = args[place], in_dims[place]
            spread[place] = given.movedim(dim, 0) if dim is not None else given.expand(size, *given.shape)
        shape = spread[samples[0]].shape[:2]
        for place in samples:
            spread[place] = spread[place].flatten(0, 1)
        value, summary = solve(*spread)
        return (value.unflatten(0, shape), summary), (0, None)
    members = [
        solve(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    unconverged, steps, residual = zip(*(summary for _, summary in members), strict=True)
    worst = Summary(sum(unconverged), max(steps), max(residual))
    return (torch.stack([value for value, _ in members]), worst), (0, None)


# The operators for compilers.


def _setup_equilibrium(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, kind, activation, solver, options, adjoint_solver, adjoint_options = inputs
    words = Words(kind, activation, from_words(solver, options), from_words(adjoint_solver, adjoint_options), None)
    _keep(ctx, output[0], weight, words)
    ctx.mark_non_differentiable(*output[1:])


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    weight, slope, grad, kind, solver, options = inputs
    _keep_linear(ctx, weight, slope, grad, output[0], kind, from_words(solver, options))
    ctx.mark_non_differentiable(*output[1:])


equilibrium_operator.register_autograd(
    lambda ctx, grad, *_: (*_pull_back(ctx, grad), *[None] * 7), setup_context=_setup_equilibrium
)
linear_operator.register_autograd(
    lambda ctx, grad, *_: (*_pull_back_linear(ctx, grad), None, None, None), setup_context=_setup_linear
)


def traced(x: Tensor, weight: Tensor, guess: Tensor | None, words: Words) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The equilibrium as one operator in a graph, and of each sample its steps, its residual, if it converged."""
    solver, adjoint_solver = in_words(words.solver), in_words(words.adjoint_solver)
    return equilibrium_operator(x, weight, guess, words.kind, words.activation, *solver, *adjoint_solver)
