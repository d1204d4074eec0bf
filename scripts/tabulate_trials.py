"""Prints the rows of the tables in results/recipes.md: `python scripts/tabulate_trials.py DIR`, DIR a folder of trials.

Only what was measured on validation images is read; a run without them, or one that did not end, is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pcdeq.recipes import TrainConfig
from pcdeq.training import Run

SETTINGS = ("channels", "lr", "scale_rate", "weight_decay", "smoothing", "average", "batch_size", "loosen", "seed")


def line(run: Run) -> str | None:
    """A row of the table: what was trained, how, and its accuracy on validation images after the last epoch."""
    config, last = run.config, run.metrics[-1]
    if last.validation_accuracy is None or last.epoch < config.epochs:
        return None
    usual = TrainConfig(config.row, data=config.data, recipe="fast").resolve(run.image_shape)
    options = ["--epochs", str(config.epochs)] if config.epochs != usual.epochs else []
    settings = []
    for name in SETTINGS:
        value = getattr(config, name)
        words, is_usual = _in_words(value), value == getattr(usual, name)
        options += [] if is_usual else [f"--{name.replace('_', '-')}", words]
        # The row's channels, no loosening and seed 0 go without saying.
        settings += [] if is_usual and (name == "channels" or value in (0, 1)) else [f"{name} {words}"]
    command = " ".join(["pcdeq train", config.row, "--data", config.data, "--recipe fast --validation 0.1", *options])
    told = (f"{config.row}, {config.data}", ", ".join(settings), config.epochs, f"{last.validation_accuracy:.2f}")
    return "| " + " | ".join(map(str, told)) + f" | `{command}` |"


def _in_words(value: float | tuple[int, ...]) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def main() -> None:
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/config.json"))
    runs = [Run.open(folder) for folder in folders if (folder / "metrics.jsonl").stat().st_size]
    for row in sorted({found for run in runs if (found := line(run)) is not None}):
        print(row)


if __name__ == "__main__":
    main()
