"""What the commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, arg

Device = Literal["auto", "cpu", "cuda", "mps"]
Which = Literal["last", "best"]
RunFolder = Annotated[Path, Positional, arg(metavar="RUN")]
Flag = Annotated[bool, FlagCreatePairsOff]


class Command(Protocol):
    """What the command line runs."""

    def run(self) -> None:
        """Do it, printing results; raise `PcdeqError` if it cannot be done."""


def print_table(entries: list[dict[str, Any]]) -> None:
    """Columns as wide as their contents; nothing is ever cut off."""
    cells = [["" if value is None else str(value) for value in entry.values()] for entry in entries]
    lines = [list(entries[0]), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
