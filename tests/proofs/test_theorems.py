"""The theorems as properties: g is monotone, scalable and concave, hence T1 and T4 to T8, for random layers."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from problems import ACTIVATIONS, FACTS, KIND_1, as_array, fixed_point_of, scalar_layer

import pcdeq
from pcdeq.activations import as_activation
from pcdeq.errors import ConvergenceWarning, UsageError
from pcdeq.solvers import Problem, run
from pcdeq.solvers.numbers import spread

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 6)
names = st.sampled_from(ACTIVATIONS)
weight_scales = st.floats(-4, 2).map(lambda e: 10.0**e)
input_scales = st.floats(-3, 1).map(lambda e: 10.0**e)


class Random:
    """A random dense layer whose input is x itself, and points to try it at."""

    def __init__(self, name: str, size: int, seed: int, weight: float, x: float, sparse: bool = True) -> None:
        self.generator = np.random.default_rng(seed)
        self.name, self.size, self.facts = name, size, FACTS[name]
        self.matrix = weight * self.generator.uniform(0, 1, (size, size))
        if sparse:
            self.matrix *= self.generator.uniform(0, 1, (size, size)) < 0.7
        self.x = x * self.generator.uniform(0.1, 1, size)
        self.layer = pcdeq.PcDEQLinear(size, name, weight_norm=False, injection=lambda x: x).double()
        with torch.no_grad():
            self.layer.operator.weight.copy_(torch.from_numpy(self.matrix))
        self.equation = self.layer.equation(torch.from_numpy(self.x)[None])

    @property
    def top(self) -> float:
        """A bound above every value of g."""
        if math.isfinite(self.facts.supremum):
            return self.facts.supremum
        bound = 1.0
        while self.facts.value(self.matrix.sum(1).max() * bound + self.x.max()) > bound:
            bound *= 2
        return bound

    def g(self, z: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.equation(torch.from_numpy(z)[None])[0].numpy()

    def point(self, reach: float = 1.0) -> np.ndarray:
        """A random point of [0, reach * top], of any order of magnitude, with exact zeros."""
        z = reach * self.top * self.generator.uniform(0, 1, self.size) ** self.generator.integers(1, 6)
        return z * (self.generator.uniform(0, 1, self.size) < 0.9)

    def answer(self) -> np.ndarray:
        return fixed_point_of(self.matrix, self.x, self.facts)

    def jacobian(self, z: np.ndarray) -> np.ndarray:
        return self.facts.slope(self.matrix @ z + self.x)[:, None] * self.matrix

    def rate(self) -> float:
        return self.layer.activation.rate(float(self.x.min()))


layers = st.builds(Random, names, sizes, seeds, weight_scales, input_scales)
EPS = 64 * np.finfo(float).eps  # a few roundings of a sum of at most 7 terms and of s


def thompson(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(np.log(a) - np.log(b)).max())


class TestTheMap:
    @given(layers)
    def test_monotone(self, layer):
        low = layer.point()
        high = low + layer.point()
        assert (layer.g(low) <= layer.g(high) * (1 + EPS)).all()

    @given(layers, st.floats(1.01, 20))
    def test_strictly_scalable(self, layer, factor):
        z = layer.point()
        assert (layer.g(factor * z) < factor * layer.g(z)).all()

    @given(layers, st.floats(0, 1))
    def test_concave(self, layer, t):
        a, b = layer.point(2.0), layer.point(2.0)
        chord = t * layer.g(a) + (1 - t) * layer.g(b)
        assert (layer.g(t * a + (1 - t) * b) >= chord * (1 - EPS)).all()

    @given(layers)
    def test_positive_and_below_the_supremum(self, layer):
        value = layer.g(layer.point(10.0))
        assert (value > 0).all()
        assert (value <= layer.facts.supremum).all()


class TestTheFixedPoint:
    @given(layers)
    def test_is_unique_from_any_start(self, layer):
        assume(layer.rate() < 0.98)  # else hundreds of steps
        answer = layer.answer()
        starts = np.stack([np.zeros(layer.size), np.full(layer.size, layer.top), layer.point(), layer.point(100.0)])
        x = torch.from_numpy(np.tile(layer.x, (4, 1)))
        problem = Problem(layer.layer.equation(x), start=torch.from_numpy(starts))
        solution = run(problem, pcdeq.Picard(tol=1e-14, max_steps=5000))
        assert solution.converged.all()
        # T4 (c): the distance left is at most c / (1 - c) times the last step, in Thompson's metric.
        for row in as_array(solution.value):
            assert thompson(row, answer) < 1e-10

    @given(layers)
    def test_lies_where_the_order_test_says(self, layer):
        # T1, with candidates around it and far from it, from both sides.
        answer = layer.answer()
        spread = 10.0 ** layer.generator.uniform(-8, 0)
        for _ in range(20):
            candidate = (
                answer * (1 + spread * layer.generator.uniform(-1, 1, layer.size))
                if layer.generator.random() < 0.7
                else layer.point()
            )
            value = layer.g(candidate)
            if (value <= candidate).all():
                assert (answer <= candidate * (1 + EPS)).all()
            if (value >= candidate).all():
                assert (answer >= candidate * (1 - EPS)).all()

    @given(layers)
    def test_the_order_test_is_passed_by_scaled_solutions(self, layer):
        # So the test above is not empty: λ z* is an upper bound by scalability, z*/λ a lower one.
        answer = layer.answer()
        assert (layer.g(1.01 * answer) <= 1.01 * answer).all()
        assert (layer.g(answer / 1.01) >= answer / 1.01).all()

    def test_the_order_test_fails_for_negative_candidates(self):
        # The caveat of T1, as a fact: tanh, W = 10, x = 0.01, u = -0.99.
        u = torch.tensor([[-0.99]]).double()
        equation = scalar_layer(10.0, "tanh").equation(torch.full((1, 1), 0.01).double())
        assert equation(u) <= u
        assert fixed_point_of(np.array([[10.0]]), np.array([0.01]), FACTS["tanh"]) > 0.99

    @given(layers)
    def test_is_monotone_and_concave_in_the_input(self, layer):
        # T8, through the layer's own solver.
        low = layer.x
        high = low + layer.generator.uniform(0, 3, layer.size)
        t = layer.generator.uniform()
        x = torch.from_numpy(np.stack([low, high, t * low + (1 - t) * high]))
        a, b, middle = as_array(layer.layer.solve(x, solver=pcdeq.Newton(tol=1e-13)).value)
        assert (a <= b * (1 + 1e-9)).all()
        assert (middle >= (t * a + (1 - t) * b) * (1 - 1e-9)).all()


class TestTheRate:
    """T4."""

    @given(layers)
    def test_no_pair_of_points_is_contracted_less(self, layer):
        c = layer.rate()
        a, b = layer.point() + 1e-6, layer.point() + 1e-6
        # The rate is found on a grid, to 1e-9; logarithms of values exact to EPS are exact to EPS.
        assert thompson(layer.g(a), layer.g(b)) <= (c + 1e-9) * thompson(a, b) + 4 * EPS

    @given(layers)
    def test_is_never_exceeded_along_the_iteration(self, layer):
        c, answer = layer.rate(), layer.answer()
        z = layer.point() + 1e-9
        distance = thompson(z, answer)
        for _ in range(30):
            new = layer.g(z)
            remaining = thompson(new, answer)
            assert remaining <= (c + 1e-9) * distance + 1e-12
            if c < 1:  # a posteriori, from the last step alone
                assert remaining <= (c + 1e-9) / (1 - c) * thompson(new, z) + 1e-12
            z, distance = new, remaining

    @given(sizes, seeds, st.floats(-2, 3).map(lambda e: 10.0**e))
    @example(1, 0, 2.157)
    def test_sigmoid_is_within_1e_4_after_8_products_from_any_start(self, size, seed, weight):
        layer = Random("sigmoid", size, seed, weight, 1e-3)
        layer.x[:] = 0
        layer.equation = layer.layer.equation(torch.zeros(1, size).double())
        z = layer.point(10.0)
        for _ in range(8):
            z = layer.g(z)
        assert thompson(z, layer.answer()) <= 1e-4

    @given(
        st.sampled_from([name for name in KIND_1 if name != "log1p"]),
        sizes,
        seeds,
        st.floats(-2, 2).map(lambda e: 10.0**e),
        st.sampled_from([0.02, 0.1, 0.5]),
    )
    def test_a_floor_makes_the_number_of_steps_known_in_advance(self, name, size, seed, weight, floor):
        layer = Random(name, size, seed, weight, 1.0)
        layer.x[:] = floor  # the slowest input that the floor admits ...
        layer.x[layer.generator.uniform(0, 1, size) < 0.3] += 1.0  # ... here and there a faster one
        layer.equation = layer.layer.equation(torch.from_numpy(layer.x)[None])
        c = layer.layer.activation.rate(floor)
        b, lowest = layer.facts.supremum, float(layer.facts.value(np.array(floor)))
        assume(b > lowest)
        steps = 1 + math.ceil(math.log(1e-4 / math.log(b / lowest)) / math.log(c)) if c > 0 else 1
        assume(steps < 3000)
        z = layer.point(100.0)
        for _ in range(steps):
            z = layer.g(z)
        assert thompson(z, layer.answer()) <= 1e-4 * (1 + 1e-6)

    @pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "log1p"])
    @pytest.mark.parametrize("rate", [0.9, 0.2])
    def test_a_layer_keeps_the_rate_and_the_steps_that_it_promises(self, name, rate):
        layer = pcdeq.PcDEQLinear(3, name, rate=rate).double()
        promise = layer.rate(tol=1e-6)
        assert promise.factor <= rate * (1 + 1e-12)
        for gain, start in itertools.product((0.1, 1.0, 10.0, 1e4), (0.0, 1e-3, 10.0)):
            with torch.no_grad():
                layer.operator.weight_g.fill_(gain)
                equation = layer.equation(torch.full((1, 3), -1e3).double())  # nothing but the floor
                z = torch.full((1, 3), start).double()
                for _ in range(promise.steps):
                    z = equation(z)
            matrix, x = as_array(equation.map.weight), as_array(equation.x)[0]
            assert thompson(as_array(z)[0], fixed_point_of(matrix, x, FACTS[name])) <= 1e-6 * (1 + 1e-6)

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_the_floor_for_a_rate_is_the_smallest(self, name):
        activation, rate = as_activation(name), 0.3
        floor = activation.floor_for(rate)
        assert activation.rate(floor) <= rate
        assert floor == 0 or activation.rate(0.999 * floor) > rate

    @pytest.mark.parametrize(
        ("name", "floor"), [("relu6", 6.0), ("relu6", 9.0), ("hard-tanh", 1.0), ("hard-sigmoid", 3.0), ("tanh", 50.0)]
    )
    def test_a_floor_that_saturates_everything_needs_one_step(self, name, floor):
        assert pcdeq.PcDEQLinear(3, name, floor=floor).rate().steps == 1

    def test_without_a_floor_kind_1_promises_nothing_of_use(self):
        promise = pcdeq.PcDEQLinear(3, "tanh").rate()
        assert promise.factor > 0.999
        assert promise.steps is None or promise.steps > 10_000

    def test_sigmoid_promises_8_without_any(self):
        assert pcdeq.PcDEQLinear(3, "sigmoid").rate(tol=1e-4).steps == 8

    @pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, math.nan])
    def test_a_rate_that_is_none_is_refused(self, rate):
        with pytest.raises(UsageError, match=f"rate.*{rate}"):
            pcdeq.PcDEQLinear(3, rate=rate)

    def test_rate_and_floor_together_are_refused(self):
        with pytest.raises(UsageError, match="either floor or rate"):
            pcdeq.PcDEQLinear(3, rate=0.5, floor=0.1)


class TestTheBackwardIteration:
    """T5."""

    @given(layers)
    def test_spectral_radius_is_below_1(self, layer):
        answer = layer.answer()
        jacobian = layer.jacobian(answer)
        assert np.abs(np.linalg.eigvals(jacobian)).max() < 1
        assert (jacobian @ answer <= (answer - layer.g(np.zeros(layer.size))) * (1 + 1e-9) + 1e-12).all()

    @given(layers, st.sampled_from(["picard", "anderson"]))
    def test_the_adjoint_is_solved(self, layer, solver):
        # A bound on the steps: J contracts by c(z*) <= 1 - min g(0)/z* in a weighted norm.
        answer = layer.answer()
        radius = np.abs(np.linalg.eigvals(layer.jacobian(answer))).max()
        assume(radius < 0.99)
        solver = {"picard": pcdeq.Picard, "anderson": pcdeq.Anderson}[solver](tol=1e-10, max_steps=10_000)
        layer.layer.solver, layer.layer.adjoint_solver = pcdeq.Newton(tol=1e-14, max_steps=200), solver
        if layer.facts.kink is not None:  # where z* sits on a kink there is no derivative to compare with
            assume(np.abs(layer.matrix @ answer + layer.x - layer.facts.kink).min() > 1e-6)
        x = torch.from_numpy(layer.x)[None].requires_grad_()
        upstream = layer.generator.normal(size=layer.size)
        layer.layer(x).backward(torch.from_numpy(upstream)[None])
        p = layer.matrix @ answer + layer.x
        y = np.linalg.solve(np.eye(layer.size) - layer.jacobian(answer).T, upstream)
        expected = layer.facts.slope(p) * y
        error = np.abs(as_array(x.grad)[0] - expected).max()
        assert error <= 1e-5 * np.abs(expected).max() + 1e-12 * np.abs(y).max()


class Hostile(pcdeq.Anderson):
    """Anderson's safeguard around proposals that mean harm."""

    def propose(self, value, residual, length, kept, state, norm, *, reuse):
        attack = self.attack(value, residual, [(state.value, state.residual)])
        Hostile.asked += 1
        if attack is None:
            return super().propose(value, residual, length, kept, state, norm, reuse=reuse)
        return torch.where(spread(kept, value), attack, state.value), kept

    def attack(self, value, residual, history):
        raise NotImplementedError


class RandomPoints(Hostile):
    def attack(self, value, residual, history):
        return torch.rand_like(value) * 4 - 1


class NotANumber(Hostile):
    def attack(self, value, residual, history):
        return torch.full_like(value, math.nan)


class Infinite(Hostile):
    def attack(self, value, residual, history):
        return torch.full_like(value, math.inf)


class PartlyNaN(Hostile):
    def attack(self, value, residual, history):
        proposal = value.clone()
        proposal[..., ::2] = math.nan
        return proposal


class Backwards(Hostile):
    def attack(self, value, residual, history):
        return value - 2 * residual


class Alternating(Hostile):
    """The best point, the bottom of the box, the best, the top ..."""

    def attack(self, value, residual, history):
        turn = Hostile.asked % 4
        if turn % 2 == 0:
            return None
        return torch.full_like(value, 0.0 if turn == 1 else 1e9)


class Stuck(Hostile):
    """Always the oldest point again."""

    def attack(self, value, residual, history):
        return history[0][0]


def just_under(equation, answer, towards, patient=False):
    """Proposals on the way from z* to a corner of the box, as far out as the safeguard can possibly accept.

    The patient variant first spoils every proposal until plain steps have nearly converged, and only
    then proposes the point far out: each acceptance would undo all of them.
    """

    class JustUnder(Hostile):
        kept, first, image = 0, None, None

        def attack(self, value, residual, history):
            cls = type(self)
            if cls.first is None:
                cls.first = history[0][1].norm()
            if cls.image is not None and torch.equal(cls.image, value):
                cls.kept += 1
            if patient and residual.norm() > 3 * self.tol * value.norm():
                return torch.full_like(value, math.nan)
            limit = 0.999 * cls.first * self.decay ** (cls.kept + 1)
            near, far = 0.0, 1.0
            for _ in range(30):
                middle = (near + far) / 2
                point = answer + middle * (towards - answer)
                if (equation(point) - point).norm() < limit:
                    near = middle
                else:
                    far = middle
            point = answer + near * (towards - answer)
            cls.image = equation(point)
            return point

    return JustUnder


class TestAccelerationThatCannotFail:
    """T6: whatever is proposed, the solve converges, and within the default number of steps where plain steps would."""

    # Rates at this floor are below 0.8: plain iteration needs at most 45 steps, and a rejection doubles them.
    FLOOR = 0.05
    ATTACKS = (RandomPoints, NotANumber, Infinite, PartlyNaN, Backwards, Alternating, Stuck)
    BOUNDED_RATE = ("tanh", "softsign", "sigmoid", "arctan", "1-exp", "isru", "log1p")

    def case(self, name: str, seed: int, samples: int = 3):
        torch.manual_seed(seed)
        layer = Random(name, 4, seed, 2.0, 1.0)
        x = self.FLOOR + layer.generator.uniform(0, 0.3, (samples, 4)) * (
            layer.generator.uniform(0, 1, (samples, 4)) < 0.5
        )
        return layer, torch.from_numpy(x)

    def check(self, layer, x, solver):
        Hostile.asked = 0
        with torch.no_grad():
            solution = layer.layer.solve(x, solver=solver)
        assert solution.outcome is pcdeq.Outcome.CONVERGED
        for row, value in zip(as_array(x), as_array(solution.value), strict=True):
            # The rule is about the residual; with these rates the error is within a small multiple of it.
            np.testing.assert_allclose(value, fixed_point_of(layer.matrix, row, layer.facts), rtol=0.02)
        assert Hostile.asked > 0
        return solution

    def corner_case(self, name, seed, top):
        layer, x = self.case(name, seed, samples=1)
        answer = torch.from_numpy(fixed_point_of(layer.matrix, as_array(x)[0], layer.facts))[None]
        corner = torch.full_like(answer, layer.top) if top else torch.zeros_like(answer)
        return layer, x, layer.layer.equation(x), answer, corner

    @pytest.mark.parametrize("attack", ATTACKS)
    @pytest.mark.parametrize("stop", ["sample", "batch"])
    @given(st.sampled_from(BOUNDED_RATE), seeds)
    @example("log1p", 79)  # plain iteration takes 27 steps here
    @example("softsign", 79)
    def test_hostile_proposals(self, attack, stop, name, seed):
        layer, x = self.case(name, seed)
        self.check(layer, x, attack(stop=stop))

    @pytest.mark.parametrize("attack", ATTACKS)
    @given(st.sampled_from(BOUNDED_RATE), seeds)
    def test_hostile_proposals_with_time_to_spare(self, attack, name, seed):
        layer, x = self.case(name, seed)
        self.check(layer, x, attack(max_steps=10_000))

    @pytest.mark.parametrize("top", [True, False])
    @settings(max_examples=8)
    @given(st.sampled_from(["tanh", "softsign", "sigmoid", "arctan", "relu6"]), seeds)
    def test_proposals_just_under_the_threshold(self, top, name, seed):
        layer, x, *rest = self.corner_case(name, seed, top)
        self.check(layer, x, just_under(*rest)())

    @pytest.mark.parametrize("top", [True, False])
    @settings(max_examples=8)
    @given(st.sampled_from(["tanh", "softsign", "arctan"]), seeds)
    def test_a_patient_adversary_cannot_undo_the_plain_steps(self, top, name, seed):
        layer, x, *rest = self.corner_case(name, seed, top)
        self.check(layer, x, just_under(*rest, patient=True)())

    def test_the_threshold_is_really_reached(self):
        # The adversary above is as strong as it claims: most of its proposals are accepted.
        layer, x, *rest = self.corner_case("tanh", 1, top=False)
        attack = just_under(*rest)
        steps = self.check(layer, x, attack()).steps.item()
        assert attack.kept > 20
        assert steps > 3 * layer.layer.solve(x, solver=pcdeq.Anderson()).steps.item()

    @given(st.sampled_from(ACTIVATIONS), seeds, st.sampled_from([0.5, 0.9, 0.99]), st.sampled_from([1, 2, 5]))
    def test_every_memory_and_decay_finds_it(self, name, seed, decay, memory):
        layer, x = self.case(name, seed)
        solver = pcdeq.Anderson(tol=1e-10, max_steps=2000, decay=decay, memory=memory)
        solution = layer.layer.solve(x, solver=solver)
        assert solution.outcome is pcdeq.Outcome.CONVERGED
        for row, value in zip(as_array(x), as_array(solution.value), strict=True):
            np.testing.assert_allclose(value, fixed_point_of(layer.matrix, row, layer.facts), rtol=1e-6)


class TestLargeWeights:
    """Spectral norms up to 50, where a contraction argument would have given up at 1."""

    def case(self, name, seed, norm, dtype):
        torch.manual_seed(seed % 2**31)
        layer = pcdeq.PcDEQLinear(8, name, weight_norm=False).to(dtype)
        with torch.no_grad():
            weight = torch.rand(8, 8, dtype=torch.float64) * (torch.rand(8, 8) < 0.5)
            weight[0, 0] += 0.1
            layer.operator.weight.copy_(norm * weight / torch.linalg.matrix_norm(weight, 2))
        return layer, 2 * torch.randn(5, 8, dtype=torch.float64).to(dtype)

    @given(
        names,
        seeds,
        st.floats(0.1, 50),
        st.sampled_from([torch.float32, torch.float64]),
        st.sampled_from([pcdeq.Picard, pcdeq.Anderson, pcdeq.Newton]),
    )
    def test_every_solve_converges_or_says_that_it_did_not(self, name, seed, norm, dtype, solver):
        layer, x = self.case(name, seed, norm, dtype)
        layer.solver = layer.adjoint_solver = solver(max_steps=30)
        if solver is pcdeq.Newton:
            layer.adjoint_solver = pcdeq.Anderson(max_steps=30)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            z = layer(x.requires_grad_())
            z.sum().backward()
        assert all(issubclass(w.category, ConvergenceWarning) for w in caught)
        said = {"forward" if "forward solve" in str(w.message) else "backward" for w in caught}
        for direction, stats in (("forward", layer.last_forward), ("backward", layer.last_backward)):
            assert (stats.unconverged == 0) == (direction not in said)
            assert stats.steps <= 30
        if layer.last_forward.unconverged == 0:
            step = layer.equation(x.detach())(z.detach()) - z.detach()
            # z = g(y) with a small step y -> z; g cannot stretch it by more than the spectral norm.
            assert (step.norm(dim=1) <= 1.01e-4 * max(norm, 1.0) * z.detach().norm(dim=1)).all()

    @given(names, seeds, st.floats(0.1, 50), st.sampled_from([pcdeq.Picard, pcdeq.Anderson, pcdeq.Newton]))
    def test_with_more_steps_every_solve_converges(self, name, seed, norm, solver):
        layer, x = self.case(name, seed, norm, torch.float64)
        solution = layer.solve(x, solver=solver(tol=1e-9, max_steps=20_000))
        assert solution.outcome is pcdeq.Outcome.CONVERGED
        matrix, facts = as_array(layer.operator.weight), FACTS[name]
        for row, value in zip(as_array(layer.equation(x).x), as_array(solution.value), strict=True):
            answer = fixed_point_of(matrix, row, facts)
            slope = facts.slope(matrix @ answer + row)
            amplification = np.linalg.norm(np.linalg.inv(np.eye(8) - slope[:, None] * matrix), 2)
            assert np.linalg.norm(value - answer) <= 1e-8 * max(amplification, 1.0) * np.linalg.norm(answer)
