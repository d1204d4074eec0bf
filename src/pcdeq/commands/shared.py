"""What the commands share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from tyro.conf import FlagCreatePairsOff, Positional, arg

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda", "mps"]
Which = Literal["last", "best"]
RunFolder = Annotated[Path, Positional, arg(metavar="RUN")]
Flag = Annotated[bool, FlagCreatePairsOff]


class Command(Protocol):
    """What the command line runs."""

    def run(self) -> None:
        """Do it, printing results; raise `PcdeqError` if it cannot be done."""


@contextmanager
def saying(what: str, quiet: bool = False) -> Iterator[None]:
    """Tell on standard error what takes so long: a spinner on a terminal, a line elsewhere."""
    if quiet:
        yield
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        console.print(f"{what} ...", soft_wrap=True)
        yield


def track(items: Sequence[T], what: str, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    shown = console.is_terminal and not quiet
    yield from rich_track(items, what, console=console, transient=True, disable=not shown)


def print_table(entries: list[dict[str, Any]]) -> None:
    """Columns as wide as their contents; nothing is ever cut off."""
    cells = [["" if value is None else str(value) for value in entry.values()] for entry in entries]
    lines = [list(entries[0]), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
