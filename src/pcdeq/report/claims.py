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
from pcdeq.recipes import rows
from pcdeq.report.curves import families
from pcdeq.report.studies import Subject, exact, trace
from pcdeq.report.tables import Line
from pcdeq.theory.asymptotic import asymptotic_mapping

SETTLED = 10  # the epoch with which the last one is compared
GROWTH = 1.10
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
    # The claims are about pcDEQs as the paper has them; of the baselines only their published figures are compared.
    lines = [line for line in lines if line.runs and line.is_usual and line.row.family == "pcdeq"]
    reason = reason or "no trained network at hand"
    return [
        *_steps_do_not_grow(lines),
        _sigmoid_below_eight(lines),
        *_lipschitz(lines),
        _unique(subjects, reason),
        _asymptotic(subjects, reason),
        _geometric(subjects, reason),
        *_reproduced(lines),
        *_text_against_tables(),
    ]


def _rule(solver: str) -> str:
    return {"paper": "the paper's rule", "default": "our solver"}.get(solver, solver)


def _steps_do_not_grow(lines: list[Line]) -> list[Claim]:
    """Last epoch against epoch 10: by then the layers have left their tiny initial weights."""
    statement = f"The number of steps does not grow during training (by over 10 % after epoch {SETTLED})."
    claims = []
    for family in families(line for line in lines if line.epochs > SETTLED):
        steps = {
            f"{name} {direction}": [line.steps(direction, epoch) or 0.0 for epoch in (SETTLED, line.epochs)]
            for name, line in family.lines.items()
            for direction in ("forward", "backward")
        }
        parts = [f"{name} {early:.1f} → {late:.1f}" for name, (early, late) in steps.items()]
        epochs = max(line.epochs for line in family.lines.values())
        text = f"{family.title}, {_rule(family.solver)}, epoch {SETTLED} → {epochs}: {', '.join(parts)}"
        held = all(late <= GROWTH * early for early, late in steps.values())
        claims.append(Claim(statement, "5.3", text, held))
    return claims or [Claim(statement, "5.3", f"no run is longer than {SETTLED} epochs")]


def _sigmoid_below_eight(lines: list[Line]) -> Claim:
    statement = "With sigmoid a forward solve takes fewer than eight steps."
    sigmoid = [line for line in lines if line.row.activation == "sigmoid"]
    if not sigmoid:
        return Claim(statement, "5.3", "no run with sigmoid")
    most = [max(max(epoch.forward_steps) for run in line.runs for epoch in run.metrics) for line in sigmoid]
    parts = [
        f"{line.row.title} on {line.data}, {_rule(line.solver)}: {steps:.1f}"
        for line, steps in zip(sigmoid, most, strict=True)
    ]
    return Claim(statement, "5.3", f"largest mean of an epoch: {'; '.join(parts)}", max(most) < 8)


def _lipschitz(lines: list[Line]) -> list[Claim]:
    above = "The Lipschitz bound ‖W‖ exceeds 1 for most of training with tanh, softsign and sigmoid (L)."
    below = "With ReLU6 it stays below 1 throughout (L)."
    dense = [line for line in lines if line.row.topology == "l" and line.epochs > SETTLED]
    none = "no run" if dense else "no run of an L network is longer than 10 epochs"
    values = {line: [epoch.largest_singular_value[0] for run in line.runs for epoch in run.metrics] for line in dense}
    shares = {
        line: fmean(norm > 1 for norm in norms) for line, norms in values.items() if line.row.activation != "relu6"
    }
    parts = [
        f"{line.row.activation} in {100 * part:.0f} % of epochs ({_rule(line.solver)})" for line, part in shares.items()
    ]
    held = all(share > 0.5 for share in shares.values()) if shares else None
    relu6 = [norm for line, norms in values.items() if line.row.activation == "relu6" for norm in norms]
    return [
        Claim(above, "5.4", ", ".join(parts) or none, held),
        Claim(below, "5.4", f"largest {max(relu6):.3f}" if relu6 else none, max(relu6) < 1 if relu6 else None),
    ]


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
        within = 0.2 if family.topology == "l" else 0.3
        text = ", ".join(f"{line.row.activation} {line.difference:+.2f} ({len(line.runs)} runs)" for line in known)
        held = all(abs(line.difference or 0.0) <= within for line in known)
        statement = f"The table's accuracies, {family.title}: within {within} points."
        claims.append(Claim(statement, "Tables 1-3", f"ours less the paper's: {text}", held))
    return claims


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
