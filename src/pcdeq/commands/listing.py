"""What there is: rows of the paper, runs, data sets."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from pcdeq.commands.shared import DataDir, Flag, show, table, warn
from pcdeq.errors import UsageError
from pcdeq.recipes import Row, own_rows, rows

if TYPE_CHECKING:
    from pcdeq.training import Run


@dataclass(frozen=True)
class List:
    """List networks that can be trained by name, the paper's rows and ours, or your runs."""

    what: Annotated[tuple[str, ...], Positional, arg(metavar="[runs | WORD ...]")] = ()
    """runs: yours; or words that a row must have in its name (mc-relu6, 'pcdeq-?-l-*') or as its data (mnist).
    (default: the paper's tables in short)"""
    all: Flag = False
    """Every row: the paper's, then ours to compare, with parameters, published accuracy, the paper's
    epochs, those of our recipe (fast) and a command."""
    runs_dir: Path | None = None
    """Where to look for runs. (default: runs)"""
    json: Flag = False
    """Print a JSON object per row or run, for programs; of every row, if no word is given."""

    def run(self) -> None:
        """Print the list."""
        if self.what == ("runs",):
            self._list_runs()
            return
        if self.runs_dir is not None:
            raise UsageError("--runs-dir belongs to `pcdeq list runs`")
        if self.all and self.what:
            raise UsageError(f"--all shows every row: leave out {' '.join(self.what)}")
        found = [row for row in (*rows(), *own_rows()) if all(_matches(row, word) for word in self.what)]
        if not found:
            words = " and ".join(map(repr, self.what))
            raise UsageError(f"no row has {words} in its name or as its data; `pcdeq list --all` shows all")
        entries = [_row_entry(row) for row in found]
        in_short = not (self.what or self.all or self.json)
        show(entries, _in_short(len(found)) if in_short else table(entries), self.json)

    def _list_runs(self) -> None:
        from pcdeq.training import readable_runs
        from pcdeq.training.run import RUNS

        if self.all:
            raise UsageError("--all is for rows; `pcdeq list runs` shows all runs")
        folder = self.runs_dir or RUNS
        runs, broken = readable_runs(folder)
        entries = [_run_entry(run) for run in runs]
        show(entries, table(entries) if entries else [f"no runs in {folder}; `pcdeq train` makes one"], self.json)
        for reason in broken:
            warn(f"left out: {reason}")


def _matches(row: Row, word: str) -> bool:
    word = word.lower()
    return word == row.dataset or word in row.name or fnmatchcase(row.name, word)


def _in_short(count: int) -> list[str]:
    """The paper's tables: of each data set and network the best row, and the best of those it is compared with."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows():
        kind = f"pcDEQ {row.topology.upper()}" if row.family == "pcdeq" else "others"
        groups.setdefault((row.dataset, f"{kind}, augmented" if row.augment else kind), []).append(row)
    entries = []
    for (data, kind), group in groups.items():
        best = max(group, key=lambda row: row.accuracy or 0.0)
        small, large = min(row.parameters for row in group), max(row.parameters for row in group)
        sizes = f"{small:,}" if small == large else f"{small:,} to {large:,}"
        entry = {"data": data, "network": kind, "rows": len(group), "parameters": sizes}
        entries.append(entry | {"best %": best.accuracy, "best row": best.name})
    return [
        *table(entries),
        "",
        "pcdeq train ROW --data DATA trains one; `pcdeq list runs` shows your runs. More of the rows:",
        f"`pcdeq list mnist`, or another data set; `pcdeq list mc-relu6`, or other words; `--all` all {count}.",
    ]


def _row_entry(row: Row) -> dict[str, Any]:
    """With the command of our recipe, if there is one: who wants the paper's leaves ``--recipe`` out."""
    fast = row.has_recipe("fast")
    return {
        "data": row.dataset,
        "row": row.title,
        "parameters": f"{row.parameters:,}",
        "accuracy %": row.accuracy,
        "epochs": row.epochs,
        "fast": row.with_recipe("fast").epochs if fast else None,
        "command": f"pcdeq train {row.name} --data {row.dataset}{' --recipe fast' if fast else ''}",
    }


def _run_entry(run: Run) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "row": run.config.row,
        "data": run.config.data,
        "recipe": run.config.recipe,
        "epochs": f"{len(run.metrics)}/{run.config.epochs}",
        "accuracy %": None if run.accuracy is None else round(run.accuracy, 2),
        "started": run.description.get("started", ""),
    }


@dataclass(frozen=True)
class Data:
    """List the data sets that have names, or fetch one."""

    name: Annotated[str | None, Positional, arg(metavar="[NAME]")] = None
    """Data set to fetch and check, or a folder or .npz file of your own to check. (default: list them)"""
    size: str | None = None
    """Cut and scale a folder's pictures to so many pixels: 32, or width and height, 32x24. (default: as they are)"""
    data_dir: DataDir = None

    def run(self) -> None:
        """List or fetch."""
        from pcdeq.data import dataset_names, load_dataset

        if self.name is None:
            print("\n".join(dataset_names()))
            print("\n`pcdeq data NAME` fetches one; `pcdeq train ROW --data NAME` does so by itself.")
            print("Your own: a folder with one folder of images per class, or an .npz file.")
        else:
            print(load_dataset(self.name, data_dir=self.data_dir, size=self.size).describe())
