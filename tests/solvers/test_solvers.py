"""Solvers x problems with known answers; stopping rules, step counts, outcomes; independence of neighbours."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from problems import (
    ACTIVATIONS,
    OPERATORS,
    PAPER_ACTIVATIONS,
    closed_forms,
    make_input,
    make_layer,
    manufactured,
    reference_solution,
    scalar_layer,
)

import pcdeq
from pcdeq.errors import ConvergenceError, ConvergenceWarning, UsageError
from pcdeq.kernels import binding
from pcdeq.solvers import Problem, run
from pcdeq.solvers.loop import _Watch
from pcdeq.testing import SolverConformance
from pcdeq.testing.counting import as_on_accelerator

SOLVERS = {
    "picard": pcdeq.Picard,
    "anderson": pcdeq.Anderson,
    "anderson-3": lambda **options: pcdeq.Anderson(memory=3, **options),
    "newton": pcdeq.Newton,
}
each_solver = pytest.mark.parametrize("solver", SOLVERS)
each_operator = pytest.mark.parametrize("operator", OPERATORS)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


class TestKnownAnswers:
    @each_solver
    @each_activation
    @each_operator
    def test_manufactured(self, operator, activation, solver):
        known = manufactured(operator, activation, solver=SOLVERS[solver](tol=1e-13))
        solution = known.layer.solve(known.x)
        assert solution.outcome is pcdeq.Outcome.CONVERGED
        # ‖z - z*‖ <= ‖(I - J)⁻¹‖ ‖g(z) - z‖ to first order, plus the rounding of the product and of s⁻¹.
        error = (solution.value - known.answer).flatten(1).norm(dim=1) / known.answer.flatten(1).norm(dim=1)
        assert error.max() < known.condition * (1e-13 + 40 * np.finfo(float).eps)

    @each_solver
    @pytest.mark.parametrize(("activation", "weight", "x", "answer"), closed_forms())
    def test_closed_forms(self, activation, weight, x, answer, solver):
        layer = scalar_layer(weight, activation, solver=SOLVERS[solver](tol=1e-14, max_steps=20000))
        value = layer.solve(torch.full((1, 1), x, dtype=torch.float64)).value.item()
        assert value == pytest.approx(answer, rel=1e-12)

    @each_solver
    @pytest.mark.parametrize("gain", [0.0, 0.01, 1.0, 5.0, 50.0])
    @each_activation
    def test_any_size_of_weight(self, activation, gain, solver):
        layer = make_layer("dense", activation, gain=gain, solver=SOLVERS[solver](tol=1e-12, max_steps=5000))
        x = make_input("dense", samples=3)
        expected = torch.from_numpy(reference_solution("dense", activation, layer, x))
        torch.testing.assert_close(layer.solve(x).value, expected, rtol=1e-9, atol=0)


class TestPicard(SolverConformance):
    def build(self, **options):
        return pcdeq.Picard(**options)

    def test_counts_the_step_from_0_and_stops_by_the_rule(self):
        # z <- z/2 + 1 from 1 (standing for one step): residual 2^-k / value; by hand below.
        z, steps = 1.0, 1
        while True:
            new = z / 2 + 1
            steps += 1
            done = abs(new - z) / new < 1e-3
            z = new
            if done:
                break
        start = torch.ones(1, 1).double()
        solution = run(Problem(lambda z: z / 2 + 1, start, steps=1), pcdeq.Picard(tol=1e-3))
        assert solution.value.item() == z
        assert solution.steps.tolist() == [steps]
        assert solution.residual.item() == pytest.approx(2.0**-9 / 1.9980, rel=1e-3)

    @each_activation
    def test_from_0_each_iterate_is_a_lower_bound(self, activation):
        layer = make_layer("dense", activation, gain=1.5)
        x = make_input("dense")
        answer = torch.from_numpy(reference_solution("dense", activation, layer, x))
        equation = layer.equation(x)
        last = torch.zeros_like(x)
        for steps in range(2, 30):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                z = run(equation.problem(), pcdeq.Picard(tol=1e-16, max_steps=steps)).value
            assert (z >= last).all()
            assert (z <= answer * (1 + 1e-14)).all()
            last = z


class TestAnderson(SolverConformance):
    def build(self, **options):
        return pcdeq.Anderson(**options)

    @pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
    def test_needs_fewer_products_than_plain_iteration(self, activation):
        layer = make_layer("dense", activation, gain=0.5, floor=0.01)
        x = make_input("dense", samples=20)
        plain = layer.solve(x, solver=pcdeq.Picard(tol=1e-8)).steps
        fast = layer.solve(x, solver=pcdeq.Anderson(tol=1e-8)).steps
        assert fast.sum() < 0.8 * plain.sum()

    def test_solves_a_line_at_once(self):
        # For one unknown and an affine map the secant is exact: start, plain step, proposal.
        solution = run(Problem(lambda z: 0.9 * z + 1, torch.ones(1, 1).double()), pcdeq.Anderson(tol=1e-12))
        assert solution.value.item() == pytest.approx(10, rel=1e-12)
        assert solution.steps.item() <= 4

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("operator", ["dense", "conv2d"])
    def test_in_float32_equals_its_own_float64(self, operator, activation):
        # float32 may take another path (a fused kernel): the same answer to the tolerance, in as many steps.
        x = make_input(operator, samples=5, dtype=torch.float32)
        options = {"gain": 0.9, "solver": pcdeq.Anderson(tol=1e-5), "floor": 0.01}
        single = make_layer(operator, activation, dtype=torch.float32, **options).solve(x)
        double = make_layer(operator, activation, dtype=torch.float64, **options).solve(x.double())
        assert single.value.dtype == torch.float32
        torch.testing.assert_close(single.value.double(), double.value, rtol=1e-4, atol=0)
        assert (single.steps - double.steps).abs().max() <= 1


class TestAndersonWithMoreMemory(SolverConformance):
    def build(self, **options):
        return pcdeq.Anderson(memory=3, **options)


class TestFastPath:
    """Anderson may be fused in float32; its plain version is the reference, and both agree."""

    def compare(self, problem, solver=None, rtol=2e-5):
        solver = solver or pcdeq.Anderson(tol=1e-5)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fast, plain = run(problem, solver), run(dataclasses.replace(problem, form=None), solver)
            limits = {"steps_before": problem.steps, "max_steps": solver.max_steps}
            asked = (problem.form, None, problem.guess, problem.box)
            by_kernel = binding.solve(*asked, tol=solver.tol, decay=solver.decay, **limits) is not None
        assert by_kernel is (problem.form.activation in binding._CODES)  # else the two are one
        assert fast.outcome is plain.outcome
        assert torch.equal(fast.converged, plain.converged)
        # Sums in another order may tip a sample over the threshold one step sooner or later.
        assert (fast.steps - plain.steps).abs().max() <= 2
        keep = plain.converged
        torch.testing.assert_close(fast.value[keep], plain.value[keep], rtol=rtol, atol=1e-30)
        return fast

    @each_activation
    @pytest.mark.parametrize("gain", [0.1, 0.5, 2.0, 30.0])
    @pytest.mark.parametrize("size", [1, 3, 17, 64])
    def test_small_layers(self, activation, gain, size):
        layer = pcdeq.PcDEQLinear(size, activation, floor=0.02)
        with torch.no_grad():
            layer.operator.weight_g.fill_(gain)
        self.compare(layer.equation(2 * torch.randn(9, size)).problem())

    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_a_batch_large_enough_for_threads(self, memory_format):
        layer = pcdeq.PcDEQConv2d(8, "tanh", floor=0.02)
        with torch.no_grad():
            layer.operator.weight_g.fill_(0.7)
        x = torch.randn(20, 8, 16, 15).to(memory_format=memory_format)
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            self.compare(layer.equation(x).problem())
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("x", [-1000.0, -5.0, 1e4, 1e30])
    @each_activation
    def test_extreme_inputs(self, activation, x):
        layer = make_layer("dense", activation, gain=1.5, dtype=torch.float32)
        self.compare(layer.equation(torch.full((2, 3), x)).problem(), rtol=1e-3)

    def test_a_sample_that_is_no_number(self):
        layer = make_layer("dense", "tanh", dtype=torch.float32)
        x = make_input("dense", samples=4, dtype=torch.float32)
        x[2, 1] = float("nan")
        fast = self.compare(layer.equation(x).problem())
        assert fast.converged.tolist() == [True, True, False, True]

    @pytest.mark.parametrize("max_steps", [1, 2, 3, 5])
    def test_the_same_iterate_at_the_step_limit(self, max_steps):
        layer = make_layer("dense", "tanh", gain=0.9, dtype=torch.float32)
        problem = layer.equation(make_input("dense", dtype=torch.float32)).problem()
        solver = pcdeq.Anderson(tol=1e-9, max_steps=max_steps)
        with torch.no_grad():
            fast, plain = run(problem, solver), run(dataclasses.replace(problem, form=None), solver)
        assert fast.steps.tolist() == plain.steps.tolist() == [max_steps] * 2
        torch.testing.assert_close(fast.value, plain.value, rtol=1e-5, atol=0)


class TestNewton(SolverConformance):
    any_map = False  # it needs a Jacobian

    def build(self, **options):
        return pcdeq.Newton(**options)

    @each_activation
    @each_operator
    def test_converges_in_a_handful_of_steps_from_above(self, operator, activation):
        layer = make_layer(operator, activation, gain=3.0)
        x = make_input(operator)
        solution = layer.solve(x, solver=pcdeq.Newton(tol=1e-13))
        assert solution.outcome is pcdeq.Outcome.CONVERGED
        assert solution.steps.max() <= 15
        rough = layer.solve(x, solver=pcdeq.Newton(tol=1e-2)).value
        assert (rough >= solution.value * (1 - 1e-12)).all()

    def test_refuses_a_state_too_large_for_a_matrix(self):
        with pytest.raises(UsageError, match=r"8192 rows.*Anderson or Picard"):
            pcdeq.PcDEQConv2d(2, solver=pcdeq.Newton())(torch.zeros(1, 2, 64, 64))

    def test_refuses_a_map_of_unknown_structure(self):
        with pytest.raises(UsageError, match=r"Jacobian.*Anderson or Picard"):
            pcdeq.fixed_point(torch.cos, torch.zeros(2), solver=pcdeq.Newton())


@each_solver
class TestSolution:
    """One record, whoever made it."""

    def test_fields(self, solver):
        layer = make_layer("conv2d", solver=SOLVERS[solver]())
        x = make_input("conv2d", samples=3)
        solution = layer.solve(x)
        assert type(solution) is pcdeq.Solution
        assert solution.value.shape == x.shape
        assert solution.steps.shape == solution.residual.shape == solution.converged.shape == (3,)
        assert solution.converged.dtype == torch.bool
        assert not solution.steps.is_floating_point()
        assert (solution.residual < 1e-4).all()
        assert not solution.value.requires_grad

    def test_residual_is_small_indeed(self, solver):
        layer = make_layer("dense", "tanh", gain=2.0, solver=SOLVERS[solver](tol=1e-6))
        x = make_input("dense", samples=5)
        z = layer.solve(x).value
        # z = g(y) with ‖z - y‖ < tol ‖z‖, and g is not steeper than W: the residual of z itself follows.
        slack = torch.linalg.matrix_norm(layer.operator.effective_weight(), 2).item()
        residual = (layer.equation(x)(z) - z).norm(dim=1) / z.norm(dim=1)
        assert (residual < 1e-6 * max(slack, 1.0)).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("max_steps", [1, 2, 4])
    def test_never_more_steps_than_allowed_and_says_so(self, solver, max_steps, dtype):
        max_steps = 1 if solver == "newton" else max_steps  # Newton converges in two or three
        layer = make_layer("dense", gain=1.0, dtype=dtype, solver=SOLVERS[solver](tol=1e-6, max_steps=max_steps))
        x = make_input("dense", dtype=dtype)
        with pytest.warns(ConvergenceWarning, match="max_steps"):
            solution = layer.solve(x)
        assert solution.outcome is pcdeq.Outcome.MAX_STEPS
        assert not solution.converged.any()
        assert (solution.steps == max_steps).all()
        # What is returned is an iterate: within the box, no uninitialised memory.
        assert ((solution.value >= layer.equation(x).at_zero()) & (solution.value <= 1)).all()

    def test_message_names_the_numbers_and_what_to_change(self, solver):
        layer = make_layer("dense", solver=SOLVERS[solver](tol=1e-15, max_steps=2))
        with pytest.warns(
            ConvergenceWarning, match="forward solve: 2 of 2 samples not converged after 2 steps"
        ) as caught:
            layer(make_input("dense"))
        message = str(caught[0].message)
        assert "tol 1e-15" in message
        assert "raise max_steps" in message

    def test_throw_raises_instead(self, solver):
        layer = make_layer("dense", solver=SOLVERS[solver](tol=1e-15, max_steps=2, throw=True))
        with pytest.raises(ConvergenceError, match="raise max_steps"):
            layer(make_input("dense"))
        with pytest.raises(ConvergenceError, match="raise max_steps"):
            layer.solve(make_input("dense"))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_an_input_that_is_no_number_is_named_and_stays_alone(self, solver, bad, dtype):
        layer = make_layer("dense", "softsign", solver=SOLVERS[solver](tol=1e-6), dtype=dtype)
        x = make_input("dense", samples=3, dtype=dtype)
        clean = layer.solve(x)
        x[1, 0] = bad
        with pytest.warns(ConvergenceWarning, match="1 of 3 samples.*infinite or NaN"):
            solution = layer.solve(x)
        assert solution.outcome is pcdeq.Outcome.NONFINITE
        assert solution.converged.tolist() == [True, False, True]
        torch.testing.assert_close(solution.value[[0, 2]], clean.value[[0, 2]])

    def test_weights_that_are_no_numbers_are_named(self, solver):
        layer = make_layer("dense", solver=SOLVERS[solver](), weight_norm=False)
        with torch.no_grad():
            layer.operator.weight[0, 0] = float("nan")
        with pytest.warns(ConvergenceWarning, match="NaN"):
            assert layer.solve(make_input("dense")).outcome is pcdeq.Outcome.NONFINITE

    def test_a_tol_below_the_dtype_is_named_or_met(self, solver):
        layer = make_layer("dense", "softsign", gain=1.0, dtype=torch.float32, solver=SOLVERS[solver](tol=1e-30))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            solution = layer.solve(make_input("dense", samples=20, dtype=torch.float32))
        assert solution.outcome in (pcdeq.Outcome.PRECISION, pcdeq.Outcome.CONVERGED)
        assert len(caught) == (solution.outcome is pcdeq.Outcome.PRECISION)
        if caught:
            assert "loosen tol or use float64" in str(caught[0].message)

    def test_options_are_checked(self, solver):
        make = SOLVERS[solver]
        for options, message in (
            ({"tol": 0.0}, "tol must be above 0, got 0.0"),
            ({"tol": -1e-4}, "tol must be above 0, got -0.0001"),
            ({"tol": float("nan")}, "tol must be above 0, got nan"),
            ({"max_steps": 0}, r"max_steps must be at least 1 and below 2\^31, got 0"),
            ({"max_steps": -3}, r"max_steps must be at least 1 and below 2\^31, got -3"),
            ({"stop": "never"}, "'sample' or 'batch', got 'never'"),
        ):
            with pytest.raises(UsageError, match=message):
                make(**options)

    def test_is_a_frozen_value(self, solver):
        one, other = SOLVERS[solver](tol=1e-5), SOLVERS[solver](tol=1e-5)
        assert one == other
        assert hash(one) == hash(other)
        assert one.with_options(tol=1e-6) == SOLVERS[solver](tol=1e-6)
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.tol = 1.0
        with pytest.raises(UsageError, match="tol"):
            one.with_options(tol=-1.0)
        with pytest.raises(TypeError):
            one.with_options(tolerance=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "memory.*use Picard"),
        ({"decay": 0.0}, "decay"),
        ({"decay": 1.0}, "decay"),
        ({"decay": 1.5}, "decay"),
    ],
)
def test_anderson_options_are_checked(options, message):
    with pytest.raises(UsageError, match=message):
        pcdeq.Anderson(**options)


class TestNeverSilentlyWrong:
    """What a small residual or a tiny norm could hide."""

    @each_solver
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("size", [1, 5, 64])
    def test_a_start_whose_square_underflows(self, size, dtype, solver):
        # x = softplus(-5000) + floor is about 1e-38, z* about 0.96: the way up is long but must be gone.
        layer = pcdeq.PcDEQLinear(size, "tanh", weight_norm=False, solver=SOLVERS[solver](max_steps=500)).to(dtype)
        with torch.no_grad():
            layer.operator.weight.fill_(2.0 / size)
        solution = layer.solve(torch.full((1, size), -1000.0, dtype=dtype))
        assert solution.outcome is pcdeq.Outcome.CONVERGED
        torch.testing.assert_close(solution.value, torch.full_like(solution.value, 0.9575040241), rtol=1e-3, atol=0)

    @pytest.mark.parametrize("solver", ["picard", "anderson", "newton"])
    @pytest.mark.parametrize("size", [1, 5])
    def test_the_default_number_of_steps_is_enough_from_there(self, size, solver):
        layer = pcdeq.PcDEQLinear(size, "tanh", weight_norm=False, solver=SOLVERS[solver]()).double()
        with torch.no_grad():
            layer.operator.weight.fill_(2.0 / size)
        assert layer.solve(torch.full((1, size), -1000.0).double()).outcome is pcdeq.Outcome.CONVERGED

    @pytest.mark.parametrize("stop", ["sample", "batch"])
    def test_the_residual_rule_can_be_met_9_percent_off(self, stop):
        layer = scalar_layer(0.999, "relu6", solver=pcdeq.Picard(stop=stop, max_steps=5000))
        solution = layer.solve(torch.full((1, 1), 0.001, dtype=torch.float64))
        assert solution.outcome is pcdeq.Outcome.CONVERGED
        assert 0.90 < solution.value.item() < 0.92  # z* = 1

    @each_solver
    @pytest.mark.parametrize("max_steps", [50, 5000])
    def test_the_certified_rule_is_met_only_by_the_true_error(self, solver, max_steps):
        solver = pcdeq.Certified(SOLVERS[solver](max_steps=max_steps))
        layer = scalar_layer(0.999, "relu6", solver=solver)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            solution = layer.solve(torch.full((1, 1), 0.001, dtype=torch.float64))
        if solution.converged.item():
            assert abs(solution.value.item() - 1) <= solution.residual.item() * solution.value.item()
            assert solution.residual.item() < 1e-4
            assert not caught
        else:
            assert solution.outcome in (pcdeq.Outcome.MAX_STEPS, pcdeq.Outcome.NOT_CERTIFIED)
            assert caught[0].category is ConvergenceWarning

    def test_the_certified_rule_can_be_met_there(self):
        layer = scalar_layer(0.999, "relu6", solver=pcdeq.Certified())
        assert layer.solve(torch.full((1, 1), 0.001, dtype=torch.float64)).outcome is pcdeq.Outcome.CONVERGED

    @each_solver
    def test_the_certified_rule_with_an_input_that_is_no_number(self, solver):
        layer = make_layer("dense", solver=pcdeq.Certified(SOLVERS[solver]()))
        x = make_input("dense", samples=3)
        x[1] = float("nan")
        with pytest.warns(ConvergenceWarning, match="NaN"):
            solution = layer.solve(x)
        assert solution.outcome is pcdeq.Outcome.NONFINITE
        assert solution.converged.tolist() == [True, False, True]

    @each_solver
    def test_the_certified_rule_below_the_dtype_says_so(self, solver):
        layer = make_layer("dense", solver=pcdeq.Certified(SOLVERS[solver](tol=1e-9)), dtype=torch.float32)
        with pytest.warns(ConvergenceWarning, match="float64"):
            solution = layer.solve(make_input("dense", dtype=torch.float32))
        assert solution.outcome is pcdeq.Outcome.NOT_CERTIFIED
        assert not solution.converged.any()

    @each_solver
    @each_operator
    @pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
    def test_the_certified_bound_holds(self, activation, operator, solver):
        layer = make_layer(operator, activation, gain=0.9, solver=pcdeq.Certified(SOLVERS[solver](tol=1e-3)))
        x = make_input(operator, samples=4)
        solution = layer.solve(x)
        assert solution.converged.all()
        answer = torch.from_numpy(reference_solution(operator, activation, layer, x))
        error = (solution.value - answer).flatten(1).norm(dim=1) / solution.value.flatten(1).norm(dim=1)
        assert (error <= solution.residual + 1e-14).all()
        assert (solution.residual < 1e-3).all()


class TestNeighbours:
    """stop="sample": what else is in the batch does not matter."""

    @each_solver
    @each_operator
    def test_alone_in_a_batch_and_in_a_shuffled_batch(self, operator, solver):
        layer = make_layer(operator, "tanh", gain=1.5, solver=SOLVERS[solver](tol=1e-12))
        x = make_input(operator, samples=7) * torch.logspace(-2, 1, 7).double().reshape(
            -1, *[1] * (len(make_input(operator).shape) - 1)
        )
        together = layer.solve(x)
        order = torch.randperm(7)
        shuffled = layer.solve(x[order])
        torch.testing.assert_close(shuffled.value, together.value[order], rtol=1e-10, atol=0)
        for i in range(7):
            alone = layer.solve(x[i : i + 1])
            torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-10, atol=0)

    @each_solver
    @each_operator
    def test_also_at_a_loose_tol(self, operator, solver):
        # Each sample stops by itself, so even an early stop gives the same iterate, up to the order of sums.
        layer = make_layer(operator, "tanh", gain=1.5, solver=SOLVERS[solver](tol=1e-2))
        x = make_input(operator, samples=5)
        x[0] *= 10
        together = layer.solve(x)
        for i in range(5):
            alone = layer.solve(x[i : i + 1])
            assert alone.steps[0] == together.steps[i]
            torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-12, atol=0)

    @each_operator
    def test_in_float32_to_the_error_bound(self, operator):
        layer = make_layer(operator, "softsign", gain=1.0, dtype=torch.float32, solver=pcdeq.Anderson(tol=1e-5))
        x = make_input(operator, samples=6, dtype=torch.float32)
        box = layer.enclose(x)
        assert box.certified.all()
        together = layer.solve(x).value
        for i in range(6):
            alone = layer.solve(x[i : i + 1]).value[0]
            # Both lie in the enclosure of the same fixed point, so they differ by no more than twice its width.
            assert ((alone - together[i]).abs() <= 2 * box.width[i] + 1e-6 * together[i]).all()

    @pytest.mark.parametrize("around", [nullcontext, as_on_accelerator], ids=["at hand", "from afar"])
    @pytest.mark.parametrize("lost", [float("nan"), 1e-200, 1e200], ids=["NaN", "tiny", "huge"])
    @pytest.mark.parametrize("solver", ["picard", "anderson", "anderson-3"])
    def test_one_that_is_lost_or_measured_otherwise_changes_no_bit(self, solver, lost, around):
        """Norms of such a sample under- or overflow or are none, which was a matter of the whole batch."""
        matrix = 0.16 * torch.rand(6, 6, generator=torch.manual_seed(0), dtype=torch.float64)
        offset = torch.randn(5, 6, generator=torch.manual_seed(1), dtype=torch.float64)

        def solve(offset):
            _Watch.ended.clear()  # so that it looks after the first steps
            problem = Problem(lambda z: z @ matrix.T + offset, offset)
            with around(), warnings.catch_warnings(action="ignore"):
                return run(problem, SOLVERS[solver](tol=1e-10, max_steps=40))

        clean, neighbours = solve(offset), [0, 1, 3, 4]
        offset[2] *= lost
        beside = solve(offset)
        for name in ("value", "steps", "residual", "converged"):
            assert torch.equal(getattr(clean, name)[neighbours], getattr(beside, name)[neighbours])
        assert bool(beside.converged[2]) == (lost == lost)

    def test_gradients_too(self):
        layer = make_layer("conv2d", "tanh", gain=1.0, solver=pcdeq.Anderson(tol=1e-12))
        x = make_input("conv2d", samples=4)

        def gradient(x):
            x = x.clone().requires_grad_()
            layer(x).square().sum().backward()
            return x.grad

        together = gradient(x)
        for i in range(4):
            torch.testing.assert_close(gradient(x[i : i + 1])[0], together[i], rtol=1e-9, atol=1e-12)
