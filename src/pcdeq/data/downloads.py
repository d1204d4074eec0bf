"""The progress of one download, on the standard error stream."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class DownloadBar:
    """What pooch asks of a progress bar (a ``total``, ``update``, ``reset``, ``close``), drawn by rich.

    It appears at the first byte: a file that is in the cache, or an address that is dead, shows nothing.
    """

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._title = progress, title
        self._task: TaskID | None = None

    @property
    def total(self) -> float | None:
        return None if self._task is None else self._progress.tasks[self._task].total

    @total.setter
    def total(self, size: int) -> None:
        # pooch says 0 where the server did not tell the size.
        self._task = self._progress.add_task(self._title, total=size or None)
        self._progress.start()

    def update(self, size: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, size)

    def reset(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop()


class DownloadLines:
    """The same for a log file: one line when the download starts, one when it is complete."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, size: int) -> None:
        self._total = size
        print(f"downloading {self._title}, {size / 1e6:.1f} MB", file=sys.stderr)

    def update(self, size: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def close(self) -> None:
        print(f"downloaded {self._title}", file=sys.stderr)


@contextlib.contextmanager
def download_progress(name: str, url: str, quiet: bool) -> Iterator[DownloadBar | DownloadLines | Literal[False]]:
    """Yield a progress bar for ``pooch``: drawn on a terminal, lines elsewhere, ``False`` when quiet."""
    if quiet:
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    title = f"{name} from {urlsplit(url).hostname}"
    console = Console(stderr=True)
    if not console.is_terminal:
        yield DownloadLines(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=console)
    try:
        yield DownloadBar(progress, title)
    finally:
        progress.stop()
