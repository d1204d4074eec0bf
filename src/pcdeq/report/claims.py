"""What the paper's text says, checked against runs and trained networks.

A claim holds, does not hold, or was not measured because there are no runs for it; each tells what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch

from pcdeq.errors import PcdeqError
from pcdeq.recipes import rows
from pcdeq.report.curves import families
from pcdeq.report.studies import Subject, exact, find_subjects, trace
from pcdeq.report.tables import Line, collect
from pcdeq.theory.asymptotic import asymptotic_mapping
from pcdeq.training import Run

SETTLED = 10  # the epoch with which the last one is compared
GROWTH = 1.10
EIGHT = 8


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper and what became of it."""

    statement: str
    source: str
    measured: str
    held: bool | None  # None: not measured

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return {True: "held", False: "did not hold", None: "not measured"}[self.held]

    def cells(self) -> dict[str, str]:
        """For a table."""
        return {"claim": self.statement, "where": self.source, "verdict": self.verdict, "measured": self.measured}


def check_claims(
    runs: Iterable[Run],
    *,
    subjects: Sequence[Subject] | None = None,
    data_dir: Path | None = None,
    reason: str | None = None,
) -> list[Claim]:
    """Check every claim against these runs, and against ``subjects`` or the networks of the runs.

    ``reason`` says why there are no subjects.
    """
    # The claims are about pcDEQs as the paper has them; of the baselines only their published figures are compared.
    lines = [line for group in collect(runs).values() for line in group if line.runs and line.is_usual]
    lines = [line for line in lines if line.row.family == "pcdeq"]
    reason = reason or "no trained network at hand"
    if subjects is None:
        try:
            subjects = find_subjects(lines, data_dir)
        except PcdeqError as error:
            subjects, reason = [], str(error)
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


def _rule(line: Line) -> str:
    return "the paper's rule" if line.solver == "paper" else "our solver" if line.solver == "default" else line.solver


def _steps_do_not_grow(lines: list[Line]) -> list[Claim]:
    """Last epoch against epoch 10: by then the layers have left their tiny initial weights."""
    statement = f"The number of steps does not grow during training (by over 10 % after epoch {SETTLED})."
    claims = []
    for family in families(lines):
        long = {name: line for name, line in family.lines.items() if line.epochs > SETTLED}
        if not long:
            continue
        ratios, parts = [], []
        for name, line in long.items():
            for direction in ("forward", "backward"):
                early, late = (
                    fmean(fmean(getattr(run.metrics[epoch - 1], f"{direction}_steps")) for run in line.runs)
                    for epoch in (SETTLED, line.epochs)
                )
                ratios.append(late / early)
                parts.append(f"{name} {direction} {early:.1f} → {late:.1f}")
        epochs = max(line.epochs for line in long.values())
        text = f"{family.title}, {_rule(next(iter(long.values())))}, epoch {SETTLED} → {epochs}: {', '.join(parts)}"
        claims.append(Claim(statement, "5.3", text, max(ratios) <= GROWTH))
    return claims or [Claim(statement, "5.3", f"no run is longer than {SETTLED} epochs", None)]


def _sigmoid_below_eight(lines: list[Line]) -> Claim:
    statement = "With sigmoid a forward solve takes fewer than eight steps."
    sigmoid = [line for line in lines if line.row.activation == "sigmoid"]
    if not sigmoid:
        return Claim(statement, "5.3", "no run with sigmoid", None)
    most = {
        f"{line.row.title} on {line.data}, {_rule(line)}": max(
            max(epoch.forward_steps) for run in line.runs for epoch in run.metrics
        )
        for line in sigmoid
    }
    text = "largest mean of an epoch: " + "; ".join(f"{name}: {value:.1f}" for name, value in most.items())
    return Claim(statement, "5.3", text, max(most.values()) < EIGHT)


def _lipschitz(lines: list[Line]) -> list[Claim]:
    above = "The Lipschitz bound ‖W‖ exceeds 1 for most of training with tanh, softsign and sigmoid (L)."
    below = "With ReLU6 it stays below 1 throughout (L)."
    dense = [line for line in lines if line.row.topology == "l" and line.epochs > SETTLED]
    if not dense:
        return [Claim(text, "5.4", "no run of an L network is longer than 10 epochs", None) for text in (above, below)]
    values = {
        line: [epoch.largest_singular_value[0] for run in line.runs for epoch in run.metrics]
        for line in dense
        if line.last[0].largest_singular_value
    }
    others = {line: norms for line, norms in values.items() if line.row.activation != "relu6"}
    relu6 = {line: norms for line, norms in values.items() if line.row.activation == "relu6"}
    shares = {line: fmean(norm > 1 for norm in norms) for line, norms in others.items()}
    parts = [
        f"{line.row.activation} in {100 * share:.0f} % of epochs ({_rule(line)})" for line, share in shares.items()
    ]
    largest = max((max(norms) for norms in relu6.values()), default=float("nan"))
    held = all(share > 0.5 for share in shares.values())
    return [
        Claim(above, "5.4", ", ".join(parts) or "no run", held if shares else None),
        Claim(below, "5.4", f"largest {largest:.3f}" if relu6 else "no run", largest < 1 if relu6 else None),
    ]


@torch.no_grad()
def _unique(subjects: Sequence[Subject], reason: str) -> Claim:
    statement = "The fixed point is unique, whatever ‖W‖: from everywhere iteration arrives at the same point."
    if not subjects:
        return Claim(statement, "4, 5.4", reason, None)
    apart, parts = 0.0, []
    for subject in subjects:
        equation = subject.equation()
        low, high = exact(equation), torch.full_like(equation.x, equation.activation.supremum)
        for _ in range(2_000):
            high = equation(high)
        distance = float((high - low).abs().max() / low.abs().max())
        apart = max(apart, distance)
        parts.append(f"{subject.activation} {distance:.0e}")
    text = f"{subjects[0].title}: from 0 and from the top of the cone, relative distance {', '.join(parts)}"
    return Claim(statement, "4, 5.4", text, apart < 1e-10)


@torch.no_grad()
def _asymptotic(subjects: Sequence[Subject], reason: str) -> Claim:
    statement = (
        "The asymptotic mapping of a pcDEQ layer is zero, hence its spectral radius, hence a fixed point exists."
    )
    if not subjects:
        return Claim(statement, "4", reason, None)
    parts, largest = [], 0.0
    for subject in subjects:
        equation = subject.equation().select(torch.arange(1))
        point = torch.ones_like(equation.x)
        limit = asymptotic_mapping(lambda z, equation=equation: equation(z))(point)  # numerically, not in closed form
        largest = max(largest, float(limit.abs().max()))
        parts.append(f"{subject.activation} {float(limit.abs().max()):.0e}")
    return Claim(statement, "4", f"largest component at z = 1: {', '.join(parts)}", largest < 1e-6)


def _geometric(subjects: Sequence[Subject], reason: str) -> Claim:
    statement = "Plain iteration converges geometrically."
    if not subjects:
        return Claim(statement, "3, 4", reason, None)
    worst, parts = 0.0, []
    for subject in subjects:
        errors = [entry["error"] for entry in trace(subject.equation()) if entry["error"] > 1e-11]
        ratio = max(late / early for early, late in pairwise(errors))
        worst = max(worst, ratio)
        parts.append(f"{subject.activation} {ratio:.2f}")
    text = f"largest factor between the errors of two steps (Thompson's metric, 128 images): {', '.join(parts)}"
    return Claim(statement, "3, 4", text, worst < 1)


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
