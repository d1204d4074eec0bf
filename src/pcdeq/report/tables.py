"""The paper's tables with our numbers in them, made from run folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from pcdeq.recipes import PAPER_DATASETS, Row, TrainConfig, find_row, rows
from pcdeq.training import EpochMetrics, Run, read_summary

TEXT_COLUMNS = {"data", "row", "command", "claim", "where", "verdict", "measured"}


@dataclass(frozen=True)
class Line:
    """All runs of a row that were trained alike; or a row of the paper that was not run."""

    row: Row
    data: str
    runs: tuple[Run, ...] = ()
    epochs: int = 0
    solver: str = "default"
    steps_per_epoch: int | None = None
    changes: tuple[tuple[str, Any], ...] = ()  # settings that are not the row's

    @property
    def last(self) -> list[EpochMetrics]:
        """The last epoch of each run."""
        return [run.metrics[-1] for run in self.runs]

    @property
    def published(self) -> float | None:
        """The paper's accuracy, if it has this row for this data."""
        return self.row.accuracy if self.row.dataset == self.data else None

    @property
    def accuracy(self) -> float | None:
        """Mean over the runs, in percent, after the last epoch."""
        return fmean(line.test_accuracy for line in self.last) if self.runs else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the runs."""
        return stdev(line.test_accuracy for line in self.last) if len(self.runs) > 1 else None

    @property
    def is_usual(self) -> bool:
        """Whether the row was trained as it is, in whole epochs, however many."""
        return self.steps_per_epoch is None and not self.changes

    @property
    def is_full(self) -> bool:
        """Whether the runs have all the epochs of the paper and no more."""
        return bool(self.runs) and self.is_usual and self.epochs == self.row.epochs

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, where the two can be compared."""
        ours, published = self.accuracy, self.published
        return None if ours is None or published is None or not self.is_full else ours - published

    @property
    def parameters(self) -> int | None:
        """Of the network that was trained, or else of the paper's."""
        counts = [summary.parameters for run in self.runs if (summary := read_summary(run)) is not None]
        return counts[0] if counts else self.row.parameters

    @property
    def certified(self) -> tuple[int, int] | None:
        """How many predictions were proved, and of how many, over all runs."""
        known = [read_summary(run) for run in self.runs]
        pairs = [(one.certified, one.certified_of) for one in known if one is not None and one.certified is not None]
        return (sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)) if pairs else None

    def steps(self, direction: str) -> float | None:
        """Mean steps per solve in the last epoch, over layers and runs; ``forward`` or ``backward``."""
        values = [step for line in self.last for step in getattr(line, f"{direction}_steps")]
        return fmean(values) if values else None

    @property
    def seconds(self) -> float | None:
        """Per epoch, for training; the median, because a machine is at times busy with other things."""
        return median(line.seconds for run in self.runs for line in run.metrics) if self.runs else None

    @property
    def unconverged(self) -> int | None:
        """Samples, over all layers, both directions, all epochs and runs."""
        return sum(line.unconverged for run in self.runs for line in run.metrics) if self.runs else None

    @property
    def command(self) -> str:
        """What to type to get this line."""
        data = self.data if "/" not in self.data else Path(self.data).name
        if self.changes or self.row.name == "demo":  # `reproduce` trains the paper's rows as they are
            parts = ["pcdeq train", self.row.name, "--data", data, "--seed", str(self.runs[0].config.seed)]
            parts += [_option(name, value) for name, value in self.changes]
        else:
            parts = ["pcdeq reproduce", data, "--rows", self.row.name]
            parts += ["--runs", str(len(self.runs))] if self.runs else []
        if self.runs and self.epochs != self.row.epochs:
            parts += ["--epochs", str(self.epochs)]
        if self.steps_per_epoch is not None:
            parts += ["--steps-per-epoch", str(self.steps_per_epoch)]
        if self.solver != "default":
            parts += ["--solver", self.solver]
        return " ".join(parts)

    def cells(self) -> dict[str, str]:
        """The line for people, by column."""
        solver = [] if self.solver == "default" else [f"{self.solver} solver"]
        title = ", ".join([self.row.title, *solver, *(_option(*change).lstrip("-") for change in self.changes)])
        ours, proved = self.accuracy, self.certified
        return {
            "row": title,
            "paper %": _number(self.published, ".1f"),
            "ours %": "" if ours is None else f"{ours:.2f}" + (f" ± {self.deviation:.2f}" if self.deviation else ""),
            "difference": _number(self.difference, "+.2f"),
            "runs": str(len(self.runs) or ""),
            "epochs": self._length() if self.runs else "",
            "parameters": _number(self.parameters, ",d") or self.row.params,
            "forward": _number(self.steps("forward"), ".1f"),
            "backward": _number(self.steps("backward"), ".1f"),
            "unconverged": _number(self.unconverged, ",d"),
            "certified": "" if proved is None else f"{100 * proved[0] / proved[1]:.1f} % of {proved[1]:,}",
            "s/epoch": _number(self.seconds, ".1f"),
            "command": self.command,
        }

    def _length(self) -> str:
        if self.steps_per_epoch is not None:
            return f"{self.epochs} of {self.steps_per_epoch} steps each, of {self.row.epochs}"
        return f"{self.epochs} of {self.row.epochs}"


def _option(name: str, value: Any) -> str:
    """A setting as it is typed.

    >>> _option("channels", (3, 4)), _option("augment", False), _option("weight_decay", 0.1)
    ('--channels 3 4', '--no-augment', '--weight-decay 0.1')
    """
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # a dictionary's items
        value = tuple(part for pair in value for part in pair)
    return " ".join([f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))])


def _number(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def collect(runs: Iterable[Run], datasets: Sequence[str] = ()) -> dict[str, list[Line]]:
    """Lines by data set: the paper's rows in its order, each followed by ours for it.

    Args:
        datasets: show the paper's rows of these even if there are no runs.
    """
    groups: dict[_Kind, list[Run]] = {}
    for run in runs:
        config = run.config
        if not run.metrics:
            continue
        kind = _Kind(config.data, config.row, config.solver, len(run.metrics), config.steps_per_epoch, _changes(run))
        group = groups.setdefault(kind, [])
        if config.seed not in [other.config.seed for other in group]:  # a repetition is not another run
            group.append(run)
    found = dict.fromkeys([*(kind.data for kind in groups), *datasets])
    return {data: _lines(data, groups) for data in sorted(found, key=_paper_order)}


class _Kind(NamedTuple):
    """What runs of one line have in common."""

    data: str
    row: str
    solver: str
    epochs: int
    steps_per_epoch: int | None
    changes: tuple[tuple[str, Any], ...]

    @property
    def rank(self) -> tuple[str, bool, str, bool, int]:
        """The row as it is first, then the usual solver, and the longest training."""
        changes = " ".join(_option(*change) for change in self.changes)
        return changes, self.solver != "default", self.solver, self.steps_per_epoch is not None, -self.epochs


# What may differ between runs that are trained alike, or has a place of its own in `_Kind`.
_FREE = {"seed", "deterministic", "solver", "epochs", "steps_per_epoch"}


def _changes(run: Run) -> tuple[tuple[str, Any], ...]:
    """The settings of a run that are not its row's."""
    usual = TrainConfig(run.config.row, data=run.config.data).resolve(run.image_shape)
    found = {name: value for name, value in run.config.changes_from(usual).items() if name not in _FREE}
    return tuple((name, tuple(value.items()) if isinstance(value, dict) else value) for name, value in found.items())


def _lines(data: str, groups: dict[_Kind, list[Run]]) -> list[Line]:
    here = {kind: runs for kind, runs in groups.items() if kind.data == data}
    image_channels = next(iter(here.values()))[0].image_shape[0] if here else None
    # Of data that are not the paper's, only the rows that were run.
    names = [row.name for row in rows(data)] if data in PAPER_DATASETS else []
    names += sorted({kind.row for kind in here} - set(names))
    lines: list[Line] = []
    for name in names:
        row = find_row(name, data, image_channels)
        kinds = sorted((kind for kind in here if kind.row == name), key=lambda kind: kind.rank)
        lines += [
            Line(row, data, tuple(here[kind]), kind.epochs, kind.solver, kind.steps_per_epoch, kind.changes)
            for kind in kinds
        ] or [Line(row, data)]
    return lines


def _paper_order(data: str) -> tuple[int, str]:
    return (PAPER_DATASETS.index(data) if data in PAPER_DATASETS else len(PAPER_DATASETS), data)


def markdown_table(entries: Sequence[dict[str, str]]) -> str:
    """A table in Markdown, numbers to the right.

    >>> print(markdown_table([{"row": "a", "ours %": "1.0"}]))
    | row | ours % |
    |---|---:|
    | a | 1.0 |
    """
    columns = list(entries[0])
    lines = [columns, ["---" if column in TEXT_COLUMNS else "---:" for column in columns]]
    text = [f"| {' | '.join(columns)} |", f"|{'|'.join(lines[1])}|"]
    text += [f"| {' | '.join(entry.values())} |" for entry in entries]
    return "\n".join(text)
