"""A page to play with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from pcdeq.commands.shared import Checkpoint
from pcdeq.errors import UsageError


@dataclass(frozen=True)
class Play:
    """Write a page to play with: draw a digit, and watch the network settle from below and from above.

    One HTML file that opens from disk in any browser, and needs nothing else. It takes networks of dense layers, one of
    them an equilibrium (the L rows); several of them, each with another activation, share a page.
    """

    networks: Annotated[tuple[str, ...], Positional, arg(metavar="[RUN ...]", help_behavior_hint="")] = ()
    """Run folders, or names of networks of the package. (default: those of the package, with four activations)"""
    out: Annotated[Path, arg(aliases=("-o",))] = Path("play.html")
    """The page."""
    checkpoint: Checkpoint = "last"

    def run(self) -> None:
        """Write the page."""
        from pcdeq.models import load
        from pcdeq.play import SHIPPED, write_page

        if self.out.suffix not in (".html", ".htm"):
            raise UsageError(f"the page must be .html, got {self.out}")
        networks = {name: load(name, self.checkpoint) for name in self.networks or SHIPPED}
        page = write_page(networks, self.out)
        print(f"{page}: {', '.join(networks)}, {page.stat().st_size / 1e6:.2f} MB")
        print("open it in a browser")
