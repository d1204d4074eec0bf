"""Figures beyond the paper's, for which trained networks are run: convergence, solvers, tolerance."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

from pcdeq.data import load_dataset
from pcdeq.equation import Equation
from pcdeq.errors import ConvergenceWarning
from pcdeq.models import Network, load, pcdeq_layers, pretrained_names
from pcdeq.proofs.order import enclose_near
from pcdeq.proofs.rates import a_priori_rate
from pcdeq.report.charts import BLUE, COLOURS, GREEN, LABELS, ORANGE, STYLES, Chart, finish, new_figure
from pcdeq.report.curves import NETWORKS, families
from pcdeq.report.tables import Line
from pcdeq.solvers import Anderson, Picard, run
from pcdeq.theory.metrics import thompson
from pcdeq.training import spread

STUDIED_IMAGES = 128  # for convergence and solvers
TESTED_IMAGES = 2_000  # for accuracy
MOST_STEPS = 40
TOLERANCES = tuple(10.0**-digits for digits in range(7))
ROUNDING = 1e-13  # distances below it are of rounding, in float64


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network and some test images of its data."""

    activation: str
    title: str
    network: Network
    images: Tensor
    labels: Tensor

    def equation(self) -> Equation:
        """The equation of its first equilibrium layer for the first images, in float64."""
        network = copy.deepcopy(self.network).double()
        layer = pcdeq_layers(network)[0]
        seen: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        with torch.no_grad():
            network(self.images[:STUDIED_IMAGES].double())
        handle.remove()
        return layer.equation(seen[0])


def find_subjects(lines: Iterable[Line], data_dir: Path | None = None) -> list[Subject]:
    """A trained network per activation: of the first class of networks, on the first data set, for which there are any.

    Weights come from the run folders or, where those hold only metrics, from the package.
    """
    ranked = sorted(families(lines), key=lambda family: (list(NETWORKS).index(family.topology), family.solver))
    for family in ranked:
        subjects = []
        for activation in (name for name in COLOURS if name in family.lines):
            network = _network_of(family.lines[activation])
            if network is None:
                continue
            run = family.lines[activation].runs[0]
            dataset = load_dataset(family.data, data_dir=data_dir or run.config.data_dir, quiet=True)
            chosen = spread(len(dataset.test), TESTED_IMAGES)
            images = run.preprocessing(dataset.test.images[chosen])
            subjects.append(Subject(activation, family.title, network, images, dataset.test.labels[chosen]))
        if subjects:
            return subjects
    return []


def _network_of(line: Line) -> Network | None:
    for candidate in line.runs:
        if candidate.has("last"):
            return load(candidate)
    name = f"{line.row.name}-{line.data}"
    return load(name) if name in pretrained_names() else None


def exact(equation: Equation) -> Tensor:
    """z* to all digits of float64: plain steps until they change nothing but the last ones."""
    z = equation.at_zero()
    for _ in range(5_000):
        new = equation(z)
        if bool(torch.allclose(new, z, rtol=1e-15, atol=0)):
            return new
        z = new
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
        bound = torch.maximum(thompson(box.upper, z), thompson(z, box.lower)) if bool(box.certified.all()) else None
        entry = {
            "step": step,
            "residual": _worst(thompson(new, z)),
            "error": _worst(thompson(z, solution)),
            "bound": math.nan if bound is None else _worst(bound),
            "a_priori": furthest * rate.factor ** (step - 1),
        }
        entries.append(entry)
        if entry["error"] < ROUNDING:
            break
        z = new
    return entries


def _worst(distances: Tensor) -> float:
    return float(distances.max())


def draw_convergence(subjects: list[Subject]) -> Chart:
    """What is true, what is seen and what is proved, step by step, for each activation."""
    figure = new_figure(3.1 * len(subjects) + 0.6, 3.6, f"plain iteration from 0: {subjects[0].title}")
    panels = figure.subplots(1, len(subjects), sharey=True, squeeze=False)[0]
    data: list[dict[str, Any]] = []
    looks = {
        "a_priori": ("T4, known in advance", {"color": "0.5", "linestyle": ":"}),
        "bound": ("proved bound", {"color": GREEN, "linewidth": 5, "alpha": 0.4}),  # broad: the error hides it
        "error": ("true error", {"color": BLUE}),
        "residual": ("change in the step", {"color": ORANGE, "linestyle": "--"}),
    }
    for subject, axes in zip(subjects, panels, strict=True):
        entries = trace(subject.equation())
        data += [{"activation": subject.activation, **entry} for entry in entries]
        for key, (label, look) in looks.items():
            values = [entry[key] for entry in entries]
            axes.plot(range(1, len(values) + 1), values, label=label, **look)
        axes.set(yscale="log", ylim=(ROUNDING, 30))
        axes.set_title(LABELS[subject.activation], fontsize=9)
        first = subject is subjects[0]
        finish(axes, "step", "distance to z* (Thompson's metric)" if first else "", legend=first)
    caption = (
        f"Convergence of plain iteration, worst of {STUDIED_IMAGES} test images, first equilibrium layer: "
        f"{subjects[0].title}. T4 with the smallest input of these images as floor."
    )
    return Chart("convergence", caption, figure, data)


@torch.no_grad()
def draw_solvers(subjects: list[Subject]) -> Chart:
    """Error after so many steps, Picard against Anderson, both from g(0) without a warm start."""
    figure = new_figure(3.1 * len(subjects) + 0.6, 3.6, f"Picard and Anderson: {subjects[0].title}")
    panels = figure.subplots(1, len(subjects), sharey=True, squeeze=False)[0]
    data: list[dict[str, Any]] = []
    for subject, axes in zip(subjects, panels, strict=True):
        equation = subject.equation()
        solution = exact(equation)
        for name, kind, colour, style in (("Picard", Picard, ORANGE, "--"), ("Anderson", Anderson, BLUE, "-")):
            errors = []
            for steps in range(1, MOST_STEPS + 1):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    found = run(equation.problem(), kind(tol=1e-15, max_steps=steps))
                error = ((found.value - solution).flatten(1).norm(dim=1) / solution.flatten(1).norm(dim=1)).max()
                errors.append(max(float(error), 1e-16))
                data.append({"activation": subject.activation, "solver": name, "step": steps, "error": errors[-1]})
                if errors[-1] < ROUNDING:
                    break
            axes.plot(range(1, len(errors) + 1), errors, label=name, color=colour, linestyle=style, linewidth=1.6)
        axes.set(yscale="log")
        axes.set_title(LABELS[subject.activation], fontsize=9)
        first = subject is subjects[0]
        finish(axes, "steps", "largest relative error" if first else "", legend=first)
    caption = f"Relative error after so many steps, worst of {STUDIED_IMAGES} test images: {subjects[0].title}."
    return Chart("solvers", caption, figure, data)


@torch.no_grad()
def draw_tolerances(subjects: list[Subject]) -> Chart:
    """What accuracy a tolerance gives and what it costs, by plain iteration from 0 and by the network's solver."""
    figure = new_figure(11.0, 3.6, f"how exact need it be? {subjects[0].title}")
    panels = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    data: list[dict[str, Any]] = []
    for solver, axes in zip(("plain", "ours"), panels, strict=False):
        for subject in subjects:
            entries = [_at_tolerance(subject, tol, solver) for tol in TOLERANCES]
            finest = entries[-1]["classes"]
            for entry in entries:
                same = 100 * float((entry.pop("classes") == finest).double().mean())
                data.append({"activation": subject.activation, **entry, "same_class_%": same})
            _by_tolerance(axes, subject, [entry["accuracy"] for entry in entries])
            if solver == "plain":
                _by_tolerance(panels[2], subject, [entry["steps"] for entry in entries], alpha=0.45)
            else:
                _by_tolerance(panels[2], subject, [entry["steps"] for entry in entries])
    count = f"{len(subjects[0].labels):,} test images"
    finish(panels[0], "tolerance", f"accuracy on {count}, %", integers=False)
    finish(panels[1], "tolerance", "", legend=False, integers=False)
    finish(panels[2], "tolerance", "steps per solve", legend=False, integers=False)
    for axes, title in zip(panels, ("plain iteration from 0", "ours", "steps: plain (pale) and ours"), strict=True):
        axes.set_title(title, fontsize=9)
    caption = f"Accuracy and steps against the tolerance of the solves: {subjects[0].title}."
    return Chart("tolerance", caption, figure, data)


def _at_tolerance(subject: Subject, tol: float, solver: str) -> dict[str, Any]:
    network = copy.deepcopy(subject.network)
    layers = pcdeq_layers(network)
    for layer in layers:
        if solver == "plain":
            layer.warm, layer.solver = None, Picard(tol=tol)
        else:
            layer.solver = layer.solver.with_options(tol=tol)
    classes, steps = [], []
    for images in subject.images.split(250):
        classes.append(network(images).argmax(1))
        steps += [layer.last_forward.steps for layer in layers if layer.last_forward is not None]
    found = torch.cat(classes)
    right = 100 * float((found == subject.labels).double().mean())
    return {"solver": solver, "tol": tol, "accuracy": right, "steps": sum(steps) / len(steps), "classes": found}


def _by_tolerance(axes: Axes, subject: Subject, values: list[float], alpha: float = 1.0) -> None:
    name = subject.activation
    look = {"color": COLOURS[name], "linestyle": STYLES[name], "marker": "o", "ms": 3, "alpha": alpha}
    axes.plot(TOLERANCES, values, label=LABELS[name], **look)
    axes.set(xscale="log")
    axes.xaxis.set_inverted(True)


def draw_studies(subjects: list[Subject]) -> list[Chart]:
    """All of them."""
    return [draw_convergence(subjects), draw_solvers(subjects), draw_tolerances(subjects)] if subjects else []
