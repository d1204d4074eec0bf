"""What is measured: the paper's networks on trained weights.

An untrained layer converges too easily to mean anything. `benchmarks/weights/` holds a short training of
each network; prepare.py makes them, and the images. Here only public names of pcdeq are used, so that older
revisions can be measured by today's benchmark (against.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

import pcdeq

WEIGHTS = Path(__file__).parent / "weights"
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

    @property
    def row(self) -> str:
        kind = 2 if self.activation == "sigmoid" else 1
        return f"pcdeq-{kind}-{self.topology}-{self.activation}"

    @property
    def weights(self) -> Path:
        return WEIGHTS / f"{self.row}-{self.data}.safetensors"

    def model(self) -> nn.Sequential:
        """The network with its trained weights."""
        model = pcdeq.build(self.row, self.data)
        model.load_state_dict(load_file(self.weights))
        return model


def cases(topologies: tuple[str, ...], data: tuple[str, ...], activations: tuple[str, ...]) -> list[Case]:
    """The cases of the benchmark that were asked for."""
    return [
        Case(topology, shape, activation)
        for topology, shape in STEPS
        if topology in topologies and shape in data
        for activation in activations
    ]
