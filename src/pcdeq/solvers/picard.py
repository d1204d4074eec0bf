"""Plain iteration, z <- g(z): what the paper uses.

For a pcDEQ layer it converges geometrically from every start >= 0, for every W >= 0 (Piotrowski &
Cavalcante 2022). From g(0) the iterates rise to z*, so each of them is a lower bound (T1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pcdeq.solvers.solution import Problem, Solution, Solver, per_sample


@dataclass(frozen=True, kw_only=True)
class Picard(Solver):
    """Plain iteration.

    >>> import torch, pcdeq
    >>> paper = pcdeq.Picard(stop="batch")  # the rule and the step counts of the paper
    >>> layer = pcdeq.PcDEQLinear(4, solver=paper)
    >>> layer.solve(torch.zeros(2, 4)).outcome.name
    'CONVERGED'
    """

    def solve(self, problem: Problem) -> Solution:
        z = problem.first()
        residual = torch.full(z.shape[:1], torch.inf, dtype=z.dtype, device=z.device)
        if problem.steps and self.stop == "batch":
            # The start stands for g(0): it was a step from 0, which the paper's rule may accept.
            residual = self.relative_residual(z, z)
        active = residual >= self.tol
        steps = torch.full(z.shape[:1], problem.steps, device=z.device)
        if problem.steps >= self.max_steps:
            return self.give_up(problem)
        for step in range(problem.steps, self.max_steps):
            if self.may_check(step, z) and not bool(active.any()):
                break
            new = problem.fn(z)
            residual = torch.where(active, self.relative_residual(new - z, new), residual)
            # Under the batch rule all samples stop at once, so nothing needs to be held back.
            z = new if self.stop == "batch" else torch.where(per_sample(active, z), new, z)
            steps += active
            active = active & (residual >= self.tol)  # a NaN stops its sample
        return self.finish(z, steps, residual)
