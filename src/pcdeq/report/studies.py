"""Figures beyond the paper's, for which trained networks are run: convergence, solvers, tolerance."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pcdeq.equation import Equation
from pcdeq.errors import DataError, PcdeqError
from pcdeq.models import Network, load, pcdeq_layers, pretrained_names
from pcdeq.proofs.order import enclose_near
from pcdeq.proofs.rates import a_priori_rate
from pcdeq.report.charts import BLUE, GREEN, LOOKS, ORANGE, Chart, finish, new_figure
from pcdeq.report.curves import NETWORKS, Family, families
from pcdeq.report.tables import Line
from pcdeq.solvers import Anderson, Picard, run
from pcdeq.theory.metrics import thompson
from pcdeq.training import Evaluation, spread
from pcdeq.training.evaluation import measure

STUDIED_IMAGES = 128  # for convergence and solvers
TESTED_IMAGES = 2_000  # for accuracy
MOST_STEPS = 40
TOLERANCES = tuple(10.0**-digits for digits in range(7))
ROUNDING = 1e-13  # distances below it are of rounding, in float64
Entries = list[dict[str, Any]]  # what was drawn


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network and some test images of its data."""

    activation: str
    title: str
    network: Network
    images: Tensor
    labels: Tensor

    @torch.no_grad()
    def equation(self) -> Equation:
        """The equation of its first equilibrium layer for the first images, in float64."""
        network = copy.deepcopy(self.network).double()
        layer = pcdeq_layers(network)[0]
        before = network[: list(network).index(layer)]
        return layer.equation(before(self.images[:STUDIED_IMAGES].double()))


def find_subjects(lines: Iterable[Line], data_dir: Path | None = None) -> tuple[list[Subject], str | None]:
    """A trained network per activation: of the first class of networks, on the first data set, for which there are any.

    Weights come from the run folders or, where those hold only metrics, from the package. Where these or the data
    cannot be had, there are no subjects but the reason.
    """
    ranked = sorted(families(lines), key=lambda family: (list(NETWORKS).index(family.topology), family.solver))
    try:
        return next(filter(None, (_subjects_of(family, data_dir) for family in ranked)), []), None
    except PcdeqError as error:
        return [], str(error)


def _subjects_of(family: Family, data_dir: Path | None) -> list[Subject]:
    subjects = []
    for activation, line in family.lines.items():
        if (network := _network_of(line)) is not None:
            run = line.runs[0]
            try:
                test = run.dataset(data_dir).test
            except DataError as error:  # which tells of every address that was tried
                raise DataError(
                    f"no pictures of {line.data}: name their folder with --data-dir or PCDEQ_DATA"
                ) from error
            chosen = spread(len(test), TESTED_IMAGES)
            images = run.preprocessing(test.images[chosen])
            subjects.append(Subject(activation, family.title, network, images, test.labels[chosen]))
    return subjects


def _network_of(line: Line) -> Network | None:
    for candidate in line.runs:
        if candidate.has("last"):
            return load(candidate)
    name = f"{line.row.name}-{line.data}"
    return load(name) if name in pretrained_names() else None


def exact(equation: Equation, start: Tensor | None = None) -> Tensor:
    """z* to all digits of float64: plain steps, by default from 0, until they change nothing but the last ones."""
    z = equation.at_zero() if start is None else start
    for _ in range(5_000):
        z, before = equation(z), z
        if torch.allclose(z, before, rtol=1e-15, atol=0):
            break
    return z


@torch.no_grad()
def trace(equation: Equation) -> list[dict[str, float]]:
    """Plain iteration from 0, step by step, the worst of all samples: residual, true error and proved bound.

    All are distances in Thompson's metric, max |log(z / z*)|, in which the theory speaks; so is T4's bound, for the
    smallest input of these samples as floor.
    """
    activation, floor = equation.activation, float(equation.x.min())
    rate = a_priori_rate(activation, floor, 1e-4)
    furthest = math.log(activation.supremum / float(equation.at_zero().min()))
    solution, z = exact(equation), equation.at_zero()
    entries = []
    for step in range(1, MOST_STEPS + 1):
        new = equation(z)
        box = enclose_near(equation, z)
        sides = (thompson(box.upper, z), thompson(z, box.lower)) if bool(box.certified.all()) else ()
        entry = {
            "step": step,
            "residual": float(thompson(new, z).max()),
            "error": float(thompson(z, solution).max()),
            "bound": max((float(side.max()) for side in sides), default=math.nan),
            "a_priori": furthest * rate.factor ** (step - 1),
        }
        entries.append(entry)
        if entry["error"] < ROUNDING:
            break
        z = new
    return entries


def draw_convergence(subjects: list[Subject]) -> Chart:
    """What is true, what is seen and what is proved, step by step, for each activation."""
    looks = {
        "a_priori": ("T4, known in advance", {"color": "0.5", "linestyle": ":"}),
        "bound": ("proved bound", {"color": GREEN, "linewidth": 5, "alpha": 0.4}),  # broad: the error hides it
        "error": ("true error", {"color": BLUE}),
        "residual": ("change in the step", {"color": ORANGE, "linestyle": "--"}),
    }

    def draw(axes: Axes, equation: Equation) -> Entries:
        entries = trace(equation)
        for key, (label, look) in looks.items():
            axes.plot(range(1, len(entries) + 1), [entry[key] for entry in entries], label=label, **look)
        axes.set(ylim=(ROUNDING, 30))
        return entries

    caption = (
        f"Convergence of plain iteration, worst of {STUDIED_IMAGES} test images, first equilibrium layer: "
        f"{subjects[0].title}. T4 with the smallest input of these images as floor."
    )
    labels = "step", "distance to z* (Thompson's metric)"
    return Chart("convergence", caption, *_by_activation(subjects, "plain iteration from 0", labels, draw))


@torch.no_grad()
def draw_solvers(subjects: list[Subject]) -> Chart:
    """Error after so many steps, Picard against Anderson, both from g(0) without a warm start."""

    def draw(axes: Axes, equation: Equation) -> Entries:
        solution, entries = exact(equation).flatten(1), []
        for kind, colour, style in ((Picard, ORANGE, "--"), (Anderson, BLUE, "-")):
            errors = []
            for steps in range(1, MOST_STEPS + 1):
                found = run(equation.problem(), kind(tol=1e-15, max_steps=steps)).value.flatten(1)
                error = ((found - solution).norm(dim=1) / solution.norm(dim=1)).max()
                errors.append(max(float(error), 1e-16))
                entries.append({"solver": kind.__name__, "step": steps, "error": errors[-1]})
                if errors[-1] < ROUNDING:
                    break
            steps = range(1, len(errors) + 1)
            axes.plot(steps, errors, label=kind.__name__, color=colour, linestyle=style, linewidth=1.6)
        return entries

    caption = f"Relative error after so many steps, worst of {STUDIED_IMAGES} test images: {subjects[0].title}."
    labels = "steps", "largest relative error"
    return Chart("solvers", caption, *_by_activation(subjects, "Picard and Anderson", labels, draw))


def _by_activation(
    subjects: list[Subject], title: str, labels: tuple[str, str], draw: Callable[[Axes, Equation], Entries]
) -> tuple[Figure, Entries]:
    """A panel for each network, with a logarithmic axis, and what ``draw`` says that it drew."""
    figure = new_figure(3.1 * len(subjects) + 0.6, 3.6, f"{title}: {subjects[0].title}")
    panels = figure.subplots(1, len(subjects), sharey=True, squeeze=False)[0]
    data: Entries = []
    for number, (subject, axes) in enumerate(zip(subjects, panels, strict=True)):
        axes.set(yscale="log")
        data += [{"activation": subject.activation, **entry} for entry in draw(axes, subject.equation())]
        name = LOOKS[subject.activation]["label"]
        finish(axes, labels[0], "" if number else labels[1], title=name, legend=not number)
    return figure, data


@torch.no_grad()
def draw_tolerances(subjects: list[Subject]) -> Chart:
    """What accuracy a tolerance gives and what it costs, by plain iteration from 0 and by the network's solver."""
    figure = new_figure(11.0, 3.6, f"how exact need it be? {subjects[0].title}")
    panels = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    data: Entries = []
    for solver, axes in zip(("plain", "ours"), panels, strict=False):
        for subject in subjects:
            found = [_at_tolerance(subject, tol, solver) for tol in TOLERANCES]
            steps = [fmean(one.forward_steps) for one in found]
            for tol, one, count in zip(TOLERANCES, found, steps, strict=True):
                same = 100 * float((one.predictions == found[-1].predictions).double().mean())
                entry = {"solver": solver, "tol": tol, "accuracy": one.accuracy, "steps": count, "same_class_%": same}
                data.append({"activation": subject.activation, **entry})
            look = {"marker": "o", "ms": 3, **LOOKS[subject.activation]}
            axes.plot(TOLERANCES, [one.accuracy for one in found], **look)
            panels[2].plot(TOLERANCES, steps, alpha=0.45 if solver == "plain" else 1.0, **look)
    labels = (f"accuracy on {len(subjects[0].labels):,} test images, %", "", "steps per solve")
    titles = ("plain iteration from 0", "ours", "steps: plain (pale) and ours")
    for axes, label, title in zip(panels, labels, titles, strict=True):
        axes.set(xscale="log")
        axes.xaxis.set_inverted(True)
        finish(axes, "tolerance", label, title=title, legend=axes is panels[0])
    caption = f"Accuracy and steps against the tolerance of the solves: {subjects[0].title}."
    return Chart("tolerance", caption, figure, data)


def _at_tolerance(subject: Subject, tol: float, solver: str) -> Evaluation:
    network = copy.deepcopy(subject.network)
    for layer in pcdeq_layers(network):
        if solver == "plain":
            layer.warm, layer.solver = None, Picard(tol=tol)
        else:
            layer.solver = layer.solver.with_options(tol=tol)
    return measure(network, zip(subject.images.split(250), subject.labels.split(250), strict=True))


def draw_studies(subjects: list[Subject]) -> list[Chart]:
    """All of them."""
    return [draw_convergence(subjects), draw_solvers(subjects), draw_tolerances(subjects)] if subjects else []
