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
