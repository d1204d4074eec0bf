"""What a solver must do, as tests for whoever writes one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcdeq.activations import as_activation
from pcdeq.equation import Adjoint, Equation
from pcdeq.errors import ConvergenceError
from pcdeq.layers import PcDEQLinear
from pcdeq.operators import ConvMap, DenseMap
from pcdeq.proofs.certified import Certified
from pcdeq.solvers import Anderson, Outcome, Problem, Solution, Solver, run
from pcdeq.solvers.loop import careful_norm_of_each
from pcdeq.testing.shared import Conformance, assert_near, uniform


class Known(NamedTuple):
    """A problem and its answer."""

    name: str
    problem: Problem
    answer: Tensor


class SolverConformance(Conformance):
    """What every solver must do: derive from it, and say how to build yours.

    A subclass has the method `build`, and ``any_map = False`` if the solver needs the bounds or the Jacobian that only
    the equation of a layer has.

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from pcdeq.solvers import Solver, State
    >>> from pcdeq.testing import SolverConformance
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Damped(Solver):
    ...     damping: float = 0.5
    ...     def step(self, problem, state, point, norm):
    ...         value = problem.fn(point)
    ...         residual = value - point
    ...         return State(torch.lerp(point, value, self.damping), value, residual, norm(residual))
    >>> class TestDamped(SolverConformance):
    ...     def build(self, **options):
    ...         return Damped(**options)
    >>> TestDamped.check()  # pytest does it by itself

    A mistake is found, and named:

    >>> class InPlace(Damped):
    ...     def step(self, problem, state, point, norm):
    ...         value = problem.fn(point)
    ...         residual = value - point
    ...         return State(point.lerp_(value, self.damping), value, residual, norm(residual))
    >>> TestDamped.build = lambda self, **options: InPlace(**options)
    >>> TestDamped().test_a_step_is_pure()
    Traceback (most recent call last):
    ...
    AssertionError: step changes what it is given in place
    """

    any_map = True

    def build(self, **options: Any) -> Solver:
        """A solver with these options, which are those of `Solver`: tol, max_steps, stop, throw."""
        raise NotImplementedError("build(**options) must return the solver that is to be tested")

    def solve(self, problem: Problem, **options: Any) -> Solution:
        return run(problem, self.build(**{"max_steps": 5000, **options}))

    # One step.

    def test_a_step_is_pure(self):
        for problem, solver, state, point in self._walk():
            given = _tensors((point, state))
            before = [tensor.clone() for tensor in given]
            first, second = (_tensors(solver.step(problem, state, point, careful_norm_of_each)) for _ in range(2))
            assert all(map(_same, given, before)), "step changes what it is given in place"
            assert all(map(_same, first, second)), "step gives another result when it is asked again"

    def test_a_state_says_what_was_evaluated(self):
        for problem, solver, state, point in self._walk():
            found = solver.step(problem, state, point, careful_norm_of_each)
            value = problem.fn(point)
            assert _same(found.value, value), "State.value is not the map at the point that was given"
            assert _same(found.residual, value - point), "State.residual is not the value minus that point"
            length = careful_norm_of_each(value - point)
            assert_near(found.length, length, 1e-12, "State.length is not the norm of the residual")

    def test_each_step_evaluates_once(self):
        problem, calls = layer_equation(samples=1).problem(), []
        counted = replace(problem, fn=lambda z: (calls.append(1), problem.fn(z))[1], form=None)
        solution = self.solve(counted)
        free = problem.steps if self.build().begins_at_start else 0
        assert solution.steps.item() == len(calls) + free, f"{len(calls)} evaluations, {solution.steps.item()} steps"

    def _walk(self):
        """The first steps of a solve: problem, solver, state and point."""
        problem, solver = layer_equation().problem(), self.build()
        point, state = solver.init(problem), None
        for _ in range(6):
            yield problem, solver, state, point
            state = solver.step(problem, state, point, careful_norm_of_each)
            point = state.point

    # A solve.

    def test_finds_known_answers(self):
        for known in [*known_layers(), *(known_maps() if self.any_map else ())]:
            solution = self.solve(known.problem, tol=1e-11)
            assert solution.outcome is Outcome.CONVERGED, f"{known.name}: {solution.outcome.name}"
            assert_near(solution.value, known.answer, 1e-8, known.name)

    def test_keeps_to_tol(self):
        problem, steps = layer_equation().problem(), 0
        for tol in (1e-1, 1e-3, 1e-6, 1e-9):
            solution = self.solve(problem, tol=tol)
            assert bool(solution.converged.all()) and bool((solution.residual < tol).all()), f"not solved to {tol}"
            assert solution.summary.steps >= steps, f"fewer steps for tol {tol} than for a larger one"
            steps = solution.summary.steps

    def test_keeps_to_max_steps(self):
        for limit in (1, 2, 3, 5):
            solution = self.solve(layer_equation(samples=1).problem(), tol=1e-14, max_steps=limit)
            assert solution.summary.steps <= limit, f"{solution.summary.steps} steps where {limit} were allowed"
            assert solution.converged.item() or solution.outcome is Outcome.MAX_STEPS, solution.outcome
        hasty = self.solve(layer_equation().problem(), tol=1e-14, max_steps=1)
        assert hasty.outcome is Outcome.MAX_STEPS and not bool(hasty.converged.any())

    def test_an_answer_does_not_depend_on_the_batch(self):
        equation = layer_equation(samples=6)
        # A product rounds differently in a batch; a solver may enlarge that, but to nowhere near tol.
        for tol in (1e-1, 1e-3):
            together = self.solve(equation.problem(), tol=tol)
            for i in range(6):
                alone = self.solve(replace(equation, x=equation.x[i : i + 1]).problem(), tol=tol)
                assert alone.steps[0] == together.steps[i], "a sample takes other steps in a batch than alone"
                assert_near(together.value[i], alone.value[0], 1e-3 * tol, "a sample's answer depends on the batch")

    def test_the_batch_rule_has_one_count_for_all(self):
        solution = self.solve(layer_equation().problem(), tol=1e-6, stop="batch")
        assert bool(solution.converged.all())
        assert solution.steps.unique().numel() == solution.residual.unique().numel() == 1
        assert float(solution.residual[0]) < 1e-6

    def test_a_sample_that_is_no_number_stays_alone(self):
        equation = layer_equation(samples=3)
        clean = self.solve(equation.problem())
        equation.x[1, 0] = torch.nan
        solution = self.solve(equation.problem())
        assert solution.outcome is Outcome.NONFINITE, solution.outcome
        assert solution.converged.tolist() == [True, False, True]
        assert_near(solution.value[[0, 2]], clean.value[[0, 2]], 1e-7, "a NaN in one sample changes the others")

    def test_a_tol_below_the_dtype_is_named_or_met(self):
        outcome = self.solve(layer_equation(dtype=torch.float32).problem(), tol=1e-30, max_steps=500).outcome
        assert outcome in (Outcome.PRECISION, Outcome.CONVERGED), outcome

    def test_does_not_depend_on_the_scale(self):
        if not self.any_map:
            return
        matrix, offset = _contraction(), uniform(3, 4, seed=8, dtype=torch.float32) - 0.5
        solutions = [
            self.solve(Problem(lambda z, s=scale: z @ matrix.float().T + s * offset, scale * offset), tol=1e-5)
            for scale in (1.0, 2.0**-110, 2.0**110)
        ]
        for scale, solution in zip((2.0**-110, 2.0**110), solutions[1:], strict=True):
            assert solution.outcome is Outcome.CONVERGED, f"data times {scale:.0e}: {solution.outcome.name}"
            assert int((solution.steps - solutions[0].steps).abs().max()) <= 1, (
                f"other steps for data times {scale:.0e}"
            )
            assert_near(solution.value / scale, solutions[0].value, 1e-4, f"data times {scale:.0e}")

    def test_nothing_is_an_answer(self):
        empty = self.solve(layer_equation(samples=0).problem())
        assert empty.value.shape == (0, 4) and empty.outcome is Outcome.CONVERGED
        if self.any_map:
            zero = self.solve(Problem(lambda z: z @ _contraction().T, torch.zeros(2, 4, dtype=torch.float64)))
            assert zero.outcome is Outcome.CONVERGED and not bool(zero.value.any()), "z = 0 is not found from 0"

    # In a layer.

    def layer(self, **options: Any) -> PcDEQLinear:
        solver = self.build(**options)
        adjoint = None if self.any_map else Anderson(tol=solver.tol)
        layer = PcDEQLinear(4, solver=solver, adjoint_solver=adjoint, weight_norm=False).double()
        with torch.no_grad():
            layer.operator.weight.copy_(0.6 * uniform(4, 4, seed=5))
        return layer

    def test_a_layer_forward_and_backward(self):
        layer = self.layer(tol=1e-13, max_steps=5000).eval()
        x = (4 * uniform(2, 4, seed=6) - 2).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, _: layer(x), (x, layer.operator.weight))
        assert layer.last_forward is not None and layer.last_forward.outcome is Outcome.CONVERGED
        assert layer.last_backward is not None and layer.last_backward.outcome is Outcome.CONVERGED

    def test_a_proof_around_it(self):
        layer, x = self.layer(), 4 * uniform(3, 4, seed=6) - 2
        solution = layer.solve(x, solver=Certified(self.build(tol=1e-3, max_steps=5000)))
        answer = layer.solve(x, solver=self.build(tol=1e-12, max_steps=5000)).value
        error = (solution.value - answer).norm(dim=1) / solution.value.norm(dim=1)
        assert bool((error <= solution.residual + 1e-10).all()) and bool((solution.residual < 1e-3).all())

    def test_a_failure_is_said(self):
        x, thrown = uniform(2, 4, seed=6), False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.layer(tol=1e-14, max_steps=1)(x)
            try:
                self.layer(tol=1e-14, max_steps=1, throw=True)(x)
            except ConvergenceError:
                thrown = True
        assert any("raise max_steps" in str(warning.message) for warning in caught), "no warning"
        assert thrown, "throw=True did not raise ConvergenceError"

    def test_is_a_value(self):
        one = self.build(tol=1e-5)
        assert one == self.build(tol=1e-5) and hash(one) == hash(self.build(tol=1e-5)), "make it a frozen dataclass"
        assert one.with_options(tol=1e-6) == self.build(tol=1e-6)


# Problems with known answers, in float64.


def layer_equation(samples: int = 5, dtype: torch.dtype = torch.float64) -> Equation:
    """The equation of a dense layer, for inputs of very different sizes."""
    size = torch.logspace(-2, 1, max(samples, 1), dtype=torch.float64)[:samples, None]
    x = size * (0.1 + uniform(samples, 4, seed=3))
    return Equation(DenseMap(0.5 * uniform(4, 4, seed=4, dtype=dtype)), as_activation("tanh"), x.to(dtype))


def known_layers() -> list[Known]:
    """Equations of layers: of one unit, solved on paper; of more, made for an answer that was chosen before."""
    found = []
    for name, weight, x, answer in (
        ("relu6", 0.5, 0.25, 0.5),
        ("relu6", 0.9, 0.05, 0.5),
        ("relu6", 0.25, 100.0, 6.0),
        ("hard-tanh", 30.0, 1e-3, 1.0),
        ("softsign", 1.0, 1.0, (5**0.5 - 1) / 2),  # z = (z + 1) / (z + 2)
        ("hard-sigmoid", 3.0, 0.0, 1.0),
    ):
        given = (torch.full((1, 1), number, dtype=torch.float64) for number in (weight, x, answer))
        found.append(_known(f"one unit, {name}, W = {weight}, x = {x}", DenseMap, name, *given))
    for name in ("tanh", "sigmoid", "log1p"):
        for kind, state, shape in ((DenseMap, (5,), (5, 5)), (ConvMap, (2, 3, 3), (2, 2, 3, 3))):
            # Choose y = Wz + x, hence z = s(y), then x.
            y, weight = 0.2 + 1.5 * uniform(3, *state, seed=1), uniform(*shape, seed=2)
            z = as_activation(name)(y)
            weight = weight * (0.7 / (kind(weight).apply(z) / y).max())  # leaves x >= 0.3 y
            found.append(_known(f"{kind.__name__}, {name}", kind, name, weight, y - kind(weight).apply(z), z))
    return found


def _known(name: str, kind: type[DenseMap | ConvMap], activation: str, weight: Tensor, x: Tensor, z: Tensor) -> Known:
    return Known(name, Equation(kind(weight), as_activation(activation), x).problem(), z)


def known_maps() -> list[Known]:
    """Maps without bounds or Jacobian: one that goes back and forth, one that turns, an adjoint equation."""
    matrix, ones = torch.tensor([[0.2, -0.5], [0.4, 0.1]]).double(), torch.ones(1, 2).double()
    turned = torch.linalg.solve(torch.eye(2).double() - matrix, ones[0])[None]
    slope, grad = uniform(3, 4, seed=1), uniform(3, 4, seed=2) - 0.5
    adjoint = Adjoint(DenseMap(_contraction()), slope, grad)
    pulled = torch.linalg.solve(torch.eye(4).double() - slope[:, :, None] * _contraction().T, slope * grad)
    return [
        Known("z = cos z", Problem(torch.cos, torch.zeros(1, 1).double()), ones[:, :1] * 0.7390851332151607),
        Known("a rotation", Problem(lambda z: z @ matrix.T + 1, 0 * ones), turned),
        Known("an adjoint equation", adjoint.problem(), pulled),
    ]


def _contraction() -> Tensor:
    matrix = uniform(4, 4, seed=7)
    return 0.6 * matrix / matrix.sum(1).max()


def _tensors(thing: object) -> list[Tensor]:
    """All tensors in a solver's state, whatever it remembers."""
    if isinstance(thing, Tensor):
        return [thing]
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a.double()), torch.nan_to_num(b.double()))
