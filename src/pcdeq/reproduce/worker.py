"""One run, from wherever it stands to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pcdeq.reproduce.plan import Job
from pcdeq.training import Run, resume, summarise, train
from pcdeq.training.display import Display

PULSE_SECONDS = 1.0


@dataclass(frozen=True)
class Pulse:
    """Where a run is within an epoch."""

    epochs_done: float
    loss: float


def work(job: Job, tell: Callable[[Pulse], None] = lambda pulse: None) -> None:
    """Train what is missing of a run, and measure what it became; ``tell`` hears once a second how far it is."""
    if job.stage != "done":
        # Also where only the summary is missing: resuming makes the metrics those of the checkpoint.
        config, display = job.config, _Pulses(tell)
        if job.run is None:
            train(config, progress=display)
        else:
            resume(job.folder, epochs=job.epochs, device=config.device, data_dir=config.data_dir, progress=display)
    if job.stage == "trained":
        summarise(Run.open(job.folder))


class _Pulses(Display):
    def __init__(self, tell: Callable[[Pulse], None]) -> None:
        self.tell = tell
        self.last = 0.0

    def start(self, text: list[str], epochs: int, epoch_images: int, epochs_done: int) -> None:
        self.per_epoch = epoch_images

    def due(self) -> bool:
        return time.monotonic() - self.last > PULSE_SECONDS

    def step(self, images_done: int, loss: float, accuracy: float, steps: float) -> None:
        self.last = time.monotonic()
        self.tell(Pulse(images_done / self.per_epoch, loss))
