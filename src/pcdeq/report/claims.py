"""What the paper's text says, checked against runs and trained networks.

A claim holds, does not hold, or was not measured because there are no runs for it; each tells what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor

from pcdeq.equation import Equation
from pcdeq.recipes import PAPER_DATASETS, Recipe, rows
from pcdeq.report.charts import LOOKS
from pcdeq.report.curves import families
from pcdeq.report.studies import Subject, exact, trace
from pcdeq.report.tables import Line
from pcdeq.theory.asymptotic import asymptotic_mapping

SETTLED = 1 / 4  # part of training after which steps are compared with those of the last epoch
GROWTH = 1.10
PAPERS = "paper_"  # before what is counted by the paper's rule
DIRECTIONS = ("forward", "backward")
Measure = Callable[[Equation], float | Tensor]  # of the first equilibrium layer of a trained network


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper and what became of it."""

    statement: str
    source: str
    measured: str
    held: bool | None = None  # None: not measured

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return {True: "held", False: "did not hold", None: "not measured"}[self.held]

    def cells(self) -> dict[str, str]:
        """For a table."""
        return {"claim": self.statement, "where": self.source, "verdict": self.verdict, "measured": self.measured}


def check_claims(lines: Iterable[Line], subjects: Sequence[Subject], reason: str | None = None) -> list[Claim]:
    """Check every claim against these runs, and against the networks in ``subjects``; ``reason`` says why none is."""
    there = [line for line in lines if line.runs]
    usual = [line for line in there if line.is_usual]
    lines = [line for line in usual if line.row.family == "pcdeq"]  # as the paper has them
    reason = reason or "no trained network at hand"
    claims = [
        *_steps_do_not_grow(lines),
        *_rivals_grow(usual),
        _sigmoid_below_eight(lines),
        *_lipschitz(lines),
        _unique(subjects, reason),
        _asymptotic(subjects, reason),
        _geometric(subjects, reason),
        *_reproduced(lines),
        _best_on_svhn(lines),
        *_order_on_cifar10(lines),
        _parameters(),
        *_text_against_tables(),
    ]
    note = _not_counted(there)
    return [replace(claim, measured=claim.measured + note) if claim.held is None else claim for claim in claims]


def _not_counted(lines: Sequence[Line]) -> str:
    """Why runs that are there do not count: what they were trained with."""
    settings = {
        f"--steps-per-epoch {line.steps_per_epoch}" if line.steps_per_epoch else " ".join(line.changes)
        for line in lines
        if not line.is_usual
    }
    return f" (runs with {', '.join(sorted(settings))} are not counted)" if settings else ""


def _rule(solver: str) -> str:
    return {"paper": "the paper's rule", "default": "our solver"}.get(solver, solver)


def _growth(line: Line, rule: str = "") -> dict[str, tuple[float, float]]:
    """Steps after a quarter of training, by when layers have left their tiny initial weights, and in the last epoch."""
    early = max(1, round(SETTLED * line.epochs))
    found = {name: [line.steps(f"{rule}{name}", epoch) for epoch in (early, line.epochs)] for name in DIRECTIONS}
    return {name: (first, last) for name, (first, last) in found.items() if first is not None and last is not None}


def _steps_do_not_grow(lines: list[Line]) -> list[Claim]:
    statement = "The number of steps does not grow during training (by over 10 % after its first quarter)."
    claims = []
    for family in families(line for line in lines if line.is_full):
        counted = all(_growth(line, PAPERS) for line in family.lines.values())
        rule = PAPERS if counted else ""  # the claim is about the paper's count; older runs have only their solver's
        steps = {
            f"{name} {direction}": pair
            for name, line in family.lines.items()
            for direction, pair in _growth(line, rule).items()
        }
        parts = [f"{name} {early:.1f} → {late:.1f}" for name, (early, late) in steps.items()]
        whose = "the paper's rule" if counted else _rule(family.solver)
        held = all(late <= GROWTH * early for early, late in steps.values())
        claims.append(Claim(statement, "5.3", f"{family.title}, {whose}: {', '.join(parts)}", held))
    return claims or [Claim(statement, "5.3", "no run is whole")]


def _rivals_grow(lines: list[Line]) -> list[Claim]:
    """What is said of the others, by the same measure."""
    claims = []
    for family, title in (("deq", "DEQ"), ("mondeq", "monDEQ")):
        statement = f"In {title} the number of steps grows during training (by over 10 % after its first quarter)."
        whole = [line for line in lines if line.row.family == family and line.is_full]
        steps = {f"{_name(line)} {way}": pair for line in whole for way, pair in _growth(line).items()}
        parts = [f"{name} {early:.1f} → {late:.1f}" for name, (early, late) in steps.items()]
        held = all(late > GROWTH * early for early, late in steps.values()) if steps else None
        claims.append(Claim(statement, "5.3", ", ".join(parts) or "no run is whole", held))
    return claims


def _name(line: Line) -> str:
    return f"{line.row.title} on {line.data}{', our recipe' if line.row.recipe == 'fast' else ''}"


def _sigmoid_below_eight(lines: list[Line]) -> Claim:
    statement = "With sigmoid a forward solve takes fewer than eight steps."
    sigmoid = [line for line in lines if line.row.activation == "sigmoid"]
    if not sigmoid:
        return Claim(statement, "5.3", "no run with sigmoid")
    most: dict[str, float] = {}
    for line in sigmoid:
        epochs = [epoch for run in line.runs for epoch in run.metrics]
        counted = [max(epoch.paper_forward_steps) for epoch in epochs if epoch.paper_forward_steps]
        whose = "the paper's rule" if counted else _rule(line.solver)
        most[f"{_name(line)}, {whose}"] = max(counted or [max(epoch.forward_steps) for epoch in epochs])
    parts = [f"{name}: {steps:.1f}" for name, steps in most.items()]
    return Claim(statement, "5.3", f"largest mean of an epoch: {'; '.join(parts)}", max(most.values()) < 8)


def _lipschitz(lines: list[Line]) -> list[Claim]:
    above = "The Lipschitz bound ‖W‖ exceeds 1 for most of training with tanh, softsign and sigmoid (L{})."
    below = "With ReLU6 it stays below 1 throughout (L{})."
    claims = []
    for recipe, end in (("paper", ""), ("fast", ", our recipe")):
        dense = [line for line in lines if line.row.topology == "l" and line.is_full and line.row.recipe == recipe]
        if recipe == "fast" and not dense:
            continue
        norms = {
            line: [epoch.largest_singular_value[0] for run in line.runs for epoch in run.metrics] for line in dense
        }
        shares = {line: fmean(norm > 1 for norm in norms[line]) for line in dense if line.row.activation != "relu6"}
        parts = [
            f"{line.row.activation} in {100 * part:.0f} % of epochs ({_rule(line.solver)})"
            for line, part in shares.items()
        ]
        relu6 = [norm for line in dense if line.row.activation == "relu6" for norm in norms[line]]
        none = "no run" if dense else "no run of an L network is whole"
        held = all(share > 0.5 for share in shares.values()) if shares else None
        claims += [
            Claim(above.format(end), "5.4", ", ".join(parts) or none, held),
            Claim(
                below.format(end),
                "5.4",
                f"largest {max(relu6):.3f}" if relu6 else none,
                max(relu6) < 1 if relu6 else None,
            ),
        ]
    return claims


def _unique(subjects: Sequence[Subject], reason: str) -> Claim:
    def distance(equation: Equation) -> Tensor:
        low, high = exact(equation), exact(equation, torch.full_like(equation.x, equation.activation.supremum))
        return (high - low).abs().max() / low.abs().max()

    statement = "The fixed point is unique, whatever ‖W‖: from everywhere iteration arrives at the same point."
    title = " ".join({subject.title for subject in subjects})  # they share it
    text = f"{title}: from 0 and from the top of the cone, relative distance"
    return _measured(Claim(statement, "4, 5.4", text), distance, ".0e", 1e-10, subjects, reason)


def _asymptotic(subjects: Sequence[Subject], reason: str) -> Claim:
    def size(equation: Equation) -> Tensor:
        one = equation.select(torch.arange(1))
        return asymptotic_mapping(one)(torch.ones_like(one.x)).abs().max()  # numerically, not in closed form

    statement = (
        "The asymptotic mapping of a pcDEQ layer is zero, hence its spectral radius, hence a fixed point exists."
    )
    return _measured(Claim(statement, "4", "largest component at z = 1:"), size, ".0e", 1e-6, subjects, reason)


def _geometric(subjects: Sequence[Subject], reason: str) -> Claim:
    def factor(equation: Equation) -> float:
        errors = [entry["error"] for entry in trace(equation) if entry["error"] > 1e-11]
        return max(late / early for early, late in pairwise(errors))

    text = "largest factor between the errors of two steps (Thompson's metric, 128 images):"
    claim = Claim("Plain iteration converges geometrically.", "3, 4", text)
    return _measured(claim, factor, ".2f", 1.0, subjects, reason)


@torch.no_grad()
def _measured(
    claim: Claim, measure: Measure, style: str, limit: float, subjects: Sequence[Subject], reason: str
) -> Claim:
    """The claim with a number for each network, the largest of which must be below the limit."""
    if not subjects:
        return replace(claim, measured=reason)
    numbers = {subject.activation: float(measure(subject.equation())) for subject in subjects}
    told = ", ".join(f"{name} {number:{style}}" for name, number in numbers.items())
    return replace(claim, measured=f"{claim.measured} {told}", held=max(numbers.values()) < limit)


def _reproduced(lines: list[Line]) -> list[Claim]:
    """The accuracies themselves, where a row was trained at full length."""
    claims = []
    for family in families(lines):
        known = [line for line in family.lines.values() if line.difference is not None]
        if not known:
            continue
        text = ", ".join(f"{line.row.activation} {line.difference:+.2f} ({len(line.runs)} runs)" for line in known)
        if family.recipe == "paper":
            within = 0.2 if family.topology == "l" else 0.3
            held = all(abs(line.difference or 0.0) <= within for line in known)
            statement = f"The table's accuracies, {family.title}: within {within} points."
        else:
            held = all(round(line.accuracy or 0.0, 1) >= (line.published or 0.0) for line in known)
            statement = f"The table's accuracies, {family.title}: reached, to their digit."
        claims.append(Claim(statement, "Tables 1-3", f"ours less the paper's: {text}", held))
    return claims


def _by_recipe(lines: list[Line], data: str) -> dict[Recipe, list[Line]]:
    """The whole runs on some data with the usual solver, without augmentation."""
    whole = [line for line in lines if line.data == data and line.is_full and line.solver == "default"]
    plain = [line for line in whole if not line.row.augment]
    recipes: tuple[Recipe, ...] = ("paper", "fast")
    return {recipe: found for recipe in recipes if (found := [line for line in plain if line.row.recipe == recipe])}


def _best_on_svhn(lines: list[Line]) -> Claim:
    statement = "On SVHN the highest accuracy is that of MC with ReLU6."
    rivals = max(row.accuracy or 0.0 for row in rows("svhn") if row.family != "pcdeq")
    table = max((row for row in rows("svhn")), key=lambda row: row.accuracy or 0.0)
    parts, held = [f"the paper's table: {table.title} {table.accuracy}"], []
    for found in _by_recipe(lines, "svhn").values():
        if len({line.row.activation for line in found if line.row.topology == "mc"}) < len(LOOKS):
            continue  # without all four it says nothing
        best = max(found, key=lambda line: line.accuracy or 0.0)
        parts.append(f"{_name(best)} {best.accuracy:.2f} of {len(found)} rows (others' best, published: {rivals})")
        held.append(best.row.name == "pcdeq-1-mc-relu6" and (best.accuracy or 0.0) > rivals)
    if not held:
        parts.append("not all of MC was trained here")
    return Claim(statement, "5.2", "; ".join(parts), all(held) if held else None)


def _order_on_cifar10(lines: list[Line]) -> list[Claim]:
    """Not a sentence of the text, but what its table says of activations."""
    claims = []
    for topology in ("sc", "mc"):
        published = {
            row.activation: row.accuracy or 0.0
            for row in rows("cifar10")
            if row.kind == topology and row.family == "pcdeq"
        }
        order = sorted(published, key=lambda name: -published[name])
        statement = (
            f"On CIFAR-10 the order of activations is, with {topology.upper()}, {', '.join(order)} (the table's)."
        )
        known = 0
        for found in _by_recipe(lines, "cifar10").values():
            ours = {line.row.activation: line.accuracy or 0.0 for line in found if line.row.topology == topology}
            if len(ours) < len(order):
                continue
            known += 1
            ranked = sorted(ours, key=lambda name: -ours[name])
            text = ", ".join(f"{name} {ours[name]:.2f}" for name in ranked)
            recipe = "our recipe" if found[0].row.recipe == "fast" else "its schedule"
            claims.append(Claim(statement, "Table 3", f"{recipe}: {text}", ranked == order))
        if not known:
            claims.append(Claim(statement, "Table 3", "not all four were trained to the end"))
    return claims


def _parameters() -> Claim:
    """Of each scenario, a data set with augmentation or without: the largest pcDEQ against the smallest rival."""
    statement = "In each scenario pcDEQs have fewer parameters than NODE, ANODE and monDEQ."
    parts, held = [], []
    for data in PAPER_DATASETS:
        for augment in (False, True):
            scenario = [row for row in rows(data) if row.augment == augment]
            ours = [row.parameters for row in scenario if row.family == "pcdeq"]
            theirs = [row.parameters for row in scenario if row.family != "pcdeq"]
            if ours and theirs:
                name = f"{data}, augmented" if augment else data
                parts.append(f"{name}: at most {max(ours):,}, theirs at least {min(theirs):,}")
                held.append(max(ours) < min(theirs))
    return Claim(statement, "5.2", f"the networks as built here: {'; '.join(parts)}", all(held))


def _text_against_tables() -> list[Claim]:
    """Two sentences that the paper's own tables do not bear out."""
    mnist = {row.name: row.accuracy or 0.0 for row in rows("mnist")}
    cifar = {row.title: row.accuracy or 0.0 for row in rows("cifar10") if row.augment and row.family == "pcdeq"}
    worst = min(value for name, value in mnist.items() if "-sc-" in name)
    best = max(cifar, key=lambda title: cifar[title])
    return [
        Claim(
            "On MNIST every pcDEQ outperforms the other models of its class.",
            "5.2",
            f"the paper's table: worst pcDEQ-SC {worst}, monDEQ-SC {mnist['mondeq-sc']}",
            worst > mnist["mondeq-sc"],
        ),
        Claim(
            "With augmentation pcDEQ-1-MC-Softsign* has the highest accuracy.",
            "5.2",
            f"the paper's table: {best} {cifar[best]}, pcDEQ-1-MC-Softsign* {cifar['pcDEQ-1-MC-Softsign*']}",
            best == "pcDEQ-1-MC-Softsign*",
        ),
    ]
