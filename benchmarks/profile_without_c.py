"""How much of a pass without C is products, which no leaner step can save; writes results/bench/profile-without-c.md.

In CPU time of one thread, so that other work on the machine hardly changes it. The bound is the ratio that a step would
have which did nothing but its products and activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple
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

ACTIVATIONS = ("tanh", "relu6", "sigmoid")
CASES = [Case(topology, "mnist", activation) for topology in ("l", "sc", "mc") for activation in ACTIVATIONS]
SECONDS = 0.5
PASSES = {"l": 10, "mc": 10, "sc": 2}
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


def in_maps(action: Callable[[], None], passes: int) -> tuple[float, float]:
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
        for _ in range(passes):
            action()
    return 1e3 * sum(maps) / passes, 1e3 * sum(steps) / passes


class Row(NamedTuple):
    """Milliseconds of a pass."""

    case: Case
    what: str
    hook: float
    explicit: float
    ours: float
    maps: float
    beside: float

    @property
    def ratio(self) -> float:
        return self.hook / self.ours

    @property
    def bound(self) -> float:
        return self.hook / (self.ours - self.beside)

    def cells(self) -> str:
        around = self.ours - self.maps - self.beside
        times = (self.hook, self.explicit, self.ours, self.maps, self.beside, around)
        numbers = [*(f"{time:.2f}" for time in times), f"{self.ratio:.2f}x", f"{self.bound:.2f}x"]
        return f"| {self.case.topology.upper()} {self.case.activation} | {self.what} | {' | '.join(numbers)} |"


def rows_of(case: Case) -> list[Row]:
    batches, _ = batches_of(case.data)
    contestants = {method: Contestant(method, case, batches) for method in ("without-c", "hook", "explicit")}
    ours, referee = contestants["without-c"], Referee(case, batches[0][0][:16])
    ours.tighten(referee, referee.errors(contestants["hook"]))
    rows = []
    for what in ("training", "inference"):
        if what == "inference":
            for contestant in contestants.values():
                contestant.deploy()
        actions = {method: c.train if what == "training" else c.infer for method, c in contestants.items()}
        times = {method: found.median for method, found in interleave(actions, SECONDS).items()}
        maps, steps = in_maps(actions["without-c"], PASSES[case.topology])
        rows.append(Row(case, what, times["hook"], times["explicit"], times["without-c"], maps, steps - maps))
    return rows


def means(rows: list[Row]) -> list[str]:
    """What the networks have in the mean over the activations, and what they could have."""
    lines = []
    for topology in dict.fromkeys(row.case.topology for row in rows):
        for what in ("training", "inference"):
            some = [row for row in rows if (row.case.topology, row.what) == (topology, what)]
            ratio, bound = (geometric_mean([getattr(row, name) for row in some]) for name in ("ratio", "bound"))
            maps, beside, explicit = (
                fmean([getattr(r, n) / r.ours for r in some]) for n in ("maps", "beside", "explicit")
            )
            lines.append(
                f"- {topology.upper()}, {what}: {ratio:.2f}x of at most {bound:.2f}x; maps are {maps:.0%} of the time, "
                f"beside {beside:.0%}; a pass of the explicit network takes {explicit:.0%}."
            )
    return lines


def main() -> None:
    torch.set_num_threads(1)
    with patch.object(measure, "seconds_of", cpu_time):
        rows = [row for case in CASES for row in rows_of(case)]
    lines = [
        "# Without C: what is left beside products",
        "",
        "Milliseconds of CPU time of one thread (medians), batch 64, MNIST, the benchmark's weights, errors no worse",
        "than `hook`'s: `python benchmarks/profile_without_c.py`. *Maps* are products and activations of our solves,",
        "*beside* all else in their steps: residuals, norms, proposals, safeguards, looking; *around* is what is no",
        "step: other layers, the weight, where a solve begins and ends, in training the rest of backward and the",
        "optimiser; *explicit* is the network with one step in place of the equilibrium. The bound is the ratio if all",
        "of *beside* took no time: a target above it needs fewer products or faster ones, not a leaner step.",
        "",
        "| network | | hook | explicit | ours | maps | beside | around | hook over ours | bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row.cells() for row in rows),
        "",
        "Geometric means of the ratios:",
        "",
        *means(rows),
    ]
    write(RESULTS / "profile-without-c.md", ("\n".join(lines) + "\n").encode())
    print("\n".join(lines))


def cpu_time(action: Callable[[], object]) -> float:
    start = clock()
    action()
    return clock() - start


if __name__ == "__main__":
    main()
