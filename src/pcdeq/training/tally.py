"""What is counted while an epoch runs."""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.solvers import SolvingLayer


class Tally:
    """Sums over an epoch, on this process; losses stay on the device until someone asks."""

    def __init__(self, layers: list[SolvingLayer]) -> None:
        self.layers = layers
        self.losses: list[Tensor] = []
        self.hits: list[Tensor] = []
        self.images: list[int] = []
        self.forward = [0] * len(layers)  # steps per layer
        self.backward = [0] * len(layers)
        self.unconverged = 0
        self.shown = 0  # how many parts `recent` has told of

    def add(self, loss: Tensor, hits: Tensor, images: int) -> None:
        """Take in one forward and backward pass."""
        self.losses.append(loss)
        self.hits.append(hits)
        self.images.append(images)
        for i, layer in enumerate(self.layers):
            for steps, stats in ((self.forward, layer.last_forward), (self.backward, layer.last_backward)):
                if stats is not None:
                    steps[i] += stats.steps
                    self.unconverged += stats.unconverged

    def sums(self) -> list[float]:
        """Loss, hits, images, solves per layer, unconverged samples, forward and backward steps per layer."""
        loss = float(torch.stack(self.losses).cpu().double().sum())
        hits = float(torch.stack(self.hits).sum())
        return [loss, hits, sum(self.images), len(self.losses), self.unconverged, *self.forward, *self.backward]

    def recent(self) -> tuple[float, float, float]:
        """Mean loss, accuracy in percent and forward steps since the last call."""
        images = sum(self.images[self.shown :])
        loss = float(torch.stack(self.losses[self.shown :]).sum()) / images
        hits = float(torch.stack(self.hits[self.shown :]).sum()) / images
        self.shown = len(self.losses)
        steps = [layer.last_forward.steps for layer in self.layers if layer.last_forward is not None]
        return loss, 100 * hits, sum(steps) / max(1, len(steps))
