"""A positive concave map of yours, as one object: test it, solve it, bound it, differentiate it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pcdeq.concave.bound import BoundMap, contradicted
from pcdeq.concave.bounds import AdjointBound, adjoint_bound, enclose_near, tighten
from pcdeq.concave.existence import Feasibility, feasibility
from pcdeq.concave.solving import certify_on, newton_on, run_on
from pcdeq.errors import ConvergenceError, ConvergenceWarning, UsageError
from pcdeq.maps import implicit_gradient
from pcdeq.proofs.certified import Certified, solve_to_bound
from pcdeq.proofs.order import Enclosure, largest, rounded_down, rounded_up
from pcdeq.proofs.rates import Rate
from pcdeq.solvers import Anderson, Newton, Outcome, Problem, Solution, Solver, per_sample, report, run
from pcdeq.solvers.solver import require_solver
from pcdeq.theory.properties import (
    DEFAULT,
    Sampling,
    Verdict,
    check_concave,
    check_monotone,
    check_positive,
    check_scalable,
)

# At this residual the size of each component is known well enough to be measured by.
ROUGH, ROUGH_STEPS = 1e-2, 50


@dataclass(frozen=True, eq=False)
class MapReport:
    """What was seen of a map; true in a condition if it may be trusted with bounds.

    Attributes:
        positive, monotone, scalable, concave: verdicts, each with a counterexample if there is one. Where a property
            holds that is evidence, where it does not, proof up to rounding.
    """

    positive: Verdict
    monotone: Verdict
    scalable: Verdict
    concave: Verdict

    def __bool__(self) -> bool:
        return bool(self.positive and self.monotone and (self.scalable or self.concave))

    def __str__(self) -> str:
        return "\n".join(str(verdict) for verdict in (self.positive, self.monotone, self.scalable, self.concave))


class ConcaveMap:
    """A positive concave map ``z = fn(z, *params)`` of yours, and what is known about its fixed point.

    The theory of pcDEQ layers is about every map of the nonnegative cone into itself that is positive, monotone and
    concave: there is at most one fixed point, plain iteration finds it from everywhere if there is one, and comparing a
    point with its image bounds it. (Scalable in place of concave will do, but for `rate`.)

    A point is ``(samples, *state)``, and samples do not influence each other; a vector is one sample. The first
    argument of every method is such a point, where a solve starts; zeros are always good.

    What is *assumed* is that fn is of this class. It is *tested* by `check`, and with a few inequalities before
    anything is claimed: samples that contradict it get no bounds, and a warning. What `enclose`, `exists` and `rate`
    say beyond that is *proved*, rounding included.

    Args:
        fn: the map; parameters are tensors, with gradients if you like.
        asymptotic: the limit of ``fn(pz, *params) / p`` for large p, if you know it. Only with it can it be proved that
            there is no fixed point.
        rounding: a bound on the relative rounding error of an evaluation, if you want to grant one. By default each
            operation of fn is analysed; one that is not known is refused by name.
        solver: by default ``Anderson(tol=1e-6, max_steps=1000, memory=5)``; ``Newton()`` for few unknowns and the last
            digits; ``Certified(...)`` to stop at a proved relative error.
        adjoint_solver: for the backward pass; by default the same, or Anderson in place of Newton.

    Two cells, each busier the more the other one is (see ``examples/cell_load.py``):

    >>> import torch, pcdeq
    >>> def load(v, demand):
    ...     return demand / torch.log1p(4 / (v.flip(-1) + 0.5))
    >>> cells, demand = pcdeq.ConcaveMap(load), torch.tensor([[0.5, 1.0]]).double().requires_grad_()
    >>> bool(cells.check(torch.zeros(1, 2).double(), demand.detach()))
    True
    >>> v = cells(torch.zeros(1, 2).double(), demand)
    >>> box = cells.enclose(v.detach(), demand.detach(), rtol=1e-12)
    >>> bool(box.certified.all()), [round(x, 4) for x in box.lower[0].tolist()]
    (True, [0.3206, 0.5648])
    >>> v.sum().backward()
    >>> [round(x, 4) for x in demand.grad[0].tolist()]
    [0.8919, 0.6846]
    """

    def __init__(
        self,
        fn: Callable[..., Tensor],
        *,
        asymptotic: Callable[..., Tensor] | None = None,
        rounding: float | None = None,
        solver: Solver | Certified | None = None,
        adjoint_solver: Solver | Certified | None = None,
    ) -> None:
        if not callable(fn):
            raise UsageError(f"fn must be a function of a point, got {fn!r}")
        if rounding is not None and not 0 <= rounding < 0.1:
            raise UsageError(f"rounding must be a small relative error, such as 1e-14, got {rounding}")
        self.fn, self.asymptotic, self.rounding = fn, asymptotic, rounding
        self.solver = Anderson(tol=1e-6, max_steps=1000, memory=5) if solver is None else solver
        self.adjoint_solver = _for_adjoint(self.solver) if adjoint_solver is None else adjoint_solver
        for name, given in (("solver", self.solver), ("adjoint_solver", self.adjoint_solver)):
            require_solver(given.solver if isinstance(given, Certified) else given, name)

    def bind(self, z0: Tensor, *params: Any) -> BoundMap:
        """The map with its parameters, ready to be evaluated, with rounding and derivative."""
        return BoundMap(self.fn, params, z0, self.rounding)

    def check(self, z0: Tensor, *params: Any, sampling: Sampling = DEFAULT) -> MapReport:
        """Test whether fn is positive, monotone, scalable and concave at some hundred points, and say where not.

        >>> import torch, pcdeq
        >>> report = pcdeq.ConcaveMap(lambda z: 1 + z.square()).check(torch.zeros(1, 2))
        >>> bool(report), bool(report.monotone), bool(report.concave)
        (False, True, False)
        """
        bound = self.bind(z0, *params)
        like = bound.samples(bound.start)
        tests = (check_positive, check_monotone, check_scalable, check_concave)

        def finite(z: Tensor) -> Tensor:
            value = bound.fn(z, *params)
            return torch.where(value.isfinite(), value, torch.nan)  # which no inequality holds for

        return MapReport(*(test(finite, like, sampling) for test in tests))

    @torch.no_grad()
    def exists(self, z0: Tensor, *params: Any) -> Feasibility:
        """Whether there is a fixed point, for each sample, with a witness or the spectral radius to prove it.

        >>> import torch, pcdeq
        >>> sizes = torch.tensor([[0.9], [1.1]])
        >>> pcdeq.ConcaveMap(lambda z: sizes * z + 1).exists(torch.zeros(2, 1)).verdict
        ('exists', 'does not exist')
        """
        bound = self.bind(z0, *params)
        solution = self._run(bound, Anderson(tol=1e-3, max_steps=200))
        return self._exists(bound, solution.value)

    def _exists(self, bound: BoundMap, z: Tensor) -> Feasibility:
        box = enclose_near(bound, z)
        bad = contradicted(bound, torch.where(box.upper.isfinite(), box.upper, z))
        far = None
        if self.asymptotic is not None:
            far = BoundMap(self.asymptotic, bound.params, bound.samples(bound.start), bound.granted)
        found = feasibility(bound, far, z, torch.where(per_sample(bad, z), torch.inf, box.upper), bad)
        return Feasibility(found.verdict, found.proved, found.lower, found.upper, bound.samples(found.witness))

    @torch.no_grad()
    def solve(self, z0: Tensor, *params: Any, solver: Solver | Certified | None = None) -> Solution:
        """The fixed point of each sample, and how the solve went; a warning says which have none.

        Each component is measured by its own size, so that small ones are as exact as large ones. With Picard or
        Anderson a solve converges whenever there is a fixed point, be the map bounded or not (T6; see the page on
        positive concave maps for why no upper bound is needed).

        >>> import torch, pcdeq
        >>> solution = pcdeq.ConcaveMap(lambda z: 1 + z.sqrt()).solve(torch.zeros(3, 1).double())
        >>> solution.converged.tolist(), round(solution.value[0].item(), 6)
        ([True, True, True], 2.618034)
        """
        bound, chosen = self.bind(z0, *params), self.solver if solver is None else solver
        solution = self._run(bound, chosen)
        solution = self._told(bound, solution, chosen)
        return solution.with_value(bound.samples(solution.value))

    def _run(self, bound: BoundMap, solver: Solver | Certified) -> Solution:
        """Solve in units of a start without zeros, or of a rough solution, then look again in those of the result."""
        inner = solver.solver if isinstance(solver, Certified) else solver
        if not bound.start.numel():
            return Solution.empty(bound.start)
        whole = bool((bound.start > 0).all())
        steps = torch.full((len(bound.start),), 0 if whole else 1, device=bound.start.device)
        start = bound.start if whole else bound(bound.start)
        before = Solution.of(start, steps, steps.to(start.dtype), steps >= 0)
        few = {"tol": max(ROUGH, inner.tol), "max_steps": min(ROUGH_STEPS, inner.max_steps)}
        first = inner if whole else inner.with_options(**few)
        if isinstance(inner, Newton):  # which wants an upper bound to fall from
            first = Anderson(**few)
        solution = run_on(bound, before, first)
        if isinstance(solver, Certified):
            return certify_on(bound, solution, inner)
        return (newton_on if isinstance(inner, Newton) else run_on)(bound, solution, inner)

    def _told(self, bound: BoundMap, solution: Solution, solver: Solver | Certified) -> Solution:
        """Say what did not converge and, if so, that there is nothing to converge to.

        A small residual may mean a fixed point at infinity: where z is large, z + 1 is nearly z. For a scalable map one
        more evaluation tells, since 2z >= fn(2z) proves that there is a fixed point below 2z.
        """
        twice = 2 * solution.value
        doubtful = ~(bound.in_cone(twice) <= twice).flatten(1).all(1) if len(twice) else solution.converged
        if not bool((doubtful | ~solution.converged).any()):
            return solution
        found = self._exists(bound, solution.value)
        exists = torch.tensor([verdict == "exists" for verdict in found.verdict], device=doubtful.device)
        converged = solution.converged & (exists | ~doubtful)
        if bool((converged != solution.converged).any()):
            told = Solution.of(solution.value, solution.steps, solution.residual, converged)
            solution = told.with_outcome(Outcome.NOT_CERTIFIED)
        if solution.outcome is not Outcome.CONVERGED:
            self._report(found, solution, solver)
        return solution

    def _report(self, found: Feasibility, solution: Solution, solver: Solver | Certified) -> None:
        none, unclear = (
            [i for i, verdict in enumerate(found.verdict) if verdict == wanted and not bool(solution.converged[i])]
            for wanted in ("does not exist", "undecided")
        )
        if not none and not unclear:
            report(solution.stats, solver, "forward")
            return
        low, high = float(found.lower[none + unclear].min()), float(found.upper[none + unclear].max())
        known = "" if self.asymptotic is not None else ", by a limit, which is no proof; give asymptotic="
        message = (
            f"samples {none[:10]} have no fixed point and of samples {unclear[:10]} it is not known: they did not "
            f"converge, and the spectral radius of the asymptotic mapping is {low:.6g} to {high:.6g}{known}"
        )
        if solver.throw:
            raise ConvergenceError(message)
        warnings.warn(message, ConvergenceWarning, stacklevel=3)

    @torch.no_grad()
    def enclose(self, z0: Tensor, *params: Any, width: float | None = None, rtol: float | None = None) -> Enclosure:
        """Bounds lower <= z* <= upper, proved for each sample by the order test, rounding included (T1, T9).

        Args:
            width: refine until no component's bounds are further apart than this.
            rtol: the same, relative to the component. Samples for which that fails are not certified.

        >>> import torch, pcdeq
        >>> box = pcdeq.ConcaveMap(lambda z: 1 + z.sqrt()).enclose(torch.zeros(1, 1).double(), rtol=1e-13)
        >>> bool(box.certified), bool(box.lower <= (3 + 5**0.5) / 2 <= box.upper)
        (True, True)
        """
        for name, given in (("width", width), ("rtol", rtol)):
            if given is not None and not given > 0:
                raise UsageError(f"{name} must be above 0, got {given}")
        bound = self.bind(z0, *params)
        box, z = None, bound.start
        finest = 4 * torch.finfo(z.dtype).eps
        inner = self.solver.solver if isinstance(self.solver, Certified) else self.solver
        asked = math.inf if width is None else width
        for tol in (inner.tol, 1e-8, 1e-10, 1e-12, 1e-14, finest):
            if box is not None and (tol >= inner.tol or tol < finest):
                continue
            z = self._run(bound.started_at(z), inner.with_options(tol=tol, throw=False)).value
            found = enclose_near(bound, z)
            box = found if box is None else _meet(box, found)
            wanted = torch.full_like(z, asked) if rtol is None else torch.minimum(box.lower * rtol, torch.tensor(asked))
            if width is None and rtol is None:
                break
            narrow = tighten(bound, box, wanted)
            if bool((narrow.certified | ~box.certified).all()) or tol == finest:
                box = narrow
                break
        assert box is not None
        return self._unless_contradicted(bound, box)

    def _unless_contradicted(self, bound: BoundMap, box: Enclosure, concave: bool = False) -> Enclosure:
        bad = contradicted(bound, box.upper, concave=concave)
        if bool(bad.any()):
            warnings.warn(
                f"samples {bad.nonzero().flatten().tolist()[:10]}: fn is not positive, monotone and "
                f"{'concave' if concave else 'scalable'} there, so that nothing is claimed; check() shows where not",
                ConvergenceWarning,
                stacklevel=3,
            )
        certified = box.certified & ~bad
        proved = per_sample(certified, box.lower)
        lower, upper = torch.where(proved, box.lower, 0.0), torch.where(proved, box.upper, torch.inf)
        return Enclosure(bound.samples(lower), bound.samples(upper), certified)

    @torch.no_grad()
    def rate(self, z0: Tensor, *params: Any, tol: float = 1e-6) -> Rate:
        """How fast plain iteration from 0 converges at least, for the slowest sample, in Thompson's metric.

        With z* <= u, g is a contraction below u by the factor max 1 - g(0)/g(u): along a ray the slope of log g is
        Jz/g(z) <= 1 - g(0)/g(z) for a concave g. Factor 1 if no upper bound was found.

        >>> import torch, pcdeq
        >>> pcdeq.ConcaveMap(lambda z: 1 + z.sqrt()).rate(torch.zeros(1, 1).double())
        Rate(factor=0.618..., steps=30)
        """
        if not tol > 0:
            raise UsageError(f"tol must be above 0, got {tol}")
        bound = self.bind(z0, *params)
        box = enclose_near(bound, self._run(bound, Anderson(tol=1e-6, max_steps=1000)).value)
        box = self._unless_contradicted(bound, box, concave=True)
        if not bool(box.certified.all()):
            return Rate(1.0, None)
        upper = box.upper.reshape(bound.start.shape)
        first = rounded_down(bound, torch.zeros_like(upper))
        eps = torch.finfo(upper.dtype).eps
        factor = float((1 - first / rounded_up(bound, upper)).max()) + 4 * eps
        distance = float((upper / first).log().max()) * (1 + 4 * eps)
        if factor >= 1 or not math.isfinite(distance):
            return Rate(min(factor, 1.0), None)
        steps = 1 if distance <= tol or factor <= 0 else 1 + math.ceil(math.log(tol / distance) / math.log(factor))
        return Rate(factor, steps)

    def __call__(self, z0: Tensor, *params: Any) -> Tensor:
        """The fixed point, with the implicit gradient for params and every tensor that fn closes over."""
        bound = self.bind(z0, *params)
        if not bound.start.numel():
            return z0.detach()
        with torch.no_grad():
            solution = self._told(bound, self._run(bound, self.solver), self.solver)
        z = implicit_gradient(bound.evaluate, solution.value, lambda grad: self._pull(bound, solution.value, grad))
        return bound.samples(z)

    def _pull(self, bound: BoundMap, z: Tensor, grad: Tensor) -> Tensor:
        solution = self._solve_adjoint(bound, z, grad)
        report(solution.stats, self.adjoint_solver, "backward")
        return solution.value

    def _solve_adjoint(self, bound: BoundMap, z: Tensor, grad: Tensor) -> Solution:
        pull = bound.pullback(z)
        problem = Problem(lambda y: pull(y) + grad, grad)
        if not isinstance(self.adjoint_solver, Certified):
            return run(problem, self.adjoint_solver)
        return solve_to_bound(self.adjoint_solver.solver, problem, lambda y: adjoint_bound(bound, z, y, grad))

    @torch.no_grad()
    def adjoint(self, z: Tensor, grad: Tensor, *params: Any) -> AdjointBound:
        """The adjoint solution y = J(z)ᵀy + grad at a point z, with a proved bound on its error (T5).

        It is what the backward pass multiplies the derivatives of fn with respect to ``params`` by. The bound is about
        the J of this very z, rounding included. It relies on J >= 0: on fn being monotone.

        >>> import torch, pcdeq
        >>> root = pcdeq.ConcaveMap(lambda z: 1 + z.sqrt())
        >>> z = root.solve(torch.zeros(1, 1).double(), solver=pcdeq.Anderson(tol=1e-14)).value
        >>> y = root.adjoint(z, torch.ones(1, 1).double())
        >>> bool(y.certified), abs(y.value.item() - 1 / (1 - 0.5 / z.item() ** 0.5)) < y.error.item() < 1e-5
        (True, True)
        """
        bound = self.bind(z, *params)
        if grad.shape != z.shape:
            raise UsageError(f"grad must have the point's shape {tuple(z.shape)}, got {tuple(grad.shape)}")
        point, grad = bound.start, grad.reshape(bound.start.shape)
        y = self._solve_adjoint(bound, point, grad).value
        error = adjoint_bound(bound, point, y, grad)
        certified = error.isfinite().flatten(1).all(1)
        return AdjointBound(bound.samples(y), bound.samples(error), certified)


def _for_adjoint(solver: Solver | Certified) -> Solver | Certified:
    """The same solver where it applies to a linear equation."""
    if isinstance(solver, Certified):
        return Certified(_for_adjoint(solver.solver))  # pyright: ignore[reportArgumentType]
    return Anderson(tol=solver.tol, max_steps=1000, throw=solver.throw) if isinstance(solver, Newton) else solver


def _meet(a: Enclosure, b: Enclosure) -> Enclosure:
    """Both are bounds, so the better of the two is."""
    lower, upper = torch.maximum(a.lower, b.lower), torch.minimum(a.upper, b.upper)
    return Enclosure(lower, upper, (a.certified | b.certified) & (largest(lower - upper) <= 0).flatten())
