"""What is counted while an epoch runs."""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.solvers import SolvingLayer


class Numbers:
    """A list of scalars in one tensor on their device.

    Kept as they come, each would hold its place in memory among the tensors of its step, which are large and whose own
    places, in pieces then, would not do for the next step's: gigabytes of gaps in an epoch of SC.
    """

    def __init__(self) -> None:
        self.places: Tensor | None = None
        self.count = 0

    def append(self, number: Tensor) -> None:
        if self.places is None:
            self.places = number.new_empty(4096)
        elif self.count == len(self.places):
            self.places = torch.cat((self.places, torch.empty_like(self.places)))
        self.places[self.count] = number
        self.count += 1

    def since(self, first: int) -> Tensor:
        """Those from one on."""
        return torch.empty(0) if self.places is None else self.places[first : self.count]


class Tally:
    """Sums over an epoch, on this process; losses stay on the device until someone asks."""

    def __init__(self, layers: list[SolvingLayer]) -> None:
        self.layers = layers
        self.losses = Numbers()
        self.hits = Numbers()
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
        loss = float(self.losses.since(0).cpu().double().sum())
        hits = float(self.hits.since(0).sum())
        return [loss, hits, sum(self.images), len(self.images), self.unconverged, *self.forward, *self.backward]

    def recent(self) -> tuple[float, float, float]:
        """Mean loss, accuracy in percent and forward steps since the last call."""
        images = sum(self.images[self.shown :])
        loss = float(self.losses.since(self.shown).sum()) / images
        hits = float(self.hits.since(self.shown).sum()) / images
        self.shown = len(self.images)
        steps = [layer.last_forward.steps for layer in self.layers if layer.last_forward is not None]
        return loss, 100 * hits, sum(steps) / max(1, len(steps))
