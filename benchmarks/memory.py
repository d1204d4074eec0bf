"""Peak memory of a training step of every pcDEQ: ``python benchmarks/memory.py`` writes results/memory.md."""

from __future__ import annotations

from pathlib import Path

import torch
from measure import peak_memory
from torch.nn import functional as F

import pcdeq
from pcdeq.models import build
from pcdeq.models.networks import Network
from pcdeq.recipes import rows

RESULTS = Path(__file__).parents[1] / "results" / "memory.md"
BATCH = 64
HEADER = f"""# Peak memory of a training step

Most bytes of tensors allocated at one time during forward, backward and optimiser step (AdamW), batch {BATCH},
float32, CPU, untrained weights, beyond the parameters, optimiser state and input that exist before the step.
It does not depend on the number of steps of the solves. Made by `python benchmarks/memory.py`.

| data | row | parameters | peak, MB |
|---|---|---|---|
"""


def training_step(model: Network, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> None:
    """One step on random labels."""
    labels = torch.zeros(len(images), dtype=torch.int64)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    pcdeq.project_(model)


def main() -> None:
    lines = []
    for row in (row for row in rows() if row.family == "pcdeq"):  # benchmarks/models.py has the others
        torch.manual_seed(0)
        model = build(row.name, row.dataset).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        images = torch.rand(BATCH, *model.image_shape).contiguous(memory_format=torch.channels_last)
        training_step(model, optimizer, images)
        peak = peak_memory(lambda m=model, o=optimizer, i=images: training_step(m, o, i))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        lines.append(f"| {row.dataset} | {row.title} | {parameters:,} | {peak / 1e6:.1f} |")
        print(lines[-1], flush=True)
    RESULTS.write_text(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
