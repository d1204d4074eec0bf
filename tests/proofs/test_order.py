"""Enclosures contain the equilibrium, whatever the layer, and are as narrow as the true error (T1, T3, T9)."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from problems import (
    ACTIVATIONS,
    FACTS,
    OPERATORS,
    PAPER_ACTIVATIONS,
    STATES,
    as_array,
    fixed_point_of,
    make_input,
    make_layer,
    matrix_of,
    scalar_layer,
)

import pcdeq
from pcdeq.errors import ConvergenceWarning, UsageError
from pcdeq.proofs.order import enclose_near, is_lower, is_upper
from pcdeq.solvers import Outcome, run

seeds = st.integers(0, 2**32 - 1)


def dense_layer(name, size, seed, weight, x, dtype=torch.float64):
    """A random layer whose entries are about ``weight`` and an input of the size ``x``, some of it exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    layer = pcdeq.PcDEQLinear(size, name, weight_norm=False, injection=lambda x: x, warm_start=False).to(dtype)
    with torch.no_grad():
        entries = torch.rand(size, size, generator=generator, dtype=torch.float64)
        entries *= torch.rand(size, size, generator=generator) < torch.rand((), generator=generator) + 0.1
        layer.operator.weight.copy_(weight * entries)
    inputs = x * torch.rand(3, size, generator=generator, dtype=torch.float64)
    inputs *= torch.rand(3, size, generator=generator) < 0.8
    return layer, inputs.to(dtype)


EXTENDED = {
    "tanh": np.tanh,
    "softsign": lambda y: y / (1 + y),
    "relu6": lambda y: np.minimum(y, 6),
    "sigmoid": lambda y: 1 / (1 + np.exp(-y)),
    "log1p": np.log1p,
    "arctan": np.arctan,
    "1-exp": lambda y: -np.expm1(-y),
    "isru": lambda y: y / np.hypot(y, np.longdouble(1)),
    "hard-tanh": lambda y: np.minimum(y, 1),
    "hard-sigmoid": lambda y: np.minimum(y / 6 + np.longdouble(0.5), 1),
}
ROUNDING = np.finfo(np.longdouble).eps


def solve_extended(matrix, right):
    """Gaussian elimination in numpy's long double, which LAPACK does not know. An M-matrix needs no pivots."""
    system = np.concatenate([matrix, right[:, None]], 1)
    for i in range(len(matrix)):
        system[i] /= system[i, i]
        others = np.arange(len(matrix)) != i
        system[others] -= system[others, i : i + 1] * system[i]
    return system[:, -1]


def referee(equation, name):
    """Bounds low <= z* <= high from the numbers that the equation has in memory, in 64-bit mantissas.

    Newton's method from above, then the order test (T1) on the point moved out by as little as passes it
    with a margin for its own rounding.
    """
    s, facts = EXTENDED[name], FACTS[name]
    matrix = as_array(equation.map.weight).astype(np.longdouble)
    inputs = as_array(equation.x).astype(np.longdouble)
    lows, highs = [], []
    for x in inputs:
        top = np.longdouble(facts.supremum)
        if np.isinf(top):
            top = np.longdouble(1)
            while s(matrix.sum(1).max() * top + x.max()) > top:
                top *= 2
        z = np.full(x.shape, top)
        for _ in range(200):
            p = matrix @ z + x
            value = s(p)
            if (np.abs(z - value) <= ROUNDING * z).all():
                break
            slope = facts.slope(np.minimum(p, 1e4).astype(float))
            newton = z - solve_extended(np.eye(len(x), dtype=np.longdouble) - slope[:, None] * matrix, z - value)
            z = np.where((newton <= value) & (newton > 0), newton, value)
        for side, bounds, last in ((1, highs, np.full_like(z, top)), (-1, lows, np.zeros_like(z))):
            # (I - J) w = z, so that moving out by a fraction of w leaves a relative gap of that fraction (T3).
            slope = facts.slope(np.minimum(matrix @ z + x, 1e4).astype(float) * (1 + side * 1e-9))
            w = solve_extended(np.eye(len(x), dtype=np.longdouble) - slope[:, None] * matrix, z)
            margin = (len(x) + 8) * ROUNDING
            candidates = (z + side * 10.0**e * w for e in np.arange(-18, 1, 0.25).astype(np.longdouble))
            bounds.append(next((c for c in candidates if (side * (c - s(matrix @ c + x)) >= margin * c).all()), last))
    return np.stack(lows), np.stack(highs)


def assert_contains(box, bounds):
    """lower <= z* <= upper for certified samples, no claim for the others."""
    lower, upper = (b.detach().numpy().reshape(bounds[0].shape).astype(np.longdouble) for b in (box.lower, box.upper))
    for certified, low, high, below, above in zip(box.certified, lower, upper, *bounds, strict=True):
        if certified:
            assert (low <= above).all()
            assert (high >= below).all()
            assert (low <= high).all()
        else:
            assert (low == 0).all()
            assert np.isinf(high).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_referee_is_sharp(activation):
    layer, inputs = dense_layer(activation, 20, 0, 0.3, 1.0)
    below, above = referee(layer.equation(inputs + 0.1), activation)
    assert ((above - below) <= 1e-16 * above).all()


class TestContainment:
    @settings(max_examples=60)
    @given(
        st.sampled_from(ACTIVATIONS),
        st.integers(1, 60),
        seeds,
        st.floats(-6, 3).map(lambda e: 10.0**e),
        st.sampled_from([0.0, 1e-30, 1e-8, 1e-3, 1.0, 10.0, 1e6, 1e30]),
        st.sampled_from([1e-2, 1e-4, 1e-8, 1e-13]),
    )
    def test_random_layers(self, name, size, seed, weight, x, tol):
        layer, inputs = dense_layer(name, size, seed, weight, x)
        equation = layer.equation(inputs)
        solver = pcdeq.Newton(tol=tol, max_steps=200) if seed % 2 else pcdeq.Anderson(tol=tol, max_steps=400)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            box = layer.enclose(inputs, solver=solver)
        assert_contains(box, referee(equation, name))

    @settings(max_examples=40)
    @given(
        st.sampled_from(ACTIVATIONS),
        st.integers(1, 60),
        seeds,
        st.floats(-6, 3).map(lambda e: 10.0**e),
        st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6]),
    )
    def test_random_layers_in_float32(self, name, size, seed, weight, x):
        # The claim is about the float32 numbers in memory, so the answer is that of those numbers.
        layer, inputs = dense_layer(name, size, seed, weight, x, torch.float32)
        equation = layer.equation(inputs)
        box = layer.enclose(inputs, solver=pcdeq.Newton(tol=1e-5))
        assert_contains(box, referee(equation, name))

    @pytest.mark.parametrize("operator", OPERATORS)
    @pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_every_operator(self, operator, activation, dtype):
        layer = make_layer(operator, activation, gain=0.8, dtype=dtype)
        x = make_input(operator, samples=4, dtype=dtype)
        equation = layer.equation(x)
        matrix = torch.from_numpy(matrix_of(operator, as_array(equation.map.weight), STATES[operator]))
        flat = pcdeq.PcDEQLinear(len(matrix), activation, weight_norm=False, injection=lambda x: x).double()
        with torch.no_grad():
            flat.operator.weight.copy_(matrix)
        box = layer.enclose(x)
        assert box.certified.all()
        # 1e-38, the smallest floor, is added to an input that is float32 already: it changes nothing.
        assert_contains(box, referee(flat.equation(equation.x.detach().double().flatten(1)), activation))

    @given(st.sampled_from(ACTIVATIONS), seeds, st.floats(0, 3))
    def test_near_any_point_not_only_near_the_answer(self, name, seed, reach):
        layer, inputs = dense_layer(name, 4, seed, 1.0, 1.0)
        equation = layer.equation(inputs)
        bounds = referee(equation, name)
        random = np.random.default_rng(seed)
        point = bounds[0].astype(float) * 10.0 ** (reach * random.uniform(-1, 1, bounds[0].shape))
        assert_contains(enclose_near(equation, torch.from_numpy(point)), bounds)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_after_training_from_a_warm_start(self, activation):
        layer = make_layer("dense", activation, gain=1.2)
        for _ in range(20):
            layer(3 * make_input("dense", samples=8, seed=4)).sum().backward()
        x = make_input("dense", samples=4)
        box = layer.enclose(x)
        assert box.certified.all()
        assert_contains(box, referee(layer.equation(x), activation))


class TestOrderTest:
    """is_upper and is_lower: what they say is true, also one ulp from the edge."""

    @given(st.sampled_from(ACTIVATIONS), seeds, st.floats(-16, 0), st.sampled_from([torch.float32, torch.float64]))
    def test_what_they_say_is_true(self, name, seed, spread, dtype):
        layer, inputs = dense_layer(name, 5, seed, 1.0, 1.0, dtype)
        equation = layer.equation(inputs)
        below, above = referee(equation, name)
        random = np.random.default_rng(seed)
        for sign in (-1, 1):
            factor = 1 + sign * 10.0**spread * random.uniform(0, 1, above.shape) * random.choice(
                [1, 1, -1], above.shape
            )
            candidate = torch.from_numpy((above * factor).astype(float)).to(dtype)
            exact = candidate.double().numpy().astype(np.longdouble)
            for i in range(3):
                if is_upper(equation, candidate)[i]:
                    assert (exact[i] >= below[i]).all()
                if is_lower(equation, candidate)[i]:
                    assert (exact[i] <= above[i]).all()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_they_do_say_it_a_little_off_the_answer(self, activation):
        layer, inputs = dense_layer(activation, 5, 0, 0.5, 1.0)
        inputs += 0.1
        equation = layer.equation(inputs)
        answer = torch.from_numpy(referee(equation, activation)[0].astype(float))
        assert is_upper(equation, answer * (1 + 1e-9)).all()
        assert is_lower(equation, answer * (1 - 1e-9)).all()
        assert not is_upper(equation, answer * (1 - 1e-9)).any()
        assert not is_lower(equation, answer * (1 + 1e-9)).any()

    def test_a_negative_candidate_is_never_an_upper_bound(self):
        # g(-0.99) <= -0.99 for tanh, W = 10, x = 0.01, and z* is near 1: T1 holds on [0, inf) only.
        equation = scalar_layer(10.0, "tanh").equation(torch.full((1, 1), 0.01).double())
        candidate = torch.full((1, 1), -0.99).double()
        assert not is_upper(equation, candidate).item()

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_no_number_is_no_bound(self, bad):
        equation = scalar_layer(0.5, "tanh").equation(torch.full((1, 1), 0.5).double())
        candidate = torch.full((1, 1), bad).double()
        assert not is_upper(equation, candidate).item()
        assert not is_lower(equation, candidate).item()


class TestWidth:
    @pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
    @pytest.mark.parametrize("operator", ["dense", "conv2d"])
    def test_the_upper_bound_is_as_near_as_the_true_error(self, operator, activation):
        # From below, at the paper's tolerance: measured 1.00 to 1.03 times the error; the norms here are harder on it.
        layer = make_layer(operator, activation, gain=0.5)
        x = make_input(operator, samples=10)
        equation = layer.equation(x)
        z = run(equation.problem(), pcdeq.Picard(tol=1e-4)).value
        answer = layer.solve(x, solver=pcdeq.Newton(tol=1e-14)).value
        box = enclose_near(equation, z)
        assert box.certified.all()
        true = (answer - z).flatten(1).amax(1)
        claimed = (box.upper - z).flatten(1).amax(1)
        assert (claimed <= 1.5 * true + 1e-13).all()

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("operator", OPERATORS)
    def test_at_full_accuracy_it_is_a_few_roundings_wide(self, operator, activation):
        layer = make_layer(operator, activation, gain=0.5)
        x = make_input(operator, samples=3)
        box = layer.enclose(x, solver=pcdeq.Newton(tol=1e-15, max_steps=60))
        assert box.certified.all()
        # margin = (terms + 16) eps, doubled on each side, amplified by ‖(I - J)⁻¹‖ < 30 in these layers.
        assert (box.width / box.upper).max() < 30 * 8 * 70 * np.finfo(float).eps
        assert torch.equal(box.width, box.upper - box.lower)

    @pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
    def test_float32_is_certified_too(self, activation):
        layer = make_layer("dense", activation, gain=0.5, dtype=torch.float32)
        box = layer.enclose(make_input("dense", samples=5, dtype=torch.float32), solver=pcdeq.Anderson(tol=1e-6))
        assert box.certified.all()
        assert (box.width / box.upper).max() < 1e-3


class TestNotCertified:
    def test_samples_are_judged_one_by_one(self):
        layer = make_layer("dense", "tanh", gain=0.5)
        x = make_input("dense", samples=3)
        x[1] = math.nan
        box = layer.enclose(x)
        assert box.certified.tolist() == [True, False, True]
        assert (box.lower[1] == 0).all()
        assert box.upper[1].isinf().all()

    def test_no_graph_is_built(self):
        layer = make_layer("dense", "tanh")
        box = layer.enclose(make_input("dense").requires_grad_())
        assert not box.lower.requires_grad
        assert not box.upper.requires_grad


class TestCertifiedRule:
    @settings(max_examples=30)
    @given(
        st.sampled_from(ACTIVATIONS),
        st.integers(1, 20),
        seeds,
        st.floats(-3, 2).map(lambda e: 10.0**e),
        st.sampled_from([1e-6, 1e-2, 1.0]),
    )
    @example("relu6", 1, 3, 1.0, 1e-2)
    def test_a_certified_solution_is_within_its_bound(self, name, size, seed, weight, x):
        layer, inputs = dense_layer(name, size, seed, weight, x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            solution = layer.solve(inputs, solver=pcdeq.Certified(pcdeq.Anderson(max_steps=1000)))
        below, _ = referee(layer.equation(inputs), name)
        value = as_array(solution.value)
        for i in range(3):
            if solution.converged[i]:
                # In long double, where the square of 1e-38 does not underflow.
                error = np.sqrt(((value[i] - below[i]) ** 2).sum() / (value[i].astype(np.longdouble) ** 2).sum())
                assert error <= solution.residual[i].item() * (1 + 1e-12) + 1e-16
                assert solution.residual[i] < 1e-4
        assert (solution.outcome is Outcome.CONVERGED) == bool(solution.converged.all()) == (not caught)

    @pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson, pcdeq.Newton])
    def test_it_is_reached_for_ordinary_layers(self, solver):
        for activation in ACTIVATIONS:
            layer = make_layer("conv2d", activation, gain=0.5, solver=pcdeq.Certified(solver(tol=1e-6)))
            assert layer.solve(make_input("conv2d", samples=4)).outcome is Outcome.CONVERGED


class TestWidthAskedFor:
    @pytest.mark.parametrize("operator", ["dense", "conv2d", "graph"])
    @pytest.mark.parametrize("activation", ["tanh", "relu6", "softsign", "sigmoid"])
    @pytest.mark.parametrize("width", [1e-2, 1e-5, 1e-9])
    def test_bounds_are_as_narrow_as_asked_for(self, operator, activation, width):
        layer, x = make_layer(operator, activation, dtype=torch.float32), make_input(operator, dtype=torch.float32)
        box = layer.enclose(x, width=width)
        assert box.certified.all()
        assert (box.width <= width).all()
        with torch.no_grad():
            equation = layer.equation(x)  # the numbers in memory, of which the claim is
        exactly = layer.operator.bind(equation.map.weight.double())
        matrix, inputs = as_array(exactly.matrix(x.shape[1:])), as_array(equation.x.flatten(1))
        exact = np.stack([fixed_point_of(matrix, row, FACTS[activation]) for row in inputs])
        slack = 1e-13  # of the referee
        assert (as_array(box.lower.flatten(1)) <= exact + slack).all()
        assert (exact - slack <= as_array(box.upper.flatten(1))).all()

    def test_float64_only_where_it_is_needed(self):
        layer, x = make_layer("dense", "tanh", dtype=torch.float32), make_input("dense", dtype=torch.float32)
        assert layer.enclose(x, width=1e-2).lower.dtype == torch.float32
        assert layer.enclose(x, width=1e-9).lower.dtype == torch.float64

    @pytest.mark.parametrize("operator", ["dense", "conv2d"])
    def test_what_the_solve_allows_takes_one_product(self, operator, monkeypatch):
        layer = make_layer(operator, "tanh", gain=0.2, dtype=torch.float32)
        x = make_input(operator, dtype=torch.float32)
        solution, products = layer.solve(x), []
        kind = type(layer.equation(x).map)
        product = kind.apply_plus
        monkeypatch.setattr("pcdeq.layers.solve_equation", lambda *_: solution)
        monkeypatch.setattr(kind, "apply_plus", lambda *given: products.append(given[1].dtype) or product(*given))
        monkeypatch.setattr(kind, "apply", lambda *_: pytest.fail("a product more"))
        assert layer.enclose(x, width=1e-2).certified.all()
        assert products == [torch.float32]
        with pytest.raises(pytest.fail.Exception, match="a product more"):
            layer.enclose(x)

    def test_each_sample_takes_what_it_needs(self):
        """Beside a sample that is not a number, a flat one and one at the edge of contraction keep their bounds."""
        layer = pcdeq.PcDEQLinear(1, activation="relu6", weight_norm=False)
        with torch.no_grad():
            layer.operator.weight.copy_(layer.operator.weight.new_tensor([[0.999]]))
        x = torch.tensor([[9.0], [torch.nan], [-9.0]])
        box = layer.enclose(x, width=1e-2)
        assert box.certified.tolist() == [True, False, True]
        assert box.lower[0] <= 6 <= box.upper[0]
        equation = layer.equation(x)
        assert box.lower[2] <= (equation.x[2] / (1 - equation.map.weight[0])).detach() <= box.upper[2]

    def test_what_cannot_be_had_is_not_certified_and_still_bounded(self):
        layer, x = make_layer("dense", "tanh"), make_input("dense")
        box = layer.enclose(x, width=1e-300)
        assert not box.certified.any()
        assert (box.width < 1e-10).all()
        with pytest.raises(pcdeq.PcdeqError, match="width must be above 0"):
            layer.enclose(x, width=0.0)


class TestDecided:
    def test_a_question_is_settled_with_fewer_steps_than_a_solve_takes(self):
        layer, x = make_layer("dense", "tanh", gain=2.0, warm_start=False), make_input("dense", samples=20)
        exact = layer.solve(x, solver=pcdeq.Anderson(tol=1e-12)).value
        threshold = 0.9 * exact.amin()

        def question(box):
            return (box.lower > threshold).all(1)

        solution = layer.solve(x, solver=pcdeq.Anderson(tol=1e-8), until=question)
        assert solution.converged.all() and solution.outcome.name == "CONVERGED"
        assert (solution.steps < layer.solve(x, solver=pcdeq.Anderson(tol=1e-8)).steps).all()

    def test_a_question_that_stays_open_is_reported(self):
        layer, x = make_layer("dense", "tanh"), make_input("dense")
        with pytest.warns(pcdeq.errors.ConvergenceWarning, match="no error bound was proved"):
            solution = layer.solve(x, until=lambda box: torch.zeros_like(box.certified))
        assert not solution.converged.any()

    @pytest.mark.parametrize("solver", [pcdeq.Anderson(stop="batch"), pcdeq.Certified()])
    def test_a_question_is_asked_sample_by_sample(self, solver):
        layer, x = make_layer("dense", "tanh"), make_input("dense")
        with pytest.raises(pcdeq.PcdeqError, match="sample by sample"):
            layer.solve(x, solver=solver, until=lambda box: box.certified)


def test_thousands_of_random_equations():
    # 300 layers of 1 to 200 units with 9 inputs each, entries 1e-6 to 1e3, inputs tiny to huge and with exact zeros;
    # the referee is Newton's method in float64.
    generator = np.random.default_rng(0)
    problems = certified = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what does not converge is not certified
        for seed in range(300):
            name = ACTIVATIONS[seed % len(ACTIVATIONS)]
            size = round(10 ** generator.uniform(0, np.log10(200)))
            weight, x = 10 ** generator.uniform(-6, 3), 10 ** generator.choice([-8.0, -3.0, -1.0, 0.0, 1.0, 6.0])
            dtype = (torch.float32, torch.float64)[seed % 3 == 0]
            layer, inputs = dense_layer(name, size, seed, weight, x, dtype)
            inputs = torch.cat([inputs, 10 * inputs, inputs / 10])
            box = layer.enclose(inputs)
            equation = layer.equation(inputs)
            matrix = as_array(equation.map.weight)
            for sample in np.flatnonzero(box.certified.numpy()):
                row = as_array(equation.x[sample])
                exact = fixed_point_of(matrix, row, FACTS[name])
                slack = 1e-9 * exact + 1e-300  # of the referee, far below any width here
                assert (as_array(box.lower[sample]) <= exact + slack).all(), (seed, sample)
                assert (exact - slack <= as_array(box.upper[sample])).all(), (seed, sample)
            problems += len(inputs)
            certified += int(box.certified.sum())
    assert problems == 2700
    assert certified > 0.9 * problems


class TestCustomActivation:
    """Bounds rest on the accuracy of s; a custom one that loses digits must not void them."""

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_ours_are_accurate(self, name):
        assert pcdeq.activations.as_activation(name).loses_digits_at is None

    @pytest.mark.parametrize(
        "function", [lambda y: 1 - torch.exp2(-y), lambda y: torch.sqrt(1 + y) - 1, lambda y: torch.log(1 + y)]
    )
    def test_one_that_cancels_near_zero_is_refused(self, function):
        layer = pcdeq.PcDEQLinear(1, pcdeq.Activation("own", function), weight_norm=False)
        layer(torch.zeros(1, 1))  # it can be used
        for proof in (layer.enclose, lambda x: layer.solve(x, solver=pcdeq.Certified())):
            with pytest.raises(UsageError, match="'own' loses digits near y = 1e-12"):
                proof(torch.zeros(1, 1))

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_our_slopes_are_accurate(self, name):
        assert pcdeq.activations.as_activation(name).slope_loses_digits_at is None

    def test_a_slope_that_cancels_is_refused_where_gradients_are_enclosed(self):
        slope = lambda y: 1 - torch.tanh(y) ** 2  # noqa: E731 (right, and 0 from 9 on in float32)
        layer = pcdeq.PcDEQLinear(2, pcdeq.Activation("own", torch.tanh, slope, supremum=1.0))
        assert bool(layer.enclose(torch.zeros(1, 2)).certified.all())
        with pytest.raises(UsageError, match="the slope of activation 'own' loses digits near y ="):
            layer.enclose_gradient(torch.zeros(1, 2), torch.ones(1, 2))

    @pytest.mark.parametrize("x", [-1.0, -2.0, -3.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_an_accurate_one_is_enclosed(self, x, dtype):
        own = pcdeq.Activation("1-2^-y", lambda y: -torch.expm1(-math.log(2) * y), supremum=1.0)
        layer = pcdeq.PcDEQLinear(1, own, weight_norm=False).to(dtype)
        with torch.no_grad():
            layer.operator.weight.fill_(0.5)
        injected = float(layer.inject(torch.tensor([[x]], dtype=dtype)))
        z = 0.0
        for _ in range(500):
            z = -math.expm1(-math.log(2) * (0.5 * z + injected))
        box = layer.enclose(torch.tensor([[x]], dtype=dtype), width=1e-12)
        assert bool(box.certified.all())
        assert float(box.lower) <= z * (1 + 1e-15) and z * (1 - 1e-15) <= float(box.upper)


def test_a_sample_that_is_not_proved_at_once_is_tried_again():
    layer = scalar_layer(0.999, "relu6", solver=pcdeq.Certified(pcdeq.Picard(tol=1e-2, max_steps=20000)))
    solution = layer.solve(torch.tensor([[0.001]], dtype=torch.float64))
    assert solution.converged.all()
    assert abs(float(solution.value) - 1.0) < 1e-2


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_what_is_proved_does_not_depend_on_a_lost_sample(strange):
    for seed in range(40):
        layer = make_layer("dense", "tanh", gain=3.0, seed=seed, solver=pcdeq.Certified(pcdeq.Picard(tol=1e-4)))
        x = make_input("dense", samples=3, seed=seed)
        alone = layer.solve(x).converged
        other = torch.cat([x, x[:1]])
        other[3, 0] = strange
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            assert layer.solve(other).converged[:3].equal(alone)


def test_a_certified_error_that_float32_rounds_away():
    """Wz has 400 terms, so that its rounding in float32, enlarged a hundredfold, is above the error asked for."""
    n = 400
    layer = pcdeq.PcDEQLinear(n, "relu6", weight_norm=False)
    with torch.no_grad():
        layer.operator.weight.fill_(0.99 / n)
    x = torch.full((1, n), -3.0)
    box = enclose_near(layer.equation(x), layer.solve(x, solver=pcdeq.Picard(tol=1e-7, max_steps=5000)).value)
    solution = layer.solve(x, solver=pcdeq.Certified(pcdeq.Anderson(tol=1e-4)))
    assert not box.certified.any() or (box.width / box.upper).max() > 1e-3
    assert solution.converged.all() and (solution.residual < 1e-4).all()
    exact = layer.equation(x).x.double()[0, 0] / (1 - 400 * layer.operator.effective_weight().double()[0, 0])
    assert ((solution.value - exact).abs() <= 1e-4 * solution.value).all()
