"""Monotone Newton iteration (T7), for small layers and high accuracy.

z - g(z) is order convex and its derivative I - J(z) an M-matrix near and above z*, so
u <- u - (I - J(u))⁻¹ (u - g(u)), started at an upper bound, falls to z* without leaving the upper
side, quadratically (Ortega & Rheinboldt 1970, chapter 13). It needs the matrix of J, one n x n
system per sample and step: at most a few thousand unknowns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.solvers.problem import Problem
from pcdeq.solvers.solver import Norm, Solver, State


@dataclass(frozen=True, kw_only=True)
class Newton(Solver):
    """Newton's method from an upper bound; quadratic convergence, dense linear algebra.

    >>> import torch, pcdeq
    >>> layer = pcdeq.PcDEQLinear(4, solver=pcdeq.Newton(tol=1e-12)).double()
    >>> bool(layer.solve(torch.randn(2, 4).double()).converged.all())
    True
    """

    max_steps: int = 50

    begins_at_start: ClassVar[bool] = False

    def init(self, problem: Problem) -> Tensor:
        if problem.jacobian is None or problem.box is None:
            raise UsageError(
                "Newton needs a map whose Jacobian and bounds are known: a pcDEQ layer, forward; use Anderson or Picard"
            )
        return torch.zeros_like(problem.first()) + problem.box[1]

    def step(self, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
        assert problem.jacobian is not None
        value = problem.fn(point)
        residual = value - point
        matrix = torch.eye(point[0].numel(), dtype=point.dtype, device=point.device) - problem.jacobian(point)
        change, _ = torch.linalg.solve_ex(matrix, -residual.flatten(1))
        # In exact arithmetic the step falls and stays above 0; g(z) is as good where rounding denies it.
        newton = point - change.reshape(point.shape)
        return State(torch.where((newton <= value) & (newton >= 0), newton, value), value, residual, norm(residual))
