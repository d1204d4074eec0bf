"""What the commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, arg

from pcdeq.errors import PcdeqError

Flag = Annotated[bool, FlagCreatePairsOff]
# Options that several commands have.
RunFolder = Annotated[Path, Positional, arg(metavar="RUN", help="Run folder, as `pcdeq list runs` shows it.")]
Checkpoint = Annotated[
    Literal["last", "best"], arg(help="last, or best, which exists if there was a validation split.")
]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], arg(help="Where to compute.")]
RunDataDir = Annotated[Path | None, arg(help="Where data sets are kept. (default: as in training)")]
DataDir = Annotated[Path | None, arg(help="Where data sets are kept. (default: the user's cache)")]
Json = Annotated[Flag, arg(help="Print a JSON object, for programs.")]


class Command(Protocol):
    """What the command line runs."""

    def run(self) -> None:
        """Do it, printing results; raise `PcdeqError` if it cannot be done."""


@contextmanager
def saying(what: str, quiet: bool = False) -> Iterator[None]:
    """Tell on standard error what takes so long: a spinner on a terminal, a line elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, quiet=quiet)
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        console.print(f"{what} ...", soft_wrap=True)
        yield


def track(items: Sequence[Any], what: str, quiet: bool = False) -> Iterator[Any]:
    """The items, with a bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True, quiet=quiet)
    yield from rich_track(items, what, console=console, transient=True, disable=not console.is_terminal)


def show(objects: Iterable[dict[str, Any]], text: Iterable[str], as_json: bool) -> None:
    """Print a line of JSON per object, for programs, or the lines of text, for people."""
    for line in map(json.dumps, objects) if as_json else text:
        print(line)


def warn(message: str) -> None:
    """Tell on standard error what did not work but is not what was asked for."""
    print(f"pcdeq: {' '.join(message.split())}", file=sys.stderr)


def draw(what: str, figures: Callable[[], Sequence[Path]], quiet: bool) -> None:
    """Draw and write figures, once the result is told, and say where; if they cannot be written, that is a warning."""
    sys.stdout.flush()
    try:
        paths = figures()
    except PcdeqError as error:
        warn(f"no figure: {error}; the result is complete without; to have it, copy the run to where you may write")
        return
    if not quiet:
        print(what, ", ".join(map(str, paths)))


def table(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of columns as wide as their contents; nothing is ever cut off."""
    cells = [["" if value is None else str(value) for value in entry.values()] for entry in entries]
    rows = [list(entries[0]), *cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
