"""The page of a comparison of two revisions, from the numbers of against.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from tables import geometric_mean, name_of

FEWEST_RUNS = 3  # whose range means something
WORSE_FROM = 1.01  # memory: a percent may be the allocator's
Numbers = dict[str, Any]
Rows = list[Numbers]


def markdown(numbers: Numbers) -> str:
    """The page."""
    names, runs = numbers["revisions"], 1 + max(row["run"] for row in numbers["measurements"])
    heads = [f"{names['that']} (that)", f"{names['this']} (this)"]
    facts = "; ".join(f"{key}: {numbers[key]}" for key in ("machine", "images", "seconds", "kernels"))
    lines = [
        f"# {names['this']} against {names['that']}",
        "",
        f"Made by `{numbers['command']}`; runs: {runs}; {facts}.",
        "",
        "How many times longer the authors' pattern (`hook`) takes than pcdeq, in each revision: the geometric mean",
        "over the activations; median of the runs, lowest and highest. The last two columns are times, this over that,",
        "in the median of the runs: of pcdeq, and of `hook`, which uses the layer's injection and activation.",
        "",
    ]
    lines += table(["what", "network", *heads, "", "pcdeq's time", "hook's time"], speed_rows(numbers["measurements"]))
    lines += ["", "Each case, with milliseconds of pcdeq:", ""]
    lines += table(["what", "case", *heads, "", "ms, that", "ms, this"], case_rows(numbers["measurements"]))
    lines += ["", "Peak memory of a training step of pcdeq, in MB:", ""]
    lines += table(["case", *heads, ""], memory_rows(numbers["measurements"]))
    if numbers["certificates"]:
        lines += [
            "",
            "`pcdeq.certify` on networks of the package: the share of images whose class is proved, and its time over",
            "that of a plain pass.",
            "",
        ]
        columns = ["network", "images", "proved, that", "proved, this", "cost, that", "cost, this", ""]
        lines += table(columns, certificate_rows(numbers["certificates"]))
    return "\n".join(lines) + "\n"


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def speed_rows(measurements: Rows) -> list[list[str]]:
    """Ratios of each network and shape."""
    groups = list(dict.fromkeys((row["topology"], row["data"]) for row in measurements))
    rows = []
    for what in ("training", "inference"):
        for group in groups:
            of_group = [row for row in measurements if (row["topology"], row["data"]) == group]
            ratios = by_side(of_group, lambda found, what=what: ratio(found, what))
            times = [change(of_group, lambda row, m=method, w=what: row[w][m]) for method in ("pcdeq", "hook")]
            rows.append([what, name_of(group), *map(spread, ratios), compare(*ratios), *(f"{t:.2f}" for t in times)])
    return rows


def case_rows(measurements: Rows) -> list[list[str]]:
    """Ratios and times of each case."""
    rows = []
    for what in ("training", "inference"):
        for case, found in by_case(measurements).items():
            ratios = by_side(found, lambda run, what=what: ratio(run, what))
            times = by_side(found, lambda run, what=what: run[0][what]["pcdeq"])
            cells = [f"{statistics.median(side):.3g}" for side in times]
            rows.append([what, case, *map(spread, ratios), compare(*ratios), *cells])
    return rows


def memory_rows(measurements: Rows) -> list[list[str]]:
    """Peak memory of each case."""
    rows = []
    for case, found in by_case([row for row in measurements if "peak bytes" in row]).items():
        that, this = (next(row["peak bytes"] for row in found if row["side"] == side) for side in ("that", "this"))
        verdict = "worse" if this > WORSE_FROM * that else "no worse"
        rows.append([case, f"{that / 1e6:.2f}", f"{this / 1e6:.2f}", verdict])
    return rows


def certificate_rows(certificates: Rows) -> list[list[str]]:
    """Shares and costs of each network."""
    rows = []
    for network in dict.fromkeys(row["network"] for row in certificates):
        found = [row for row in certificates if row["network"] == network]
        # The cost is turned round, so that more is better, as with the ratios.
        speeds = by_side(found, lambda run: run[0]["times"]["plain"] / run[0]["times"]["certify"])
        shares = by_side(found, lambda run: run[0]["share"])
        costs = [spread([1 / speed for speed in side]) for side in speeds]
        verdict = "proves less" if min(shares[1]) < min(shares[0]) else compare(*speeds)
        cells = [f"{100 * min(side):.1f} %" for side in shares]
        rows.append([network, str(found[0]["images"]), *cells, *costs, verdict])
    return rows


def by_case(measurements: Rows) -> dict[str, Rows]:
    cases: dict[str, Rows] = {}
    for row in measurements:
        cases.setdefault(f"{row['topology'].upper()} {row['data']} {row['activation']}", []).append(row)
    return cases


def by_side(rows: Rows, value: Callable[[Rows], float]) -> tuple[list[float], list[float]]:
    """A value of each run, for that and for this revision."""
    runs = sorted({row["run"] for row in rows})
    that, this = (
        [value([row for row in rows if row["side"] == side and row["run"] == run]) for run in runs]
        for side in ("that", "this")
    )
    return that, this


def ratio(run: Rows, what: str) -> float:
    """hook's time over pcdeq's, the geometric mean over what was measured in a run."""
    return geometric_mean([row[what]["hook"] / row[what]["pcdeq"] for row in run])


def change(rows: Rows, time: Callable[[Numbers], float]) -> float:
    """This revision's time over that one's: the mean over the cases, the median of the runs."""
    that, this = by_side(rows, lambda run: geometric_mean([time(row) for row in run]))
    return statistics.median(new / old for old, new in zip(that, this, strict=True))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def compare(that: list[float], this: list[float]) -> str:
    """Whether the ranges overlap; more is better."""
    if len(this) < FEWEST_RUNS:
        return "too few runs"
    if min(this) > max(that):
        return "improves"
    return "worse" if max(this) < min(that) else "overlaps"
