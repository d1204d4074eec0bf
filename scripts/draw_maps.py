"""Draws the pictures of the examples beyond networks into docs/img: ``python scripts/draw_maps.py``."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from draw_docs import BLUE, GREEN, GREY, ORANGE, new_figure, save

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> dict:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def banks() -> None:
    """Left: what each bank pays, over all shocks. Right: what is paid in all, two solves against a thousand shocks."""
    market = example("clearing_payments")
    total, shares, cash = market["market"]()
    fn = market["clearing"](total, shares)
    low, high = market["stress"](fn, 0.5 * cash, cash)
    shocks = cash * (0.5 + 0.5 * torch.rand(1000, len(cash), generator=torch.Generator().manual_seed(1)).double())
    seen = fn.solve(torch.zeros_like(shocks), shocks).value
    figure, (each, all_) = new_figure(2)
    order = (low / total).argsort()
    place = torch.arange(len(total))
    each.vlines(
        place, (low / total)[order], (high / total)[order], color=ORANGE, linewidth=4, label="proved, all shocks"
    )
    each.plot(place, (seen / total).mean(0)[order], ".", color="black", label="mean of 1000 random shocks")
    each.set(xlabel="bank, in order of what it pays at worst", ylabel="paid / owed", ylim=(0, 1.05))
    each.legend(frameon=False, fontsize=9, loc="lower right")
    all_.hist(seen.sum(1), bins=40, color=GREY)
    for bound in (low.sum(), high.sum()):
        all_.axvline(float(bound), color=ORANGE, linewidth=2)
    all_.set(xlabel="paid in all; lines: proved for every shock", ylabel="random shocks")
    save(figure, "banks.png")


def cells() -> None:
    """Left: powers rise to infinity at the border. Right: the loads of the cells with the demand."""
    network = example("power_control")
    powers, loads = network["uplink"](network["network"]()), network["load_coupling"](network["network"]())
    radius = powers.exists(torch.zeros(1, 16).double(), torch.ones(1, 1).double())
    border = -10 * float(radius.upper.log10())
    figure, (uplink, load) = new_figure(2)
    targets = torch.linspace(-16, border - 0.002, 200).double()[:, None]
    found = powers.solve(torch.zeros(200, 16).double(), 10 ** (targets / 10)).value
    uplink.semilogy(targets, found.sum(1), color=BLUE)
    uplink.axvline(border, color=ORANGE)
    uplink.axvspan(border, border + 2, color=ORANGE, alpha=0.15)
    uplink.text(border + 0.1, float(found.sum(1)[0]) * 2, "proved:\nno powers\nwill do", color=ORANGE, fontsize=9)
    uplink.set(xlabel="target SINR of all users, dB", ylabel="total power, W", xlim=(-16, border + 2))
    demands = torch.linspace(0.5, 30, 100).double()[:, None]
    busy = loads.solve(torch.zeros(100, 4).double(), (1e6 * demands).expand(100, 16)).value
    load.plot(demands, busy)
    load.axhline(1, color=GREY, linestyle="--", linewidth=0.8)
    load.set(xlabel="demand of each user, Mbit/s", ylabel="load of the four cells", ylim=(0, 4))
    save(figure, "cells.png")


def epidemic() -> None:
    """Left: the endemic level against the infection rate. Right: whom to protect."""
    people = example("epidemic")
    indices = people["contacts"]()
    close = torch.rand(people["CONTACTS"], generator=torch.Generator().manual_seed(1)).double().repeat(2)
    rates, x = 0.6 * close**4, torch.full((people["PEOPLE"],), 1e-3).double()
    figure, (level, whom) = new_figure(2)
    factors = torch.linspace(0, 2, 15)
    for imported, colour in ((1e-2, ORANGE), (1e-3, BLUE), (1e-4, GREEN)):
        totals = []
        for factor in factors.tolist():
            layer = people["epidemic"](indices, factor * rates)
            totals.append(float(layer.solve((x * 0 + imported)[None]).value.mean()))
        level.plot(factors, totals, color=colour, label=f"importation {imported:g}")
    level.set(xlabel="infection rates, relative", ylabel="infected share")
    level.legend(frameon=False, fontsize=9)
    layer = people["epidemic"](indices, rates)
    layer(x[None]).sum().backward()
    score = people["importance"](indices, rates, layer.operator.weight.grad[0])
    degree = torch.bincount(indices[0], minlength=len(x))
    numbers = [0, 50, 100, 200, 400, 800]
    for name, order, colour in (
        ("by their gradient", score.argsort(descending=True), BLUE),
        ("by their number of contacts", degree.argsort(descending=True), ORANGE),
        ("at random", torch.arange(len(x)), GREY),
    ):
        totals = [people["protect"](order[:number], indices, rates, x) for number in numbers]
        whom.plot(numbers, totals, "o-", color=colour, label=name)
    whom.set(xlabel="people protected", ylabel="people infected", ylim=(0, None))
    whom.legend(frameon=False, fontsize=9)
    save(figure, "epidemic.png")


def demand() -> None:
    """Evaluations of the slowest market, ours and pyblp's, as the share of the outside good falls."""
    import pyblp

    import pcdeq

    work = example("demand_inversion")
    shares = (0.3, 0.1, 0.03, 0.01, 0.003)
    ours, theirs = [], []
    for outside in shares:
        problem, markets, sigma, pi = work["load"]("nevo", outside)
        fn = work["demand"](markets, solver=pcdeq.Anderson(tol=1e-14, memory=5))
        ours.append(float((fn.solve(markets.logit(), *markets.consumers(sigma, pi)).steps + 1).double().mean()))
        found = problem.solve(
            sigma.numpy(),
            pi.numpy(),
            method="1s",
            check_optimality="gradient",
            optimization=pyblp.Optimization("return"),
            iteration=pyblp.Iteration("squarem", {"atol": 1e-14}),
        )
        theirs.append(float(found.contraction_evaluations.mean()))
    figure, (counts, curve) = new_figure(2)
    counts.loglog(shares, theirs, "o-", color=ORANGE, label="SQUAREM (pyblp)")
    counts.loglog(shares, ours, "o-", color=BLUE, label="pcdeq")
    counts.invert_xaxis()
    counts.set(xlabel="share of the outside good", ylabel="evaluations a market, to 1e-14")
    counts.legend(frameon=False, fontsize=9)
    w = torch.linspace(0, 3, 200).double()
    a, weights = torch.tensor([0.2, 1.0, 5.0]).double(), torch.tensor([1.0, 1.0, 1.0]).double() / 3
    for share, colour in ((0.3, GREEN), (0.5, BLUE), (0.6, ORANGE)):
        value = share / (weights * a / (1 + w[:, None] * a)).sum(1)
        curve.plot(w, value, color=colour, label=f"share {share:g}")
    curve.plot(w, w, color=GREY, linestyle="--", linewidth=0.8)
    curve.set(xlabel="w, one product and three kinds of consumers", ylabel="g(w), and w (dashed)")
    curve.legend(frameon=False, fontsize=9)
    save(figure, "demand.png")


def main() -> None:
    for draw in (banks, cells, epidemic, demand):
        draw()


if __name__ == "__main__":
    main()
