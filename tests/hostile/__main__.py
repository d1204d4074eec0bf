"""Run the hostile suite: ``make hostile N=100000``; ``python -m hostile --only SEED`` repeats one case."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from hostile import claims, networks
from hostile.claims import Score, quiet
from hostile.files import odd_files
from hostile.surroundings import SURROUNDINGS

import pcdeq

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "hostile.md"
# What a case is about, and how often.
SUBJECTS: dict[str, tuple[Callable[[Score, np.random.Generator], str], float]] = {
    "layer": (claims.about_a_layer, 0.62),
    "network": (networks.about_a_network, 0.16),
    "export": (networks.exports, 0.03),
    "rate": (claims.rates, 0.04),
    "file": (odd_files, 0.12),
    "odd module": (networks.odd_modules, 0.04),
    "tangent": (claims.tangents, 0.01),
    "threads": (claims.threads, 0.01),
}
ALONE = ("threads", "tangent", "file")  # which bring their own surroundings


class Tally(Score):
    """The score of many cases."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: Counter[str] = Counter()
        self.failed: list[tuple[int, str]] = []
        self.made["traceback"] = 0  # the table says so if there is none

    def take(self, seed: int, case: Score, subject: str, surrounding: str) -> None:
        self.cases[subject] += 1
        if surrounding != "alone":
            self.cases[f"in {surrounding}"] += 1
        self.made.update(case.made)
        self.false += case.false
        self.failed += [(seed, f"[{subject}, {surrounding}] {detail}") for detail in case.details]


def run_case(seed: int, tally: Tally, *, verbose: bool = False) -> None:
    """One case, all of which follows from its seed."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    names = list(SUBJECTS)
    shares = np.array([share for _, share in SUBJECTS.values()])
    subject = str(rng.choice(names, p=shares / shares.sum()))
    odd = rng.random() < 0.5 and subject not in ALONE
    surrounding = str(rng.choice(list(SURROUNDINGS))) if odd else "plain" if subject not in ALONE else "alone"
    score = Score(SURROUNDINGS.get(surrounding, nullcontext))
    try:
        with quiet():
            told = SUBJECTS[subject][0](score, rng)
        if verbose:
            print(f"{subject} in {surrounding}: {told}; claims {dict(score.made)}, false {dict(score.false)}")
    except Exception as error:
        score.add("traceback", 1, True, f"{type(error).__name__}: {str(error)[:200]}")
        if verbose:
            traceback.print_exc()
    tally.take(seed, score, subject, surrounding)


def run(cases: int, first: int = 0, *, progress: bool = False, seconds: float | None = None) -> Tally:
    """So many cases from a first seed on; with ``seconds``, no longer than that."""
    tally, start = Tally(), time.monotonic()
    for seed in _watched(range(first, first + cases), tally, progress):
        run_case(seed, tally)
        if seconds is not None and time.monotonic() - start > seconds:
            break
    return tally


def _watched(seeds: range, tally: Tally, progress: bool) -> Iterator[int]:
    if not progress:
        yield from seeds
        return
    from rich.progress import track

    yield from track(seeds, description="hostile cases")
    del tally


def command(seed: int) -> str:
    """What repeats a case."""
    return f"PYTHONPATH=tests .venv/bin/python -m hostile --only {seed}"


def table(tally: Tally, cases: int, first: int, seconds: float) -> str:
    """The counts, for results/hostile.md."""
    kinds = "\n".join(f"| {kind} | {made:,} | {tally.false[kind]:,} |" for kind, made in sorted(tally.made.items()))
    subjects = ", ".join(
        f"{count:,} {name}" for name, count in sorted(tally.cases.items()) if not name.startswith("in ")
    )
    around = ", ".join(f"{count:,} {name}" for name, count in sorted(tally.cases.items()) if name.startswith("in "))
    failed = "".join(f"- `{command(seed)}`: {detail}\n" for seed, detail in tally.failed[:50]) or "None.\n"
    return f"""# The hostile suite: claims put before a referee

`make hostile N={cases} SEED={first}`, {seconds / 60:.1f} minutes on {torch.get_num_threads()} thread(s), torch
{torch.__version__}, pcdeq {pcdeq.__version__}. What is claimed and how it is judged: `docs/guarantees.md`,
`tests/hostile/`.

Cases: {subjects}; of layers, networks and modules {around}.

| claim | made | false |
|---|---|---|
{kinds}

## Failures

{failed}"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hostile", description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="one case, with all that it says")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is not None:
        tally = Tally()
        run_case(options.only, tally, verbose=True)
    else:
        start = time.monotonic()
        tally = run(options.cases, options.first, progress=True)
        RESULTS.write_text(table(tally, options.cases, options.first, time.monotonic() - start), encoding="utf-8")
        print(f"{sum(tally.made.values()):,} claims, {sum(tally.false.values()):,} false; {RESULTS}")
    for seed, detail in tally.failed:
        print(f"FALSE {detail}\n  {command(seed)}", file=sys.stderr)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
