"""What a model card tells of the run that trained a network."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pcdeq.errors import DataError
from pcdeq.recipes import find_row
from pcdeq.training.run import EpochMetrics, Run, Which


def describe_training(run: Run, checkpoint: Which) -> dict[str, Any]:
    """What a model card tells of a run; where the run did not record something, it is None."""
    config, description = run.config, run.description
    row = find_row(config.row, config.data, run.image_shape[0])
    last = _last_metrics(run) if checkpoint == "last" else None  # which are not those of the best epoch
    versions = ", ".join(f"{name} {version}" for name, version in description.get("versions", {}).items())
    return {
        "row": config.row,
        "data": Path(config.data).name,  # of a user's own data, not where it lies
        "test_accuracy": None if last is None else last.test_accuracy,
        "published_accuracy": row.accuracy if row.dataset == config.data else None,
        "epochs": None if last is None else last.epoch,
        "seed": config.seed,
        "certified": None if last is None else _certified(run, last.epoch),
        "command": _command(description.get("command", [])),
        "versions": versions or None,
    }


def _last_metrics(run: Run) -> EpochMetrics | None:
    try:
        return run.metrics[-1]
    except (DataError, IndexError):  # the network is there all the same
        return None


def _certified(run: Run, epoch: int) -> str | None:
    """How many predictions after this epoch were proved, if the run's summary says so."""
    try:
        summary = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))
        if summary["epoch"] == epoch and summary["certified"] is not None:
            return f"{summary['certified']:,} of {summary['certified_of']:,} test images"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _command(arguments: list[str]) -> str | None:
    """The command line of a run as others would type it; None if the run was not started by one."""
    if not arguments or Path(arguments[0]).stem not in ("pcdeq", "__main__"):
        return None
    kept, rest = ["pcdeq"], iter(arguments[1:])
    for argument in rest:
        if argument in ("--out", "--data-dir", "--device"):
            next(rest, None)  # places and devices are of one machine
        elif argument != "--json":
            kept.append(Path(argument).name if kept[-1] == "--data" else argument)
    return shlex.join(kept)
