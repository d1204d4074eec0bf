"""The toolbox against maps whose answers are known from elsewhere: numpy's eigenvalues, enumeration, algebra."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import ACTIVATIONS, as_array, make_input, make_layer
from torch import Tensor

from pcdeq import Picard, fixed_point
from pcdeq.errors import UsageError
from pcdeq.theory import (
    Sampling,
    asymptotic_mapping,
    check_concave,
    check_monotone,
    check_positive,
    check_scalable,
    conditional_eigenvector,
    enclose_map,
    has_fixed_point,
    hilbert,
    is_lower,
    is_upper,
    scaling_bounds,
    spectral_radius,
    thompson,
)

CHECKS = {
    "positive": check_positive,
    "monotone": check_monotone,
    "scalable": check_scalable,
    "concave": check_concave,
}
QUICK = Sampling(samples=100)
seeds = st.integers(0, 10**6)
each_check = pytest.mark.parametrize("name", CHECKS)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def random_matrix(seed: int, n: int = 4, density: float = 1.0, radius: float | None = None) -> Tensor:
    generator = np.random.default_rng(seed)
    a = generator.uniform(0.1, 1, (n, n)) * (generator.uniform(size=(n, n)) < density)
    if radius is not None:
        a *= radius / perron(a)
    return torch.from_numpy(a)


def perron(a) -> float:
    return float(np.abs(np.linalg.eigvals(np.asarray(a))).max())


def affine(a: Tensor, b: Tensor):
    return lambda z: a @ z + b


class TestMetrics:
    def test_by_hand(self):
        x, y = vector(1, 2, 8), vector(2, 2, 1)
        assert thompson(x, y).item() == pytest.approx(math.log(8))
        assert hilbert(x, y).item() == pytest.approx(math.log(8) + math.log(2))

    def test_zeros(self):
        x = torch.stack([vector(0, 0), vector(0, 3), vector(0, 3), vector(2, 3)])
        y = torch.stack([vector(0, 0), vector(0, 6), vector(3, 0), vector(0, 3)])
        assert thompson(x, y).tolist() == pytest.approx([0, math.log(2), math.inf, math.inf])
        assert hilbert(x, y).tolist() == pytest.approx([0, 0, math.inf, math.inf], abs=1e-15)

    def test_a_single_infinite_component_is_infinite_for_hilbert(self):
        assert hilbert(vector(0, 1, 2), vector(1, 1, 2)).item() == math.inf
        assert hilbert(vector(1, 1, 2), vector(0, 1, 2)).item() == math.inf
        assert hilbert(vector(0, 0), vector(1, 2)).item() == math.inf

    def test_extreme_magnitudes(self):
        assert thompson(vector(1e300), vector(1e-300)).item() == pytest.approx(600 * math.log(10))

    @given(seed=seeds)
    def test_are_metrics(self, seed):
        x, y, z = torch.from_numpy(np.random.default_rng(seed).lognormal(0, 3, (3, 5)))
        for distance in (thompson, hilbert):
            assert distance(x, x).item() == 0
            assert distance(x, y).item() == distance(y, x).item() > 0
            assert distance(x, z) <= distance(x, y) + distance(y, z) + 1e-12
        assert hilbert(3 * x, y).item() == pytest.approx(hilbert(x, y).item())
        assert thompson(x, 3 * x).item() == pytest.approx(math.log(3))

    @given(seed=seeds)
    def test_interference_maps_do_not_expand_thompson_nor_positive_matrices_hilbert(self, seed):
        a, (b, x, y) = random_matrix(seed), torch.from_numpy(np.random.default_rng(seed).lognormal(0, 3, (3, 4)))
        fn = affine(a, b)
        assert thompson(fn(x), fn(y)) < thompson(x, y)
        assert hilbert(a @ x, a @ y) < hilbert(x, y)

    def test_a_map_that_is_not_scalable_may_expand(self):
        x, y = vector(1.0, 2.0), vector(2.0, 2.0)
        assert thompson(x**2, y**2) > 1.9 * thompson(x, y)

    def test_broadcasts_over_leading_dimensions(self):
        assert thompson(torch.ones(3, 1, 4), torch.ones(2, 4)).shape == (3, 2)

    @pytest.mark.parametrize("y", [torch.ones(2), torch.ones(()), -torch.ones(3)])
    def test_refuses(self, y):
        with pytest.raises(UsageError):
            thompson(torch.ones(3), y)


A = matrix([[0.2, 0.7, 0.0], [0.0, 0.0, 1.5], [0.4, 0.1, 0.9]])
B = vector(0.5, 0.01, 3.0)
# name: (map, the properties it has); by mathematics, not by measurement.
ZOO = {
    "affine": (lambda z: A @ z + B, "positive monotone scalable concave"),
    "linear": (lambda z: A @ z, "monotone concave"),
    "constant": (lambda z: B, "positive monotone scalable concave"),
    "sqrt": (torch.sqrt, "monotone concave"),
    "1 + sqrt": (lambda z: 1 + z.sqrt(), "positive monotone scalable concave"),
    "square + 1": (lambda z: z**2 + 1, "positive monotone"),
    "1 / (1 + z)": (lambda z: 1 / (1 + z), "positive scalable"),
    "max(1, z)": (lambda z: z.clamp(min=1), "positive monotone"),
    "min of affine": (
        lambda z: torch.minimum(A @ z + B, 2 * z.sum() + B.flip(0)),
        "positive monotone scalable concave",
    ),
    "max of affine": (lambda z: torch.maximum(A @ z + B, 2 * z.sum() + B.flip(0)), "positive monotone scalable"),
    "concave, then falls": (lambda z: torch.minimum(1 + z, 50 - z), "concave scalable"),
    "one bad component": (lambda z: torch.cat([1 + z[:2].sqrt(), 1 + z[2:] / (1 + z[:1] ** 2)]), "positive scalable"),
    "shifted": (lambda z: z - 3, "monotone concave"),
    "oscillating": (lambda z: 1 + 0.5 * torch.sin(z), "positive"),
    "homogeneous mean": (lambda z: z.prod() ** (1 / 3) * torch.ones_like(z), "monotone concave"),
}


class TestProperties:
    @each_check
    @pytest.mark.parametrize("case", ZOO)
    def test_zoo(self, case, name):
        fn, properties = ZOO[case]
        verdict = CHECKS[name](fn, 3, QUICK)
        assert bool(verdict) is verdict.holds is (name in properties.split()), str(verdict)
        assert verdict.tested == 100
        if verdict.holds:
            assert verdict.counterexample is None and "evidence" in str(verdict)
        else:
            assert_refutes(fn, name, verdict.counterexample)
            assert str(verdict).startswith(f"not {name}") and "\n" not in str(verdict)

    @each_check
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_layers_have_all(self, activation, name):
        layer, x = make_layer("dense", activation, gain=3.0), make_input("dense")
        verdict = CHECKS[name](layer.equation(x), x, QUICK)
        assert verdict, str(verdict)

    @each_check
    def test_convolutions_in_float32(self, name):
        layer, x = make_layer("conv2d", "tanh", dtype=torch.float32), make_input("conv2d", dtype=torch.float32)
        verdict = CHECKS[name](layer.equation(x), x, QUICK)
        assert verdict, str(verdict)

    @settings(max_examples=5)
    @given(seed=seeds)
    def test_the_seed_does_not_matter(self, seed):
        sampling = Sampling(samples=50, seed=seed)
        for name, check in CHECKS.items():
            assert check(ZOO["affine"][0], 3, sampling)
            assert bool(check(ZOO["square + 1"][0], 3, sampling)) == (name in ("positive", "monotone"))

    @each_check
    def test_cancelled_digits_are_not_a_violation(self, name):
        def fn(z):  # the sum of the others, as one should not compute it
            return 1e-6 + 0.1 * (z.sum() - z)

        assert abs(fn(vector(1e6, 1e-6, 1e-6))[0].item() / 1.2e-6 - 1) > 1e-6  # it does lose digits
        verdict = CHECKS[name](fn, 3, QUICK)
        assert verdict, str(verdict)

    def test_looks_where_it_is_told(self):
        def fn(z):  # rises up to 1e9, then falls
            return torch.minimum(1 + z, 2e9 - z).clamp(min=1)

        assert check_monotone(fn, 2)
        assert not check_monotone(fn, 2, Sampling(scales=(1e-3, 1e12)))

    def test_overlooks_what_it_is_told(self):
        def fn(z):
            return 1 + 1e-10 * torch.sin(z)

        assert check_monotone(fn, 2)
        assert not check_monotone(fn, 2, Sampling(rtol=1e-12))

    def test_shows_the_worst(self):
        assert check_monotone(lambda z: 1 / (1 + z), 2).counterexample.amount > 0.999

    def test_a_map_that_is_not_a_number(self):
        verdict = check_monotone(lambda z: (z - 10).sqrt(), 2)
        assert not verdict
        assert "nan" in str(verdict)

    @pytest.mark.parametrize(
        "call",
        [
            lambda: check_monotone(lambda z: z, 0),
            lambda: check_monotone(lambda z: z, 2.0),
            lambda: check_monotone(lambda z: z, torch.ones(2, dtype=torch.int64)),
            lambda: check_monotone(lambda z: z.sum(), 2),
            lambda: check_monotone(lambda z: 1.0, 2),
            lambda: Sampling(samples=0),
            lambda: Sampling(scales=(1.0, 0.1)),
        ],
    )
    def test_refuses(self, call):
        with pytest.raises(UsageError):
            call()


def assert_refutes(fn, name, found):
    """The points of a counterexample contradict the property, without help from the code under test."""
    i, x, y, factor = found.index, found.x, found.y, found.factor
    assert bool((x >= 0).all())
    if name == "positive":
        assert fn(x)[i] <= 0
    elif name == "monotone":
        assert bool((x <= y).all())
        assert fn(x)[i] > fn(y)[i] * (1 + 1e-12)
    elif name == "scalable":
        assert factor > 1
        assert fn(factor * x)[i] >= factor * fn(x)[i]
    else:
        assert 0 < factor < 1
        assert bool((y >= 0).all())
        assert (
            factor * fn(x)[i] + (1 - factor) * fn(y)[i] > fn(factor * x + (1 - factor) * y)[i] + 1e-12 * fn(x)[i].abs()
        )
    assert found.amount == pytest.approx((found.left - found.right) / max(abs(found.left), abs(found.right), 1e-300))


class TestAsymptoticMapping:
    @pytest.mark.parametrize("case", ["affine", "constant", "1 + sqrt", "min of affine", "max of affine"])
    def test_known_limits(self, case):
        z = vector(0.3, 2.0, 5.0)
        expected = {
            "affine": A @ z,
            "min of affine": torch.minimum(A @ z, 2 * z.sum() * torch.ones_like(z)),
            "max of affine": torch.maximum(A @ z, 2 * z.sum() * torch.ones_like(z)),
        }.get(case, torch.zeros(3).double())
        limit = asymptotic_mapping(ZOO[case][0]).limit(z)
        assert limit.converged
        torch.testing.assert_close(limit.value, expected, rtol=1e-13, atol=1e-12)
        assert bool((limit.upper >= expected * (1 - 1e-14)).all())

    def test_a_saturation_far_out_is_seen(self):
        assert asymptotic_mapping(lambda z: z.clamp(max=1e9) + 1)(vector(1, 2)).tolist() == pytest.approx(
            [0, 0], abs=1e-9
        )

    @pytest.mark.parametrize(("log", "accuracy"), [(torch.log1p, 1e-12), (lambda x: torch.log(1 + x), 1e-7)])
    def test_load_coupling(self, log, accuracy):
        # 0.3 / log(1 + 0.3/(z + 0.1)) ~ z: with log1p to rounding, without it until the digits are gone.
        limit = asymptotic_mapping(lambda z: 0.3 / log(0.3 / (z.flip(0) + 0.1))).limit(vector(1, 2.7))
        assert limit.converged
        assert limit.value.tolist() == pytest.approx([2.7, 1], rel=accuracy)

    def test_components_that_are_0(self):
        limit = asymptotic_mapping(lambda z: 1 + z.sqrt()).limit(vector(1, 0))
        assert limit.converged and limit.value.tolist() == pytest.approx([0, 0], abs=1e-12)

    def test_slow_decay_is_reported(self):
        limit = asymptotic_mapping(lambda z: z / torch.log(3 + z) + 1).limit(vector(1.0))
        assert not limit.converged
        assert 0 < limit.value.item() <= limit.upper.item() < 0.03

    def test_a_map_without_a_limit_is_reported(self):
        assert not asymptotic_mapping(lambda z: z**2).limit(vector(1.0)).converged

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_zero_for_layers(self, activation):
        layer, x = make_layer("dense", activation, gain=50.0), make_input("dense")
        equation = layer.equation(x)
        z = torch.rand_like(x)
        assert asymptotic_mapping(equation).limit(z).upper.tolist() == torch.zeros_like(x).tolist()
        numerical = asymptotic_mapping(lambda z: equation(z)).limit(z)
        assert numerical.converged and float(numerical.value.max()) < 1e-9

    @given(seed=seeds, factor=st.floats(1e-9, 1e9))
    def test_is_homogeneous(self, seed, factor):
        z = torch.from_numpy(np.random.default_rng(seed).lognormal(0, 2, 3))
        far = asymptotic_mapping(ZOO["max of affine"][0])
        torch.testing.assert_close(far(factor * z), factor * far(z), rtol=1e-10, atol=0)

    def test_zero_maps_to_zero(self):
        assert asymptotic_mapping(ZOO["affine"][0])(torch.zeros(3).double()).tolist() == [0, 0, 0]

    def test_refuses_points_outside_the_cone(self):
        with pytest.raises(UsageError, match="cone"):
            asymptotic_mapping(ZOO["affine"][0])(vector(1, -1, 1))


def contains(pair, value: float) -> bool:
    return pair.lower <= value * (1 + 1e-12) and value * (1 - 1e-12) <= pair.upper


REDUCIBLE = {
    "jordan": (matrix([[1, 1], [0, 1]]), 1.0),
    "triangular": (matrix([[0.5, 7, 7], [0, 2, 7], [0, 0, 1]]), 2.0),
    "two cycles": (matrix([[0, 4, 0, 0], [1, 0, 0, 0], [5, 5, 0, 1], [0, 0, 9, 0]]), 3.0),
    "decoupled": (matrix([[3, 0], [0, 0.1]]), 3.0),
    "nilpotent": (torch.diag(torch.full((9,), 7.0), 1).double(), 0.0),
    "zero": (torch.zeros(3, 3), 0.0),
    "periodic": (torch.eye(5).roll(1, 0).double() * 2, 2.0),
    "one": (matrix([[0.25]]), 0.25),
    "nearly reducible": (matrix([[1, 1], [1e-12, 1]]), 1 + 1e-6),
}


class TestSpectralRadius:
    @pytest.mark.parametrize("case", REDUCIBLE)
    def test_matrices_of_known_radius(self, case):
        a, radius = REDUCIBLE[case]
        pair = spectral_radius(a)
        assert pair.converged and contains(pair, radius)
        assert pair.value == pytest.approx(radius, rel=2e-9, abs=0)

    @pytest.mark.parametrize("case", REDUCIBLE)
    def test_the_same_matrices_as_maps(self, case):
        a, radius = REDUCIBLE[case]
        pair = spectral_radius(lambda z: a.double() @ z, len(a))
        assert contains(pair, radius)
        assert pair.upper - pair.lower < 5e-3  # a Jordan block converges like 1/steps; the others far better
        assert bool((a.double() @ pair.vector <= pair.upper * pair.vector * (1 + 1e-12)).all())

    @given(seed=seeds, n=st.integers(1, 12), density=st.sampled_from([1.0, 0.5, 0.2]))
    def test_random_matrices(self, seed, n, density):
        a = random_matrix(seed, n, density)
        exact, iterated = spectral_radius(a), spectral_radius(lambda z: a @ z, n)
        # eigvals itself is off by eps^(1/n) at a Jordan block; irreducible matrices are where it can be trusted.
        tolerance = 1e-10 if density == 1 else 1e-2
        assert exact.converged and exact.value == pytest.approx(perron(a), rel=tolerance, abs=tolerance)
        assert iterated.lower <= exact.upper and exact.lower <= iterated.upper
        assert density < 1 or iterated.converged

    def test_eigenvector(self):
        a = random_matrix(1, 5)
        for pair in (spectral_radius(a), spectral_radius(lambda z: a @ z, 5)):
            torch.testing.assert_close(a @ pair.vector, pair.value * pair.vector, rtol=1e-8, atol=0)
            assert float(pair.vector.min()) > 0 and float(pair.vector.max()) == pytest.approx(1)

    @pytest.mark.parametrize(("extreme", "choose"), [(torch.amin, min), (torch.amax, max)])
    @given(seed=seeds)
    def test_row_by_row_minimum_and_maximum(self, extreme, choose, seed):
        # The radius of a rowwise minimum is the least over all choices of rows, and likewise the maximum.
        options = torch.stack([random_matrix(seed, 3), random_matrix(seed + 1, 3)])
        choices = itertools.product(range(2), repeat=3)
        expected = choose(perron(options[list(choice), range(3)]) for choice in choices)
        pair = spectral_radius(lambda z: extreme(options @ z, dim=0), 3)
        assert pair.converged and contains(pair, expected)

    @given(seed=seeds)
    def test_max_times_algebra(self, seed):
        # The radius of z -> max_j a_ij z_j is the largest geometric mean of a along a cycle.
        a = random_matrix(seed, 3)
        cycles = [cycle for n in (1, 2, 3) for cycle in itertools.permutations(range(3), n)]
        means = [math.prod(float(a[c[k - 1], c[k]]) for k in range(len(c))) ** (1 / len(c)) for c in cycles]
        pair = spectral_radius(lambda z: (a * z).amax(1), 3)
        assert pair.lower <= max(means) * (1 + 1e-12) and pair.upper >= max(means) * (1 - 1e-12)
        assert pair.upper - pair.lower < 1e-6

    def test_layers_in_closed_form(self):
        layer, x = make_layer("conv2d", "relu6", gain=100.0), make_input("conv2d")
        for pair in (spectral_radius(layer), spectral_radius(layer.equation(x))):
            assert (pair.lower, pair.value, pair.upper, pair.converged) == (0, 0, 0, True)

    def test_a_limit_that_is_not_known_gives_no_lower_bound(self):
        pair = spectral_radius(asymptotic_mapping(lambda z: z / torch.log(3 + z) + 1), 2)
        assert pair.lower == 0 < pair.value == pair.upper < 0.05
        assert not pair.converged and "not converged" in str(pair)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((torch.ones(2, 3),), "square"),
            ((-torch.eye(2),), "nonnegative"),
            ((torch.full((2, 2), math.inf),), "finite"),
            ((lambda z: z,), "number of components"),
            ((lambda z: z + 1, 2), "homogeneous"),
            ((lambda z: z.clamp(min=1), 2), "homogeneous"),
            ((lambda z: -z, 2), "cone"),
        ],
    )
    def test_refuses(self, arguments, message):
        with pytest.raises(UsageError, match=message):
            spectral_radius(*arguments)


class TestExistence:
    @given(seed=seeds, radius=st.sampled_from([0.0, 0.3, 0.99, 1 - 1e-9, 1 + 1e-9, 1.2, 30.0]))
    def test_affine_maps_have_one_iff_the_radius_is_below_1(self, seed, radius):
        a, b = random_matrix(seed, 4, radius=radius), torch.from_numpy(np.random.default_rng(seed).lognormal(0, 2, 4))
        for asymptotic in (None, a, lambda z: a @ z):
            answer = has_fixed_point(affine(a, b), 4, asymptotic=asymptotic)
            assert bool(answer) is (radius < 1)
            assert answer.verdict == ("exists" if radius < 1 else "does not exist")
            assert answer.radius.value == pytest.approx(radius, rel=1e-8, abs=1e-12)
            if radius < 1:
                solution = np.linalg.solve(np.eye(4) - a.numpy(), b.numpy())
                assert (answer.witness.numpy() >= solution * (1 - 1e-6)).all()
                assert bool((a @ answer.witness + b <= answer.witness).all())
            else:
                assert answer.witness is None

    def test_radius_1_is_undecided(self):
        answer = has_fixed_point(lambda z: z.flip(0) + 1, 2)
        assert answer.verdict == "undecided" and not answer
        assert "undecided" in str(answer)

    @pytest.mark.parametrize(("scale", "verdict"), [(0.95, "exists"), (1.05, "does not exist")])
    def test_choosing_the_better_station(self, scale, verdict):
        options = torch.stack([random_matrix(5, 3), random_matrix(6, 3)])
        radius = min(perron(options[list(choice), range(3)]) for choice in itertools.product(range(2), repeat=3))
        fixed = perron(options[0])
        options = options * scale / radius
        assert fixed > radius  # choosing helps
        assert has_fixed_point(lambda z: (options @ z + 1).amin(0), 3).verdict == verdict

    def test_maps_that_grow_slower_than_any_line(self):
        answer = has_fixed_point(lambda z: 1e4 * z.sqrt() + 1, 3)
        assert answer and float(answer.witness.min()) >= 1e8

    def test_a_witness_decides_where_the_limit_does_not(self):
        answer = has_fixed_point(lambda z: 100 * z / torch.log(3 + z) + 1, 2)  # z* is near e^100
        assert answer.radius.lower == 0 and answer.radius.upper > 1
        assert answer and float(answer.witness.min()) > math.exp(99)

    def test_reducible(self):
        a = 5 * torch.diag(torch.ones(5), 1).double()
        assert has_fixed_point(affine(a, torch.ones(6).double()), 6)
        assert has_fixed_point(affine(a, torch.ones(6).double()), 6, asymptotic=a).witness is not None

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_layers_always(self, activation):
        layer, x = make_layer("dense", activation, gain=20.0), make_input("dense")
        answer = has_fixed_point(layer.equation(x), x)
        assert answer and answer.radius.upper == 0
        assert bool((answer.witness >= layer.solve(x).value).all())

    def test_refuses_maps_that_are_0_at_0(self):
        with pytest.raises(UsageError, match="standard interference"):
            has_fixed_point(torch.sqrt, 2)


class TestConditionalEigenvector:
    @given(seed=seeds)
    def test_affine_maps(self, seed):
        # With Σx = 1, Ax + b = (A + b1ᵀ)x; with max x = x_k = 1, Ax + b = (A + b e_kᵀ)x, and λ is the largest of these.
        a, b = random_matrix(seed), torch.from_numpy(np.random.default_rng(seed).lognormal(0, 1, 4))
        total, peak = (conditional_eigenvector(affine(a, b), 4, norm=order) for order in (1, math.inf))
        assert total.converged and peak.converged
        assert total.value == pytest.approx(perron(a + b[:, None]), rel=1e-11)
        assert peak.value == pytest.approx(max(perron(a + torch.outer(b, e)) for e in torch.eye(4)), rel=1e-11)
        assert float(total.vector.sum()) == pytest.approx(1) and float(peak.vector.max()) == pytest.approx(1)
        torch.testing.assert_close(a @ peak.vector + b, peak.value * peak.vector, rtol=1e-10, atol=0)

    @given(seed=seeds)
    def test_is_the_fairest_and_every_point_brackets_it(self, seed):
        fn = ZOO["max of affine"][0]
        pair = conditional_eigenvector(fn, 3, norm=2)
        x = torch.from_numpy(np.random.default_rng(seed).lognormal(0, 1, 3))
        ratio = fn(x / x.norm()) / (x / x.norm())
        assert float(ratio.min()) <= pair.lower <= pair.upper <= float(ratio.max())

    def test_a_norm_of_ones_own(self):
        budget = vector(0.5, 2, 1)
        pair = conditional_eigenvector(lambda x: 1 + x.sqrt(), 3, norm=lambda x: (x / budget).max())
        assert float((pair.vector / budget).max()) == pytest.approx(1)
        assert float(pair.vector.max()) == pytest.approx(0.5)  # one value for all, by symmetry, at the tightest budget
        assert pair.value == pytest.approx((1 + math.sqrt(0.5)) / 0.5)

    def test_bounds_hold_before_convergence(self):
        fn = affine(random_matrix(2, 4, density=0.6), vector(1, 1e-3, 1, 10))
        early, late = (conditional_eigenvector(fn, 4, max_steps=steps) for steps in (2, 1000))
        assert not early.converged and late.converged
        assert early.lower <= late.value <= early.upper and early.upper > 1.01 * early.lower

    def test_refuses_maps_that_are_not_positive(self):
        with pytest.raises(UsageError, match="positive"):
            conditional_eigenvector(lambda x: x - 1, 2)


class TestOrder:
    @given(seed=seeds)
    def test_the_order_test_never_lies(self, seed):
        generator = np.random.default_rng(seed)
        a, b = random_matrix(seed, 3, radius=0.8), torch.from_numpy(generator.lognormal(0, 1, 3))
        solution = torch.linalg.solve(torch.eye(3) - a, b)
        points = solution * torch.from_numpy(generator.lognormal(0, generator.choice([1e-9, 0.1, 1]), (64, 3)))
        lower, upper = (test(lambda z: z @ a.T + b, points) for test in (is_lower, is_upper))
        assert lower.shape == upper.shape == (64,)
        assert bool((points[lower] <= solution * (1 + 1e-13)).all())
        assert bool((points[upper] >= solution * (1 - 1e-13)).all())
        inside = torch.stack([solution * (1 - 1e-9), solution * (1 + 1e-9)])
        assert is_lower(lambda z: z @ a.T + b, inside).tolist() == [True, False]
        assert is_upper(lambda z: z @ a.T + b, inside).tolist() == [False, True]

    def test_rounding_is_not_an_answer(self):
        z = vector(2.0)  # exactly the fixed point of 1 + z/2: true with equality, not shown by floats
        assert not is_lower(lambda z: 1 + z / 2, z) and not is_upper(lambda z: 1 + z / 2, z)
        assert is_lower(lambda z: 1 + z / 2, z, rtol=0.0) == is_upper(lambda z: 1 + z / 2, z, rtol=0.0)
        assert not is_lower(lambda z: 1 + z / 2, 0.999 * z, rtol=0.01)

    def test_infinite_and_missing_values_prove_nothing(self):
        assert not is_upper(lambda z: 1 + z / 2, vector(math.inf))
        assert not is_upper(lambda z: z * math.nan, vector(1.0))
        assert not is_lower(lambda z: z * math.nan, vector(0.0))
        assert is_lower(lambda z: z / 2, vector(0.0))

    @pytest.mark.parametrize("function", [is_lower, is_upper, enclose_map, scaling_bounds])
    def test_refuses_points_outside_the_cone(self, function):
        with pytest.raises(UsageError, match="cone"):
            function(lambda z: 1 + z / 2, vector(-1.0))

    @pytest.mark.parametrize("fn", [ZOO["1 + sqrt"][0], lambda z: ZOO["max of affine"][0](z) ** 0.9])
    def test_encloses_what_picard_finds(self, fn):
        exact = fixed_point(fn, torch.ones(3).double(), solver=Picard(tol=1e-15, max_steps=5000))
        for tol in (1e-2, 1e-6, 1e-10):
            rough = fixed_point(fn, torch.ones(3).double(), solver=Picard(tol=tol, max_steps=1000))
            box = enclose_map(fn, rough)
            assert bool(box.certified)
            assert bool((box.lower <= exact).all()) and bool((exact <= box.upper).all())
            error = float((rough / exact - 1).abs().max())
            assert float((box.width / exact).max()) < 50 * error + 1e-12

    def test_no_upper_bound_where_there_is_no_fixed_point(self):
        box = enclose_map(lambda z: 1.1 * z + 1, vector(1.0))
        assert not bool(box.certified) and box.upper.item() == math.inf
        box = scaling_bounds(lambda z: 1.1 * z + 1, vector(1.0))
        assert not bool(box.certified) and box.upper.item() == math.inf

    def test_samples_are_certified_one_by_one(self):
        fn = ZOO["1 + sqrt"][0]
        points = matrix([[2.6, 2.6], [0.0, 2.6], [2.618, 2.618]])
        for enclose in (enclose_map, scaling_bounds):
            box = enclose(fn, points)
            assert box.certified.tolist() == [True, False, True]
            for point, lower, upper, certified in zip(points, box.lower, box.upper, box.certified, strict=True):
                alone = enclose(fn, point)
                assert bool(alone.certified) == bool(certified)
                assert alone.lower.tolist() == lower.tolist() and alone.upper.tolist() == upper.tolist()

    @given(seed=seeds, activation=st.sampled_from(ACTIVATIONS))
    def test_scaling_bounds_hold_for_layers(self, seed, activation):
        layer, x = make_layer("dense", activation, gain=2.0, seed=seed % 97), make_input("dense", seed=seed)
        equation = layer.equation(x)
        exact = layer.solve(x, solver=Picard(tol=1e-14, max_steps=20000)).value
        z = exact * torch.exp(0.05 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed)))
        box = scaling_bounds(equation, z)
        slack = 1e-9 if activation in ("relu6", "hard-tanh") else 1e-11  # of the reference
        assert bool((box.lower <= exact * (1 + slack)).all()) and bool((exact * (1 - slack) <= box.upper).all())

    def test_scaling_bounds_are_those_of_the_formula(self):
        fn, z = ZOO["affine"][0], vector(3, 6, 4)
        g, g0 = as_array(fn(z)), as_array(B)
        m, big = (np.maximum(as_array(z) - g, 0) / g0).max(), (np.maximum(g - as_array(z), 0) / g0).max()
        box = scaling_bounds(fn, z)
        assert box.lower.numpy() == pytest.approx(as_array(z) / (1 + m), rel=1e-12)
        assert bool(box.certified) is bool(big < 1)

    def test_scaling_bounds_without_a_positive_value_at_0(self):
        box = scaling_bounds(torch.sqrt, vector(0.9))
        assert not bool(box.certified) and box.lower.item() == 0
        with pytest.raises(UsageError, match=r"fn\(0\)"):
            scaling_bounds(lambda z: z / 2 - 1, vector(1.0))
