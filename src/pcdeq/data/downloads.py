"""The progress of one download, on the standard error stream."""

from __future__ import annotations


class DownloadBar:
    """What pooch asks of a progress bar (a ``total``, ``update``, ``reset``, ``close``), drawn by rich.

    It appears at the first byte: a file that is in the cache, or an address that is dead, shows nothing. In a log file,
    where there is no bar to draw, a line says that the download starts, and another that it is complete.
    """

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.console = Console(stderr=True, highlight=False)
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task(title, total=None)
        self.title = title

    def _begin(self, size: int) -> None:
        # pooch says 0 where the server did not tell the size.
        self.progress.update(self.task, total=size or None)
        self.progress.start()
        self._say(f"downloading {self.title}, {size / 1e6:.1f} MB")

    total = property(fset=_begin)

    def update(self, size: int) -> None:
        self.progress.advance(self.task, size)

    def reset(self) -> None:
        self.progress.update(self.task, completed=0)

    def close(self) -> None:
        self._say(f"downloaded {self.title}")

    def _say(self, line: str) -> None:
        if self.progress.disable:
            self.console.print(line, soft_wrap=True)

    def stop(self) -> None:
        """The download has ended, well or not; where none began, there is nothing to take away."""
        if self.progress.live.is_started:  # else some versions of rich print an empty line
            self.progress.stop()
