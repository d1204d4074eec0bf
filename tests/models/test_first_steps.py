"""The first fifty training steps are those of the first version: a new structure, the same mathematics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import pcdeq
from pcdeq.data import load_dataset

# Written by revision d2c670d, with this loop.
LOSSES: dict[str, list[float]] = json.loads((Path(__file__).parent / "old" / "losses.json").read_text())


@pytest.mark.parametrize("row", LOSSES)
def test_losses_of_the_first_version(row):
    """In float64, and solved to 1e-12 both ways, so that nothing is left to rounding and tolerance."""
    data = load_dataset("mnist-mini").train
    torch.manual_seed(0)
    exact = pcdeq.Anderson(tol=1e-12, max_steps=5000)
    channels = None if "-l-" in row else (4, 6, 8)
    model = pcdeq.build(row, channels=channels, solver=exact, adjoint_solver=exact).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, expected in enumerate(LOSSES[row]):
        chosen = torch.arange(step * 16, (step + 1) * 16) % len(data)
        loss = F.cross_entropy(model(data.images[chosen].double() / 255), data.labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pcdeq.project_(model)
        assert loss.item() == pytest.approx(expected, abs=1e-6), f"step {step}"
