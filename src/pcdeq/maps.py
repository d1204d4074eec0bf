"""The fixed point of any map of yours, with the implicit gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pcdeq.autograd import attach_gradient
from pcdeq.errors import UsageError
from pcdeq.proofs.certified import Certified
from pcdeq.solvers import Picard, Problem, Solver, report, run
from pcdeq.solvers.solver import require_solver
from pcdeq.trees import Packing

Tree = TypeVar("Tree")  # a tensor, or a tuple, list or dict of trees


def fixed_point(
    fn: Callable[..., Tree],
    z0: Tree,
    *params: Any,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
) -> Tree:
    """The fixed point ``z = fn(z, *params)`` of any map of yours, with the implicit gradient.

    z0 is a tensor, or a tuple, list or dict of tensors, nested as you like; so is z, with the same shapes and dtypes.
    Gradients reach ``params`` and every tensor that ``fn`` closes over; what is kept for them is one evaluation of
    ``fn``, whatever the number of steps. Dimension 0 counts samples that do not influence each other, each stopped on
    its own residual, if all tensors of z0 share it and they are not just vectors; if yours do influence each other,
    use a solver with ``stop="batch"``. A sample's residual is that of all its tensors together. About a map of
    unknown structure nothing is promised: if the solver does not converge, it says so.

    >>> import torch, pcdeq
    >>> a = torch.tensor([0.5], requires_grad=True)
    >>> z = pcdeq.fixed_point(lambda z: torch.cos(a * z), torch.zeros(1), solver=pcdeq.Picard(tol=1e-6))
    >>> round(z.item(), 4), a.grad is None
    (0.9004, True)
    >>> z.backward(); round(a.grad.item(), 4)
    -0.3218

    Two variables:

    >>> def step(z):
    ...     return {"x": torch.cos(z["y"]), "y": torch.sin(z["x"])}
    >>> z = pcdeq.fixed_point(step, {"x": torch.zeros(2), "y": torch.zeros(2)}, solver=pcdeq.Picard(tol=1e-6))
    >>> z["x"], z["y"]
    (tensor([0.7682, 0.7682]), tensor([0.6948, 0.6948]))
    """
    solver = Picard() if solver is None else solver
    adjoint_solver = solver if adjoint_solver is None else adjoint_solver
    for name, given in (("solver", solver), ("adjoint_solver", adjoint_solver)):
        if isinstance(given, Certified):
            raise UsageError(f"{name}: Certified needs a map of known structure, a layer or a pcdeq.ConcaveMap")
        require_solver(given, name)
    packing = Packing(z0, "z0")
    start = packing.pack(z0, "z0").detach()
    if not start.numel():
        return packing.unpack(start)
    kind = packing.device
    autocast = {
        "device_type": kind, "enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)
    }  # fmt: skip

    def evaluate(z: Tensor) -> Tensor:
        return packing.pack(fn(packing.unpack(z), *params), "fn")

    with torch.no_grad():
        solution = run(Problem(evaluate, start), solver)
    report(solution.stats, solver, "forward")

    def solve_adjoint(grad: Tensor) -> Tensor:
        # The map is evaluated again, as in gradient checkpointing, so that no second graph is kept.
        point = solution.value.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**autocast):
            mapped = evaluate(point)

        def step(y: Tensor) -> Tensor:
            (pulled,) = torch.autograd.grad(mapped, point, y, retain_graph=True, materialize_grads=True)
            return pulled + grad

        result = run(Problem(step, grad), adjoint_solver)
        report(result.stats, adjoint_solver, "backward")
        return result.value

    return packing.unpack(implicit_gradient(evaluate, solution.value, solve_adjoint))


def implicit_gradient(
    evaluate: Callable[[Tensor], Tensor], z: Tensor, solve_adjoint: Callable[[Tensor], Tensor]
) -> Tensor:
    """A solution z = evaluate(z) with the gradient that the adjoint solution takes to whatever the map depends on."""
    value = evaluate(z.detach())
    return attach_gradient(value, value, solve_adjoint) if value.requires_grad else z
