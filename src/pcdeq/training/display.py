"""What a person, a log file or a program sees while a network trains."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pcdeq.training.run import EpochMetrics

ProgressKind = Literal["auto", "bar", "lines", "json", "none"]
REFRESH_SECONDS = 0.15  # reading a loss waits for the device, so not at every step


class Display:
    """Where training reports to; this one shows nothing."""

    def start(self, text: list[str], epochs: int, epoch_images: int, epochs_done: int) -> None:
        """Training begins or goes on; ``text`` says what is trained on what."""

    def due(self) -> bool:
        """Whether it is time for `step` again."""
        return False

    def step(self, images_done: int, loss: float, accuracy: float, steps: float) -> None:
        """Some batches are done; ``steps`` is the mean number of forward steps just now."""

    def epoch(self, metrics: EpochMetrics) -> None:
        """An epoch is done and saved."""

    def stop(self) -> None:
        """Training has ended, well or not."""


class JsonLines(Display):
    """One JSON object per epoch on standard output: the lines of ``metrics.jsonl``."""

    def epoch(self, metrics: EpochMetrics) -> None:
        print(json.dumps(asdict(metrics)), flush=True)


class Lines(Display):
    """A line per epoch, for people and for logs."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False, emoji=False)

    def start(self, text: list[str], epochs: int, epoch_images: int, epochs_done: int) -> None:
        self.epochs = epochs
        self.console.print("\n".join(text), soft_wrap=True)

    def epoch(self, metrics: EpochMetrics) -> None:
        self.console.print(describe_epoch(metrics, self.epochs), soft_wrap=True)


class Bar(Lines):
    """The same above a bar over the whole run."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            speed_estimate_period=60,
            transient=True,
        )
        self.last_refresh = 0.0

    def start(self, text: list[str], epochs: int, epoch_images: int, epochs_done: int) -> None:
        super().start(text, epochs, epoch_images, epochs_done)
        self.per_epoch, done = epoch_images, epochs_done * epoch_images
        self.first = (time.monotonic(), done)
        total = epochs * epoch_images
        self.task = self.progress.add_task("", total=total, completed=done, epoch=self._epoch(done), numbers="")
        self.progress.start()

    def due(self) -> bool:
        return time.monotonic() - self.last_refresh > REFRESH_SECONDS

    def step(self, images_done: int, loss: float, accuracy: float, steps: float) -> None:
        self.last_refresh = time.monotonic()
        start, at_start = self.first
        speed = (images_done - at_start) / max(1e-9, self.last_refresh - start)
        numbers = f"loss {loss:.3f}  accuracy {accuracy:.1f} %  {steps:.0f} steps  {speed:,.0f} images/s"
        self.progress.update(self.task, completed=images_done, epoch=self._epoch(images_done), numbers=numbers)

    def stop(self) -> None:
        self.progress.stop()

    def _epoch(self, images_done: int) -> str:
        return f"{min(self.epochs, images_done // self.per_epoch + 1)}/{self.epochs}"


def make_display(kind: ProgressKind | Display) -> Display:
    """The display of this kind; ``auto`` draws a bar on a terminal and prints lines elsewhere."""
    if not isinstance(kind, str):
        return kind
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "lines"
    if kind in ("bar", "lines"):
        return Bar() if kind == "bar" else Lines()
    return JsonLines() if kind == "json" else Display()


def describe_epoch(metrics: EpochMetrics, epochs: int) -> str:
    """One line for people about one epoch."""
    parts = [
        f"epoch {metrics.epoch:>{len(str(epochs))}}/{epochs}",
        f"loss {metrics.loss:.4f}",
        f"train {metrics.train_accuracy:.2f} %",
        f"test {metrics.test_accuracy:.2f} %",
        f"steps {mean(metrics.forward_steps):.1f} forward {mean(metrics.backward_steps):.1f} backward",
        f"{metrics.seconds:.1f} s, test {metrics.test_seconds:.1f} s",
    ]
    if metrics.validation_accuracy is not None:
        parts.insert(3, f"validation {metrics.validation_accuracy:.2f} %")
    if metrics.unconverged:
        parts.append(f"{metrics.unconverged:,} solves did not converge")
    return "  ".join(parts)


def mean(values: tuple[float, ...]) -> float:
    """The average over a network's equilibrium layers, as the paper plots it."""
    return sum(values) / len(values) if values else 0.0
