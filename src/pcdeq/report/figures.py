"""Figures of a run: how it learned, how many steps its solves took, and what it gets wrong."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from pcdeq.data import Dataset
from pcdeq.proofs.certify import Certificate
from pcdeq.recipes import find_row
from pcdeq.report.charts import BLUE, GREEN, ORANGE, finish, new_figure
from pcdeq.training import Evaluation, Run

LAYER_COLOURS = (BLUE, ORANGE, GREEN)
ERROR_ROWS, ERROR_COLUMNS = 3, 4


def draw_run(run: Run) -> list[Path]:
    """Draw the training curves and the steps of the solves into the run folder; return the files.

    >>> import tempfile, pcdeq.training
    >>> from pcdeq.recipes import TrainConfig
    >>> config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(8,), out=tempfile.mkdtemp())
    >>> [path.name for path in draw_run(pcdeq.training.train(config, progress="none"))]
    ['curves.png', 'steps.png']
    """
    figures = {"curves.png": draw_curves(run), "steps.png": draw_steps(run)}
    return [run.write(name, _png(figure)) for name, figure in figures.items()]


def draw_evaluation(run: Run, evaluation: Evaluation, dataset: Dataset) -> Path:
    """Draw the confusion matrix and the worst errors into the run folder; return the file."""
    return run.write(f"errors-{dataset.name}.png", _png(draw_errors(evaluation, dataset)))


def draw_certificate(
    run: Run, certificate: Certificate, labels: Tensor, curve: dict[float, float] | None, name: str
) -> Path:
    """Draw by how much the proved classes lead, and the robustness curve if there is one; return the file."""
    figure = new_figure(8.4 if curve else 4.6, 3.4, f"{run.config.row} on {run.config.data}: what is proved")
    axes = figure.subplots(1, 2 if curve else 1, squeeze=False)[0]
    right = certificate.classes == labels
    groups = [certificate.margin[certificate.proved & which].clamp(min=1e-9) for which in (right, ~right)]
    largest = max((float(group.max()) for group in groups if len(group)), default=1.0)
    smallest = min((float(group.min()) for group in groups if len(group)), default=largest / 10)
    bins = [smallest * (largest / smallest) ** (step / 30) for step in range(31)] if smallest < largest else 10
    axes[0].hist([group.tolist() for group in groups], bins=bins, stacked=True, color=[BLUE, ORANGE])  # pyright: ignore
    axes[0].set(xscale="log", yscale="symlog", xlabel="proved lead of the class's score", ylabel="images")
    missing = int((~certificate.proved).sum())
    axes[0].set_title(f"right (blue), wrong (orange), {missing:,} not proved", fontsize=9)
    if curve:
        axes[1].plot(list(curve), [100 * share for share in curve.values()], marker="o", color=BLUE)
        axes[1].set(xlabel="distance in each pixel, 0 to 1", ylabel="proved and right, %", ylim=(0, 101))
    return run.write(f"{name}.png", _png(figure))


def draw_curves(run: Run) -> Figure:
    """Loss and accuracy by epoch, with the paper's accuracy where the run follows a row of it."""
    metrics, config = run.metrics, run.config
    figure = new_figure(8.4, 3.4, f"{config.row} on {Path(config.data).name}, seed {config.seed}")
    loss, accuracy = figure.subplots(1, 2)
    _line(loss, [line.loss for line in metrics], "training", BLUE)
    _line(loss, [line.test_loss for line in metrics], "test", ORANGE)
    loss.set(yscale="log")
    loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss.yaxis.set_major_formatter("{x:g}")
    loss.yaxis.set_minor_locator(NullLocator())
    _line(accuracy, [line.train_accuracy for line in metrics], "training", BLUE)
    _line(accuracy, [line.test_accuracy for line in metrics], "test", ORANGE)
    if metrics[-1].validation_accuracy is not None:
        _line(accuracy, [line.validation_accuracy or 0.0 for line in metrics], "validation", GREEN)
    row = find_row(config.row, config.data, run.image_shape[0])
    if row.dataset == config.data and row.accuracy is not None:
        accuracy.axhline(row.accuracy, color="0.4", linestyle="--", linewidth=1, label=f"paper {row.accuracy} %")
    finish(loss, "epoch", "cross-entropy")
    finish(accuracy, "epoch", "accuracy in %")
    return figure


def draw_steps(run: Run) -> Figure:
    """Mean forward and backward steps by epoch, a line per equilibrium layer, and ‖W‖₂ of dense layers."""
    metrics = run.metrics
    panels = {"forward steps": "forward_steps", "backward steps": "backward_steps"}
    if metrics[-1].largest_singular_value:
        panels["largest singular value of W"] = "largest_singular_value"
    title = f"{run.config.row} on {run.config.data}: steps of the solves"
    figure = new_figure(8.4 if len(panels) == 2 else 12.0, 3.4, title)
    for axes, (label, name) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        layers = list(zip(*(getattr(line, name) for line in metrics), strict=True))
        for number, (values, colour) in enumerate(zip(layers, LAYER_COLOURS, strict=False), start=1):
            _line(axes, values, f"layer {number}", colour)
        axes.set_ylim(bottom=0)
        finish(axes, "epoch", label, legend=len(layers) > 1)
    return figure


def draw_errors(evaluation: Evaluation, dataset: Dataset) -> Figure:
    """The confusion matrix beside the wrong predictions that the network was surest of."""
    title = f"{dataset.name}: {evaluation.accuracy:.2f} % of {len(evaluation.labels):,} test images"
    figure = new_figure(11.0, 5.2, title)
    ((left, right),) = figure.subfigures(1, 2, squeeze=False, width_ratios=(1.1, 1))
    _draw_confusion(left.subplots(), evaluation, dataset.classes)
    _draw_worst(right, evaluation, dataset)
    return figure


def _draw_confusion(axes: Axes, evaluation: Evaluation, classes: tuple[str, ...]) -> None:
    counts = evaluation.confusion(len(classes))
    wrong = counts.float()
    wrong.fill_diagonal_(0)  # colour shows the errors; the diagonal would outshine them
    axes.imshow(wrong.numpy(), cmap="Oranges", vmin=0, vmax=max(1.0, float(wrong.max())))
    if len(classes) <= 20:
        for i, j in counts.nonzero().tolist():
            dark = wrong[i, j] > 0.6 * wrong.max()
            colour = "0.45" if i == j else "white" if dark else "black"
            axes.text(j, i, f"{int(counts[i, j])}", ha="center", va="center", fontsize=8, color=colour)
        long = max(map(len, classes)) > 2
        axes.set_xticks(range(len(classes)), classes, rotation=90 if long else 0)
        axes.set_yticks(range(len(classes)), classes)
    axes.set(xlabel="predicted", ylabel="true class", title="confusion matrix")
    axes.title.set_fontsize(10)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _draw_worst(figure: SubFigure, evaluation: Evaluation, dataset: Dataset) -> None:
    worst = evaluation.worst_errors(ERROR_ROWS * ERROR_COLUMNS).tolist()
    figure.suptitle("worst errors: true class → prediction" if worst else "no errors", fontsize=10)
    for position, index in enumerate(worst, start=1):
        axes = figure.add_subplot(ERROR_ROWS, ERROR_COLUMNS, position)
        image = dataset.test.images[index].permute(1, 2, 0).squeeze(-1).numpy()
        axes.imshow(image, cmap="gray", vmin=0, vmax=255)
        true, guess = (dataset.classes[int(values[index])] for values in (evaluation.labels, evaluation.predictions))
        axes.set_title(f"{true} → {guess}\n{100 * float(evaluation.confidences[index]):.0f} % sure", fontsize=8)
        axes.set_axis_off()


def _line(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    """What a run's epochs gave, from the first on."""
    epochs, marker = range(1, len(values) + 1), "o" if len(values) <= 20 else None
    axes.plot(epochs, values, label=label, color=colour, marker=marker, markersize=3.5, linewidth=1.6)


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
