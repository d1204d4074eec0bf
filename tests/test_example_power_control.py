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


def needed(gain, p):
    """What each user needs at each station for a target of 1, written as a loop."""
    users = len(p)
    return np.array(
        [
            [(sum(row[j] * p[j] for j in range(users) if j != i) + 1) / row[i] for i in range(users)]
            for row in gain.numpy()
        ]
    )


def test_the_map_is_the_least_power_that_a_user_needs(example):
    gain = example["network"]()
    p = np.linspace(0.1, 2, example["USERS"])
    expected = 0.3 * needed(gain, p).min(0)
    found = example["uplink"](gain).fn(torch.from_numpy(p)[None], 0.3)
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-12)


def test_the_border_is_proved_on_both_sides(example, report):
    fn = example["uplink"](example["network"]())
    low, high = (float(x) for x in re.search(r"for all: (\S+) to (\S+) dB, proved", report).groups())
    assert 0 <= high - low < 1e-8
    rows = re.findall(r"target (\S+) dB: a solution (exists|does not exist), proved: True", report)
    assert [verdict for _, verdict in rows] == ["exists", "exists", "does not exist", "does not exist"]
    assert float(rows[2][0]) - float(rows[1][0]) < 1e-5
    for target, verdict in (rows[0], rows[3]):
        p = torch.zeros(1, example["USERS"]).double()
        for _ in range(2000):
            p = fn.fn(p, 10 ** (float(target) / 10))
        assert (verdict == "exists") == bool((p < 1e6).all())
    assert "proved: True" in report.split("at -12 dB")[1]


def test_loads_and_their_gradient(example, report):
    loads = example["load_coupling"](example["network"]())
    demand, start = (
        torch.full((1, example["USERS"]), example["DEMAND"]).double(),
        torch.zeros(1, example["CELLS"]).double(),
    )
    v = start
    for _ in range(500):
        v = loads.fn(v, demand)
    printed = [float(x) for x in re.search(r"loads \[(.*)\]", report)[1].split(", ")]
    np.testing.assert_allclose(printed, v[0].numpy(), atol=1e-6)
    user, cost = re.search(r"most costly is user (\d+): ([\d.]+) per", report).groups()
    step = 100 * torch.eye(example["USERS"]).double()[[int(user)]]
    up, down = (float(loads.solve(start, demand + d).value.sum()) for d in (step, -step))
    assert float(cost) == pytest.approx(1e6 * (up - down) / 200, rel=1e-4)
    border = float(re.search(r"finite below ([\d.]+)", report)[1])
    verdicts = loads.exists(
        torch.zeros(2, 4).double(), 1e6 * border * torch.tensor([[0.999], [1.001]]).double()
    ).verdict
    assert verdicts == ("exists", "does not exist")


def test_nothing_global_is_left_behind(report):
    assert torch.get_default_dtype() is torch.float32
