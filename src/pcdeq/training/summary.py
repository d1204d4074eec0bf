"""What a finished run's metrics do not tell: how large its network is, and how much of what it says is proved."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from pcdeq.data import Dataset
from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.files import read_json
from pcdeq.models import load
from pcdeq.proofs.certify import certify
from pcdeq.recipes.config import check_types
from pcdeq.training.run import RUNS, Run, find_runs

CERTIFIED_IMAGES = 1_000  # test images; `pcdeq certify` takes them all


@dataclass(frozen=True)
class Summary:
    """The content of ``summary.json``, made after ``epoch`` epochs."""

    epoch: int
    parameters: int
    test_images: int
    certified: int | None  # None for a network about which nothing can be proved
    certified_of: int


def summarise(run: Run, dataset: Dataset | None = None) -> Summary:
    """Certify the predictions for some test images and write ``summary.json``.

    >>> import tempfile, pcdeq.training
    >>> from pcdeq.recipes import TrainConfig
    >>> config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(8,), out=tempfile.mkdtemp())
    >>> summary = summarise(pcdeq.training.train(config, progress="none"))
    >>> summary.parameters, summary.certified, summary.certified_of
    (6474, 1000, 1000)
    """
    dataset = dataset or run.dataset()
    network = load(run)
    chosen = spread(len(dataset.test), CERTIFIED_IMAGES)
    try:
        certified = int(certify(network, run.preprocessing(dataset.test.images[chosen])).proved.sum())
    except UsageError:  # a baseline
        certified = None
    summary = Summary(
        epoch=len(run.metrics),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        test_images=len(dataset.test),
        certified=certified,
        certified_of=len(chosen),
    )
    run.write("summary.json", (json.dumps(asdict(summary), indent=2) + "\n").encode())
    return summary


def read_summary(run: Run) -> Summary | None:
    """The run's summary, if one was made after its last epoch."""
    path = run.path / "summary.json"
    if not path.is_file():
        return None
    try:
        summary = Summary(**read_json(path))
        check_types(summary)
    except (DataError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}; delete it and repeat the command that made it") from error
    return summary if summary.epoch == len(run.metrics) else None


def readable_runs(folder: Path = RUNS) -> tuple[list[Run], list[str]]:
    """The runs in a folder that can be read, and of each other one why not."""
    runs, broken = [], []
    for run in find_runs(folder):
        try:
            _ = run.config, read_summary(run), run.metrics
            runs.append(run)
        except PcdeqError as error:
            broken.append(f"{run.path}: {error}")
    return runs, broken


def spread(total: int, images: int | None) -> Tensor:
    """The indices of so many test images, spread over the test set, or of all.

    >>> spread(10, 4).tolist()
    [0, 3, 6, 9]
    """
    return torch.linspace(0, total - 1, min(images or total, total)).long()
