"""Solves in logarithms: small components are to be as exact as large ones, and every point is in the cone.

In y = 1 + log(z/d), with d a rough solution, all components are about 1 at the solution, and the loop's relative
residual, one number a sample, is about the relative error of a component. A monotone scalable map does not expand the
sup norm in y, which is Thompson's metric, so secants bend less than they do in z.

*Why no upper bound is needed* (T6 clamps to a box). Let r = log(g(z)/z) be the residual. Along plain steps its sup norm
does not grow, its Euclidean norm hence by at most √n. A proposal is kept only with a residual of at most qʲR after j
others, R the largest at a plain step; so R stops growing once √n qʲ <= 1, and if infinitely many are kept, their
residuals go to 0. Such points are bounded: below, because z = g(z)/exp(r) >= g(0)/exp(r) > 0; above, because along
‖z‖ -> ∞ a limit v of z/‖z‖ would have g∞(v) = v (g(pv)/p tends to the asymptotic mapping g∞ uniformly, as both are
continuous and the limit is monotone), but its spectral radius is below 1 if there is a fixed point. So they go to the
one fixed point, and plain steps in between do not increase Thompson's distance to it. If only finitely many are kept,
what remains are plain steps, which converge from everywhere. ∎
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


def from_logs(y: Tensor, unit: Tensor) -> Tensor:
    """The point z whose logarithm is y - 1, in such units."""
    return torch.exp(y - 1) * unit


def run_on(bound: BoundMap, before: Solution, solver: Solver) -> Solution:
    """Solve in logarithms, in units of an earlier solution and from there; each sample's steps are those of both."""
    unit = unit_of(before.value)
    problem = Problem(lambda y: 1 + torch.log(bound(from_logs(y, unit)) / unit), torch.ones_like(unit))
    found = run(problem, solver)
    return _together(before, found.with_value(from_logs(found.value, unit)))


def newton_on(bound: BoundMap, before: Solution, solver: Solver) -> Solution:
    """The same by Newton's method, which needs the cone itself: there the map is concave."""
    unit = unit_of(before.value)
    found = run(with_jacobian(bound, scaled_problem(bound, before), before.value), solver)
    return _together(before, found.with_value(found.value * unit))


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


def certify_on(bound: BoundMap, before: Solution, solver: Solver) -> Solution:
    """The same until the relative error is proved to be below the solver's tol."""
    unit = unit_of(before.value)

    def distance(z: Tensor) -> Tensor:
        box = enclose_near(bound, z * unit)
        off = torch.maximum(box.upper - z * unit, z * unit - box.lower) / unit
        return torch.where(per_sample(box.certified, z), off, torch.inf)

    found = solve_to_bound(solver, scaled_problem(bound, before), distance)
    return _together(before, found.with_value(found.value * unit))


def _together(before: Solution, after: Solution) -> Solution:
    joined = Solution.of(after.value, before.steps + after.steps, after.residual, after.converged)
    return joined.with_outcome(after.outcome)
