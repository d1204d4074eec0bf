"""The paper's tables with our numbers in them, made from run folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

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
    changes: tuple[str, ...] = ()  # settings that are not the row's, as they are typed

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
        """Whether the runs have all the epochs of their recipe, the paper's or ours, and no more."""
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

    def steps(self, direction: str, epoch: int | None = None) -> float | None:
        """Mean steps per solve in an epoch, by default the last, over layers and runs.

        ``direction`` is forward or backward, or paper_forward or paper_backward for what the paper counts.
        """
        metrics = [run.metrics[(epoch or self.epochs) - 1] for run in self.runs]
        values = [step for line in metrics for step in getattr(line, f"{direction}_steps")]
        return fmean(values) if values else None

    @property
    def command(self) -> str:
        """What to type to get this line."""
        data = self.data if "/" not in self.data else Path(self.data).name
        if self.changes or self.row.name == "demo":  # `reproduce` trains the paper's rows as they are
            seed = self.runs[0].config.seed if self.runs else 0
            start, options = f"pcdeq train {self.row.name}", {"data": data, "seed": seed}
        else:
            start, options = f"pcdeq reproduce {data}", {"rows": self.row.name, "runs": len(self.runs) or None}
        options["recipe"] = None if self.row.recipe == "paper" else self.row.recipe
        options["epochs"] = self.epochs if self.runs and self.epochs != self.row.epochs else None
        options["steps_per_epoch"] = self.steps_per_epoch
        options["solver"] = None if self.solver == "default" else self.solver
        typed = [_option(name, value) for name, value in options.items() if value is not None]
        return " ".join([start, *typed, *self.changes])

    def cells(self) -> dict[str, str]:
        """The line for people, by column."""
        solver = [] if self.solver == "default" else [f"{self.solver} solver"]
        recipe = [] if self.row.recipe == "paper" else ["our recipe"]
        title = ", ".join([self.row.title, *recipe, *solver, *(change.lstrip("-") for change in self.changes)])
        proved, epochs = self.certified, [line for run in self.runs for line in run.metrics]
        each = "" if self.steps_per_epoch is None else f" of {self.steps_per_epoch} steps each,"
        return {
            "row": title,
            "paper %": _number(self.published, ".1f"),
            "ours %": with_spread(self),
            "difference": signed(self.difference),
            "runs": str(len(self.runs) or ""),
            "epochs": f"{self.epochs}{each} of {self.row.epochs}" if self.runs else "",
            "parameters": _number(self.parameters, ",d") or self.row.params,
            "steps": self._both_steps(""),
            "paper's steps": self._both_steps("paper_"),
            "unconverged": f"{sum(line.unconverged for line in epochs):,}" if epochs else "",
            "certified": "" if proved is None else f"{100 * proved[0] / proved[1]:.1f} % of {proved[1]:,}",
            "s/epoch": _number(seconds_per_epoch(self), ".1f"),
            "command": self.command,
        }

    def _both_steps(self, rule: str) -> str:
        """Forward and backward, in the last epoch."""
        found = [self.steps(f"{rule}{direction}") for direction in ("forward", "backward")] if self.runs else []
        return " / ".join(f"{steps:.1f}" for steps in found if steps is not None)

    @property
    def rank(self) -> tuple[bool, str, bool, str, bool, int]:
        """Of the lines of a row, the paper's recipe first, as it is, with the usual solver, in the longest training."""
        usual = (self.row.recipe == "paper", self.solver == "default", self.steps_per_epoch is None)
        return not usual[0], " ".join(self.changes), not usual[1], self.solver, not usual[2], -self.epochs


def with_spread(line: Line) -> str:
    """Mean ± standard deviation of its accuracies, in percent; empty if there are none."""
    if line.accuracy is None:
        return ""
    return f"{line.accuracy:.2f}" + (f" ± {line.deviation:.2f}" if line.deviation else "")


def seconds_per_epoch(line: Line) -> float | None:
    """Of training, the median over all epochs, because a machine is at times busy with other things."""
    seconds = [epoch.seconds for run in line.runs for epoch in run.metrics]
    return median(seconds) if seconds else None


def _option(name: str, value: Any) -> str:
    """A setting as it is typed.

    >>> _option("channels", (3, 4)), _option("augment", False), _option("optimizer_options", {"momentum": 0.9})
    ('--channels 3 4', '--no-augment', '--optimizer-options momentum 0.9')
    """
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, dict):
        value = tuple(part for pair in value.items() for part in pair)
    return " ".join([f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))])


def signed(value: float | None) -> str:
    """With its sign, but for nothing.

    >>> signed(0.123), signed(-0.001), signed(None)
    ('+0.12', '0.00', '')
    """
    if value is None:
        return ""
    return f"{value:+.2f}" if abs(value) >= 0.005 else "0.00"


def _number(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def collect(runs: Iterable[Run], datasets: Sequence[str] = ()) -> dict[str, list[Line]]:
    """Lines by data set: the paper's rows in its order, each followed by ours for it.

    Args:
        datasets: show the paper's rows of these even if there are no runs.
    """
    alike: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        config = run.config
        if not run.metrics:
            continue
        which = (config.data, config.row, config.recipe)
        kind = (*which, len(run.metrics), config.solver, config.steps_per_epoch, _changes(run))
        group = alike.setdefault(kind, [])
        if config.seed not in [other.config.seed for other in group]:  # a repetition is not another run
            group.append(run)
    found: dict[str, list[Line]] = {data: [] for data in datasets}
    for (data, name, recipe, *training), group in alike.items():
        row = find_row(name, data, group[0].image_shape[0], recipe=recipe)
        found.setdefault(data, []).append(Line(row, data, tuple(group), *training))
    others = sorted(found.keys() - set(PAPER_DATASETS))
    return {data: _in_order(data, found[data]) for data in (*PAPER_DATASETS, *others) if data in found}


# What may differ between runs that are trained alike, or has a place of its own in a `Line`.
_FREE = {"seed", "deterministic", "solver", "epochs", "steps_per_epoch"}


def _changes(run: Run) -> tuple[str, ...]:
    """The settings of a run that are not its row's."""
    config = run.config
    usual = TrainConfig(config.row, data=config.data, recipe=config.recipe).resolve(run.image_shape)
    return tuple(_option(*item) for item in config.changes_from(usual).items() if item[0] not in _FREE)


def _in_order(data: str, lines: Sequence[Line]) -> list[Line]:
    """With the paper's rows that were not run; of data that are not the paper's, there are only the rows that were."""
    papers = {row.name: row for row in rows(data)} if data in PAPER_DATASETS else {}
    order = [*papers, *sorted({line.row.name for line in lines} - papers.keys())]
    idle = [Line(papers[name], data) for name in papers.keys() - {line.row.name for line in lines}]
    return sorted([*lines, *idle], key=lambda line: (order.index(line.row.name), line.rank))


def markdown_table(entries: Sequence[dict[str, str]]) -> str:
    """A table in Markdown, numbers to the right.

    >>> print(markdown_table([{"row": "a", "ours %": "1.0"}]))
    | row | ours % |
    |---|---:|
    | a | 1.0 |
    """
    columns = list(entries[0])
    rule = "|".join("---" if column in TEXT_COLUMNS else "---:" for column in columns)
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *(entry.values() for entry in entries))]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])
