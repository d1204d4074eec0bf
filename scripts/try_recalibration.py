"""Does `--recalibrate` help? `python scripts/try_recalibration.py RUN...`, runs that held out validation images.

Prints for each run the accuracy on its validation images with the statistics of batch norm as training left them, and
with those that `pcdeq.recalibrate` measures on what it was trained on: what the option would have given at the end.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import pcdeq
from pcdeq.data import Batches, load_dataset, split_validation
from pcdeq.training import Run


@torch.inference_mode()
def accuracy(model: nn.Module, batches: Batches) -> float:
    """In percent, in evaluation mode."""
    model.eval()
    right = torch.cat([model(images).argmax(1) == labels for images, labels in batches])
    return 100 * float(right.double().mean())


def main() -> None:
    print("| run | epochs | lagging | recalibrated |\n|---|---:|---:|---:|")
    for path in map(Path, sys.argv[1:]):
        run = Run.open(path)
        config, dataset = run.config, load_dataset(run.config.data)
        train, held_out = split_validation(dataset.train, config.validation, seed=config.seed)
        batches = partial(Batches, mean=dataset.mean, std=dataset.std, channels_last=True)
        model, validation = pcdeq.load(run.path), batches(held_out, 256)
        before = accuracy(model, validation)
        pcdeq.recalibrate(model, batches(train, config.batch_size, shuffle=True, augment=config.augment))
        print(f"| {path.name} | {config.epochs} | {before:.2f} | {accuracy(model, validation):.2f} |", flush=True)


if __name__ == "__main__":
    main()
