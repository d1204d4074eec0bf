"""What a measurement needs: batches of images, and trained weights, which ``python benchmarks/prepare.py`` makes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
from cases import ACTIVATIONS, BATCH, STEPS, WEIGHTS, Batch, Case, cases
from safetensors.torch import save_file
from torch.nn import functional as F

import pcdeq
from pcdeq.data import Batches, load_dataset
from pcdeq.errors import PcdeqError
from pcdeq.models import build, equilibrium_layers
from pcdeq.models.networks import Preprocessing
from pcdeq.recipes import find_row

BATCHES = 8  # that take turns: a solve must not start from what the same images have taught
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def batches_of(shape: str) -> tuple[list[Batch], str]:
    """Batches of test images and labels of a data set, and where they are from.

    Without the data sets they are digits of the package, which the weights of MNIST have seen.
    """
    name = shape
    try:
        data = load_dataset(name, quiet=True)
    except PcdeqError:  # no network: digits, enlarged, are real images of the right shape
        data, name = load_dataset("mnist-mini"), "mnist-mini, enlarged"
    images = Preprocessing(data.mean, data.std, data.classes)(data.test.images)
    if images.shape[1:] != SHAPES[shape]:
        images = F.interpolate(images, size=SHAPES[shape][1:]).expand(-1, SHAPES[shape][0], -1, -1)
    # Spread over the test set, which may be sorted by class.
    chosen = [torch.arange(start, len(images), len(images) // BATCH)[:BATCH] for start in range(BATCHES)]
    return [(images[indices], data.test.labels[indices]) for indices in chosen], name


def make_weights(case: Case) -> None:
    """Train a case's network for a short time on its own data set and keep its weights."""
    torch.manual_seed(0)
    data = load_dataset(case.data)
    row = find_row(case.row, case.data)
    model = build(case.row, case.data).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=row.lr, weight_decay=row.weight_decay, fused=True)
    batches = Batches(data.train, BATCH, mean=data.mean, std=data.std, shuffle=True, channels_last=True)
    steps = STEPS[case.topology, case.data]
    for step, (images, labels) in enumerate(itertools.islice(_epochs(batches), steps), start=1):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        pcdeq.project_(model)
        if step % max(1, steps // 10) == 0:
            counts = [layer.last_forward.steps for layer in equilibrium_layers(model)]
            print(f"{case.row} {case.data}: step {step}, loss {loss.item():.3f}, forward steps {counts}", flush=True)
    WEIGHTS.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, case.weights)


def _epochs(batches: Batches) -> Iterator[Batch]:
    for epoch in itertools.count():
        batches.set_epoch(epoch)
        yield from batches


if __name__ == "__main__":
    for case in cases(("l", "sc", "mc"), ("mnist", "cifar10"), ACTIVATIONS):
        if not case.weights.exists() or "--all" in sys.argv:
            make_weights(case)
