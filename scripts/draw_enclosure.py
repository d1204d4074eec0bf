"""Draws docs/img/enclosure.png: bounds that close in on an equilibrium from both sides."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure

import pcdeq
from pcdeq.proofs.order import enclose_near
from pcdeq.solvers import run

TARGET = Path(__file__).parents[1] / "docs" / "img" / "enclosure.png"
STEPS = 14


def main() -> None:
    torch.manual_seed(0)
    layer = pcdeq.PcDEQLinear(20, "tanh", warm_start=False).double()
    with torch.no_grad():
        layer.operator.weight_v.uniform_()
        layer.operator.weight_g.fill_(0.55)
        equation = layer.equation(0.3 * torch.randn(1, 20).double())
        exact = run(equation.problem(), pcdeq.Anderson(tol=1e-14, max_steps=500)).value
        below, above = torch.zeros_like(exact), torch.ones_like(exact)
        lower, upper, errors, widths = [], [], [], []
        for _ in range(STEPS):
            box = enclose_near(equation, below)
            lower.append(float(below[0, 0]))
            upper.append(float(above[0, 0]))
            errors.append(float((below - exact).abs().max()))
            widths.append(float((box.upper - below).max()))
            below, above = equation(below), equation(above)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.fill_between(range(STEPS), lower, upper, color="#0072b2", alpha=0.15)
    left.plot(lower, color="#0072b2", marker="o", label="from 0: below z*")
    left.plot(upper, color="#d55e00", marker="o", label="from sup s: above z*")
    left.axhline(float(exact[0, 0]), color="black", linewidth=0.8, linestyle="--", label="z*")
    left.set(xlabel="plain steps", ylabel="one component")
    left.set_title("order: either side stays on its side (T1)", fontsize=10)
    left.legend(frameon=False)
    finite = [(step, width) for step, width in enumerate(widths) if width < 1e6]
    right.semilogy(errors, color="black", marker="o", label="true error")
    right.semilogy(*zip(*finite, strict=True), color="#009e73", marker="s", linestyle="--", label="proved bound (T3)")
    right.set(xlabel="plain steps")
    right.set_title("a few products more, and the error is known", fontsize=10)
    right.legend(frameon=False)
    figure.savefig(TARGET, dpi=150)


if __name__ == "__main__":
    main()
