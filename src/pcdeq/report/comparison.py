"""A line per row: published, ours with the paper's schedule, ours with our recipe; who is above, and how soon."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from pcdeq.errors import DataError
from pcdeq.recipes import Recipe, Row
from pcdeq.report.tables import Line, seconds_per_epoch, signed, with_spread

BATCH = 64  # images of a step of the paper
IMAGES = {"mnist": 60_000, "svhn": 73_257, "cifar10": 50_000}  # of training
TIMED_LIKE = {"svhn": "cifar10"}  # the benchmark leaves out data whose networks and pictures are of the same size
AUTHORS, OURS = "hook", "pcdeq"  # what the benchmark calls their pattern of code, and ours
Verdict = Literal["above", "equal", "below", "not trained"]


@dataclass(frozen=True)
class Bench:
    """Milliseconds of a training step, by method, row and data, as `make bench` measured them in turns."""

    steps: dict[tuple[str, str, str], float]

    @classmethod
    def read(cls, path: Path) -> Bench:
        """From ``bench.json``; of several runs of the benchmark the median."""
        found: dict[tuple[str, str, str], list[float]] = {}
        try:
            for one in json.loads(path.read_text(encoding="utf-8"))["measurements"]:
                kind = (one["method"], one["row"], one["data"])
                found.setdefault(kind, []).append(float(one["training"]["median"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not what `make bench` writes: {error!r}") from error
        return cls({key: median(values) for key, values in found.items()})

    def minutes(self, method: str, row: Row, epochs: int) -> float | None:
        """What so many epochs take at that speed; computed, not trained."""
        step = self.steps.get((method, row.name, TIMED_LIKE.get(row.dataset, row.dataset)))
        return None if step is None else step * ceil(IMAGES[row.dataset] / BATCH) * epochs / 60_000


@dataclass(frozen=True)
class Comparison:
    """What is known of a row on some data."""

    lines: tuple[Line, ...]
    bench: Bench

    @property
    def row(self) -> Row:
        """With the paper's hyperparameters."""
        return self.lines[0].row.with_recipe("paper")

    @property
    def data(self) -> str:
        """The name of the data set."""
        return self.lines[0].data

    def by(self, recipe: Recipe) -> Line | None:
        """Its whole runs by a recipe, with the usual solver."""
        whole = (line for line in self.lines if line.is_full and line.solver == "default")
        return next((line for line in whole if line.row.recipe == recipe), None)

    @property
    def shown(self) -> Line | None:
        """The line that is compared with the paper: by our recipe, else by its own; nothing is chosen by accuracy."""
        return self.by("fast") or self.by("paper")

    @property
    def is_the_papers(self) -> bool:
        """Whether it is a pcDEQ row of the paper, on its data."""
        return self.row.family == "pcdeq" and self.lines[0].published is not None

    @property
    def verdict(self) -> Verdict:
        """How ours compares with the published figure, which has one digit after the point."""
        line = self.shown
        if line is None or line.difference is None or line.accuracy is None:
            return "not trained"
        if line.difference > 0:
            return "above"
        return "equal" if round(line.accuracy, 1) >= (line.published or 0.0) else "below"

    @property
    def commands(self) -> list[str]:
        """What to type for the lines that are shown, or for the first one."""
        return [line.command for line in (self.by("fast"), self.by("paper")) if line is not None] or [self.to_come]

    @property
    def to_come(self) -> str:
        """What to type to train it by our recipe, or by the paper's where there is none of ours."""
        recipe: Recipe = "fast" if self.row.has_recipe("fast") else "paper"
        return Line(self.row.with_recipe(recipe), self.data).command

    def cells(self) -> dict[str, str]:
        """For a table, what matters first."""
        fast, papers, shown = self.by("fast"), self.by("paper"), self.shown
        epochs = "" if shown is None else f"{shown.epochs} of {self.row.epochs}"
        authors = self._authors_minutes
        return {
            "row": self.row.title,
            "published": "" if self.lines[0].published is None else f"{self.lines[0].published:.1f}",
            "our recipe": _accuracy(fast),
            "its schedule": _accuracy(papers),
            "difference": "" if shown is None else signed(shown.difference),
            "epochs": epochs,
            "faster*": "" if (faster := self.speedup) is None else f"{faster:.0f}x",
            "min, recipe": _minutes(fast),
            "min, schedule": _minutes(papers),
            "min, authors'*": "" if authors is None else _short(authors),
        }

    @property
    def _authors_minutes(self) -> float | None:
        known = self.is_the_papers and self.shown is not None
        return self.bench.minutes(AUTHORS, self.row, self.row.epochs) if known else None

    @property
    def speedup(self) -> float | None:
        """How much sooner our recipe has the published accuracy: both at the speed of a quiet machine, in turns."""
        line, authors = self.by("fast"), self._authors_minutes
        epochs = None if line is None or line.published is None else epochs_until(line, line.published)
        ours = None if epochs is None else self.bench.minutes(OURS, self.row, epochs)
        return None if ours is None or authors is None else authors / ours


def compare(lines: Sequence[Line], bench: Bench | None = None) -> list[Comparison]:
    """The rows of these lines, in their order."""
    groups = groupby(lines, key=lambda line: (line.data, line.row.name))
    return [Comparison(tuple(group), bench or Bench({})) for _, group in groups]


def count_verdicts(rows: Iterable[Comparison]) -> dict[Verdict, int]:
    """How many of the paper's pcDEQ rows are above their published figure, equal to its digit, below, or to come."""
    counts: dict[Verdict, int] = {"above": 0, "equal": 0, "below": 0, "not trained": 0}
    for row in rows:
        if row.is_the_papers:
            counts[row.verdict] += 1
    return counts


def verdict_in_words(rows: Sequence[Comparison]) -> str:
    """What came of it all, in a paragraph."""
    counts = count_verdicts(rows)
    known = [row.shown for row in rows if row.is_the_papers and row.verdict == "below"]
    behind = min((line.difference or 0.0 for line in known if line is not None), default=0.0)
    parts = [f"{counts['above']} of {sum(counts.values())} pcDEQ rows of the paper are above their published accuracy"]
    if counts["equal"]:
        parts.append(f"{counts['equal']} equal to its digit")
    if counts["below"]:
        parts.append(f"{counts['below']} below, at most by {-behind:.2f} points")
    if counts["not trained"]:
        parts.append(f"{counts['not trained']} not yet trained to the end")
    return ", ".join(parts) + "."


def epochs_until(line: Line, accuracy: float) -> int | None:
    """Epochs until the mean over the runs has this accuracy, to its digit, and keeps it to the end."""
    held = 0
    for epoch, metrics in enumerate(zip(*(run.metrics for run in line.runs), strict=True), start=1):
        reached = round(fmean(one.test_accuracy for one in metrics), 1) >= accuracy
        held = (held or epoch) if reached else 0
    return held or None


def _accuracy(line: Line | None) -> str:
    return "" if line is None else with_spread(line)


def _minutes(line: Line | None) -> str:
    if line is None or line.published is None:
        return ""
    epochs, seconds = epochs_until(line, line.published), seconds_per_epoch(line)
    return "not reached" if epochs is None or seconds is None else _short(epochs * seconds / 60)


def _short(minutes: float) -> str:
    """With two digits that matter.

    >>> _short(0.347), _short(3.47), _short(1234.5)
    ('0.35', '3.5', '1,234')
    """
    return f"{minutes:.2f}" if minutes < 1 else f"{minutes:.1f}" if minutes < 10 else f"{minutes:,.0f}"
