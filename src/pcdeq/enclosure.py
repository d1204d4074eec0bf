"""Bounds on the equilibrium that are proved, not estimated (T1, T3, T9).

The order test (T1): l <= g(l) implies l <= z*, and u >= g(u) implies u >= z*. A candidate may come
from anywhere. Ours come from the Neumann series of J = diag(s'(Wz + x)) W at a computed point z (T3),
which makes them as narrow as the true error, and are then moved outward by a little more than the
rounding of the test (T9). What is claimed in the end is only what the test itself has shown, with a
margin for the rounding of its own products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pcdeq.equation import Equation
from pcdeq.solvers import Outcome, Solution, Solver
from pcdeq.solvers.solution import per_sample

# Neumann terms beyond the first; at the paper's tolerance four make the bound 1.00 to 1.03 times the error.
NEUMANN_TERMS = 4
# Outward moves tried where curvature or a kink defeats the linearisation.
ATTEMPTS = 4


@dataclass(frozen=True)
class Enclosure:
    """lower <= z* <= upper, for the samples that are certified.

    Attributes:
        lower, upper: the bounds, (samples, *state); for a sample that is not certified, 0 and infinity.
        certified: for which samples the bounds are proved, (samples,).

    >>> import torch, pcdeq
    >>> box = pcdeq.PcDEQLinear(4).enclose(torch.zeros(2, 4))
    >>> bool(box.certified.all()), bool((box.upper - box.lower < 1e-3).all())
    (True, True)
    """

    lower: Tensor
    upper: Tensor
    certified: Tensor

    @property
    def width(self) -> Tensor:
        """upper - lower, componentwise."""
        return self.upper - self.lower


@torch.no_grad()
def enclose_near(equation: Equation, z: Tensor) -> Enclosure:
    """Enclose z* from a point z >= 0 near it (any point is safe; a far one is not certified)."""
    margin = rounding_margin(equation, z)
    preactivation = equation.map.apply(z) + equation.x
    value = equation.activation.value(preactivation)
    slope = equation.activation.derivative(preactivation)
    rise, fall, weights, gap = _neumann(equation, slope, value - z)
    floor = equation.at_zero() * (1 - 4 * margin)
    lower, upper = torch.zeros_like(z), torch.full_like(z, torch.inf)
    below = above = torch.zeros(z.shape[:1], dtype=torch.bool, device=z.device)
    for attempt in range(ATTEMPTS):
        # Outward by twice the test's margin, and from the second attempt on by half the width again.
        outward = (2 * margin * (1 + attempt) * _largest((value + rise) / gap)) * weights
        stretch = 1 + 0.5 * attempt
        high = z + stretch * rise + outward
        low = torch.maximum(z - stretch * fall - outward, floor)
        now_above, now_below = is_upper(equation, high, margin), is_lower(equation, low, margin)
        upper = torch.where(per_sample(now_above & ~above, z), high, upper)
        lower = torch.where(per_sample(now_below & ~below, z), low, lower)
        above, below = above | now_above, below | now_below
        if bool((above & below).all()):
            break
    certified = above & below
    return Enclosure(
        torch.where(per_sample(certified, z), lower, 0.0),
        torch.where(per_sample(certified, z), upper, torch.inf),
        certified,
    )


def is_upper(equation: Equation, u: Tensor, margin: float) -> Tensor:
    """T1 for each sample: g(u) <= u in real numbers, hence z* <= u."""
    return _all(equation(u) * (1 + margin) + _tiny(u) <= u) & _all(u.isfinite())


def is_lower(equation: Equation, low: Tensor, margin: float) -> Tensor:
    """T1 for each sample: 0 <= l <= g(l) in real numbers, hence l <= z*."""
    return _all((equation(low) * (1 - margin) - _tiny(low) >= low) | (low <= 0)) & _all(low >= 0)


def rounding_margin(equation: Equation, z: Tensor) -> float:
    """A bound on the relative rounding error of one evaluation of g (T9).

    All terms of Wz + x are nonnegative, so the sum's error is relative: at most its number of terms
    times eps. s is concave with s(0) >= 0, so it does not enlarge a relative error; its own evaluation
    is given 16 eps.
    """
    return (equation.map.terms(z.shape[1:]) + 16) * torch.finfo(z.dtype).eps


def _neumann(equation: Equation, slope: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The two sides v + a w of T3, with w and w - Jw (1 where that is not positive: the test will fail)."""
    terms = torch.cat([residual.clamp(min=0), (-residual).clamp(min=0), torch.ones_like(residual)])
    slopes = torch.cat([slope, slope, slope])
    total = terms
    for _ in range(NEUMANN_TERMS):
        terms = slopes * equation.map.apply(terms)
        total = total + terms
    rest_up, rest_down, rest_one = (slopes * equation.map.apply(terms)).chunk(3)
    up, down, weights = total.chunk(3)
    gap = 1 - rest_one  # w - Jw telescopes
    gap = torch.where(gap > 0, gap, 1.0)
    return up + _largest(rest_up / gap) * weights, down + _largest(rest_down / gap) * weights, weights, gap


def _largest(z: Tensor) -> Tensor:
    return z.amax(tuple(range(1, z.ndim)), keepdim=True)


def _all(condition: Tensor) -> Tensor:
    return condition.flatten(1).all(1)


def _tiny(z: Tensor) -> float:
    return torch.finfo(z.dtype).tiny


def solve_certified(solver: Solver, equation: Equation, guess: Tensor | None = None) -> Solution:
    """Solve until the proved bound on ‖z - z*‖ / ‖z‖ is below the solver's tol, sample by sample.

    Residual and error differ by a factor that only the bound reveals, so the residual's tolerance is
    tightened by what was missing until the bound is met or the steps are used up.
    """
    inner = solver.with_options(stop="sample", throw=False)
    problem = equation.problem(guess)
    finest = 4 * torch.finfo(equation.x.dtype).eps
    while True:
        solution = inner.solve(problem)
        box = enclose_near(equation, solution.value)
        width = inner.norm(torch.where(per_sample(box.certified, box.lower), box.width, torch.inf))
        bound = width / (inner.norm(solution.value) + _tiny(width))
        converged = bound < solver.tol
        used = int(solution.steps.max()) if len(solution.steps) else 0
        if (
            solution.outcome is Outcome.NONFINITE
            or bool(converged.all())
            or used >= solver.max_steps
            or inner.tol <= finest
        ):
            break
        missing = float((bound / solver.tol).clamp(2.0, 100.0).max())
        inner = inner.with_options(tol=max(inner.tol / missing, finest))
        problem = problem.continued(solution.value, used)
    outcome = solution.outcome
    if outcome in (Outcome.CONVERGED, Outcome.PRECISION) and not bool(converged.all()):
        outcome = Outcome.NOT_CERTIFIED
    elif bool(converged.all()):
        outcome = Outcome.CONVERGED
    return Solution(solution.value, solution.steps, bound, converged, outcome)
