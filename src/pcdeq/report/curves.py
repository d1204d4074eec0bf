"""The paper's figures, from the metrics of runs: accuracy, steps and ‖W‖₂ by epoch, mean and band over runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from pcdeq.report.charts import COLOURS, LABELS, STYLES, Chart, finish, new_figure
from pcdeq.report.tables import Line
from pcdeq.training import EpochMetrics

NETWORKS = {"l": "one linear layer (L)", "sc": "one convolution (SC)", "mc": "three convolutions (MC)"}
Quantity = Callable[[EpochMetrics], float]


@dataclass(frozen=True)
class Family:
    """The rows of a network class on one data set that differ in the activation, trained with one solver."""

    data: str
    topology: str
    solver: str
    augmented: bool
    lines: dict[str, Line]  # by activation

    @property
    def name(self) -> str:
        """For file names."""
        parts = [self.data, self.topology, "aug" if self.augmented else "", self.solver.replace("default", "")]
        return "-".join(part for part in parts if part)

    @property
    def title(self) -> str:
        """For people."""
        solver = "" if self.solver == "default" else f", {self.solver} solver"
        return f"{self.data}{', augmented' if self.augmented else ''}, {NETWORKS[self.topology]}{solver}"


def families(lines: Iterable[Line]) -> list[Family]:
    """Sort lines into families; of several lengths of training the longest counts."""
    found: dict[tuple[str, str, str, bool], dict[str, Line]] = {}
    for line in lines:
        row = line.row
        if not line.runs or row.family != "pcdeq" or row.name == "demo" or not line.is_usual:
            continue
        family = found.setdefault((line.data, row.topology, line.solver, row.augment), {})
        if row.activation not in family or family[row.activation].epochs < line.epochs:
            family[row.activation] = line
    return [Family(*key, lines=found[key]) for key in found]


def draw_families(lines: Iterable[Line]) -> list[Chart]:
    """All figures of the paper for which there are runs of at least two epochs."""
    charts: list[Chart] = []
    for family in families(lines):
        family = Family(
            family.data,
            family.topology,
            family.solver,
            family.augmented,
            {name: family.lines[name] for name in COLOURS if name in family.lines and family.lines[name].epochs > 1},
        )
        if not family.lines:
            continue
        charts.append(_draw(family, "accuracy", "test accuracy, %", lambda epoch: epoch.test_accuracy))
        for direction in ("forward", "backward"):
            charts.append(_draw(family, f"{direction}-steps", f"{direction} steps per solve", _mean_steps(direction)))
            if family.topology == "mc":
                charts.append(_draw_layers(family, direction))
        if family.topology == "l":
            charts.append(_draw_singular_values(family))
    return charts


def _mean_steps(direction: str, layer: int | None = None) -> Quantity:
    def quantity(epoch: EpochMetrics) -> float:
        steps = getattr(epoch, f"{direction}_steps")
        return fmean(steps) if layer is None else steps[layer]

    return quantity


def _caption(family: Family, what: str) -> str:
    counts = sorted({len(line.runs) for line in family.lines.values()})
    runs = " or ".join(map(str, counts))
    return f"{what}: {family.title}; mean and range (band) over {runs} run{'s' if counts != [1] else ''}."


def _draw(family: Family, kind: str, label: str, quantity: Quantity) -> Chart:
    figure = new_figure(6.0, 3.8, family.title)
    axes = figure.subplots()
    data = _plot(axes, family, quantity)
    if kind == "accuracy":
        _zoom(axes, data)
    else:
        axes.set_ylim(bottom=0)
    finish(axes, "epoch", label)
    return Chart(f"{kind}-{family.name}", _caption(family, label.split(",")[0].capitalize()), figure, data)


def _plot(axes: Axes, family: Family, quantity: Quantity) -> list[dict[str, Any]]:
    """A line and a band per activation; returns what was drawn."""
    drawn: list[dict[str, Any]] = []
    for activation, line in family.lines.items():
        epochs = range(1, line.epochs + 1)
        values = [[quantity(run.metrics[epoch - 1]) for run in line.runs] for epoch in epochs]
        means = [fmean(value) for value in values]
        lows, highs = [min(value) for value in values], [max(value) for value in values]
        colour, style = COLOURS[activation], STYLES[activation]
        marker = "o" if line.epochs <= 20 else None
        axes.plot(
            epochs, means, color=colour, linestyle=style, label=LABELS[activation], linewidth=1.6, marker=marker, ms=3
        )
        axes.fill_between(epochs, lows, highs, color=colour, alpha=0.2, linewidth=0)
        for epoch, mean, low, high in zip(epochs, means, lows, highs, strict=True):
            entry = {"activation": activation, "epoch": epoch, "mean": mean, "low": low, "high": high}
            drawn.append(entry | {"runs": len(line.runs)})
    return drawn


def _zoom(axes: Axes, data: list[dict[str, Any]]) -> None:
    """Leave out the first epochs' low accuracies where they would hide the differences of the later ones."""
    lows = sorted(entry["low"] for entry in data)
    highest = max(entry["high"] for entry in data)
    bottom = lows[len(lows) // 10]
    margin = 0.1 * max(highest - bottom, 0.1)
    axes.set_ylim(bottom - margin, highest + margin)


def _draw_layers(family: Family, direction: str) -> Chart:
    """Beyond the paper, which averages: a panel per layer."""
    figure = new_figure(11.0, 3.6, f"{family.title}: {direction} steps by layer")
    panels = figure.subplots(1, 3, sharey=True)
    data: list[dict[str, Any]] = []
    for layer, axes in enumerate(panels):
        data += [{"layer": layer + 1, **entry} for entry in _plot(axes, family, _mean_steps(direction, layer))]
        axes.set_title(f"layer {layer + 1}", fontsize=9)
        axes.set_ylim(bottom=0)
        finish(axes, "epoch", f"{direction} steps per solve" if layer == 0 else "", legend=layer == 2)
    name = f"{direction}-steps-layers-{family.name}"
    return Chart(name, _caption(family, f"{direction.capitalize()} steps by layer"), figure, data)


def _draw_singular_values(family: Family) -> Chart:
    figure = new_figure(6.0, 3.8, family.title)
    axes = figure.subplots()
    data = _plot(axes, family, lambda epoch: epoch.largest_singular_value[0])
    axes.axhline(1, color="0.3", linewidth=1)
    note = {"fontsize": 7, "color": "0.3", "ha": "right", "va": "top"}
    axes.text(1, 0.99, "above 1 Banach's theorem says nothing", transform=axes.get_yaxis_transform(), **note)
    axes.set_ylim(bottom=0)
    finish(axes, "epoch", "largest singular value of W")
    return Chart(f"singular-value-{family.name}", _caption(family, "Largest singular value of W"), figure, data)
