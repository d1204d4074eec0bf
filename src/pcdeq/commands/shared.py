"""What the commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, arg

if TYPE_CHECKING:
    from torch import Tensor

    from pcdeq.data import Dataset
    from pcdeq.guarantees.certify import Certificate
    from pcdeq.training import Run

Device = Literal["auto", "cpu", "cuda", "mps"]
Which = Literal["last", "best"]
RunFolder = Annotated[Path, Positional, arg(metavar="RUN")]
Flag = Annotated[bool, FlagCreatePairsOff]


class Command(Protocol):
    """What the command line runs."""

    def run(self) -> None:
        """Do it, printing results; raise `PcdeqError` if it cannot be done."""


def certify_run(run: Run, dataset: Dataset, images: int | None, radius: float = 0.0) -> Certificate:
    """Certify the predictions for so many test images, spread over the test set, or for all."""
    from pcdeq.guarantees.certify import certify
    from pcdeq.training import load

    chosen = spread(dataset, images)
    return certify(load(run), run.preprocessing(dataset.test.images[chosen]), radius=radius)


def spread(dataset: Dataset, images: int | None) -> Tensor:
    """The indices of so many test images, spread over the test set, or of all."""
    import torch

    total = len(dataset.test.labels)
    return torch.linspace(0, total - 1, min(images or total, total)).long()


def print_table(entries: list[dict[str, Any]]) -> None:
    """Columns as wide as their contents; nothing is ever cut off."""
    cells = [["" if value is None else str(value) for value in entry.values()] for entry in entries]
    lines = [list(entries[0]), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
