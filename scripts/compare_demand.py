"""Our inversion of market shares beside pyblp's: ``python scripts/compare_demand.py`` writes results/demand.md.

An evaluation is one of the contraction, or of our map, in one market: both cost a pass over its consumers and products.
Times are those of the inversions alone, medians of runs taken in turns on one thread.
"""

from __future__ import annotations

import runpy
import statistics
import time
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyblp
import torch
from pyblp.configurations import iteration as built_in

import pcdeq
from pcdeq.files import replace_file

ROOT = Path(__file__).parents[1]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "demand_inversion.py"))
RUNS = 3
LIMIT = 5000  # evaluations a market
CASES = (
    ("Nevo, cereals", "nevo", 1.0, None),
    ("BLP, automobiles", "automobiles", 1.0, None),
    ("Nevo, tastes four times as different", "nevo", 4.0, None),
    ("Nevo, outside share 1e-3", "nevo", 1.0, 1e-3),
    ("Nevo, outside share 1e-5", "nevo", 1.0, 1e-5),
)


class Row(NamedTuple):
    """How one method did: markets converged, evaluations in all and of the slowest market, seconds, δ."""

    converged: int
    evaluations: int
    slowest: int
    seconds: float
    delta: np.ndarray


def by_pyblp(problem, sigma: np.ndarray, pi: np.ndarray, method: str) -> Row:
    """pyblp's own loop to 1e-14, with a clock around it."""
    spent = 0.0
    inner = {"simple": built_in.simple_iterator, "squarem": built_in.squarem_iterator}[method]
    options = {**pyblp.Iteration(method)._method_options, "atol": 1e-14, "max_evaluations": LIMIT}

    def timed(initial, contraction, iteration_callback, **_):
        nonlocal spent
        began = time.perf_counter()
        try:
            return inner(initial, contraction, iteration_callback, **options)
        finally:
            spent += time.perf_counter() - began

    results = problem.solve(
        sigma,
        pi,
        method="1s",
        check_optimality="gradient",
        optimization=pyblp.Optimization("return"),
        iteration=pyblp.Iteration(timed),
    )
    counts = results.contraction_evaluations
    return Row(int(results.fp_converged.sum()), int(counts.sum()), int(counts.max()), spent, results.delta[:, 0])


def by_us(markets, given) -> Row:
    fn = EXAMPLE["demand"](markets, solver=pcdeq.Anderson(tol=1e-14, memory=5, max_steps=LIMIT))
    began = time.perf_counter()
    solution = fn.solve(markets.logit(), *given)
    seconds = time.perf_counter() - began
    delta = np.empty(len(markets.rows))
    delta[markets.rows.numpy()] = solution.value.log()[markets.real].numpy()
    steps = solution.steps + 1  # one more looks whether the fixed point is at infinity
    return Row(int(solution.converged.sum()), int(steps.sum()), int(steps.max()), seconds, delta)


def bounds(markets, given, delta: np.ndarray) -> str:
    """How many markets have proved bounds, how wide they are, and whether pyblp's δ is within."""
    fn = EXAMPLE["demand"](markets, solver=pcdeq.Anderson(tol=1e-10, memory=5, max_steps=LIMIT))
    began = time.perf_counter()
    box = fn.enclose(markets.logit(), *given)
    seconds = time.perf_counter() - began
    low, high = (np.empty(len(markets.rows)) for _ in range(2))
    low[markets.rows.numpy()] = box.lower.log()[markets.real].numpy()
    high[markets.rows.numpy()] = box.upper.log()[markets.real].numpy()
    proved = np.empty(len(markets.rows), dtype=bool)
    proved[markets.rows.numpy()] = box.certified[:, None].expand_as(markets.real)[markets.real].numpy()
    inside = bool(((low <= delta) & (delta <= high))[proved].all())
    wide = (high - low)[proved].max() if proved.any() else np.inf
    count = f"{int(box.certified.sum())} of {len(box.certified)}"
    return f"{count} | {wide:.0e} | {'yes' if inside else 'no'} | {seconds:.2f}"


def compare() -> str:
    table = ["| data | method | markets converged | evaluations | most in a market | seconds |", "|---" * 6 + "|"]
    proofs = ["| data | markets with proved bounds | widest, in δ | SQUAREM's δ within | seconds |", "|---" * 5 + "|"]
    apart = ["| data | largest difference of δ, ours and SQUAREM's |", "|---" * 2 + "|"]
    for title, name, scale, outside in CASES:
        problem, markets, sigma, pi = EXAMPLE["load"](name, outside)
        sigma, pi = scale * sigma, scale * pi
        given = markets.consumers(sigma, pi)
        methods = {
            "pyblp, contraction": partial(by_pyblp, problem, sigma.numpy(), pi.numpy(), "simple"),
            "pyblp, SQUAREM": partial(by_pyblp, problem, sigma.numpy(), pi.numpy(), "squarem"),
            "pcdeq, all markets at once": partial(by_us, markets, given),
        }
        if outside is not None:  # with so small a share it would need some thousand times as many
            del methods["pyblp, contraction"]
        hard = outside is not None and outside < 1e-4
        rows: dict[str, list[Row]] = {method: [] for method in methods}
        for _ in range(1 if hard else RUNS):
            for method, run in methods.items():
                rows[method].append(run())
        for method, found in rows.items():
            first, seconds = found[0], statistics.median(row.seconds for row in found)
            count = f"{first.converged} of {len(given[0])}"
            table.append(f"| {title} | {method} | {count} | {first.evaluations} | {first.slowest} | {seconds:.3f} |")
        theirs, ours = rows["pyblp, SQUAREM"][0], rows["pcdeq, all markets at once"][0]
        solved = theirs.converged == len(given[0])
        note = "" if solved else ", which did not converge"
        apart.append(f"| {title} | {np.abs(theirs.delta - ours.delta).max():.0e}{note} |")
        proofs.append(f"| {title} | {bounds(markets, given, theirs.delta)} |")
    return "\n\n".join("\n".join(rows) for rows in (table, proofs, apart))


def main() -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = compare()
    text = f"""# Demand inversion beside pyblp

`python scripts/compare_demand.py` (pyblp {pyblp.__version__}, torch {torch.__version__}, one thread) made these tables.
An evaluation is one of the contraction or of our map in one market; each costs a pass over its consumers and products.
In a batch, markets that are done wait for the slowest; what is counted is what each needed.
Seconds are those of the inversions alone, to 1e-14, medians of {RUNS} runs (one for the hardest case). SQUAREM and the
contraction may take {LIMIT} evaluations a market. Times were taken on a machine that was busy with other work: take the
counts, not the times.

{tables}
"""
    replace_file(ROOT / "results" / "demand.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
