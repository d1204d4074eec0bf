"""Demand inversion against pyblp, on the two data sets that ship with it; skipped where pyblp is not installed."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import pcdeq

pyblp = pytest.importorskip("pyblp", reason="pip install pcdeq[demand]")
EXAMPLE = Path(__file__).parents[1] / "examples" / "demand_inversion.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module", params=["nevo", "automobiles"])
def case(request, example):
    """A data set, and what pyblp says of it: δ to 1e-14 by SQUAREM, the derivatives, how many evaluations it took."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem, markets, sigma, pi = example["load"](request.param)
        results = problem.solve(
            sigma.numpy(),
            pi.numpy(),
            method="1s",
            optimization=pyblp.Optimization("return"),
            iteration=pyblp.Iteration("squarem", {"atol": 1e-14}),
        )
    assert results.fp_converged.all()
    return markets, sigma, pi, results


def in_rows(markets, values):
    """A batch as the column of pyblp's table."""
    column = torch.empty(len(markets.rows), dtype=torch.float64)
    column[markets.rows] = values[markets.real]
    return column.numpy()


def test_delta_is_pyblp_s_in_fewer_evaluations(example, case):
    markets, sigma, pi, results = case
    fn = example["demand"](markets, solver=pcdeq.Anderson(tol=1e-14, memory=5))
    solution = fn.solve(markets.logit(), *markets.consumers(sigma, pi))
    assert solution.converged.all()
    assert np.abs(in_rows(markets, solution.value.log()) - results.delta[:, 0]).max() < 1e-12
    assert int(solution.steps.sum()) + len(solution.steps) < 0.7 * results.contraction_evaluations.sum()


def test_the_bounds_contain_pyblp_s_delta_in_every_market(example, case):
    markets, sigma, pi, results = case
    # Bounds of about 1e-9; tighter ones show the last digits of pyblp's own rounding.
    fn = example["demand"](markets, solver=pcdeq.Anderson(tol=1e-10, memory=5))
    box = fn.enclose(markets.logit(), *markets.consumers(sigma, pi))
    assert box.certified.all()
    assert float((box.upper / box.lower).log().max()) < 1e-7
    delta = results.delta[:, 0]
    assert (in_rows(markets, box.lower.log()) <= delta).all()
    assert (delta <= in_rows(markets, box.upper.log())).all()


def test_the_radius_is_one_minus_the_outside_share(example, case):
    markets, sigma, pi, _ = case
    found = example["demand"](markets).exists(markets.logit(), *markets.consumers(sigma, pi))
    assert found and found.proved.all()
    expected = (markets.shares * markets.real).sum(1) / markets.weights.sum(1)
    torch.testing.assert_close(found.upper, expected, rtol=1e-10, atol=0)


def test_the_gradient_is_pyblp_s(example, case):
    markets, sigma, pi, results = case
    sigma, pi = sigma.clone().requires_grad_(), pi.clone().requires_grad_()
    fn = example["demand"](markets, solver=pcdeq.Anderson(tol=1e-13, memory=5))
    delta = fn(markets.logit(), *markets.consumers(sigma, pi)).log()
    weights = np.random.default_rng(0).standard_normal(len(markets.rows))
    spread = torch.zeros_like(delta)
    spread[markets.real] = torch.from_numpy(weights)[markets.rows]
    found = torch.autograd.grad((delta * spread).sum(), [sigma, pi])
    ours = np.concatenate([found[0][sigma != 0].numpy(), found[1][pi != 0].numpy()])
    np.testing.assert_allclose(ours, weights @ results.xi_by_theta_jacobian, rtol=1e-7)


@pytest.mark.parametrize(("scale", "outside"), [(4.0, None), (1.0, 1e-3)])
def test_hard_cases(example, scale, outside):
    """Shares down to 1e-11 of the largest, and an outside share near 0, where the contraction hardly contracts."""
    _, markets, sigma, pi = example["load"]("nevo", outside)
    fn = example["demand"](markets, solver=pcdeq.Anderson(tol=1e-12, memory=5))
    given = markets.consumers(scale * sigma, scale * pi)
    solution = fn.solve(markets.logit(), *given)
    box = fn.enclose(markets.logit(), *given)
    assert solution.converged.all() and box.certified.all()
    assert int(solution.steps.max()) < 100
    # The shares that the answer gives are those of the data.
    a, one = given
    inclusive = one + a.mT @ solution.value[:, :, None]
    shares = solution.value * (a @ (markets.weights[:, :, None] / inclusive))[:, :, 0]
    torch.testing.assert_close(shares, markets.shares, rtol=1e-10, atol=0)
