"""A figure with its data, and how it is drawn and kept: PNG and SVG to look at, CSV to draw it anew."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from pcdeq.files import write_file

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
LOOKS: dict[str, dict[str, Any]] = {  # of the paper's activations, in its order
    "relu6": {"label": "ReLU6", "color": ORANGE, "linestyle": "-"},
    "tanh": {"label": "tanh", "color": BLUE, "linestyle": "--"},
    "softsign": {"label": "softsign", "color": GREEN, "linestyle": "-."},
    "sigmoid": {"label": "sigmoid", "color": PURPLE, "linestyle": ":"},
}


@dataclass(frozen=True, eq=False)
class Chart:
    """One figure, named like its files, with the numbers in it."""

    name: str
    caption: str
    figure: Figure
    data: Sequence[dict[str, Any]]

    @cached_property
    def svg(self) -> bytes:
        """As text that browsers draw, made once; the same bytes for the same figure."""
        picture = io.BytesIO()
        with rc_context({"svg.hashsalt": self.name, "svg.fonttype": "path"}):
            self.figure.savefig(picture, format="svg", metadata={"Date": None})
        return picture.getvalue()

    def save(self, folder: Path) -> None:
        """Write all three files."""
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png", metadata={"Software": None})
        table = io.StringIO()
        writer = csv.DictWriter(table, list(self.data[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _short(value) for key, value in entry.items()} for entry in self.data)
        for suffix, content in (("png", picture.getvalue()), ("svg", self.svg), ("csv", table.getvalue().encode())):
            write_file(folder / f"{self.name}.{suffix}", content)


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure with a title."""
    figure = Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12))
    figure.suptitle(title, fontsize=11)
    return figure


def finish(axes: Axes, xlabel: str, ylabel: str, *, title: str = "", legend: bool = True) -> None:
    """Labels, a light grid, and no more frame than needed."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, fontsize=9)
    if axes.get_xscale() == "linear":  # epochs or steps
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=8)
