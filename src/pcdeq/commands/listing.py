"""What there is: rows of the paper, runs, data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from pcdeq.commands.shared import DataDir, Flag, show, table
from pcdeq.recipes import own_rows, rows


@dataclass(frozen=True)
class List:
    """List the rows of the paper, or your runs."""

    what: Annotated[Literal["rows", "runs"], Positional] = "rows"
    """rows: of the paper, then ours to compare, with parameters, published accuracy, the paper's epochs, those of our
    recipe (fast) and a command; runs: yours."""
    runs_dir: Path = Path("runs")
    """Where to look for runs."""
    json: Flag = False
    """Print a JSON object per row or run, for programs."""

    def run(self) -> None:
        """Print the list."""
        entries = _row_entries() if self.what == "rows" else _run_entries(self.runs_dir)
        none = [f"no runs in {self.runs_dir}; `pcdeq train` makes one"]
        show(entries, table(entries) if entries else none, self.json)


def _row_entries() -> list[dict[str, Any]]:
    """Each row with the command of our recipe, if it has one: who wants the paper's leaves ``--recipe`` out."""
    entries = []
    for row in (*rows(), *own_rows()):
        fast = row.has_recipe("fast")
        entries.append(
            {
                "data": row.dataset,
                "row": row.title,
                "parameters": f"{row.parameters:,}",
                "accuracy %": row.accuracy,
                "epochs": row.epochs,
                "fast": row.with_recipe("fast").epochs if fast else None,
                "command": f"pcdeq train {row.name} --data {row.dataset}{' --recipe fast' if fast else ''}",
            }
        )
    return entries


def _run_entries(folder: Path) -> list[dict[str, Any]]:
    from pcdeq.training import find_runs

    return [
        {
            "run": str(run.path),
            "row": run.config.row,
            "data": run.config.data,
            "recipe": run.config.recipe,
            "epochs": f"{len(run.metrics)}/{run.config.epochs}",
            "accuracy %": run.accuracy,
            "started": run.description.get("started", ""),
        }
        for run in find_runs(folder)
    ]


@dataclass(frozen=True)
class Data:
    """List the data sets that have names, or fetch one."""

    name: Annotated[str | None, Positional, arg(metavar="[NAME]")] = None
    """Data set to fetch and check, or a folder or .npz file of your own to check. (default: list them)"""
    data_dir: DataDir = None

    def run(self) -> None:
        """List or fetch."""
        from pcdeq.data import dataset_names, load_dataset

        if self.name is None:
            print("\n".join(dataset_names()))
            print("\n`pcdeq data NAME` fetches one; `pcdeq train ROW --data NAME` does so by itself.")
            print("Your own: a folder with one folder of images per class, or an .npz file.")
        else:
            print(load_dataset(self.name, data_dir=self.data_dir).describe())
