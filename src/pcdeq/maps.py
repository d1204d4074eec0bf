"""The fixed point of any map of yours, with the implicit gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pcdeq.autograd import attach_gradient
from pcdeq.errors import UsageError
from pcdeq.proofs.certified import Certified
from pcdeq.solvers import Picard, Problem, Solver, report, run
from pcdeq.solvers.solver import require_solver


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
    for name, given in (("solver", solver), ("adjoint_solver", adjoint_solver)):
        if isinstance(given, Certified):
            raise UsageError("Certified needs the structure of a pcDEQ layer; give fixed_point the solver itself")
        require_solver(given, name)
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
        solution = run(Problem(evaluate, z0.detach().reshape(lift)), solver)
    report(solution.stats, solver, "forward")
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

        result = run(Problem(step, grad), adjoint_solver)
        report(result.stats, adjoint_solver, "backward")
        return result.value

    return attach_gradient(value, value, adjoint).reshape(z0.shape)
