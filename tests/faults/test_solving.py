"""A solve does not depend on the scale of its data, 0 is an answer, and no solver is told a rule that it ignores."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from alone import alone, main
from torch import Tensor

import pcdeq
from pcdeq.errors import ConvergenceWarning, UsageError
from pcdeq.kernels import binding

SHAPES = {"dense": (16,), "conv": (8, 6, 6)}
ACTIVATIONS = ("tanh", "relu6")
# From numbers that float32 can hardly tell from 0 to some whose sum of squares is infinite.
# Not far beyond 1e30: torch's own gradient of softplus, which comes after the solve, multiplies by exp(5x) first.
SCALES = (0.0, 1e-44, 1e-42, 1e-40, 1e-30, 1.0, 1e20, 1e30)


def layer_of(kind: str, activation: str, dtype: torch.dtype, solver: pcdeq.Anderson) -> pcdeq.PcDEQ:
    """Coupled so strongly that plain iteration is several times slower than Anderson's."""
    torch.manual_seed(0)
    make = pcdeq.PcDEQLinear if kind == "dense" else pcdeq.PcDEQConv2d
    layer = make(SHAPES[kind][0], activation, solver=solver)
    with torch.no_grad():
        layer.operator.weight_v.uniform_(0, 1)
        layer.operator.weight_g.fill_(1.1 / layer.operator.weight_v[0].numel() ** 0.5)
    return layer.to(dtype).eval()


def gradient(layer: pcdeq.PcDEQ, x: Tensor, grad: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    layer(x).backward(grad)
    assert x.grad is not None
    return x.grad


def measure() -> None:
    """Print for each case how the adjoint solve went and how far the gradient is from that of float64.

    The first sample has a gradient of usual size in every case, as in a batch of which most are classified well.
    """
    found: dict[str, dict[str, Any]] = {}
    for kind, shape in SHAPES.items():
        for activation in ACTIVATIONS:
            layer = layer_of(kind, activation, torch.float32, pcdeq.Anderson())
            exact = layer_of(kind, activation, torch.float64, pcdeq.Anderson(tol=1e-12, max_steps=5000))
            x, grad = torch.randn(4, *shape) - 0.5, torch.randn(4, *shape)
            for scale in SCALES:
                scaled = torch.cat([grad[:1], grad[1:] * scale])
                value = gradient(layer, x, scaled)[1:].double()
                # From the same float32 numbers, in units of their scale: the squares of some are 0 in float64, too.
                unit = scale or 1.0
                right = gradient(exact, x.double(), scaled.double() / unit)[1:]
                rounding = 1.4e-45 / unit * right.numel() ** 0.5  # half a unit in the last place, for each component
                stats = layer.last_backward
                assert stats is not None
                found[f"{kind}-{activation}-{scale:g}"] = {
                    "steps": stats.steps,
                    "unconverged": stats.unconverged,
                    "error": float((value / unit - right).norm()),
                    "allowed": 5e-3 * float(right.norm()) + 4 * rounding,
                    "zero": not bool(value.any()),
                }
    print(json.dumps(found))


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    return {kernels: json.loads(alone(measure, PCDEQ_KERNELS=kernels)) for kernels in ("1", "0")}


# Of these 64, 36 failed on the first version: too many steps, not converged, or another gradient.
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("activation", ["tanh", "relu6"])
@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("kernels", ["1", "0"])
def test_the_adjoint_solve_does_not_depend_on_scale(measured, kernels, kind, activation, scale):
    found, usual = (measured[kernels][f"{kind}-{activation}-{number:g}"] for number in (scale, 1.0))
    assert found["unconverged"] == 0
    assert found["steps"] <= 1.3 * usual["steps"] + 2
    assert found["error"] <= found["allowed"]  # false for NaN
    assert found["zero"] or scale > 0


@pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson, pcdeq.Newton])
@pytest.mark.parametrize("stop", ["certified", "decided"])
def test_no_solver_is_told_a_rule_that_it_ignores(solver, stop):
    with pytest.raises(UsageError):
        solver(stop=stop)


if __name__ == "__main__":
    main(globals())


class TestConverged:
    """Said of the value that is returned: the step to it stretched the residual that was looked at up to 500 times."""

    @pytest.mark.parametrize("kernels", [True, False])
    @pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson, pcdeq.Newton])
    @pytest.mark.parametrize("exponent", [-6, -5, -4, -3, -2])
    @pytest.mark.parametrize("growth", [5.0, 50.0, 500.0])
    def test_the_residual_of_the_value_is_below_tol(self, monkeypatch, growth, exponent, solver, kernels):
        if not kernels:
            monkeypatch.setattr(binding, "solve", lambda *given, **options: None)
        layer = pcdeq.PcDEQLinear(2, "relu6", weight_norm=False)
        layer.operator.weight.data = torch.tensor([[0.0, 0.0], [0.0, growth]])
        starts = torch.linspace(-4, -1, 40)  # 40 sizes from which the second unit grows beside the first
        x, tol = torch.stack([torch.full((40,), 7.0), starts], 1), 10.0**exponent
        solution = layer.solve(x, solver=solver(tol=tol))
        assert solution.converged.all()
        with torch.no_grad():
            equation = layer._equation_in_float64(layer.equation(x))
        value = equation(solution.value.double())
        residual = (value - solution.value).norm(dim=1) / value.norm(dim=1)
        assert (residual <= tol + 3e-6).all()
        assert (residual - solution.residual).abs().max() < 1e-6  # which is what is told

    def test_a_limit_of_steps_is_not_passed_and_said(self):
        layer = pcdeq.PcDEQLinear(2, "relu6", weight_norm=False)
        layer.operator.weight.data = torch.tensor([[0.0, 0.0], [0.0, 50.0]])
        with pytest.warns(ConvergenceWarning, match="1 of 2 samples"):
            solution = layer.solve(torch.tensor([[7.0, -3.0], [7.0, 7.0]]), solver=pcdeq.Picard(tol=1e-6, max_steps=3))
        assert solution.converged.tolist() == [False, True]
        assert (solution.steps <= 3).all() and solution.outcome is pcdeq.Outcome.MAX_STEPS


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_certified_solve_goes_on_while_small_components_grow_beside_large_ones(samples):
    """Its residual is 0 in float32 for ten steps and more, and no bound can be proved while they last."""
    layer = pcdeq.PcDEQLinear(2, "hard-tanh", weight_norm=False, solver=pcdeq.Certified(pcdeq.Anderson(tol=1e-3)))
    layer.operator.weight.data = torch.tensor([[10.0, 0.0], [0.0, 10.0]])
    solution = layer.solve(torch.tensor([[3.0, -5.4]]).expand(samples, 2))
    assert solution.converged.all() and (solution.steps <= 200).all()
    torch.testing.assert_close(solution.value, torch.ones(samples, 2))
