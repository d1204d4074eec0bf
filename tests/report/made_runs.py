"""Run folders with metrics that are made up, to see what reports make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pcdeq.models import Preprocessing
from pcdeq.recipes import TrainConfig
from pcdeq.training import EpochMetrics, Run

DIGITS = Preprocessing((0.0,), (1.0,), tuple("0123456789"))

EPOCH = EpochMetrics(
    epoch=1,
    loss=0.1,
    train_accuracy=99.0,
    test_loss=0.2,
    test_accuracy=98.0,
    validation_accuracy=None,
    learning_rate=1e-3,
    forward_steps=(5.0,),
    backward_steps=(4.0,),
    unconverged=0,
    largest_singular_value=(1.2,),
    seconds=2.0,
    test_seconds=0.1,
)


def make_run(
    folder: Path,
    row: str,
    epochs: int,
    seed: int = 0,
    solver: str = "default",
    steps_per_epoch: int | None = None,
    settings: dict[str, Any] | None = None,
    **columns,
) -> Run:
    """A run whose metrics are given by epoch, as functions of it, or constant."""
    settings = {"data": "mnist", "recipe": "paper", **(settings or {})}
    out = folder / f"{row}-{settings['data']}-{settings['recipe']}-{solver}-{steps_per_epoch}-seed{seed}"
    options = {"seed": seed, "solver": solver, "steps_per_epoch": steps_per_epoch, "out": out, **settings}
    run = Run.create(TrainConfig(row, **options).resolve(), DIGITS, (1, 28, 28))
    for epoch in range(1, epochs + 1):
        values = {name: value(epoch) if callable(value) else value for name, value in columns.items()}
        run.append_metrics(replace(EPOCH, epoch=epoch, **values))
    return run
