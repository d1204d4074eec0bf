"""Anderson acceleration that cannot fail (T6).

Anderson (1965), type II, with each sample's coefficients from its own least squares problem. Its
proposals are safeguarded: a proposal is clamped to a box that holds the solution, evaluated (which
the next step needs anyway), and kept only if its residual is not above that of the point it replaces,
and not above q^j R, where j counts the proposals kept so far and R is the largest residual met at a
plain step; otherwise the sample takes the plain step z <- g(z) from where it was. Plain steps alone
converge from every start in the box, kept proposals have residuals that go to 0 (R is bounded, as the
box is), and the fixed point is unique: so the whole converges, whatever is proposed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.solvers import fused
from pcdeq.solvers.solution import Problem, Solution, Solver, per_sample

# (g(z), residual) of an earlier point.
Point = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver):
    """Plain iteration, accelerated from the last few steps.

    Args:
        memory: how many earlier points a proposal may use; 1 or 2 give nearly all the gain.
        decay: q of the safeguard, in (0, 1).

    >>> import torch, pcdeq
    >>> layer = pcdeq.PcDEQLinear(4, solver=pcdeq.Anderson(tol=1e-6))
    >>> bool(layer.solve(torch.randn(2, 4)).converged.all())
    True
    """

    memory: int = 1
    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < 1:
            raise UsageError(f"memory must be at least 1, got {self.memory}; without memory use Picard")
        if not 0 < self.decay < 1:
            raise UsageError(f"decay must be between 0 and 1, got {self.decay}")

    def propose(self, value: Tensor, residual: Tensor, history: deque[Point]) -> Tensor:
        """Σ aᵢ g(zᵢ) over the last points, with Σ aᵢ = 1 and ‖Σ aᵢ rᵢ‖ least, sample by sample."""
        changes = [residual - past_residual for _, past_residual in history]
        weights = _least_squares(changes, residual)
        # Weights that sum to 1 or more mean that residuals grow: far below z*, where the map still expands
        # and the secant points back to 0. The plain step is better there.
        towards = torch.stack(weights).sum(0) < 1
        proposal = value
        for (past_value, _), weight in zip(history, weights, strict=True):
            proposal = proposal - per_sample(torch.where(towards, weight, 0.0), value) * (value - past_value)
        return proposal

    @property
    def can_be_fused(self) -> bool:
        """Whether the kernels know this kind of solve."""
        return self.memory == 1 and self.stop == "sample" and type(self) is Anderson

    def solve(self, problem: Problem) -> Solution:
        if self.can_be_fused and fused.applies(problem):
            return fused.anderson(self, self.decay, problem)
        return self.solve_plain(problem)

    def solve_plain(self, problem: Problem) -> Solution:
        """The reference: the same in plain torch, on any device and dtype, differentiable."""
        if problem.steps >= self.max_steps:
            return self.give_up(problem)
        z = problem.first()
        value = problem.fn(z)
        residual = value - z
        norm = largest = self.norm(residual)
        relative = self.relative_residual(residual, value)
        steps = torch.full(z.shape[:1], problem.steps + 1, device=z.device)
        active = relative >= self.tol
        plain = torch.ones_like(active)  # samples whose next step is the plain one
        kept = torch.zeros_like(steps)
        history: deque[Point] = deque(maxlen=self.memory)
        for step in range(problem.steps + 1, self.max_steps):
            if self.may_check(step, z) and not bool(active.any()):
                break
            candidate = value
            if history:
                proposal = self.propose(value, residual, history)
                if problem.box is not None:
                    proposal = proposal.clamp(*problem.box)  # pyright: ignore[reportCallIssue, reportArgumentType]
                candidate = torch.where(per_sample(plain, value), value, proposal)
                plain = plain | (candidate == value).flatten(1).all(1)
            new_value = problem.fn(candidate)
            new_residual = new_value - candidate
            new_norm = self.norm(new_residual)
            new_relative = self.relative_residual(new_residual, new_value)
            small = new_norm <= torch.minimum(norm, largest * self.decay ** (kept + 1))
            accept = plain | small | (new_relative < self.tol)
            move = active & accept
            history.append((value, residual))
            moved = per_sample(move, value)
            value, residual = torch.where(moved, new_value, value), torch.where(moved, new_residual, residual)
            norm, relative = torch.where(move, new_norm, norm), torch.where(move, new_relative, relative)
            largest = torch.where(move & plain, torch.maximum(largest, new_norm), largest)
            steps += active
            kept += move & ~plain
            plain = ~accept
            active = active & (relative >= self.tol)
        return self.finish(value, steps, relative)


def _least_squares(changes: list[Tensor], residual: Tensor) -> list[Tensor]:
    """Coefficients c of least ‖residual - Σ cᵢ changesᵢ‖ for each sample, each (samples,)."""
    dims = tuple(range(1, residual.ndim))
    right = [(change * residual).sum(dims) for change in changes]
    gram = [[(a * b).sum(dims) for b in changes] for a in changes]
    if len(changes) == 1:
        return [torch.where(gram[0][0] > 0, right[0] / gram[0][0], 0.0)]
    matrix = torch.stack([torch.stack(row, -1) for row in gram], -2)
    # Nearly parallel changes: a little regularisation, relative to their size, keeps this solvable.
    scale = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)
    ridge = (scale * 100 * torch.finfo(scale.dtype).eps + torch.finfo(scale.dtype).tiny)[:, None, None]
    identity = torch.eye(len(changes), dtype=scale.dtype, device=scale.device)
    solved, _ = torch.linalg.solve_ex(matrix + ridge * identity, torch.stack(right, -1))
    return list(solved.unbind(-1))
