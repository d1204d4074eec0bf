"""The measurements as tables, and what they come to against the targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from cases import Case
from measure import OURS, Measurement
from rich.table import Table

Run = dict[Case, list[Measurement]]

# (ours, what, against): at least so many times faster, for each network in float32.
TARGETS = {
    ("pcdeq", "training", "hook"): {"l": 3.0, "sc": 3.0, "mc": 2.0},
    ("pcdeq", "inference", "hook"): {"l": 4.0, "sc": 4.0, "mc": 4.0},
    ("pcdeq", "training", "torchdeq"): {"l": 4.0, "sc": 3.0, "mc": 3.0},
    ("without-c", "training", "hook"): {"l": 1.0, "sc": 1.4, "mc": 1.5},
    ("without-c", "inference", "hook"): {"l": 1.3, "sc": 2.0, "mc": 2.2},
}
PRODUCTS = {"tanh": 5.0, "relu6": 6.0, "softsign": 5.0, "sigmoid": 3.0}  # a forward solve of L


def groups(run: Run) -> list[tuple[str, str]]:
    """The networks and shapes that were measured."""
    return list(dict.fromkeys(case.group for case in run))


def ratio(measurements: list[Measurement], ours: str, against: str, what: str) -> float:
    """How many times longer the other method takes than ours; of torchdeq the better setting."""
    times = {m.method: getattr(m, what).median for m in measurements}
    others = [time for method, time in times.items() if method == against or method == f"{against}-anderson"]
    return min(others) / times[ours]


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def mean_ratio(run: Run, group: tuple[str, str], ours: str, against: str, what: str) -> float:
    """The geometric mean over the activations."""
    return geometric_mean([ratio(r, ours, against, what) for c, r in run.items() if c.group == group])


def median(runs: list[Run], value: Callable[[Run], float]) -> float:
    return statistics.median(value(run) for run in runs)


def target_table(runs: list[Run]) -> Table:
    """Which targets are met, by the median of the runs."""
    table = Table(title="Targets (geometric mean over activations, median of the runs; lowest and highest run)")
    for name in ("what", "network", "target", "measured", ""):
        table.add_column(name, justify="left" if name in ("what", "network") else "right")
    present = {m.method for m in next(iter(runs[0].values()))}
    for (ours, what, against), wanted in TARGETS.items():
        for group in groups(runs[0]):
            if not {ours, against} <= present or "float64" in group[1]:
                continue
            values = [mean_ratio(run, group, ours, against, what) for run in runs]
            middle, least = statistics.median(values), wanted[group[0]]
            spread = f"{middle:.2f}x ({min(values):.2f}-{max(values):.2f})"
            verdict = "met" if middle >= least else "missed"
            table.add_row(f"{ours}, {what} against {against}", name_of(group), f">= {least:.1f}x", spread, verdict)
    for case in runs[0]:
        if case.topology == "l" and case.dtype == "float32":
            found, most = best(runs[0][case]).forward_products, PRODUCTS[case.activation]
            verdict = "met" if found <= most else "missed"
            table.add_row(
                f"products, {case.activation}", name_of(("l", case.data)), f"<= {most:.0f}", f"{found:.1f}", verdict
            )
    if "hook" in present:
        for case, measurements in runs[0].items():
            hook = next(m for m in measurements if m.method == "hook").peak_bytes
            if best(measurements).peak_bytes >= hook:
                table.add_row("memory against hook", f"{case.row} {case.data}", "below", "above", "missed")
    return table


def best(measurements: list[Measurement]) -> Measurement:
    """Ours: with C, if it was measured."""
    return min((m for m in measurements if m.method in OURS), key=lambda m: OURS.index(m.method))


def name_of(group: tuple[str, str]) -> str:
    return f"{group[0].upper()} {group[1]}"


def ratio_table(runs: list[Run]) -> Table:
    """Ratios by network: the geometric mean over activations, and their range."""
    table = Table(title="How many times longer do others take? (median of the runs; range over activations)")
    table.add_column("against")
    found = groups(runs[0])
    for group in found:
        table.add_column(name_of(group), justify="right")
    for ours in OURS:
        for what in ("training", "inference"):
            for method in others(runs[0]):
                cells = [_ratio_cell(runs, group, ours, method, what) for group in found]
                if any(cells):
                    table.add_row(f"{method} over {ours}, {what}", *cells)
    return table


def others(run: Run) -> list[str]:
    """All methods but ours, in the order in which they were measured."""
    return list(dict.fromkeys(m.method for measurements in run.values() for m in measurements if m.method not in OURS))


def single_ratios(runs: list[Run], group: tuple[str, str], ours: str, method: str, what: str) -> list[float]:
    """The method's time over ours for each activation, the median of the runs."""

    def of(measurements: list[Measurement]) -> float:
        times = {m.method: getattr(m, what).median for m in measurements}
        return times[method] / times[ours]

    measured = [
        case for case, found in runs[0].items() if case.group == group and {ours, method} <= {m.method for m in found}
    ]
    return [median(runs, lambda run, case=case: of(run[case])) for case in measured]


def _ratio_cell(runs: list[Run], group: tuple[str, str], ours: str, method: str, what: str) -> str:
    single = single_ratios(runs, group, ours, method, what)
    return f"{geometric_mean(single):.2f} ({min(single):.2f}-{max(single):.2f})" if single else ""


COLUMNS = ("case", "trained", "method", "training", "inference", "forward", "backward", "MB", "error", "gradient error")


def details(runs: list[Run]) -> list[tuple[str, ...]]:
    """One row for each case and method, as in COLUMNS."""
    rows = []
    for case in runs[0]:
        for index, m in enumerate(runs[0][case]):
            times = (
                statistics.median(getattr(run[case][index], what).median for run in runs)
                for what in ("training", "inference")
            )
            rows.append(
                (
                    f"{case.row} {case.group[1]}",
                    case.trained,
                    m.method,
                    *(f"{time:.2f}" for time in times),
                    f"{m.forward_products:.1f}",
                    "" if m.method.startswith("torchdeq") else f"{m.backward_products:.1f}",  # it does not tell
                    f"{m.peak_bytes / 1e6:.1f}",
                    f"{m.value_error:.1e}",
                    f"{m.gradient_error:.1e}",
                )
            )
    return rows


def detail_table(runs: list[Run]) -> Table:
    """Every measurement."""
    table = Table(title="Milliseconds (medians), products per layer and sample, peak memory of a step, true errors")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("case", "trained", "method") else "right")
    for row in details(runs):
        table.add_row(*row)
    return table
