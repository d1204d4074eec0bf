"""Picard(stop="batch") against a transcription of the paper's formulas, in numpy and plain matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import (
    FACTS,
    PAPER_ACTIVATIONS,
    STATES,
    as_array,
    injected,
    layer_matrix,
    make_input,
    make_layer,
    matrix_of,
    scalar_layer,
)

import pcdeq
from pcdeq.errors import ConvergenceWarning


def iterate(step, start, max_steps=200):
    """z <- step(z) until ‖z_{k+1} - z_k‖ / (‖z_{k+1}‖ + 1e-5) < 1e-4, Frobenius over the batch."""
    z, count, done = start, 0, False
    while not done and count < max_steps:
        new, count = step(z), count + 1
        done = np.linalg.norm(new - z) / (np.linalg.norm(new) + 1e-5) < 1e-4
        z = new
    return z, count


def paper(operator, activation, layer, x, upstream, max_steps=200):
    """The value used, the gradients of <upstream, value>, and both step counts."""
    facts, matrix = FACTS[activation], layer_matrix(operator, layer)
    raw = as_array(x).reshape(len(x), -1)
    u, v = injected(raw, facts.kind), as_array(upstream).reshape(len(x), -1)
    last, forward = iterate(lambda z: facts.value(z @ matrix.T + u), np.zeros_like(u), max_steps)
    p = last @ matrix.T + u
    value = facts.value(p)  # one further application of g
    slope = facts.slope(p)
    y, backward = iterate(lambda y: (slope * y) @ matrix + v, v, max_steps)
    inject_slope = 1 / (1 + np.exp(-5 * raw)) if facts.kind == 1 else (raw > 0)
    # dL/dW as a matrix: an entry of a convolution's kernel stands at many places of it.
    return value, slope * y * inject_slope, (slope * y).T @ value, forward, backward


@pytest.mark.parametrize("gain", [0.01, 0.3, 0.8, 1.5, 10.0])
@pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
@pytest.mark.parametrize("operator", ["dense", "conv2d"])
def test_values_and_step_counts_are_the_paper_s(operator, activation, gain):
    layer = make_layer(operator, activation, gain=gain, solver=pcdeq.Picard(stop="batch"), weight_norm=False)
    for seed in range(4):
        x = make_input(operator, samples=5, seed=seed).requires_grad_()
        upstream = make_input(operator, samples=5, seed=seed + 50)
        layer.zero_grad()
        z = layer(x)
        z.backward(upstream)
        value, grad_x, grad_matrix, forward, backward = paper(operator, activation, layer, x, upstream)
        assert layer.last_forward.steps == forward
        assert layer.last_backward.steps == backward
        np.testing.assert_allclose(as_array(z).reshape(value.shape), value, rtol=1e-12)
        # A slope read off a saturated value is exact to eps in absolute terms, and the upstream gradient is about 1.
        np.testing.assert_allclose(as_array(x.grad).reshape(value.shape), grad_x, rtol=1e-11, atol=1e-13)
        weight_grad = as_array(layer.operator.weight.grad)
        np.testing.assert_allclose(weight_grad, fold(operator, grad_matrix, weight_grad.shape), rtol=1e-9, atol=1e-11)
        assert layer.solve(x).steps.tolist() == [forward] * 5


def fold(operator, grad_matrix, shape):
    """The gradient of the weight from that of the matrix, which is linear in it."""
    if operator == "dense":
        return grad_matrix
    result = np.zeros(shape)
    for index in np.ndindex(*shape):
        unit = np.zeros(shape)
        unit[index] = 1.0
        result[index] = (matrix_of(operator, unit, STATES[operator]) * grad_matrix).sum()
    return result


@pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
def test_the_step_counts_do_not_hinge_on_where_j_is_taken(activation):
    # The formulas leave open whether J is that of the last iterate or of the value used, which is one step on.
    facts = FACTS[activation]
    for seed in range(6):
        layer = make_layer("dense", activation, gain=0.5, seed=seed, solver=pcdeq.Picard(stop="batch"))
        x = make_input("dense", samples=5, seed=seed)
        upstream = make_input("dense", samples=5, seed=seed + 50)
        matrix, u = layer_matrix("dense", layer), injected(as_array(x), facts.kind)
        z = layer(x)
        z.backward(upstream)
        slope = facts.slope(as_array(z) @ matrix.T + u)
        v = as_array(upstream)
        assert layer.last_backward.steps == iterate(lambda y, s=slope, m=matrix, v=v: (s * y) @ m + v, v)[1]


@pytest.mark.parametrize("max_steps", [1, 2, 3, 7])
def test_the_step_limit_is_the_paper_s(max_steps):
    layer = make_layer("dense", "tanh", gain=1.0, solver=pcdeq.Picard(stop="batch", max_steps=max_steps))
    x, upstream = make_input("dense"), make_input("dense", seed=1)
    value, *_, forward, backward = paper("dense", "tanh", layer, x, upstream, max_steps)
    with pytest.warns(ConvergenceWarning, match="max_steps") as caught:
        z = layer(x)
        z.backward(upstream)
    assert ["forward" in str(w.message) for w in caught] == [True, False]
    assert (layer.last_forward.steps, layer.last_backward.steps) == (forward, backward) == (max_steps, max_steps)
    np.testing.assert_allclose(as_array(z), value, rtol=1e-13)


def test_the_default_solver_is_the_paper_s_but_for_the_rule():
    assert (pcdeq.Picard().tol, pcdeq.Picard().max_steps) == (1e-4, 200)


def test_sigmoid_can_take_nine_steps():
    layer = scalar_layer(2.157, "sigmoid", solver=pcdeq.Picard(stop="batch"))
    assert layer.solve(torch.zeros(1, 1).double()).steps.tolist() == [9]


def test_one_norm_over_the_whole_batch():
    # A sample of norm 1000 times the other's hides it: the slow small sample stops with the large one.
    layer = make_layer("dense", "log1p", gain=0.9)
    x = make_input("dense", samples=1)
    both = torch.cat([x - 3, x + 1e4])
    small = layer.solve(x - 3, solver=pcdeq.Picard(stop="batch")).steps.item()
    together = layer.solve(both, solver=pcdeq.Picard(stop="batch")).steps
    assert together.tolist() == [together[0].item()] * 2
    assert together[0] < small


def test_a_start_small_enough_meets_the_rule_at_once():
    # ‖g(0)‖ / (‖g(0)‖ + 1e-5) < 1e-4 where ‖g(0)‖ < 1e-9, though z* is 0.96: the paper's rule, so the paper's answer.
    layer = scalar_layer(2.0, "tanh", solver=pcdeq.Picard(stop="batch"))
    solution = layer.solve(torch.full((1, 1), 5e-10, dtype=torch.float64))
    assert solution.steps.tolist() == [1]
    assert solution.value.item() == pytest.approx(1.5e-9, rel=1e-6)


def test_the_gradient_that_is_exactly_0():
    layer = make_layer("dense", "tanh", solver=pcdeq.Picard(stop="batch"))
    x = make_input("dense").requires_grad_()
    layer(x).backward(torch.zeros(2, 3).double())
    assert (x.grad == 0).all()
    assert layer.last_backward.steps == 1
