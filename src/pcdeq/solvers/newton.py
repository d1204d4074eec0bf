"""Monotone Newton iteration (T7), for small layers and high accuracy.

z - g(z) is order convex and its derivative I - J(z) an M-matrix near and above z*, so
u <- u - (I - J(u))⁻¹ (u - g(u)), started at an upper bound, falls to z* without leaving the upper
side, quadratically (Ortega & Rheinboldt 1970, chapter 13). It needs the matrix of J, one n x n
system per sample and step: at most a few thousand unknowns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pcdeq.errors import UsageError
from pcdeq.solvers.solution import Problem, Solution, Solver, per_sample


@dataclass(frozen=True, kw_only=True)
class Newton(Solver):
    """Newton's method from an upper bound; quadratic convergence, dense linear algebra.

    >>> import torch, pcdeq
    >>> layer = pcdeq.PcDEQLinear(4, solver=pcdeq.Newton(tol=1e-12)).double()
    >>> bool(layer.solve(torch.randn(2, 4).double()).converged.all())
    True
    """

    max_steps: int = 50

    def solve(self, problem: Problem) -> Solution:
        if problem.jacobian is None or problem.box is None:
            raise UsageError(
                "Newton needs a map whose Jacobian and bounds are known: a pcDEQ layer, forward; use Anderson or Picard"
            )
        z = torch.zeros_like(problem.first()) + problem.box[1]
        steps = torch.zeros(z.shape[:1], dtype=torch.int64, device=z.device)
        residual = torch.full(z.shape[:1], torch.inf, dtype=z.dtype, device=z.device)
        active = residual >= self.tol
        identity = torch.eye(z[0].numel(), dtype=z.dtype, device=z.device)
        value = z
        for _ in range(self.max_steps):
            if not bool(active.any()):
                break
            moving = per_sample(active, z)
            value = torch.where(moving, problem.fn(z), value)
            residual = torch.where(active, self.relative_residual(value - z, value), residual)
            steps += active
            active = active & (residual >= self.tol)
            excess = (z - value).flatten(1)
            change, _ = torch.linalg.solve_ex(identity - problem.jacobian(z), excess)
            # In exact arithmetic the step falls and stays above 0; g(z) is as good where rounding denies it.
            newton = z - change.reshape(z.shape)
            safe = (newton <= value) & (newton >= 0)
            z = torch.where(per_sample(active, z), torch.where(safe, newton, value), z)
        return self.finish(value, steps, residual)
