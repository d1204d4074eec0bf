"""Solves in units of the point itself: small components are to be as exact as large ones.

z = fn(z) with z = D ζ is ζ = D⁻¹ fn(D ζ), positive and concave like fn. If D is a rough solution, all components of ζ
are about 1 and the loop's relative residual, one number a sample, is about that of each component.

*Why no upper bound is needed* (T6 clamps to a box): suppose that there is a fixed point, so that the spectral radius of
the asymptotic mapping g∞ is below 1. As ‖z‖ grows, (g(z) - z)/‖z‖ comes close to g∞(v) - v, v = z/‖z‖, uniformly, as g∞
is continuous; that is not 0 and, the sphere being compact, not near 0. So points with a residual of at most r are
bounded, by C(1 + r). A proposal is kept only if its residual is at most r = qʲR after j others. The plain step from
there lies between g(0) and C(1 + r), and those that follow do not increase Thompson's distance to z*; so their
residuals are at most C(1 + r), too, for some C. Hence R, the largest residual at a plain step, stays bounded, because
qʲ falls; all is in one bounded set, and the proof of T6 applies as it is. ∎
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pcdeq.concave.bound import BoundMap
from pcdeq.concave.bounds import enclose_near
from pcdeq.proofs.certified import solve_to_bound
from pcdeq.solvers import Problem, Solution, Solver, per_sample, run


def unit_of(z: Tensor) -> Tensor:
    """What each component is measured by."""
    return torch.where(z.isfinite() & (z > 0), z, 1.0)


def scaled_problem(bound: BoundMap, before: Solution) -> Problem:
    """The map in units of the value of an earlier solve, to go on from there."""
    unit = unit_of(before.value)
    return Problem(lambda z: bound.in_cone(z * unit) / unit, before.value / unit)


def with_jacobian(bound: BoundMap, problem: Problem, z: Tensor) -> Problem:
    """What Newton needs: the matrices, and an upper bound to fall from, where there is one."""
    unit, box, n = unit_of(z), enclose_near(bound, z), z[0].numel()
    above = torch.where(per_sample(box.certified, z), box.upper, z) / unit
    scale = unit.reshape(-1, n)

    def jacobian(point: Tensor) -> Tensor:
        return bound.jacobian((point * unit).clamp(min=0)) * scale[:, None, :] / scale[:, :, None]

    return replace(problem, box=(torch.zeros_like(above), above), jacobian=jacobian)


def run_on(before: Solution, problem: Problem, solver: Solver) -> Solution:
    """Solve a scaled problem that goes on where another solve ended; each sample's steps are those of both."""
    return _together(before, run(problem, solver))


def certify_on(bound: BoundMap, before: Solution, solver: Solver) -> Solution:
    """The same until the relative error is proved to be below the solver's tol."""
    unit = unit_of(before.value)

    def distance(z: Tensor) -> Tensor:
        box = enclose_near(bound, z * unit)
        off = torch.maximum(box.upper - z * unit, z * unit - box.lower) / unit
        return torch.where(per_sample(box.certified, z), off, torch.inf)

    return _together(before, solve_to_bound(solver, scaled_problem(bound, before), distance))


def _together(before: Solution, after: Solution) -> Solution:
    steps = before.steps + after.steps
    joined = Solution.of(after.value * unit_of(before.value), steps, after.residual, after.converged)
    return joined.with_outcome(after.outcome)
