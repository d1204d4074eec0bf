"""The conformance classes find mistakes: each of these operators and solvers has one, and a test that names it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.solvers import Solver, State
from pcdeq.testing import OperatorConformance, SolverConformance


class Mixing(pcdeq.LinearMap):
    """z -> W z + a share of the one before it, indices modulo the length."""

    def apply(self, z):
        return z @ self.weight.T + 0.5 * self.weight[0, 0] * z.roll(1, -1)


class Offset(Mixing):
    def apply(self, z):
        return super().apply(z) + 0.1


class Signed(Mixing):
    def apply(self, z):
        return super().apply(z) - 0.7 * z


class ClampsItsArgument(Mixing):
    def apply(self, z):
        return super().apply(z.clamp(min=0.0))


class RollsTheBatch(Mixing):
    def apply(self, z):
        return super().apply(z) + 0.1 * z.roll(1, 0)


class WrongAdjoint(Mixing):
    def adjoint(self, y):
        return y @ self.weight + 0.5 * self.weight[0, 0] * y.roll(1, -1)


class WrongGradient(Mixing):
    def weight_gradient(self, z, y):
        return y.T @ z


class WrongMatrix(Mixing):
    def matrix(self, state):
        return self.weight


class InPlace(Mixing):
    def apply(self, z):
        result = super().apply(z)
        z.zero_()
        return result


class InSinglePrecision(Mixing):
    def apply(self, z):
        return super().apply(z.float().to(z.dtype)).float()


class HidesRoundings(Mixing):
    def terms(self, state):
        return 1


class Coarse(Mixing):
    def apply(self, z):
        return super().apply(z) * (1 + 1e-5 if z.dtype == torch.float32 else 1)


class KeepsAGraph(Mixing):
    @torch.enable_grad()
    def adjoint(self, y):
        return (y * self.weight.detach().requires_grad_().sum()).detach().requires_grad_() * 0 + super().adjoint(y)


class Broken(pcdeq.Operator):
    def __init__(self, linear):
        super().__init__((4, 4), state_ndim=1)
        self.linear = linear

    def bind(self, weight):
        return self.linear(weight)


class NegativeWeight(Broken):
    def effective_weight(self):
        return self.weight_v * self.weight_g


class LearnsWhatTheGradientDoesNotSee(Broken):
    def __init__(self, linear):
        super().__init__(linear)
        self.gain = nn.Parameter(torch.ones(()))

    def bind(self, weight):
        return self.linear(weight * self.gain.detach().to(weight.dtype))


class TestCorrectOperator(OperatorConformance):
    state = (4,)

    def build(self):
        return Broken(Mixing)


@pytest.mark.parametrize(
    ("operator", "test"),
    [
        (lambda: Broken(Offset), "test_is_linear"),
        (lambda: Broken(ClampsItsArgument), "test_is_linear"),
        (lambda: Broken(Signed), "test_maps_nonnegative_to_nonnegative"),
        (lambda: Broken(RollsTheBatch), "test_samples_do_not_mix"),
        (lambda: Broken(WrongAdjoint), "test_adjoint_is_the_transpose"),
        (lambda: Broken(WrongAdjoint), "test_gradients_of_a_layer"),
        (lambda: Broken(WrongGradient), "test_weight_gradient_is_the_derivative"),
        (lambda: Broken(WrongGradient), "test_gradients_of_a_layer"),
        (lambda: Broken(WrongMatrix), "test_matrix_is_the_matrix"),
        (lambda: Broken(InPlace), "test_keeps_shape_and_dtype_and_leaves_its_argument_alone"),
        (lambda: Broken(InSinglePrecision), "test_keeps_shape_and_dtype_and_leaves_its_argument_alone"),
        (lambda: Broken(HidesRoundings), "test_terms_bound_the_rounding"),
        (lambda: Broken(Coarse), "test_terms_bound_the_rounding"),
        (lambda: Broken(Coarse), "test_bounds_hold_the_answer"),
        (lambda: Broken(KeepsAGraph), "test_adjoint_and_weight_gradient_build_no_graph"),
        (lambda: NegativeWeight(Mixing), "test_weight_is_nonnegative_whatever_the_parameters"),
        (lambda: LearnsWhatTheGradientDoesNotSee(Mixing), "test_gradients_of_a_layer"),
    ],
)
def test_a_mistake_in_an_operator_is_found(operator, test):
    conformance = TestCorrectOperator()
    conformance.build = operator
    with pytest.raises((AssertionError, RuntimeError)):
        getattr(conformance, test)()


@dataclass(frozen=True, kw_only=True)
class Damped(Solver):
    """Halfway to the value."""

    def step(self, problem, state, point, norm):
        value = problem.fn(point)
        residual = value - point
        length = norm(residual)
        return State(self.between(point, value), value, residual, length)

    def between(self, point, value):
        return torch.lerp(point, value, 0.5)


class Diverges(Damped):
    def between(self, point, value):
        return point + 3 * (value - point)


class StopsInTheMiddle(Damped):
    def step(self, problem, state, point, norm):
        found = super().step(problem, state, point, norm)
        return found._replace(length=1e-11 * found.length)


class ReturnsItsPoint(Damped):
    def step(self, problem, state, point, norm):
        found = super().step(problem, state, point, norm)
        return found._replace(value=found.point)


class MixesSamples(Damped):
    def between(self, point, value):
        return point + (value - point) * (0.5 + 0.2 * value.mean())


class ChangesItsPoint(Damped):
    def between(self, point, value):
        return point.lerp_(value, 0.5)


class Random(Damped):
    def between(self, point, value):
        return torch.lerp(point, value, 0.5 + 0.1 * torch.rand(()).item())


class EvaluatesTwice(Damped):
    def between(self, point, value):
        return value

    def step(self, problem, state, point, norm):
        return super().step(problem, state, problem.fn(point), norm)


class DependsOnScale(Damped):
    def step(self, problem, state, point, norm):
        found = super().step(problem, state, point, norm)
        following = torch.lerp(point, found.value, 0.9 - 0.8 * torch.exp(-1e6 * found.length)[:, None])
        return found._replace(point=following)


class NeedsASample(Damped):
    def init(self, problem):
        first = problem.first()
        return torch.zeros_like(first) + first.min()


class Impatient(Damped):
    def __post_init__(self):
        object.__setattr__(self, "max_steps", 3 * self.max_steps)


class Sloppy(Damped):
    def __post_init__(self):
        object.__setattr__(self, "tol", 10 * self.tol)


class OneRule(Damped):
    def __post_init__(self):
        object.__setattr__(self, "stop", "sample")


class Silent(Damped):
    def __post_init__(self):
        object.__setattr__(self, "throw", False)


class Unequal(Damped):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class TestCorrectSolver(SolverConformance):
    def build(self, **options):
        return Damped(**options)


@pytest.mark.parametrize(
    ("solver", "test"),
    [
        (Diverges, "test_finds_known_answers"),
        (StopsInTheMiddle, "test_a_state_says_what_was_evaluated"),
        (ReturnsItsPoint, "test_a_state_says_what_was_evaluated"),
        (StopsInTheMiddle, "test_a_layer_forward_and_backward"),
        (MixesSamples, "test_an_answer_does_not_depend_on_the_batch"),
        (MixesSamples, "test_a_sample_that_is_no_number_stays_alone"),
        (ChangesItsPoint, "test_a_step_is_pure"),
        (Random, "test_a_step_is_pure"),
        (EvaluatesTwice, "test_each_step_evaluates_once"),
        (DependsOnScale, "test_does_not_depend_on_the_scale"),
        (NeedsASample, "test_nothing_is_an_answer"),
        (Impatient, "test_keeps_to_max_steps"),
        (Sloppy, "test_keeps_to_tol"),
        (OneRule, "test_the_batch_rule_has_one_count_for_all"),
        (Silent, "test_a_failure_is_said"),
        (Unequal, "test_is_a_value"),
    ],
)
def test_a_mistake_in_a_solver_is_found(solver, test):
    conformance = TestCorrectSolver()
    conformance.build = lambda **options: solver(**options)
    with pytest.raises((AssertionError, RuntimeError)):
        getattr(conformance, test)()


def test_check_raises_what_a_test_does():
    class Checked(TestCorrectSolver):
        def test_is_a_value(self):
            raise AssertionError("seen")

    with pytest.raises(AssertionError, match="seen"):
        Checked.check()


def test_pytest_is_not_needed():
    code = "import sys; sys.modules['pytest'] = None; import pcdeq.testing; print(pcdeq.testing.SolverConformance)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
