"""pcDEQ beside the models that it is compared with: time, evaluations and memory of a step; part of `make bench`.

Unlike in `measure.py`, where other methods solve the same networks, these are other networks, of about the same
size. All take turns in one process, on the same batches, each at its own default tolerance: with the weights of
finished runs where ``--runs`` has them, else after the same few steps of training. Numbers of evaluations grow with
training, monDEQ's and DEQ's most of all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from cases import Batch
from measure import Timing, interleave, peak_memory
from prepare import batches_of
from report import write
from torch.nn import functional as F

import pcdeq
from pcdeq.errors import ConvergenceWarning
from pcdeq.models import build, equilibrium_layers
from pcdeq.recipes import find_row
from pcdeq.training import Run

# A step of the ODEs and of the convolutions by FFT takes seconds: --classes l,mc,sc,ode asks for all.
CLASSES = {
    "l": ("pcdeq-1-l-relu6", "pcdeq-1-l-tanh", "mondeq-l", "deq-l-relu6", "deq-l-tanh", "explicit-l-relu6"),
    "mc": ("pcdeq-1-mc-relu6", "mondeq-mt", "deq-mc-relu6", "explicit-mc-relu6"),
    "sc": ("pcdeq-1-sc-relu6", "mondeq-sc", "deq-sc-relu6", "explicit-sc-relu6"),
    "ode": ("pcdeq-1-mc-relu6", "node", "anode"),
}
DEFAULT = "l,mc"
COLUMNS = ("row", "parameters", "trained", "training ms", "inference ms", "forward", "backward", "unconverged", "MB")


class Model:
    """A row's network with its optimiser, ready to train and to infer."""

    def __init__(self, row: str, data: str, batches: list[Batch], runs: Path | None, warm_up: int) -> None:
        torch.manual_seed(0)
        self.row = find_row(row, data)
        folder = None if runs is None else runs / f"{row}-{data}-seed0"
        run = Run.open(folder) if folder is not None and folder.is_dir() else None
        self.network = build(row, data) if run is None else pcdeq.load(run).train()
        self.turns = itertools.cycle(batches)
        self.optimizer = self._optimizer(self.row.lr)
        self.forward: list[float] = []  # evaluations of each step, the mean over the layers
        self.backward: list[float] = []
        self.unconverged = 0
        for _ in range(0 if run else warm_up):
            self.train()
        self.trained = f"{warm_up} steps" if run is None else _length(run)
        # A rate of nearly 0: the weights stay those that were trained, the work is that of a step.
        self.optimizer = self._optimizer(1e-12)
        self.forward, self.backward, self.unconverged = [], [], 0

    def _optimizer(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.network.parameters(), lr=lr, weight_decay=0.0, fused=True)

    def train(self) -> None:
        """One training step."""
        images, labels = next(self.turns)
        F.cross_entropy(self.network(images), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        pcdeq.project_(self.network)
        layers = equilibrium_layers(self.network)
        for steps, name in ((self.forward, "last_forward"), (self.backward, "last_backward")):
            found = [stats for layer in layers if (stats := getattr(layer, name)) is not None]
            steps.append(fmean([stats.steps for stats in found] or [1]))
            self.unconverged += sum(stats.unconverged for stats in found)

    def deploy(self) -> None:
        """Make ready for inference."""
        self.deployed = pcdeq.freeze(self.network)

    @torch.inference_mode()
    def infer(self) -> None:
        """One forward pass."""
        self.deployed(next(self.turns)[0])


def _length(run: Run) -> str:
    epochs, steps = len(run.metrics), run.config.steps_per_epoch
    return f"{epochs} epoch{'s' if epochs > 1 else ''}" if steps is None else f"{epochs * steps} steps"


@dataclass(frozen=True)
class Entry:
    """What was measured of a model; steps and failures are those of the training steps."""

    row: str
    title: str
    parameters: int
    trained: str
    training: Timing
    inference: Timing
    forward: float
    backward: float
    unconverged: float  # of 100 samples, layers and directions
    peak_bytes: int

    @classmethod
    def of(cls, model: Model, training: Timing, inference: Timing, peak_bytes: int) -> Entry:
        solves = 2 * 64 * len(model.forward) * max(1, len(equilibrium_layers(model.network)))
        return cls(
            row=model.row.name,
            title=model.row.title,
            parameters=model.row.parameters,
            trained=model.trained,
            training=training,
            inference=inference,
            forward=fmean(model.forward),
            backward=fmean(model.backward),
            unconverged=100 * model.unconverged / solves,
            peak_bytes=peak_bytes,
        )

    def cells(self) -> tuple[str, ...]:
        return (
            self.title,
            f"{self.parameters:,}",
            self.trained,
            f"{self.training.median:.1f} ({self.training.low:.1f}-{self.training.high:.1f})",
            f"{self.inference.median:.1f} ({self.inference.low:.1f}-{self.inference.high:.1f})",
            f"{self.forward:.1f}",
            f"{self.backward:.1f}",
            f"{self.unconverged:.2g} %",
            f"{self.peak_bytes / 1e6:.1f}",
        )


def measure_class(rows: tuple[str, ...], data: str, runs: Path | None, warm_up: int, seconds: float) -> list[Entry]:
    """Let the models of a class take turns."""
    batches, _ = batches_of(data)
    batches = [(images.contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # counted instead
        models = {row: Model(row, data, batches, runs, warm_up) for row in rows}
        training = interleave({row: model.train for row, model in models.items()}, seconds)
        memory = {row: peak_memory(model.train) for row, model in models.items()}
        for model in models.values():
            model.deploy()
        inference = interleave({row: model.infer for row, model in models.items()}, seconds)
    return [Entry.of(model, training[row], inference[row], memory[row]) for row, model in models.items()]


def main(classes: str, data: str, runs: Path | None, warm_up: int, seconds: float, out: Path | None) -> None:
    """Measure, print, and write the page and its numbers if asked to."""
    facts: dict[str, Any] = {"data": data, "threads": torch.get_num_threads(), "machine": platform.processor()}
    found: dict[str, list[Entry]] = {}
    lines = ["# Speed of the models that pcDEQ is compared with", ""]
    lines += [" ".join((__doc__ or "").split()), ""]
    lines += [f"Made by `python benchmarks/models.py {' '.join(sys.argv[1:])}`."]
    lines += [f"{data}, batches of 64, {torch.get_num_threads()} thread(s), medians and middle halves."]
    lines += ["Evaluations are a layer's mean; an explicit layer has one.", ""]
    for name in classes.split(","):
        found[name] = measure_class(CLASSES[name], data, runs, warm_up, seconds)
        lines += [f"**{name.upper()}**", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [f"| {' | '.join(entry.cells())} |" for entry in found[name]]
        lines.append("")
        print("\n".join(lines[-len(found[name]) - 1 :]), flush=True)
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    numbers = {name: [asdict(entry) for entry in entries] for name, entries in found.items()}
    write(out.with_suffix(".json"), json.dumps({**facts, "classes": numbers}, indent=1).encode())
    write(out, "\n".join(lines).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", default=DEFAULT, help=f"of {', '.join(CLASSES)}")
    parser.add_argument("--data", default="mnist", choices=("mnist", "cifar10"))
    parser.add_argument("--runs", type=Path, help="folder of finished runs, ROW-DATA-seed0, whose weights to take")
    parser.add_argument("--warm-up", type=int, default=10, help="steps of training of a model without a run")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each model, in training and in inference")
    parser.add_argument("--out", type=Path, help="write a page; its numbers go beside it as .json")
    parser.add_argument("--threads", type=int, default=2)
    options = vars(parser.parse_args())
    torch.set_num_threads(options.pop("threads"))
    main(**options)
