"""Plain iteration, z <- g(z): what the paper uses.

For a pcDEQ layer it converges geometrically from every start >= 0, for every W >= 0 (Piotrowski &
Cavalcante 2022). From g(0) the iterates rise to z*, so each of them is a lower bound (T1).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pcdeq.solvers.problem import Problem
from pcdeq.solvers.solver import Norm, Solver, State


@dataclass(frozen=True, kw_only=True)
class Picard(Solver):
    """Plain iteration.

    >>> import torch, pcdeq
    >>> paper = pcdeq.Picard(stop="batch")  # the rule and the step counts of the paper
    >>> layer = pcdeq.PcDEQLinear(4, solver=paper)
    >>> layer.solve(torch.zeros(2, 4)).outcome.name
    'CONVERGED'
    """

    def step(self, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
        value = problem.fn(point)
        residual = value - point
        return State(value, value, residual, norm(residual))
