"""Anderson acceleration that cannot fail (T6).

Anderson (1965), type II, with each sample's coefficients from its own least squares problem. Its
proposals are safeguarded: a proposal is clamped to a box that holds the solution, evaluated (which
the next step needs anyway), and kept only if its residual is not above that of the point it replaces,
and not above q^j R, where j counts the proposals kept so far and R is the largest residual met at a
plain step; otherwise the sample takes the plain step z <- g(z) from where it was. Plain steps alone
converge from every start in the box, kept proposals have residuals that go to 0 (R is bounded, as the
box is), and the fixed point is unique: so the whole converges, whatever is proposed.

A point that was not kept still serves as history: a secant through it is as good as any other, and so
no tensor but the next point depends on the decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.solvers.compiled import compiled_step
from pcdeq.solvers.numbers import Numbers, alike, library, numbers, plus_product, spread
from pcdeq.solvers.problem import ANYWHERE, Problem
from pcdeq.solvers.solver import Norm, Solver, State, pick


class Safeguard(NamedTuple):
    """What decides whether the next point is kept, one number a sample, and the points before the last."""

    limit: Numbers  # the most that its residual may be: infinite for a plain step, which is kept whatever comes
    largest: Numbers  # R
    power: Numbers  # q^(j+1)
    proposed: Numbers  # whether it is a proposal
    never: Numbers  # infinity
    half: Numbers
    older: tuple[tuple[Tensor, Tensor], ...] = ()  # (value, residual), the latest first


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver):
    """Plain iteration, accelerated from the last few steps.

    Args:
        memory: how many earlier points a proposal may use; 1 or 2 give nearly all the gain.
        decay: q of the safeguard, in (0, 1).
        compiled: on a device that the host would have to wait for, send steps through `torch.compile`; see the page
            "On a GPU, with compilers" of the documentation.

    >>> import torch, pcdeq
    >>> layer = pcdeq.PcDEQLinear(4, solver=pcdeq.Anderson(tol=1e-6))
    >>> bool(layer.solve(torch.randn(2, 4)).converged.all())
    True
    """

    memory: int = 1
    decay: float = 0.9
    compiled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory < 1:
            raise UsageError(f"memory must be at least 1, got {self.memory}; without memory use Picard")
        if not 0 < self.decay < 1:
            raise UsageError(f"decay must be between 0 and 1, got {self.decay}")

    @property
    def kernel_decay(self) -> float | None:
        return self.decay if self.memory == 1 and self.stop == "sample" and type(self) is Anderson else None

    def step(self, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
        return self._step(problem, state, point, norm, reuse=False)

    def step_on(self, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
        # Values of the package's own maps lie in memory that is theirs alone; whose else's it may be is not known.
        own = problem.form is not None and self.memory == 1 and type(self) is Anderson
        return self._step(problem, state, point, norm, reuse=own and not torch.is_grad_enabled())

    def step_from_afar(self, problem: Problem, state: State | None, point: Tensor, norm: Norm) -> State:
        step = compiled_step if self.compiled else type(self).step
        return step(self, problem, state, point, norm)

    def _step(self, problem: Problem, state: State | None, point: Tensor, norm: Norm, *, reuse: bool) -> State:
        value = problem.fn(point)
        if state is None:
            residual = value - point
            length = norm(residual)
            now = numbers(length)
            full = library(now).full_like
            never = full(now, torch.inf)
            guard = Safeguard(never, now, full(now, self.decay), now > never, never, full(now, 0.5))
            return State(value, value, residual, length, guard)
        # The first point is not the solve's own, the second is the first value.
        residual = torch.sub(value, point, out=point if reuse and point is not state.value else None)
        length = norm(residual)
        guard = state.memory
        now = alike(length, guard.limit)
        kept = now <= guard.limit
        following, proposed = self.propose(value, residual, now, kept, state, norm, reuse=reuse)
        if problem.box is None:  # a map of unknown structure: what was refused may be infinite
            following = torch.where(spread(kept, value), following, state.value)
        elif problem.box is not ANYWHERE:
            following.clamp_(*problem.box)  # pyright: ignore[reportCallIssue, reportArgumentType]
        guard = self.watch(now, kept, proposed, guard)
        if self.memory > 1:
            guard = guard._replace(older=((state.value, state.residual), *state.memory.older)[: self.memory - 1])
        return State(following, value, residual, length, guard)

    def watch(self, length: Numbers, kept: Numbers, proposed: Numbers, guard: Safeguard) -> Safeguard:
        """The safeguard of the next point."""
        xp = library(length)
        # Of a point that was not kept nothing is taken over: a plain step follows, whose residual is the next measure.
        largest = xp.maximum(guard.largest, xp.minimum(length, guard.limit))
        power = plus_product(guard.power, guard.power, kept & guard.proposed, self.decay - 1)
        limit = xp.where(proposed, xp.minimum(length, largest * power), guard.never)
        return Safeguard(limit, largest, power, proposed, guard.never, guard.half)

    def propose(
        self, value: Tensor, residual: Tensor, length: Numbers, kept: Numbers, state: State, norm: Norm, *, reuse: bool
    ) -> tuple[Tensor, Numbers]:
        """The next point, and for which samples it is a proposal.

        Proposed is Σ aᵢ g(zᵢ) over the last points, with Σ aᵢ = 1 and ‖Σ aᵢ rᵢ‖ least, sample by sample. Where the last
        point was not kept, the next one is the value before it, and where no proposal is of use, the plain step. The
        state is written over if its memory may be used again.
        """
        older, rest = state.memory.older, []
        if older:
            before = (state.residual, *(earlier for _, earlier in older))
            found = _least_squares([residual - earlier for earlier in before], residual)
            first, *rest = (alike(one, length) for one in found)
            share = 1 - first
        else:
            change = torch.sub(residual, state.residual, out=state.residual if reuse else None)
            before, span = alike(state.length, length), alike(norm(change), length)
            secant = _secant if isinstance(length, Tensor) else _secant_of_arrays
            share = secant(length, before, span, state.memory.half)
        # Coefficients of the earlier values that sum to 1 or more mean that residuals grow: far below z*, where the map
        # still expands and the secant points back to 0. The plain step is better there. A NaN, where nothing changed,
        # compares as false.
        proposed, xp = kept & (share > sum(rest)), library(length)
        # The share of the latest value also says how to go without a proposal: 1 is the plain step, 0 leads back.
        shares = spread(xp.where(proposed, share, kept), value)
        following = torch.lerp(state.value, value, shares, out=state.value if reuse else None)
        for coefficient, (earlier, _) in zip(rest, older, strict=True):
            following += spread(xp.where(proposed, coefficient, 0.0), value) * (earlier - value)
        return following, proposed

    def select(self, state: State, samples: Tensor) -> State | None:
        return pick(state, samples) if type(self) is Anderson else None


def _secant(now: Numbers, before: Numbers, span: Numbers, half: Numbers) -> Numbers:
    """1 - <r, d> / <d, d> for d = r - r', from their three norms: only ratios are squared, so nothing is lost."""
    now, before = now / span, before / span
    return plus_product(plus_product(half, before, before, 0.5), now, now, -0.5)


_secant_of_arrays = np.errstate(all="ignore")(_secant)  # 0 / 0 where nothing changed: no number, and no warning


def _least_squares(changes: list[Tensor], residual: Tensor) -> list[Tensor]:
    """Coefficients c of least ‖residual - Σ cᵢ changesᵢ‖ for each sample, each (samples,)."""
    dims = tuple(range(1, residual.ndim))
    # Squares of small numbers would be 0: each sample is measured by its largest change.
    size = torch.stack([change.abs().amax(dims, keepdim=True) for change in changes]).amax(0)
    size = size + (size == 0)
    # In float16 sums of squares would overflow, and torch solves nothing.
    wide = torch.promote_types(residual.dtype, torch.float32)
    changes, residual = [(change / size).to(wide) for change in changes], (residual / size).to(wide)
    right = torch.stack([(change * residual).sum(dims) for change in changes], -1)
    gram = torch.stack([torch.stack([(a * b).sum(dims) for b in changes], -1) for a in changes], -2)
    # Nearly parallel changes: a little regularisation, relative to their size, keeps this solvable.
    scale = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    ridge = (scale * 100 * torch.finfo(scale.dtype).eps + torch.finfo(scale.dtype).tiny)[:, None, None]
    identity = torch.eye(len(changes), dtype=scale.dtype, device=scale.device)
    solved, _ = torch.linalg.solve_ex(gram + ridge * identity, right)
    return list(solved.unbind(-1))
