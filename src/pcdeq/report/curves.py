"""The paper's figures, from the metrics of runs: accuracy, steps and ‖W‖₂ by epoch, mean and band over runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from pcdeq.recipes import Recipe
from pcdeq.report.charts import LOOKS, Chart, finish, new_figure
from pcdeq.report.figures import draw_curves
from pcdeq.report.tables import Line
from pcdeq.training import EpochMetrics

NETWORKS = {
    "l": "one linear layer (L)",
    "sc": "one convolution (SC)",
    "mc": "three convolutions (MC)",
    "tc": "two convolutions (TC)",
}
CURVES = ("epoch", "loss", "train_accuracy", "test_loss", "test_accuracy")
Quantity = Callable[[EpochMetrics], float]


@dataclass(frozen=True)
class Family:
    """The rows of a network class on one data set that differ in the activation, trained by one recipe and solver."""

    data: str
    topology: str
    recipe: Recipe
    solver: str
    augmented: bool
    lines: dict[str, Line]  # by activation

    @property
    def name(self) -> str:
        """For file names."""
        parts = [self.data, self.topology, "aug" if self.augmented else ""]
        parts += ["" if self.recipe == "paper" else self.recipe, self.solver.replace("default", "")]
        return "-".join(part for part in parts if part)

    @property
    def title(self) -> str:
        """For people."""
        recipe = "" if self.recipe == "paper" else ", our recipe"
        solver = "" if self.solver == "default" else f", {self.solver} solver"
        return f"{self.data}{', augmented' if self.augmented else ''}, {NETWORKS[self.topology]}{recipe}{solver}"


def families(lines: Iterable[Line]) -> list[Family]:
    """Sort lines into families, each in the order of `LOOKS`; of several lengths of training the longest counts."""
    found: dict[tuple[str, str, Recipe, str, bool], dict[str, Line]] = {}
    for line in lines:
        row = line.row
        if not line.runs or row.family != "pcdeq" or row.name == "demo" or not line.is_usual:
            continue
        family = found.setdefault((line.data, row.topology, row.recipe, line.solver, row.augment), {})
        if row.activation not in family or family[row.activation].epochs < line.epochs:
            family[row.activation] = line
    return [Family(*key, {name: of[name] for name in LOOKS if name in of}) for key, of in found.items()]


def draw_families(lines: Iterable[Line]) -> list[Chart]:
    """All figures of the paper for which there are runs of at least two epochs."""
    charts: list[Chart] = []
    for family in families(lines):
        family = replace(family, lines={name: line for name, line in family.lines.items() if line.epochs > 1})
        if not family.lines:
            continue
        charts.append(_draw(family, "accuracy", "test accuracy, %", lambda epoch: epoch.test_accuracy))
        for direction in ("forward", "backward"):
            charts.append(_draw_steps(family, direction))
            if family.topology == "mc":
                charts.append(_draw_layers(family, direction))
        if family.topology == "l":
            label = "largest singular value of W"
            charts.append(_draw(family, "singular-value", label, lambda epoch: epoch.largest_singular_value[0]))
    return charts


def draw_others(lines: Iterable[Line]) -> list[Chart]:
    """The curves of every other run, such as the demo's, a rival's or one with settings of its own."""
    lines = [line for line in lines if line.runs]
    drawn = [line for family in families(lines) for line in family.lines.values() if line.epochs > 1]
    charts = []
    for line in lines:
        if any(line is other for other in drawn):
            continue
        run = line.runs[0]
        more = f", the first of {len(line.runs)}" if len(line.runs) > 1 else ""
        caption = f"Loss and accuracy by epoch: {' '.join([line.row.title, *line.changes])}, run {run.path.name}{more}."
        data = [{name: getattr(epoch, name) for name in CURVES} for epoch in run.metrics]
        charts.append(Chart(f"curves-{run.path.name}", caption, draw_curves(run), data))
    return charts


def _mean_steps(direction: str, layers: slice = slice(None)) -> Quantity:
    return lambda epoch: fmean(getattr(epoch, f"{direction}_steps")[layers])


def _is_counted(line: Line) -> bool:
    """Whether all its runs, in all epochs, have the paper's count, which older ones lack."""
    return all(epoch.paper_forward_steps for run in line.runs for epoch in run.metrics)


def _caption(family: Family, what: str) -> str:
    counts = sorted({len(line.runs) for line in family.lines.values()})
    runs = " or ".join(map(str, counts))
    return f"{what}: {family.title}; mean and range (band) over {runs} run{'s' if counts != [1] else ''}."


def _draw(family: Family, kind: str, label: str, quantity: Quantity) -> Chart:
    figure = new_figure(6.0, 3.8, family.title)
    axes = figure.subplots()
    data = _plot(axes, family, quantity)
    if kind == "singular-value":
        axes.axhline(1, color="0.3", linewidth=1)
        note = {"fontsize": 7, "color": "0.3", "ha": "right", "va": "top"}
        axes.text(1, 0.99, "above 1 Banach's theorem says nothing", transform=axes.get_yaxis_transform(), **note)
    if kind == "accuracy":
        _zoom(axes, data, _mark_published(axes, family))
    else:
        axes.set_ylim(bottom=0)
    finish(axes, "epoch", label)
    caption = _caption(family, label[0].upper() + label[1:].split(",")[0])
    marks = " Triangles: published." if kind == "accuracy" else ""
    return Chart(f"{kind}-{family.name}", f"{caption}{marks}", figure, data)


def _plot(axes: Axes, family: Family, quantity: Quantity) -> list[dict[str, Any]]:
    """A line and a band per activation; returns what was drawn."""
    drawn: list[dict[str, Any]] = []
    for activation, line in family.lines.items():
        entries = []
        for number, epoch in enumerate(zip(*(run.metrics for run in line.runs), strict=True), start=1):
            values = [quantity(metrics) for metrics in epoch]
            entry = {"mean": fmean(values), "low": min(values), "high": max(values), "runs": len(values)}
            entries.append({"activation": activation, "epoch": number, **entry})
        epochs, means, lows, highs = ([entry[key] for entry in entries] for key in ("epoch", "mean", "low", "high"))
        axes.plot(epochs, means, linewidth=1.6, marker="o" if line.epochs <= 20 else None, ms=3, **LOOKS[activation])
        axes.fill_between(epochs, lows, highs, color=LOOKS[activation]["color"], alpha=0.2, linewidth=0)
        drawn += entries
    return drawn


def _mark_published(axes: Axes, family: Family) -> list[float]:
    """The paper's accuracies, at the right edge, in the colours of their lines; return them."""
    published = {name: line.published for name, line in family.lines.items() if line.published is not None}
    for activation, accuracy in published.items():
        mark = {"marker": "<", "color": LOOKS[activation]["color"], "clip_on": False, "markersize": 5}
        axes.plot(1.0, accuracy, transform=axes.get_yaxis_transform(), **mark)
    return list(published.values())


def _zoom(axes: Axes, data: list[dict[str, Any]], published: list[float]) -> None:
    """Leave out the first epochs' low accuracies where they would hide the differences of the later ones."""
    bottom = min(sorted(entry["low"] for entry in data)[len(data) // 10], *published, 100.0)
    highest = max(*(entry["high"] for entry in data), *published, 0.0)
    margin = 0.1 * max(highest - bottom, 0.1)
    axes.set_ylim(bottom - margin, highest + margin)


def _draw_steps(family: Family, direction: str) -> Chart:
    """As the paper counts them and, where training used another solver, as that took them."""
    label = f"{direction} steps per solve"
    rules = {"solver": ("in training, ours" if family.solver == "default" else "in training", direction, family.lines)}
    counted = {name: line for name, line in family.lines.items() if _is_counted(line)}
    if counted and family.solver != "paper":
        rules["paper"] = ("the paper's rule, at the end of each epoch", f"paper_{direction}", counted)
    figure = new_figure(6.0 if len(rules) == 1 else 9.0, 3.8, family.title)
    data: list[dict[str, Any]] = []
    for number, (axes, (rule, (title, quantity, lines))) in enumerate(
        zip(figure.subplots(1, len(rules), sharey=True, squeeze=False)[0], rules.items(), strict=True)
    ):
        drawn = _plot(axes, replace(family, lines=lines), _mean_steps(quantity))
        data += [{"rule": rule, **entry} for entry in drawn]
        finish(axes, "epoch", "" if number else label, title=title if len(rules) > 1 else "")
    figure.axes[0].set_ylim(bottom=0)  # when all is drawn: it is shared, and would follow no further panel
    return Chart(f"{direction}-steps-{family.name}", _caption(family, label.capitalize()), figure, data)


def _draw_layers(family: Family, direction: str) -> Chart:
    """Beyond the paper, which averages: a panel per layer."""
    figure = new_figure(11.0, 3.6, f"{family.title}: {direction} steps by layer")
    data: list[dict[str, Any]] = []
    for layer, axes in enumerate(figure.subplots(1, 3, sharey=True)):
        drawn = _plot(axes, family, _mean_steps(direction, slice(layer, layer + 1)))
        data += [{"layer": layer + 1, **entry} for entry in drawn]
        label = f"{direction} steps per solve" if layer == 0 else ""
        finish(axes, "epoch", label, title=f"layer {layer + 1}", legend=layer == 2)
    figure.axes[0].set_ylim(bottom=0)
    name = f"{direction}-steps-layers-{family.name}"
    return Chart(name, _caption(family, f"{direction.capitalize()} steps by layer"), figure, data)
