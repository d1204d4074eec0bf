"""What every layer shares whose output is found by a solve."""

from __future__ import annotations

from torch import nn

from pcdeq.solvers import Solution, Solver, SolveStats, report


class SolvingLayer(nn.Module):
    """A layer that solves forward and backward, and remembers how its last solves went.

    After a pass ``last_forward`` and ``last_backward`` hold its `SolveStats`, for whoever logs.
    """

    last_forward: SolveStats | None
    last_backward: SolveStats | None

    def __init__(self, solver: Solver, adjoint_solver: Solver) -> None:
        super().__init__()
        self.solver = solver
        self.adjoint_solver = adjoint_solver
        self.last_forward = None
        self.last_backward = None

    def _record_forward(self, solution: Solution) -> None:
        self.last_forward = SolveStats.of(solution)
        report(solution, self.solver, "forward")

    def _record_backward(self, solution: Solution) -> None:
        self.last_backward = SolveStats.of(solution)
        report(solution, self.adjoint_solver, "backward")
