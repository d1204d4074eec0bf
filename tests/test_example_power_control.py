"""The worked example runs, and what it prints is true."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "power_control.py"


@pytest.fixture(scope="module")
def example() -> dict:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def report(example) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example["main"]()
    return printed.getvalue()


def test_feasible_and_infeasible_targets(example, report):
    gain = example["network"]()
    _, best, matrix = example["uplink"](gain)
    limit = -10 * np.log10(np.abs(np.linalg.eigvals(matrix.numpy())).max())
    assert float(re.search(r"fixed station: (-?[\d.]+) dB", report)[1]) == pytest.approx(limit, abs=1e-3)
    verdicts = dict(re.findall(r"target (-?\d+) dB: a solution (exists|does not exist)", report))
    assert len(verdicts) == 3
    for target, verdict in verdicts.items():
        p = torch.zeros(example["USERS"]).double()
        for _ in range(2000):
            p = 10 ** (int(target) / 10) * best(p)
        assert (verdict == "exists") == bool((p < 1e6).all())


def test_powers_meet_the_target_with_equality(example):
    gain = example["network"]()
    fixed, _, _ = example["uplink"](gain)
    target, p = 10**-1.2, torch.zeros(example["USERS"]).double()
    for _ in range(500):
        p = target * fixed(p)
    for i, b in enumerate(gain.argmax(0).tolist()):
        interference = sum(gain[b, j] * p[j] for j in range(len(p)) if j != i)
        assert float(gain[b, i] * p[i] / (interference + 1)) == pytest.approx(target)


def test_loads_and_their_gradient(example, report):
    assert len(re.findall(r"(?:Picard|Anderson): loads (\[.*\])", report)) == 2
    assert len(set(re.findall(r"loads (\[.*\])", report))) == 1
    closed, limit = re.search(r"ρ of the asymptotic mapping: ([\d.]+) in closed form, ([\d.]+) as", report).groups()
    assert float(closed) == pytest.approx(float(limit), rel=1e-7)
    implicit, differences = re.search(r"user 0: ([\d.]+), by differences ([\d.]+)", report).groups()
    assert float(implicit) == pytest.approx(float(differences), rel=1e-6)
    for bound in re.findall(r"(?:proved to|, to|known to) (\S+) ", report):
        assert float(bound) < 1e-8


def test_nothing_global_is_left_behind(report):
    assert torch.get_default_dtype() is torch.float32
