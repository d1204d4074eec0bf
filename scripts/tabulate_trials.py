"""Prints the rows of the tables in results/recipes.md: `python scripts/tabulate_trials.py DIR`, DIR a folder of trials.

Only what was measured on validation images is read; a run without them, or one that did not end, is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pcdeq.recipes import TrainConfig
from pcdeq.training import Run

SETTINGS = ("lr", "weight_decay", "smoothing", "average", "batch_size", "seed")


def line(run: Run) -> str | None:
    """A row of the table: what was trained, how, and its accuracy on validation images after the last epoch."""
    config, last = run.config, run.metrics[-1]
    if last.validation_accuracy is None or last.epoch < config.epochs:
        return None
    usual = TrainConfig(config.row, data=config.data, recipe="fast").resolve(run.image_shape)
    options = ["--epochs", str(config.epochs)] if config.epochs != usual.epochs else []
    for name in SETTINGS:
        if (value := getattr(config, name)) != getattr(usual, name):
            options += [f"--{name.replace('_', '-')}", f"{value:g}"]
    settings = ", ".join(f"{name} {getattr(config, name):g}" for name in SETTINGS if getattr(config, name))
    command = " ".join(["pcdeq train", config.row, "--data", config.data, "--recipe fast --validation 0.1", *options])
    return (
        f"| {config.row}, {config.data} | {settings} | {config.epochs} | {last.validation_accuracy:.2f} | `{command}` |"
    )


def main() -> None:
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/config.json"))
    runs = [Run.open(folder) for folder in folders if (folder / "metrics.jsonl").stat().st_size]
    for row in sorted({found for run in runs if (found := line(run)) is not None}):
        print(row)


if __name__ == "__main__":
    main()
