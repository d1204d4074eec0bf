"""One live table of all runs; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean
from typing import Literal, Self, get_args

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pcdeq.reproduce.plan import Job
from pcdeq.reproduce.worker import Pulse
from pcdeq.training.display import describe_epoch

FINISHED_SHOWN = 5  # of many finished runs the last few

State = Literal["running", "waiting", "done", "failed"]


@dataclass
class Entry:
    """What the board knows of a run."""

    job: Job
    state: State = "waiting"
    note: str = ""
    pulse: Pulse | None = None
    epochs_told: int = 0


class Board:
    """Shows how far all runs are; whoever runs them tells it when one begins, goes on and ends."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        self.entries = {job.name: Entry(job, epochs_told=len(job.metrics)) for job in jobs}
        self.console = console
        self.live = Live(console=console, refresh_per_second=1, get_renderable=self._table)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        for entry in self.entries.values():
            if entry.state == "running":  # and interrupted
                self._tell_epochs(entry)
        self.live.stop()

    def set(self, job: Job, state: State, note: str = "") -> None:
        """A run has begun, has ended, or waits to be tried again."""
        entry = self.entries[job.name]
        self._tell_epochs(entry)
        if state != entry.state or note:
            self._say(f"{job.name}  {state}{f': {note}' if note else ''}")
        entry.state, entry.note, entry.pulse = state, note, None

    def tell(self, job: Job, pulse: Pulse) -> None:
        """How far a run is, now and then."""
        entry = self.entries[job.name]
        entry.pulse = pulse
        self._tell_epochs(entry)

    @property
    def failures(self) -> dict[str, str]:
        """The runs that failed, and why."""
        return {name: entry.note for name, entry in self.entries.items() if entry.state == "failed"}

    def _tell_epochs(self, entry: Entry) -> None:
        for line in entry.job.metrics[entry.epochs_told :]:
            self._say(f"{entry.job.name}  {describe_epoch(line, entry.job.epochs)}")
            entry.epochs_told = line.epoch

    def _say(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(text, soft_wrap=True, markup=False)

    def _table(self) -> Table:
        groups = {state: [one for one in self.entries.values() if one.state == state] for state in get_args(State)}
        title = ", ".join(f"{len(group)} {state}" for state, group in groups.items())
        table = Table(title=title, title_justify="left", expand=False)
        for column in ("run", "epoch", "loss", "test %", "s/epoch", "left", ""):
            table.add_column(column, justify="left" if column in ("run", "") else "right")
        for entry in [*groups["failed"], *groups["done"][-FINISHED_SHOWN:], *groups["running"]]:
            table.add_row(*_cells(entry))
        if (hidden := len(groups["done"]) - FINISHED_SHOWN) > 0:
            table.caption = f"and {hidden} more done"
        return table


def _cells(entry: Entry) -> list[str]:
    job, pulse, metrics = entry.job, entry.pulse, entry.job.metrics
    done, epochs = len(metrics), str(len(metrics))
    loss = accuracy = pace = left = ""
    if pulse:
        done, epochs, loss = pulse.epochs_done, f"{pulse.epochs_done:.1f}", f"{pulse.loss:.4f}"
    if metrics:
        seconds = fmean(line.seconds + line.test_seconds for line in metrics)
        loss, accuracy, pace = loss or f"{metrics[-1].loss:.4f}", f"{metrics[-1].test_accuracy:.2f}", f"{seconds:.1f}"
        if entry.state == "running":
            left = str(timedelta(seconds=round(seconds * (job.epochs - done))))
    return [job.name, f"{epochs}/{job.epochs}", loss, accuracy, pace, left, entry.note or entry.state]
