"""What is measured: the paper's networks on trained weights.

An untrained layer converges too easily to mean anything. The weights are those of the package, fully trained, where it
has them. Of the other networks `benchmarks/weights/` holds those of a finished run, which scripts/keep_runs.py puts
there, or of a short training, which prepare.py makes, and the images. `Case.trained` says how long each was trained.
Here only public names of pcdeq are used, so that older revisions can be measured by today's benchmark (against.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import pcdeq

WEIGHTS = Path(__file__).parent / "weights"
PACKAGE = Path(__file__).parents[1] / "src" / "pcdeq" / "weights"
ACTIVATIONS = ("tanh", "relu6", "softsign", "sigmoid")
BATCH = 64
Batch = tuple[Tensor, Tensor]
# The networks and shapes of images, and steps of the short training, with the row's learning rate; as many as an hour
# on two cores allows.
STEPS = {
    ("l", "mnist"): 9_000,
    ("sc", "mnist"): 300,
    ("mc", "mnist"): 1_500,
    ("sc", "cifar10"): 60,
    ("mc", "cifar10"): 500,
}


@dataclass(frozen=True)
class Case:
    """One network on one shape of images."""

    topology: str
    data: str
    activation: str
    dtype: str = "float32"

    @property
    def group(self) -> tuple[str, str]:
        """What it is reported under: the network, and the images with what they are computed in."""
        return self.topology, self.data if self.dtype == "float32" else f"{self.data} {self.dtype}"

    @property
    def row(self) -> str:
        kind = 2 if self.activation == "sigmoid" else 1
        return f"pcdeq-{kind}-{self.topology}-{self.activation}"

    @property
    def weights(self) -> Path:
        name = f"{self.row}-{self.data}.safetensors"
        return PACKAGE / name if (PACKAGE / name).exists() else WEIGHTS / name

    @property
    def trained(self) -> str:
        """How long: in epochs, as the file says if it is of a whole run, else in steps of the short training."""
        if self.weights.parent == PACKAGE:
            facts = pcdeq.load(self.weights.stem).training_facts
            return "unknown" if facts is None else f"{facts.epochs} epochs"
        with safe_open(self.weights, "pt") as file:
            told = (file.metadata() or {}).get("pcdeq")
        if told is None:
            return f"{STEPS[self.topology, self.data]} steps"
        return f"{json.loads(told)['training']['epochs']} epochs"

    def model(self) -> nn.Sequential:
        """The network with its trained weights."""
        model = pcdeq.build(self.row, self.data)
        model.load_state_dict(load_file(self.weights))
        return model.to(getattr(torch, self.dtype))


def cases(
    topologies: tuple[str, ...], data: tuple[str, ...], activations: tuple[str, ...], dtype: str = "float32"
) -> list[Case]:
    """The cases of the benchmark that were asked for."""
    return [
        Case(topology, shape, activation, dtype)
        for topology, shape in STEPS
        if topology in topologies and shape in data
        for activation in activations
    ]
