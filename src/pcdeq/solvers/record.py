"""What every layer shares whose output is found by a solve."""

from __future__ import annotations

from typing import Any

from torch import nn

from pcdeq.solvers.problem import EachStats, SolveStats, report
from pcdeq.solvers.solver import Stopping


class SolvingLayer(nn.Module):
    """A layer that solves forward and backward, and remembers how its last solves went.

    After a pass ``last_forward`` and ``last_backward`` hold its `SolveStats`, for whoever logs.
    """

    last_backward: SolveStats | None

    def __init__(self, solver: Stopping, adjoint_solver: Stopping) -> None:
        super().__init__()
        self.solver: Any = solver
        self.adjoint_solver: Any = adjoint_solver
        self._last_forward: SolveStats | EachStats | None = None
        self.last_backward = None

    @property
    def last_forward(self) -> SolveStats | None:
        """How the last forward solve went; read from the device now, if it was one of a compiled graph."""
        if isinstance(self._last_forward, EachStats):
            self._last_forward = self._last_forward.read()
        return self._last_forward

    @last_forward.setter
    def last_forward(self, stats: SolveStats | None) -> None:
        self._last_forward = stats

    def record_forward(self, stats: SolveStats | EachStats) -> None:
        """Remember how a forward solve went, and warn if it failed; an operator of torch warns for itself."""
        if isinstance(stats, EachStats):
            self._last_forward, self.last_backward = None if stats.steps.is_meta else stats, None
            return
        self._last_forward = stats
        report(stats, self.solver, "forward")

    def record_backward(self, stats: SolveStats) -> None:
        """The same for the adjoint solve."""
        self.last_backward = stats
        report(stats, self.adjoint_solver, "backward")
