"""What each of the two processes of the fixture `both` does; run by torchrun, not by pytest."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from pcdeq.cli import leave, main
from pcdeq.layers import PcDEQLinear
from pcdeq.models import equilibrium_layers
from pcdeq.training.tally import Tally
from pcdeq.training.trainer import add_gradients

BATCHES = (10, 7, 5)  # even and uneven shares


def make_model() -> nn.Module:
    """Without batch norm, so that it does not matter who sees which image."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), PcDEQLinear(8, warm_start=False), nn.Linear(8, 3))


def make_batch(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(images)
    return torch.rand(images, 1, 4, 4, generator=generator), torch.arange(images) % 3


def save_gradients(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    network = make_model()
    model = accelerator.prepare(network)
    rank, world = accelerator.process_index, accelerator.num_processes
    results = []
    for parts in (1, 2):
        for count in BATCHES:
            network.zero_grad()
            images, labels = make_batch(count)
            mine = slice(rank, None, world)
            tally = Tally(equilibrium_layers(network))
            add_gradients(accelerator, model, images[mine], labels[mine], count, parts, tally)
            results.append([parameter.grad.clone() for parameter in network.parameters()])
    torch.save(results, folder / f"gradients{rank}.pt")


if __name__ == "__main__":
    folder, *command = sys.argv[1:]
    if "--robust-radius" not in command:
        save_gradients(Path(folder))
    leave(main(command))
