"""Activations: values, slopes, supremum, kind and rate, against formulas written here; and what is refused."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from problems import ACTIVATIONS, FACTS

import pcdeq
from pcdeq.activations import as_activation, overwrite
from pcdeq.errors import UsageError


def points(name: str, far: float = 30.0) -> torch.Tensor:
    """Arguments >= 0, none within 1e-3 of a kink."""
    y = torch.cat([torch.zeros(1), torch.logspace(-8, math.log10(far), 400)]).double()
    kink = FACTS[name].kink
    return y if kink is None else y[(y - kink).abs() > 1e-3]


@pytest.mark.parametrize("name", ACTIVATIONS)
class TestEveryActivation:
    def test_value(self, name):
        y = points(name)
        expected = torch.from_numpy(FACTS[name].value(y.numpy()))
        torch.testing.assert_close(as_activation(name)(y), expected, rtol=4e-15, atol=0)

    def test_slope_is_the_formula(self, name):
        y = points(name)
        expected = torch.from_numpy(FACTS[name].slope(y.numpy()))
        torch.testing.assert_close(as_activation(name).derivative(y), expected, rtol=1e-13, atol=1e-16)

    def test_slope_is_autograd_s(self, name):
        y = points(name).requires_grad_()
        (expected,) = torch.autograd.grad(as_activation(name)(y).sum(), y)
        torch.testing.assert_close(as_activation(name).derivative(y.detach()), expected, rtol=1e-9, atol=1e-15)

    def test_slope_is_the_finite_difference(self, name):
        y = points(name)
        y = y[y > 1e-3]
        h = 1e-4 * y.clamp(max=1.0)
        s = as_activation(name).value
        # Central: error h² s'''/6 + eps s / h, both below 1e-7 here.
        torch.testing.assert_close(
            as_activation(name).derivative(y), (s(y + h) - s(y - h)) / (2 * h), rtol=1e-6, atol=1e-7
        )

    def test_slope_can_be_read_off_the_value(self, name):
        activation = as_activation(name)
        y = points(name)
        from_value = activation.slope_of_value(activation(y))
        # Where s saturates the value has lost y; the slope is then below 1e-7 (isru: (2 eps)^1.5) and exact to eps.
        torch.testing.assert_close(from_value, activation.derivative(y), rtol=1e-9, atol=1e-14)

    def test_slope_of_value_is_never_negative(self, name):
        activation = as_activation(name)
        for dtype in (torch.float32, torch.float64):
            y = torch.logspace(-3, 30, 500).to(dtype)
            slope = activation.slope_of_value(activation(y))
            assert (slope >= 0).all()

    def test_extreme_arguments_stay_finite(self, name):
        activation = as_activation(name)
        for dtype in (torch.float32, torch.float64):
            info = torch.finfo(dtype)
            y = torch.tensor([0.0, info.tiny, 1.0, 1e4, 1e18, info.max / 4], dtype=dtype)
            for function in (activation.value, activation.derivative):
                result = function(y)
                assert result.dtype == dtype
                assert result.isfinite().all()
                assert (result >= 0).all()

    def test_at_a_kink_the_slope_lies_between_the_two_sides(self, name):
        kink = FACTS[name].kink
        activation = as_activation(name)
        assert activation.kinks == (() if kink is None else (kink,))
        if kink is not None:
            y = torch.tensor([kink * 0.999, kink, kink * 1.001], dtype=torch.float64)
            left, at, right = activation.derivative(y).tolist()
            assert right == 0 < left
            assert right <= at <= left

    def test_supremum(self, name):
        activation = as_activation(name)
        assert activation.supremum == pytest.approx(FACTS[name].supremum, rel=1e-15)
        far = float(activation(torch.tensor(1e15, dtype=torch.float64)))
        assert far <= activation.supremum
        if math.isfinite(activation.supremum):
            assert far > activation.supremum - 1e-12
        else:
            assert far == pytest.approx(math.log(1e15))

    def test_kind_follows_from_the_value_at_0(self, name):
        activation = as_activation(name)
        assert activation.at_zero == (0.5 if "sigmoid" in name else 0.0)
        assert activation.kind == FACTS[name].kind

    @pytest.mark.parametrize("floor", [0.0, 1e-3, 0.01, 0.1, 0.5, 2.0])
    def test_rate_is_the_supremum_of_the_elasticity(self, name, floor):
        facts = FACTS[name]
        if floor == 0 and facts.kind == 1:
            assert as_activation(name).rate() == 1.0
            return

        def elasticity(distance):
            y = floor + np.asarray(distance, dtype=np.float64)
            return distance * facts.slope(y) / facts.value(y)

        if facts.kink is not None:  # rises up to the kink, 0 beyond
            expected = float(elasticity((facts.kink - floor) * (1 - 1e-14))) if floor < facts.kink else 0.0
        else:
            low, high = -12.0, 8.0
            for _ in range(4):  # each time around the largest of 2001
                grid = np.linspace(low, high, 2001)
                values = elasticity(10**grid)
                best = int(np.argmax(values))
                low, high = grid[max(best - 1, 0)], grid[min(best + 1, 2000)]
            expected = float(values.max())
        rate = as_activation(name).rate(floor)
        assert rate == pytest.approx(expected, rel=1e-8)
        assert rate < 1

    def test_rate_falls_as_the_floor_rises(self, name):
        rates = [as_activation(name).rate(floor) for floor in (0.0, 0.01, 0.05, 0.2, 0.9)]
        assert all(low <= high for high, low in itertools.pairwise(rates))

    def test_travels_through_pickle_and_deepcopy_as_itself(self, name):
        activation = as_activation(name)
        assert pickle.loads(pickle.dumps(activation)) is activation
        assert copy.deepcopy(activation) is activation


# The table of T4 in THEORY.md, as printed: half a unit of the last digit is its accuracy.
RATES = {
    0.0: {"tanh": "1", "softsign": "1", "sigmoid": "0.2785", "relu6": "1"},
    0.01: {"tanh": "0.925", "softsign": "0.819", "sigmoid": "0.276", "relu6": "0.998"},
    0.05: {"tanh": "0.791", "softsign": "0.642", "sigmoid": "0.268", "relu6": "0.992"},
    0.1: {"tanh": "0.682", "softsign": "0.537", "sigmoid": "0.257", "relu6": "0.983"},
    0.25: {"tanh": "0.473", "softsign": "0.382", "sigmoid": "0.228", "relu6": "0.958"},
    0.5: {"tanh": "0.276", "softsign": "0.268", "sigmoid": "0.185", "relu6": "0.917"},
}


@pytest.mark.parametrize(("floor", "name"), [(f, n) for f, row in RATES.items() for n in row])
def test_rate_table(floor, name):
    printed = RATES[floor][name]
    digits = len(printed.partition(".")[2])
    assert as_activation(name).rate(floor) == pytest.approx(float(printed), abs=0.5 * 10.0**-digits)


@pytest.mark.parametrize("floor", [-0.1, math.nan, math.inf])
def test_rate_refuses_a_floor_that_is_none(floor):
    with pytest.raises(UsageError, match=re.escape(str(floor))):
        as_activation("tanh").rate(floor)


REFUSED = {
    "softplus, convex": (torch.nn.functional.softplus, "not concave"),
    "square, convex": (lambda y: y * y, "not concave"),
    "logistic shifted, convex at first": (lambda y: torch.sigmoid(y - 5), "not concave"),
    "a step": (lambda y: (y > 1).double(), "not concave"),
    "decreasing": (lambda y: torch.exp(-y), "not nondecreasing"),
    "decreasing far out": (lambda y: y.clamp(max=1.0) - 1e-3 * (y - 100).clamp(0, 1), "not nondecreasing"),
    "negative": (lambda y: torch.tanh(y) - 0.1, "not nonnegative"),
    "relu": (torch.relu, "grows linearly"),
    "elu plus line": (lambda y: torch.tanh(y) + 0.3 * y, "grows linearly"),
    "a hair of a line": (lambda y: torch.tanh(y) + 1e-5 * y, "grows linearly"),
    "zero": (torch.zeros_like, "0 everywhere"),
    "sum": (lambda y: y.sum(), "elementwise"),
    "infinite": (lambda y: 1 / y, "finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_activation_that_voids_the_guarantee_is_refused_with_the_reason(name):
    function, reason = REFUSED[name]
    with pytest.raises(UsageError, match=reason) as caught:
        pcdeq.Activation(name, function)
    assert name in str(caught.value)


def test_a_value_above_the_stated_supremum_is_refused():
    with pytest.raises(UsageError, match=r"exceeds its supremum 0\.5"):
        pcdeq.Activation("half", torch.tanh, supremum=0.5)


ACCEPTED = {
    "sqrt": (torch.sqrt, math.inf, 1),
    "power 0.9": (lambda y: y**0.9, math.inf, 1),  # s(y)/y = y^-0.1 -> 0
    "square root, shifted": (lambda y: torch.sqrt(1 + y), math.inf, 2),
    "algebraic": (lambda y: y / (2 + y), 1.0, 1),
    "min": (lambda y: torch.minimum(2 * y, 1 + 0.5 * y).clamp(max=3), 3.0, 1),
    "constant": (lambda y: torch.full_like(y, 0.3), 0.3, 2),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_concave_sublinear_activation_is_accepted(name):
    function, supremum, kind = ACCEPTED[name]
    assert pcdeq.Activation(name, function, supremum=supremum).kind == kind


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_slope_left_out_is_found_by_autograd(mode):
    activation = pcdeq.Activation("algebraic", lambda y: y / (2 + y), supremum=1.0)
    with mode():
        y = torch.linspace(0, 9, 7).double()
        torch.testing.assert_close(activation.derivative(y), 2 / (2 + y) ** 2)


def test_a_custom_activation_pickles_if_its_functions_do():
    again = pickle.loads(pickle.dumps(pcdeq.Activation("mine", torch.atan, supremum=2.0)))
    assert (again.name, again.supremum, float(again(torch.ones(())))) == ("mine", 2.0, pytest.approx(math.pi / 4))


def test_a_custom_activation_may_carry_the_name_of_a_built_in_one():
    own = pcdeq.Activation("tanh", torch.atan, supremum=2.0)
    assert pickle.loads(pickle.dumps(own)).supremum == 2.0


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(UsageError, match="unknown activation 'swish'") as caught:
        as_activation("swish")
    assert all(name in str(caught.value) for name in ACTIVATIONS)


def test_relu_is_answered_with_relu6():
    with pytest.raises(UsageError, match="relu6"):
        as_activation("relu")


def test_a_plain_function_is_answered_with_how_to_wrap_it():
    with pytest.raises(UsageError, match=r"pcdeq\.Activation\("):
        as_activation(torch.tanh)


def test_what_is_known_of_an_activation_does_not_depend_on_the_default_device():
    with torch.device("meta"):  # where a model is made without its memory; an MPS device has no float64
        own = pcdeq.Activation("own", lambda y: 1 - torch.exp2(-y), supremum=1.0)
        assert (own.kind, own.loses_digits_at is None) == (1, False)
        assert 0 < own.rate(0.5) < 1


def test_the_rate_of_relu6_is_never_below_its_factor():
    """1 - floor / 6, in exact fractions."""
    relu6 = as_activation("relu6")
    for k in range(1, 600):
        floor = k / 100 if k % 2 else 6 - 10 ** (-k / 100)
        rate = relu6.rate(floor)
        assert Fraction(rate) >= 1 - Fraction(floor) / 6
        assert Fraction(rate) <= (1 - Fraction(floor) / 6) * (1 + Fraction(1, 10**12))


@pytest.mark.parametrize("floor", [1e9, 5.6e10, 1e13, 1e30, 1e100])
def test_the_rate_of_log1p_above_large_floors(floor):
    y = floor * np.logspace(-3, 6, 200001)
    elasticity = y / ((1 + floor + y) * np.log1p(floor + y))
    assert as_activation("log1p").rate(floor) >= elasticity.max() * (1 - 1e-15)
    assert as_activation("log1p").rate(floor) == pytest.approx(elasticity.max(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_value_in_the_memory_of_its_argument_is_the_value(name, dtype):
    """Also of the tiniest and the largest arguments, and never falling: pcDEQ-1 lives on the relative size of z."""
    activation, limits = as_activation(name), torch.finfo(dtype)
    ends = torch.tensor([0.0, limits.max], dtype=dtype)
    y = torch.cat([ends[:1], torch.logspace(-30, 3, 20_001, dtype=dtype), ends[1:]])
    expected = activation.value(y)
    found = overwrite(activation, y.clone())
    torch.testing.assert_close(found, expected, rtol=4 * limits.eps, atol=0)
    assert bool((found <= activation.supremum).all())
    assert bool((found.diff() >= -2 * limits.eps * found[1:]).all())
