"""pcDEQ beside the models that it is compared with: time, evaluations and memory of a step; part of `make bench`.

Unlike in `measure.py`, where other methods solve the same networks, these are other networks, of about the same
size. All take turns in one process, on the same batches, each at its own default tolerance, after the same short
training; so the numbers of steps are those of the beginning, and monDEQ's and DEQ's grow later.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from cases import Batch, Case
from measure import Timing, interleave, peak_memory
from report import write
from torch.nn import functional as F

import pcdeq
from pcdeq.errors import ConvergenceWarning
from pcdeq.models import build, equilibrium_layers
from pcdeq.recipes import find_row

RESULTS = Path(__file__).parents[1] / "results" / "bench" / "models.md"
# A step of the ODEs and of the convolutions by FFT takes seconds: --classes l,mc,sc,ode asks for all.
CLASSES = {
    "l": ("pcdeq-1-l-relu6", "mondeq-l", "deq-l-relu6", "explicit-l-relu6"),
    "mc": ("pcdeq-1-mc-relu6", "mondeq-mt", "deq-mc-relu6", "explicit-mc-relu6"),
    "sc": ("pcdeq-1-sc-relu6", "mondeq-sc", "deq-sc-relu6", "explicit-sc-relu6"),
    "ode": ("pcdeq-1-mc-relu6", "node", "anode"),
}
DEFAULT = "l,mc"
COLUMNS = ("row", "parameters", "training ms", "inference ms", "forward", "backward", "unconverged", "MB")


class Model:
    """A row's network with its optimiser, ready to train and to infer."""

    def __init__(self, row: str, data: str, batches: list[Batch]) -> None:
        torch.manual_seed(0)
        self.row = find_row(row, data)
        self.network = build(row, data)
        self.turns = itertools.cycle(batches)
        parameters = self.network.parameters()
        lr, decay = self.row.lr, self.row.weight_decay
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=True)
        self.forward: list[float] = []  # evaluations of each step, the mean over the layers
        self.backward: list[float] = []
        self.unconverged = 0

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


@dataclass(frozen=True)
class Entry:
    """What was measured of a model."""

    model: Model
    training: Timing
    inference: Timing
    peak_bytes: int

    def cells(self) -> tuple[str, ...]:
        model = self.model
        return (
            model.row.title,
            f"{model.row.parameters:,}",
            f"{self.training.median:.1f} ({self.training.low:.1f}-{self.training.high:.1f})",
            f"{self.inference.median:.1f} ({self.inference.low:.1f}-{self.inference.high:.1f})",
            f"{fmean(model.forward):.1f}",
            f"{fmean(model.backward):.1f}",
            f"{model.unconverged:,}",
            f"{self.peak_bytes / 1e6:.1f}",
        )


def measure_class(rows: tuple[str, ...], data: str, warm_up: int, seconds: float) -> list[Entry]:
    """Train all models for some steps, then let them take turns."""
    batches, _ = Case("mc", data, "relu6").batches()
    batches = [(images.contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]
    models = {row: Model(row, data, batches) for row in rows}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # counted instead
        for model in models.values():
            for _ in range(warm_up):
                model.train()
        training = interleave({row: model.train for row, model in models.items()}, seconds)
        memory = {row: peak_memory(model.train) for row, model in models.items()}
        for model in models.values():
            model.deploy()
        inference = interleave({row: model.infer for row, model in models.items()}, seconds)
    return [Entry(model, training[row], inference[row], memory[row]) for row, model in models.items()]


def main(classes: str = DEFAULT, data: str = "mnist", warm_up: int = 10, seconds: float = 1.0) -> None:
    """Measure, print and write the page."""
    lines = ["# Speed of the models that pcDEQ is compared with", ""]
    lines += [" ".join((__doc__ or "").split()), "", "Evaluations are a layer's mean; an explicit layer has one."]
    lines += [f"{data}, batches of 64, {torch.get_num_threads()} thread(s), {warm_up} steps of training before.", ""]
    for name in classes.split(","):
        lines += [f"**{name.upper()}**", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for entry in measure_class(CLASSES[name], data, warm_up, seconds):
            lines.append(f"| {' | '.join(entry.cells())} |")
            print(lines[-1], flush=True)
        lines.append("")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    write(RESULTS, "\n".join(lines).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", default=DEFAULT, help=f"of {', '.join(CLASSES)}")
    parser.add_argument("--data", default="mnist", choices=("mnist", "cifar10"))
    parser.add_argument("--warm-up", type=int, default=10, help="training steps before")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each model, in training and in inference")
    parser.add_argument("--threads", type=int, default=2)
    options = vars(parser.parse_args())
    torch.set_num_threads(options.pop("threads"))
    main(**options)
