"""The examples run, and what they print is true. (examples/power_control.py has tests of its own.)"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import pcdeq

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(capsys):
    def run(name: str) -> tuple[dict, str]:
        example = runpy.run_path(str(EXAMPLES / name))
        example["main"]()
        return example, capsys.readouterr().out

    return run


def test_residual_network(run):
    example, report = run("residual_network.py")
    accuracies = [float(number) for number in re.findall(r"([\d.]+) % of the test", report)]
    assert len(accuracies) == example["EPOCHS"]
    assert accuracies[-1] > 85
    assert report.count(" 0 unconverged") == 2
    assert "guarantees hold: True" in report


def test_node_classification(run):
    example, report = run("node_classification.py")
    alone, graph = (float(number) for number in re.findall(r"([\d.]+) %", report))
    assert graph > alone
    assert "guarantee holds: True; equilibrium proved to 1e-06: True" in report
    adjacency, *_ = example["communities"]()
    linear = example["Graph"](adjacency, 4).bind(torch.rand(4, 4))
    z, y = torch.rand(2, 300, 4), torch.rand(2, 300, 4)
    assert float((y * linear.apply(z)).sum()) == pytest.approx(float((linear.adjoint(y) * z).sum()), rel=1e-4)
    assert torch.allclose(linear.adjoint(y), pcdeq.LinearMap.adjoint(linear, y), atol=1e-5)


def test_certified_inference(run):
    _, report = run("certified_inference.py")
    assert report.count("settled for 1000 of 1000 images, the same class for 1000") == 2
    assert all(float(early) < float(full) for early, full in re.findall(r"picture: ([\d.]+), against ([\d.]+)", report))
    ordinary, robust = (float(number) for number in re.findall(r"every picture within \S+ ([\d.]+) %", report))
    assert robust > ordinary + 20


def test_clearing_payments(run):
    example, report = run("clearing_payments.py")
    assert "all claims are of the class: True; 1 of 1 samples have a fixed point (1 proved)" in report
    assert float(re.search(r"linear program differs by (\S+)", report)[1]) < 1e-6
    assert "within: True" in report
    total, shares, cash = example["market"]()
    paid = torch.zeros_like(cash)
    for _ in range(2000):
        paid = torch.minimum(shares.T @ paid + cash, total)
    assert int((paid < total - 1e-9).sum()) == int(re.search(r"(\d+) of \d+ banks default", report)[1])
    low, high = example["stress"](example["clearing"](total, shares), 0.5 * cash, cash)
    assert (low <= paid).all() and (paid <= high * (1 + 1e-12)).all()
    kinds = [int(number) for number in re.search(r"(\d+) banks pay.* (\d+) in none, (\d+) depend", report).groups()]
    assert sum(kinds) == example["BANKS"] and min(kinds) > 0


def test_epidemic(run):
    example, report = run("epidemic.py")
    infected = float(re.search(r"^([\d.]+) of 10000", report)[1])
    low, high = (float(x) for x in re.search(r"proved: True, ([\d.]+) to ([\d.]+)", report).groups())
    assert low - 1e-3 <= infected <= high + 1e-3 and high - low < 1e-4
    important, popular, anybody = (float(x) for x in re.findall(r"([\d.]+) infected$", report, flags=re.MULTILINE))
    assert important < popular < anybody < infected
    # The layer is the epidemic: at its level as many fall ill as recover; and its gradient is that of the total.
    indices, rates = example["contacts"](), torch.rand(2 * example["CONTACTS"]).double() / 4
    layer, x = example["epidemic"](indices, rates), torch.full((1, example["PEOPLE"]), 1e-3).double()
    z = layer(x)
    z.sum().backward()
    z = z.detach()
    pressure = torch.zeros_like(z).index_add(1, indices[0], z[:, indices[1]] * rates) + x
    torch.testing.assert_close((1 - z) * pressure, z, rtol=1e-6, atol=1e-9)
    step = torch.zeros_like(rates)
    step[7] = 1e-3
    up, down = (example["epidemic"](indices, rates + d).solve(x).value.sum() for d in (step, -step))
    assert float(layer.operator.weight.grad[0, 7]) == pytest.approx(float(up - down) / 2e-3, rel=1e-3)


class TestMinimal:
    """The idea in one file of plain torch, and the package, say the same."""

    @pytest.fixture
    def minimal(self):
        return runpy.run_path(str(EXAMPLES / "minimal.py"))

    def test_it_is_short_and_without_the_package(self, capsys):
        text = (EXAMPLES / "minimal.py").read_text()
        assert text.count("\n") < 80
        assert not re.search(r"^(import|from) (?!torch)", text, flags=re.MULTILINE)
        runpy.run_path(str(EXAMPLES / "minimal.py"), run_name="__main__")
        width = float(re.search(r"known to (\S+), proved", capsys.readouterr().out)[1])
        assert 0 < width < 1e-9

    @pytest.mark.parametrize("size", [0.1, 1.0, 50.0])
    def test_it_agrees_with_the_package(self, minimal, size):
        solver = pcdeq.Anderson(tol=1e-12, max_steps=5000)
        ours = pcdeq.PcDEQLinear(12, "tanh", weight_norm=False, solver=solver).double()
        layer = minimal["Layer"](12).double()
        with torch.no_grad():
            layer.weight.mul_(size)
            ours.operator.weight.copy_(layer.weight)
        x, v = torch.randn(5, 12, dtype=torch.float64).requires_grad_(), torch.randn(5, 12, dtype=torch.float64)
        values, gradients = [], []
        for module, weight in ((layer, layer.weight), (ours, ours.operator.weight)):
            z = module(x)
            values.append(z.detach())
            gradients.append(torch.autograd.grad((z * v).sum(), (x, weight)))
        torch.testing.assert_close(*values, rtol=1e-8, atol=1e-10)
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize("error", [0.0, 1e-3, 0.5])
    def test_its_bounds_hold_the_equilibrium(self, minimal, error):
        ours = pcdeq.PcDEQLinear(12, "tanh", solver=pcdeq.Anderson(tol=1e-14, max_steps=5000)).double()
        x = torch.randn(5, 12, dtype=torch.float64)
        box, z = ours.enclose(x), ours.solve(x).value.detach()
        near = z * (1 + error * torch.rand_like(z))
        low, high = minimal["bounds"](ours.operator.effective_weight().detach(), ours.inject(x).detach(), near)
        assert bool((low <= box.upper).all()) and bool((box.lower <= high).all())
        assert bool((low <= z).all()) and bool((z <= high).all())
        assert float((high - low).max()) < (1 if error else 1e-9)
