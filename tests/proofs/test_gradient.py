"""Bounds on gradients contain the exact ones, which numpy finds from the matrix (T5)."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import (
    ACTIVATIONS,
    FACTS,
    OPERATORS,
    as_array,
    fixed_point_of,
    injected,
    layer_matrix,
    make_input,
    make_layer,
    reference_solution,
)

import pcdeq
from pcdeq.equation import Adjoint
from pcdeq.errors import ConvergenceWarning
from pcdeq.operations import solve_adjoint
from pcdeq.proofs.gradient import adjoint_distance
from pcdeq.solvers import run


def exact_gradient(operator, activation, layer, x, grad):
    """The gradient of <grad, z*> with respect to x, from (I - J)⁻¹ at the exact equilibrium."""
    facts, matrix = FACTS[activation], layer_matrix(operator, layer)
    z = reference_solution(operator, activation, layer, x).reshape(len(x), -1)
    raw, v = as_array(x).reshape(z.shape), as_array(grad).reshape(z.shape)
    slope = facts.slope(z @ matrix.T + injected(raw, facts.kind))
    systems = np.eye(z.shape[1]) - matrix.T * slope[:, None, :]  # I - Jᵀ, J = D W
    y = np.linalg.solve(systems, v[..., None])[..., 0]
    through = 1 / (1 + np.exp(-5 * raw)) if facts.kind == 1 else (raw > 0)
    return (slope * y * through).reshape(x.shape)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_exact_gradient_lies_within_narrow_bounds(operator, activation):
    layer, x = make_layer(operator, activation, gain=0.8), make_input(operator)
    grad = make_input(operator, seed=7)
    bounds = layer.enclose_gradient(x, grad, tol=1e-8)
    exact = exact_gradient(operator, activation, layer, x, grad)
    assert bounds.certified.all()
    assert not bounds.kinks.any()
    assert (as_array(bounds.lower) <= exact).all() and (exact <= as_array(bounds.upper)).all()
    assert float(bounds.width.max()) < 1e-6


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 12),
    gain=st.floats(0.05, 20),
    scale=st.floats(0.01, 5),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_random_layers_of_all_sizes(size, gain, scale, activation, dtype, seed):
    torch.manual_seed(seed)
    layer = pcdeq.PcDEQLinear(size, activation).to(dtype)
    with torch.no_grad():
        layer.operator.weight_v.uniform_()
        layer.operator.weight_g.uniform_(0, gain)
    x, grad = scale * torch.randn(2, size, dtype=dtype), torch.randn(2, size, dtype=dtype)
    bounds = layer.enclose_gradient(x, grad)
    # The claim is about the weight and the injected input in memory: numpy starts from the same numbers.
    equation = layer.equation(x)
    weight, facts = as_array(equation.map.weight), FACTS[activation]
    z = np.stack([fixed_point_of(weight, row, facts) for row in as_array(equation.x)])
    p = z @ weight.T + as_array(equation.x)
    slope = facts.slope(p)
    y = np.linalg.solve(np.eye(size) - weight.T * slope[:, None, :], as_array(grad)[..., None])[..., 0]
    raw = as_array(x)
    through = 1 / (1 + np.exp(-5 * raw)) if facts.kind == 1 else (raw > 0)
    exact, slack = slope * y * through, 1e-9 * (1 + np.abs(slope * y))  # of numpy's own solve
    sure = as_array(bounds.certified)[:, None].astype(bool)
    inside = (as_array(bounds.lower) <= exact + slack) & (exact - slack <= as_array(bounds.upper))
    assert (inside | ~sure).all()


def test_a_kink_within_the_bounds_is_reported_and_both_slopes_are_covered():
    # ReLU6, W = 0.5, x = 3: z* is 6 exactly, at the kink; dz/dx is 2 from below and 0 from above.
    layer = pcdeq.PcDEQLinear(1, "relu6", weight_norm=False).double()
    with torch.no_grad():
        layer.operator.weight.fill_(0.5)
    injected_as_3 = np.log(np.expm1(15.0)) / 5
    x = torch.tensor([[injected_as_3], [2.0], [4.0]], dtype=torch.float64)
    bounds = layer.enclose_gradient(x, torch.ones(3, 1).double())
    assert bounds.kinks[:, 0].tolist() == [True, False, False]
    assert bounds.lower[0, 0] <= 0 and bounds.upper[0, 0] >= 2 - 1e-6
    through = 1 / (1 + np.exp(-5 * 2.0))
    assert abs(bounds.lower[1, 0] - 2 * through) < 1e-5 and abs(bounds.upper[1, 0] - 2 * through) < 1e-5
    assert abs(bounds.upper[2, 0]) < 1e-12


def test_where_no_bound_exists_none_is_claimed():
    layer = make_layer("dense", "tanh")
    x = make_input("dense")
    x[1, 0] = torch.nan
    bounds = layer.enclose_gradient(x, torch.ones_like(x))
    assert bounds.certified.tolist() == [True, False]
    assert (bounds.upper[1] == torch.inf).all() and (bounds.lower[1] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 2, 4, 200])
@pytest.mark.parametrize("operator", ["dense", "conv2d", "graph"])
def test_the_distance_of_an_adjoint_is_bounded_whenever_it_stops(operator, steps, dtype):
    layer, x = make_layer(operator, "tanh", gain=1.0, dtype=dtype), make_input(operator, samples=5, dtype=dtype)
    grad = make_input(operator, samples=5, seed=3, dtype=dtype)
    with torch.no_grad():
        equation = layer.equation(x)
        slope = equation.slope(run(equation.problem(), pcdeq.Anderson(tol=1e-6)).value)
        adjoint = Adjoint(equation.map, slope, grad)
        u = solve_adjoint(adjoint, pcdeq.Picard(tol=1e-13, max_steps=steps)).value
        bound = adjoint_distance(adjoint, u)
    matrix = as_array(equation.map.matrix(x.shape[1:]))
    d, v = as_array(slope).reshape(5, -1), as_array(grad).reshape(5, -1)
    exact = np.linalg.solve(np.eye(d.shape[1]) - d[:, :, None] * matrix.T, (d * v)[..., None])[..., 0]
    error = np.abs(as_array(u).reshape(5, -1) - exact)
    assert (error <= as_array(bound).reshape(5, -1)).all()
    if steps == 200 and dtype == torch.float64:
        assert float(bound.max()) < 1e-9


@pytest.mark.parametrize("activation", ["tanh", "relu6", "sigmoid"])
def test_a_certified_layer_says_how_good_its_gradient_is(activation):
    layer = make_layer("conv2d", activation, gain=1.2, solver=pcdeq.Certified(pcdeq.Anderson(tol=1e-6)))
    x, grad = make_input("conv2d", samples=3).requires_grad_(), make_input("conv2d", samples=3, seed=5)
    layer(x).backward(grad)
    assert layer.last_backward.unconverged == 0
    assert layer.last_backward.residual < 1e-6
    exact = exact_gradient("conv2d", activation, layer, x, grad)
    np.testing.assert_allclose(as_array(x.grad), exact, rtol=0, atol=1e-5)


def test_bad_input_is_one_clear_line():
    layer, x = make_layer("dense", "tanh"), make_input("dense")
    with pytest.raises(pcdeq.PcdeqError, match="grad must have the input's shape"):
        layer.enclose_gradient(x, torch.ones(1))
    with pytest.raises(pcdeq.PcdeqError, match="an injection of your own"):
        make_layer("dense", "tanh", injection=torch.relu).enclose_gradient(x, x)


def test_a_gradient_that_is_no_number_is_not_certified():
    layer = make_layer("dense", "tanh", solver=pcdeq.Certified())
    x, grad = make_input("dense", samples=3).requires_grad_(), torch.ones(3, 3).double()
    grad[1, 0] = torch.nan
    with pytest.warns(ConvergenceWarning, match="1 of 3 samples"):
        layer(x).backward(grad)
    assert layer.last_backward.unconverged == 1


def test_a_gradient_of_zero_is_certified_to_be_zero():
    layer = make_layer("dense", "tanh", solver=pcdeq.Certified())
    x = make_input("dense", samples=3).requires_grad_()
    layer(x).backward(torch.zeros(3, 3).double())
    assert (x.grad == 0).all() and layer.last_backward.unconverged == 0


def test_an_empty_batch():
    layer, x = make_layer("conv2d", "tanh"), make_input("conv2d", samples=0)
    assert layer.enclose_gradient(x, x).certified.shape == (0,)
    assert layer.enclose(x, width=1e-9).certified.shape == (0,)
    decided = layer.solve(x, until=lambda box: box.certified)
    assert decided.converged.shape == (0,)


def diagonal(activation, weight=0.0):
    """One unit; with the weight 0 its gradient is the slope of the activation, times that of the injection."""
    layer = pcdeq.PcDEQLinear(1, activation, weight_norm=False, warm_start=False).double()
    with torch.no_grad():
        layer.operator.weight.fill_(weight)
    return layer


SLOPES = {
    "tanh": lambda y: (2 / (y.exp() + (-y).exp())) ** 2,
    "sigmoid": lambda y: (-y).exp() / (1 + (-y).exp()) ** 2,
    "1-exp": lambda y: (-y).exp(),
}


@pytest.mark.parametrize("activation", SLOPES)
@pytest.mark.parametrize("x", [30.0, 349.0, 352.0, 365.0, 500.0, 744.0, 800.0])
def test_slopes_near_the_end_of_the_floating_point_range(activation, x):
    """Exact to 50 digits: 4 exp(-704) is no 0 yet, 4 exp(-730) a denormal number, 4 exp(-1000) none at all."""
    bounds = diagonal(activation).enclose_gradient(torch.tensor([[x]]).double(), torch.ones(1, 1).double())
    with localcontext(prec=50):
        exact = SLOPES[activation](Decimal(x))  # the injection is the identity here, but for exp(-150) of it
        assert bounds.certified.all()
        assert Decimal(float(bounds.lower)) <= exact <= Decimal(float(bounds.upper))
    assert float(bounds.width) < 1e-5 * float(exact) + 1e-300


def test_gradients_below_the_floating_point_range_of_the_injection():
    bounds = diagonal("sigmoid").enclose_gradient(torch.tensor([[-1.0]]).double(), torch.ones(1, 1).double())
    assert bounds.lower <= 0 <= bounds.upper  # ReLU
    layer, x = diagonal("tanh"), -148.0  # exp(-740)
    bounds = layer.enclose_gradient(torch.tensor([[x]]).double(), torch.ones(1, 1).double())
    with localcontext(prec=50):
        through = 1 / (1 + (5 * Decimal(-x)).exp())
        assert Decimal(float(bounds.lower)) <= through <= Decimal(float(bounds.upper))


@pytest.mark.parametrize("exponent", [-1060, -1000, -300, 300, 1000])
def test_bounds_scale_with_the_gradient(exponent):
    layer, x = make_layer("dense", "tanh"), make_input("dense")
    grad = torch.ones_like(x)
    plain, scaled = (layer.enclose_gradient(x, g) for g in (grad, grad * 2.0**exponent))
    assert scaled.certified.all()
    assert (scaled.lower <= plain.upper * 2.0**exponent).all() and (scaled.upper >= plain.lower * 2.0**exponent).all()
    if exponent > -1000:
        torch.testing.assert_close(scaled.lower / 2.0**exponent, plain.lower, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("strange", [torch.inf, -torch.inf, torch.nan])
def test_an_enclosure_of_a_gradient_that_is_no_number_is_not_certified(strange):
    layer, x = make_layer("dense", "tanh"), make_input("dense")
    grad = torch.ones_like(x)
    alone = layer.enclose_gradient(x[1:], grad[1:])
    grad[0, 1] = strange
    bounds = layer.enclose_gradient(x, grad)
    assert bounds.certified.tolist() == [False, *alone.certified.tolist()]
    assert (bounds.lower[0] == -torch.inf).all() and (bounds.upper[0] == torch.inf).all()
    torch.testing.assert_close(bounds.lower[1:], alone.lower)


def test_a_lost_sample_takes_no_certificate_from_others():
    # J has row sums of 4 and a spectral radius of 0.45: it takes more than one term to see that it contracts.
    layer = pcdeq.PcDEQLinear(2, "relu6", weight_norm=False, warm_start=False).double()
    with torch.no_grad():
        layer.operator.weight.copy_(torch.tensor([[0.0, 4.0], [0.05, 0.0]]))
    x = torch.tensor([[0.1, 0.2], [torch.nan, 0.2]]).double()
    bounds = layer.enclose_gradient(x, torch.ones_like(x))
    assert bounds.certified.tolist() == [True, False]
    adjoint = Adjoint(layer.operator.bind(layer.operator.weight.detach()), torch.ones(2, 2).double(), x)
    assert adjoint_distance(adjoint, torch.ones(2, 2).double())[0].isfinite().all()
