"""How much of a pass without C is products, which no leaner step can save; writes results/bench/profile-without-c.md.

In CPU time of one thread, so that other work on the machine hardly changes it. The bound is the ratio that a step would
have which did nothing but its products and activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import measure
import torch
from cases import Case
from measure import Contestant, Referee, interleave
from prepare import batches_of
from report import write
from run import RESULTS

import pcdeq
from pcdeq.equation import Adjoint, Equation
from pcdeq.solvers import loop

CASES = [Case(topology, "mnist", activation) for topology in ("l", "mc") for activation in ("tanh", "relu6", "sigmoid")]
SECONDS, PASSES = 0.5, 10
clock = time.process_time


@contextmanager
def timed(owner: Any, name: str, spent: list[float]) -> Iterator[None]:
    """Add up the CPU time of all calls of a function."""
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        start = clock()
        result = original(*args, **options)
        spent.append(clock() - start)
        return result

    with patch.object(owner, name, call):
        yield


def in_maps(action: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of a pass in evaluations of the maps, and in all the solver's steps, these included."""
    maps: list[float] = []
    steps: list[float] = []
    with ExitStack() as stack:
        for owner, name, spent in (
            (Equation, "__call__", maps),
            (Adjoint, "__call__", maps),
            (pcdeq.Anderson, "step_on", steps),
            (loop._Watch, "look", steps),
            (loop._Watch, "shrink", steps),
        ):
            stack.enter_context(timed(owner, name, spent))
        for _ in range(PASSES):
            action()
    return 1e3 * sum(maps) / PASSES, 1e3 * sum(steps) / PASSES


def rows_of(case: Case) -> list[str]:
    batches, _ = batches_of(case.data)
    ours, hook = (Contestant(method, case, batches) for method in ("without-c", "hook"))
    referee = Referee(case, batches[0][0][:16])
    ours.tighten(referee, referee.errors(hook))
    rows = []
    for what in ("training", "inference"):
        if what == "inference":
            ours.deploy()
            hook.deploy()
        mine, theirs = (c.train if what == "training" else c.infer for c in (ours, hook))
        times = interleave({"ours": mine, "hook": theirs}, SECONDS)
        total, other = times["ours"].median, times["hook"].median
        maps, steps = in_maps(mine)
        bound = other / (total - (steps - maps))
        cells = (f"{other:.2f}", f"{total:.2f}", f"{maps:.2f}", f"{steps - maps:.2f}", f"{other / total:.2f}x")
        rows.append(f"| {case.topology.upper()} {case.activation} | {what} | {' | '.join(cells)} | {bound:.2f}x |")
    return rows


def main() -> None:
    torch.set_num_threads(1)
    with patch.object(measure, "seconds_of", cpu_time):
        rows = [row for case in CASES for row in rows_of(case)]
    lines = [
        "# Without C: what is left beside products",
        "",
        "Milliseconds of CPU time of one thread (medians), batch 64, MNIST, the package's weights, errors no worse",
        "than `hook`'s: `python benchmarks/profile_without_c.py`. *Maps* are products and activations of our solves,",
        "*beside* all else in their steps: residuals, norms, proposals, safeguards, looking. The bound is the ratio if",
        "all of *beside* took no time: a target above it needs fewer products or faster ones, not a leaner step.",
        "",
        "| network | | hook | ours | maps | beside | hook over ours | bound |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    write(RESULTS / "profile-without-c.md", ("\n".join(lines) + "\n").encode())
    print("\n".join(lines))


def cpu_time(action: Callable[[], object]) -> float:
    start = clock()
    action()
    return clock() - start


if __name__ == "__main__":
    main()
