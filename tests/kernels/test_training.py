"""Two hundred training steps from one seed go the same way in C, in plain torch, and with a compiled step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.kernels import binding

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())
STEPS, LAST = 200, 20


def losses(row: str, channels: tuple[int, ...], **options: object) -> torch.Tensor:
    data = load_dataset("mnist-mini").train
    torch.manual_seed(0)
    model = pcdeq.build(row, channels=channels, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        chosen = torch.arange(step * 32, (step + 1) * 32) % len(data)
        loss = F.cross_entropy(model(data.images[chosen] / 255), data.labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def assert_same_way(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Roundings are enlarged by training, so in the mean: of all steps, and of the last ones."""
    assert expected[-LAST:].mean() < 0.9 * expected[:LAST].mean(), "nothing was learned"
    for part in (slice(None), slice(-LAST, None)):
        assert found[part].mean().item() == pytest.approx(expected[part].mean().item(), rel=1e-2)


@pytest.mark.parametrize(
    ("row", "channels"),
    [("pcdeq-1-l-tanh", (40,)), ("pcdeq-1-sc-relu6", (6,)), ("pcdeq-1-mc-tanh", (4, 6, 8))],
)
def test_with_and_without_kernels(row, channels, monkeypatch):
    found = losses(row, channels)
    monkeypatch.setattr(binding, "_KERNELS", None)
    assert_same_way(found, losses(row, channels))


def test_with_a_compiled_step(monkeypatch):
    monkeypatch.setattr(pcdeq.solvers.compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    lean, compiled = (pcdeq.Anderson(compiled=on) for on in (False, True))
    assert_same_way(
        losses("pcdeq-1-l-tanh", (40,), solver=compiled, adjoint_solver=compiled),
        losses("pcdeq-1-l-tanh", (40,), solver=lean, adjoint_solver=lean),
    )
