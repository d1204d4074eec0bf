"""The runs that a table of the paper needs, and how far each of them is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

from pcdeq.errors import UsageError
from pcdeq.recipes import PAPER_DATASETS, Recipe, TrainConfig, own_rows, paper_dataset, rows
from pcdeq.training import EpochMetrics, Run, read_summary
from pcdeq.training.run import RUNS

Stage = Literal["missing", "begun", "trained", "done"]


@dataclass(frozen=True)
class Job:
    """One run: its configuration, with the folder in which it is found again."""

    config: TrainConfig

    @property
    def folder(self) -> Path:
        """The run folder."""
        return cast(Path, self.config.out)  # plan sets it

    @property
    def name(self) -> str:
        """Row, data and seed."""
        return self.folder.name

    @property
    def epochs(self) -> int:
        """How many epochs it shall have."""
        return cast(int, self.config.epochs)  # plan sets it

    @property
    def run(self) -> Run | None:
        """What there is of it."""
        return Run.open(self.folder) if (self.folder / "config.json").is_file() else None

    @property
    def metrics(self) -> list[EpochMetrics]:
        """Of the epochs that it has."""
        return [] if self.run is None else self.run.metrics

    @property
    def stage(self) -> Stage:
        """How far it is: trained is a run that lacks only its summary."""
        run = self.run
        if run is None:
            return "missing"
        if len(run.metrics) < self.epochs:
            return "begun"
        return "done" if read_summary(run) is not None else "trained"

    def require_same(self) -> None:
        """Refuse to go on with a run that was started with other settings."""
        run = self.run
        if run is None:
            return
        wanted, found = self.config.resolve(run.image_shape), run.config
        for name, theirs in found.changes_from(wanted).items():
            if name != "epochs":
                raise UsageError(
                    f"{self.folder} was trained with {name} = {theirs}, not {getattr(wanted, name)}: choose another "
                    "--runs-dir, or move that folder away"
                )


def plan(
    datasets: tuple[str, ...] = PAPER_DATASETS,
    *,
    pattern: str = "*",
    runs: int = 5,
    runs_dir: Path = RUNS,
    image_channels: int | None = None,
    epochs: int | None = None,
    recipe: Recipe = "paper",
    **settings: Any,
) -> list[Job]:
    """The runs of all rows whose names match, first seeds first, so that every row soon has a number.

    Args:
        datasets: of the paper; or others, which follow the rows of the one they resemble.
        pattern: for row names, as for file names. Rows that are not the paper's must be asked for.
        image_channels: of data that are not the paper's, to choose the rows by.
        epochs: of each run; by default the recipe's.
        recipe: the paper's, or ours, for the rows that have one.
        settings: of `TrainConfig`, the same for all runs.

    >>> [job.name for job in plan(("mnist",), pattern="pcdeq-?-l-*d", runs=2)]
    ['pcdeq-2-l-sigmoid-mnist-seed0', 'pcdeq-2-l-sigmoid-mnist-seed1']
    >>> [job.name for job in plan(("mnist",), pattern="deq-l-t*", runs=1)]
    ['deq-l-tanh-mnist-seed0']
    >>> plan(("mnist",), pattern="*-gelu")
    Traceback (most recent call last):
    ...
    pcdeq.errors.UsageError: no row of mnist matches '*-gelu'; see `pcdeq list`
    """
    if runs < 1:
        raise UsageError(f"runs must be at least 1, got {runs}")
    tables = (rows,) if pattern == "*" else (rows, own_rows)
    chosen = [
        (row, data)
        for data in datasets
        for table in tables
        for row in table(paper_dataset(data, image_channels))
        if fnmatchcase(row.name, pattern) and row.has_recipe(recipe)
    ]
    if not chosen:
        which = "" if recipe == "paper" else f" with a recipe {recipe}"
        raise UsageError(f"no row of {', '.join(datasets)}{which} matches {pattern!r}; see `pcdeq list`")
    jobs = []
    for seed in range(runs):
        for row, data in chosen:
            wanted = row.with_recipe(recipe).epochs if epochs is None else epochs
            config = TrainConfig(row.name, data=data, recipe=recipe, seed=seed, epochs=wanted, **settings)
            jobs.append(Job(replace(config, out=runs_dir.expanduser().resolve() / config.run_name)))
            jobs[-1].require_same()
    return jobs
