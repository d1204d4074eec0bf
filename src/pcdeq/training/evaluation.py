"""How well a trained network does: on a data set, or on pictures of one's own."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcdeq.data import Batches, Dataset, load_dataset
from pcdeq.data.datasets import size_in_words
from pcdeq.errors import ConvergenceWarning, PcdeqError, UsageError
from pcdeq.models import equilibrium_layers, load
from pcdeq.training.run import Run, Which

Device = Literal["auto", "cpu", "cuda", "mps"]
EVALUATION_BATCH = 256


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a network said about every image of a split.

    >>> labels, predictions = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])
    >>> result = Evaluation(labels, predictions, torch.ones(3), 0.2, (5.0,), unconverged=0, seconds=0.1)
    >>> round(result.accuracy, 1), result.confusion(2).tolist()
    (66.7, [[1, 0], [1, 1]])
    """

    labels: Tensor  # (n,)
    predictions: Tensor  # (n,)
    confidences: Tensor  # (n,) the probability given to the prediction
    loss: float
    forward_steps: tuple[float, ...]  # a number per equilibrium layer, the mean over batches
    unconverged: int
    seconds: float

    @property
    def correct(self) -> int:
        """How many images were classified correctly."""
        return int((self.labels == self.predictions).sum())

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.correct / max(1, len(self.labels))

    def confusion(self, num_classes: int) -> Tensor:
        """How often class i (row) was called class j (column)."""
        pairs = self.labels * num_classes + self.predictions
        return pairs.bincount(minlength=num_classes**2).reshape(num_classes, num_classes)

    def worst_errors(self, count: int) -> Tensor:
        """Positions of the wrong predictions that the network was surest of, worst first."""
        wrong = (self.labels != self.predictions).nonzero()[:, 0]
        return wrong[self.confidences[wrong].argsort(descending=True)][:count]


@torch.inference_mode()
def measure(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Evaluation:
    """Run a network over batches, in evaluation mode, and leave it in the mode it was in."""
    start = time.perf_counter()
    layers = equilibrium_layers(network)
    was_training = network.training
    network.eval()
    seen: list[Tensor] = []  # of each image label, prediction, confidence and loss
    steps = [0] * len(layers)
    unconverged = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # counted instead
        for images, truth in batches:
            if not len(truth):
                continue  # this process has no part in the last batch
            logits = network(images).float()
            confidence, prediction = logits.softmax(1).max(1)
            loss = F.cross_entropy(logits, truth, reduction="none")
            seen.append(torch.stack([truth.float(), prediction.float(), confidence, loss], 1))
            for i, layer in enumerate(layers):
                if layer.last_forward is not None:
                    steps[i] += layer.last_forward.steps
                    unconverged += layer.last_forward.unconverged
    network.train(was_training)
    table = torch.cat(seen).cpu() if seen else torch.empty(0, 4)
    labels, predictions, confidences, losses = table.unbind(1)
    return Evaluation(
        labels=labels.long(),
        predictions=predictions.long(),
        confidences=confidences,
        loss=float(losses.double().sum()) / max(1, len(losses)),
        forward_steps=tuple(total / max(1, len(seen)) for total in steps),
        unconverged=unconverged,
        seconds=time.perf_counter() - start,
    )


def evaluate(
    run: str | os.PathLike[str] | Run,
    data: str | None = None,
    *,
    checkpoint: Which = "last",
    device: Device = "auto",
    batch_size: int = EVALUATION_BATCH,
    data_dir: Path | None = None,
    quiet: bool = False,
) -> tuple[Evaluation, Dataset]:
    """Test a run's network on the test images of its data set, or of another of the same shape.

    Returns the data set too, for pictures of the errors.

    >>> import tempfile, pcdeq.training
    >>> from pcdeq.recipes import TrainConfig
    >>> config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(8,), out=tempfile.mkdtemp())
    >>> run = pcdeq.training.train(config, progress="none")
    >>> evaluation, dataset = evaluate(run)
    >>> evaluation.accuracy == run.accuracy, evaluation.unconverged, dataset.name
    (True, 0, 'mnist-mini')
    """
    run = Run.open(run)
    own = data is None or Path(data).expanduser().is_dir()  # of pictures in another folder, too, the run knows the size
    size, place = run.config.size if own else None, data_dir or run.config.data_dir
    dataset = load_dataset(data or run.config.data, data_dir=place, size=size, quiet=quiet)
    if dataset.image_shape != run.image_shape or dataset.num_classes != len(run.preprocessing.classes):
        here = f"{dataset.num_classes} classes of {size_in_words(dataset.image_shape)}"
        trained = f"{len(run.preprocessing.classes)} classes of {size_in_words(run.image_shape)} images"
        raise UsageError(f"{run.path} was trained on {trained}; {dataset.name} has {here}")
    where = pick_device(device)
    mean, std = run.preprocessing.mean, run.preprocessing.std
    batches = Batches(dataset.test, batch_size, mean=mean, std=std, device=where, channels_last=True)
    evaluation = measure(load(run, checkpoint).to(where), batches)
    if not math.isfinite(evaluation.loss):
        raise PcdeqError(f"the network of {run.path} gives infinite numbers or NaN: its weights are of no use")
    return evaluation, dataset


def pick_device(name: Device) -> torch.device:
    """The device of this name, or the best there is; `UsageError` if this machine has none such."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available[name]:
        raise UsageError(f"this machine has no {name} device; use --device auto")
    return torch.device(name)
