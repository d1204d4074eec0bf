"""One live table of all runs; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pcdeq.reproduce.plan import Job
from pcdeq.reproduce.worker import Pulse
from pcdeq.training import EpochMetrics
from pcdeq.training.display import describe_epoch

REFRESH_SECONDS = 1.0
FINISHED_SHOWN = 5  # of many finished runs the last few

State = Literal["waiting", "running", "done", "failed"]


@dataclass
class Entry:
    """What the board knows of a run."""

    job: Job
    state: State = "waiting"
    note: str = ""
    pulse: Pulse | None = None
    epochs_told: int = 0


class Board:
    """Shows how far all runs are; whoever runs them tells it when one begins and ends."""

    def __init__(self, jobs: Sequence[Job], console: Console | None = None) -> None:
        self.entries = {job.name: Entry(job, epochs_told=len(_metrics(job))) for job in jobs}
        self.console = console or Console(highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, get_renderable=self._table)
        self.last = 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.update(at_once=True)
        if self.console.is_terminal:
            self.live.stop()

    def set(self, job: Job, state: State, note: str = "") -> None:
        """A run has begun, has ended, or waits to be tried again."""
        entry = self.entries[job.name]
        if not self.console.is_terminal and (state != entry.state or note):
            self._tell_epochs(entry)
            self._say(f"{job.name}  {state}{f': {note}' if note else ''}")
        entry.state, entry.note, entry.pulse = state, note, None
        self.update(at_once=True)

    def tell(self, job: Job, pulse: Pulse) -> None:
        """How far a run is."""
        self.entries[job.name].pulse = pulse
        self.update()

    def update(self, at_once: bool = False) -> None:
        """Look at the folders of the runs that are running, now and then."""
        if not at_once and time.monotonic() - self.last < REFRESH_SECONDS:
            return
        self.last = time.monotonic()
        if self.console.is_terminal:
            self.live.refresh()
            return
        for entry in self.entries.values():
            if entry.state == "running":
                self._tell_epochs(entry)

    @property
    def failures(self) -> dict[str, str]:
        """The runs that failed, and why."""
        return {name: entry.note for name, entry in self.entries.items() if entry.state == "failed"}

    def _tell_epochs(self, entry: Entry) -> None:
        for line in _metrics(entry.job)[entry.epochs_told :]:
            self._say(f"{entry.job.name}  {describe_epoch(line, entry.job.epochs)}")
            entry.epochs_told = line.epoch

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def _table(self) -> Table:
        counts = Counter(entry.state for entry in self.entries.values())
        title = ", ".join(f"{counts[state]} {state}" for state in ("running", "waiting", "done", "failed"))
        table = Table(title=title, title_justify="left", expand=False)
        for column in ("run", "epoch", "loss", "test %", "s/epoch", "left", ""):
            table.add_column(column, justify="left" if column in ("run", "") else "right")
        done = [entry for entry in self.entries.values() if entry.state == "done"]
        running = [entry for entry in self.entries.values() if entry.state == "running"]
        failed = [entry for entry in self.entries.values() if entry.state == "failed"]
        for entry in [*failed, *done[-FINISHED_SHOWN:], *running]:
            table.add_row(*_cells(entry))
        if hidden := len(done) - min(len(done), FINISHED_SHOWN):
            table.caption = f"and {hidden} more done"
        return table


def _cells(entry: Entry) -> list[str]:
    job, pulse, metrics = entry.job, entry.pulse, _metrics(entry.job)
    done = max(len(metrics), pulse.epochs_done if pulse else 0)
    seconds = sum(line.seconds + line.test_seconds for line in metrics) / len(metrics) if metrics else None
    left = None if seconds is None or entry.state != "running" else seconds * (job.epochs - done)
    loss = pulse.loss if pulse else metrics[-1].loss if metrics else None
    return [
        job.name,
        f"{done:.1f}/{job.epochs}" if pulse else f"{len(metrics)}/{job.epochs}",
        "" if loss is None else f"{loss:.4f}",
        f"{metrics[-1].test_accuracy:.2f}" if metrics else "",
        "" if seconds is None else f"{seconds:.1f}",
        "" if left is None else _duration(left),
        entry.note or entry.state,
    ]


def _metrics(job: Job) -> list[EpochMetrics]:
    run = job.run
    return [] if run is None else run.metrics


def _duration(seconds: float) -> str:
    """For people.

    >>> _duration(59), _duration(3600 * 2 + 120)
    ('0:59', '2:02:00')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
