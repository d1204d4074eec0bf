"""What every layer shares whose output is found by a solve."""

from __future__ import annotations

from typing import Any

from torch import nn

from pcdeq.solvers.problem import SolveStats, report
from pcdeq.solvers.solver import Stopping


class SolvingLayer(nn.Module):
    """A layer that solves forward and backward, and remembers how its last solves went.

    After a pass ``last_forward`` and ``last_backward`` hold its `SolveStats`, for whoever logs.
    """

    last_forward: SolveStats | None
    last_backward: SolveStats | None

    def __init__(self, solver: Stopping, adjoint_solver: Stopping) -> None:
        super().__init__()
        self.solver: Any = solver
        self.adjoint_solver: Any = adjoint_solver
        self.last_forward = None
        self.last_backward = None

    def record_forward(self, stats: SolveStats) -> None:
        """Remember how a forward solve went, and warn if it failed."""
        self.last_forward = stats
        report(stats, self.solver, "forward")

    def record_backward(self, stats: SolveStats) -> None:
        """The same for the adjoint solve."""
        self.last_backward = stats
        report(stats, self.adjoint_solver, "backward")
