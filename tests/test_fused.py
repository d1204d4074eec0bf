"""The C kernel takes the same steps as the reference in plain torch, and gives the same answers."""

import pytest
import torch

import pcdeq
from pcdeq.implicit import solve_adjoint
from pcdeq.kernels import KERNELS
from pcdeq.solvers import Problem, fused

pytestmark = pytest.mark.skipif(KERNELS is None, reason="installed without a C compiler")
NAMES = [name for name in fused.CODES if name != "linear"]


def make(kind, activation, gain, seed=0):
    torch.manual_seed(seed)
    layer = pcdeq.PcDEQLinear(24, activation) if kind == "dense" else pcdeq.PcDEQConv2d(5, activation)
    x = torch.randn(6, 24) if kind == "dense" else torch.randn(6, 5, 9, 7)
    with torch.no_grad():
        layer.operator.weight_v.uniform_()
        layer.operator.weight_g.uniform_(0, gain)
    if kind == "channels last":
        layer, x = layer.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return layer, x


@pytest.mark.parametrize("kind", ["dense", "conv", "channels last"])
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("gain", [0.5, 3.0, 20.0])
def test_forward_takes_the_same_steps(kind, activation, gain):
    layer, x = make(kind, activation, gain)
    solver = pcdeq.Anderson(tol=1e-4)
    with torch.no_grad():
        problem = layer.equation(x).problem()
        assert fused.applies(problem)
        fast, plain = solver.solve(problem), solver.solve_plain(problem)
    assert torch.equal(fast.steps, plain.steps)
    assert fast.converged.all()
    # Both stop at a relative residual of 1e-4 along the same path; what differs is the rounding of the activation.
    torch.testing.assert_close(fast.value, plain.value, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(fast.residual, plain.residual, rtol=0.05, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "channels last"])
@pytest.mark.parametrize("activation", ["tanh", "relu6", "sigmoid"])
def test_backward_takes_the_same_steps(kind, activation):
    layer, x = make(kind, activation, 1.5)
    solver = pcdeq.Anderson(tol=1e-5)
    with torch.no_grad():
        equation = layer.equation(x)
        slope = equation.slope(pcdeq.Anderson(tol=1e-6).solve(equation.problem()).value)
        grad = torch.randn_like(x)
        fast = solve_adjoint(equation.map, slope, grad, solver)
        plain = solver.solve_plain(Problem(lambda u: slope * (equation.map.adjoint(u) + grad), slope * grad))
    assert torch.equal(fast.steps, plain.steps)
    torch.testing.assert_close(fast.value, plain.value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", NAMES)
def test_values_are_accurate_from_tiny_to_huge(activation):
    # With W = 0 the solution is s(x) itself, here from subnormal to beyond saturation.
    x = torch.cat([torch.logspace(-37, 4, 2000), torch.linspace(0.1, 50, 2000)])[None]
    layer = pcdeq.PcDEQLinear(4000, activation, weight_norm=False, injection=lambda x: x)
    with torch.no_grad():
        layer.operator.weight.zero_()
        problem = layer.equation(x).problem()
        value = pcdeq.Anderson().solve(problem).value
    exact = layer.activation.value((x + layer.floor).double())
    torch.testing.assert_close(value.double(), exact, rtol=5e-7, atol=0)


def test_a_nan_stops_its_sample_only():
    layer, x = make("dense", "tanh", 1.0)
    x[2, 3] = torch.nan
    with torch.no_grad():
        solution = pcdeq.Anderson().solve(layer.equation(x).problem())
    assert solution.outcome is pcdeq.Outcome.NONFINITE
    assert solution.converged.tolist() == [True, True, False, True, True, True]


def test_a_custom_activation_by_a_known_name_is_not_mistaken_for_it():
    half = pcdeq.Activation("tanh", lambda y: torch.tanh(y) / 2, supremum=0.5)
    with torch.no_grad():
        layer = pcdeq.PcDEQLinear(3, half)
        assert not fused.applies(layer.equation(torch.zeros(1, 3)).problem())
        assert float(layer(torch.full((1, 3), 50.0)).max()) <= 0.5


def test_two_hundred_training_steps_give_the_same_loss_curve(monkeypatch):
    def curve():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), pcdeq.PcDEQLinear(16), torch.nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        x, losses = torch.randn(64, 8), []
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        for _ in range(200):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pcdeq.project_(model)
            losses.append(loss.item())
        return torch.tensor(losses)

    fast = curve()
    monkeypatch.setattr(fused, "applies", lambda problem: False)
    torch.testing.assert_close(fast, curve(), rtol=0.01, atol=1e-4)
    assert fast[-1] < 0.5 * fast[0]
