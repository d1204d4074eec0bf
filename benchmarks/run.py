"""Speed of pcdeq against its peers: `make bench`.

Every figure is a ratio of medians from one process in which all methods take turns, on trained
weights, 2 threads, batch 64, float32, at the paper's tolerance. The last columns are the true errors,
so that nobody wins by being sloppy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch
from cases import ACTIVATIONS, Case, cases, make_weights
from measure import METHODS, Measurement, measure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pcdeq

RESULTS = Path(__file__).parents[1] / "results" / "bench"
Results = dict[Case, list[Measurement]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", default="l,sc,mc")
    parser.add_argument("--data", default="mnist,cifar10", help="shapes of images")
    parser.add_argument("--activations", default=",".join(ACTIVATIONS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=None, help="turns per method [100 for L, 12 for MC, 4 for SC]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    methods = tuple(options.methods.split(","))
    chosen = cases(*(tuple(getattr(options, name).split(",")) for name in ("topologies", "data", "activations")))
    results: Results = {}
    for case in track(chosen, description="measuring", console=Console(stderr=True)):
        if not case.weights.exists():
            make_weights(case)
        rounds = options.rounds or {"l": 100, "mc": 12, "sc": 4}[case.topology]
        results[case] = measure(case, methods, rounds)
    Console(width=150).print(summary_table(results), detail_table(results))
    options.out.mkdir(parents=True, exist_ok=True)
    save(results, options.out, vars(options))


def ratio(measurements: list[Measurement], method: str, what: str) -> float:
    """How many times longer that method takes than pcdeq."""
    by_name = {m.method: getattr(m, what).median for m in measurements}
    return by_name[method] / by_name["pcdeq"]


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary_table(results: Results) -> Table:
    """Ratios by network, averaged over its activations."""
    table = Table(title="How many times faster is pcdeq? (geometric mean over activations; spread)")
    table.add_column("against")
    groups = sorted({(case.topology, case.data) for case in results})
    for topology, data in groups:
        table.add_column(f"{topology.upper()} {data}", justify="right")
    present = [m.method for m in next(iter(results.values())) if m.method != "pcdeq"]
    for what in ("training", "inference"):
        for method in present:
            cells = []
            for group in groups:
                ratios = [ratio(r, method, what) for c, r in results.items() if (c.topology, c.data) == group]
                cells.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
            table.add_row(f"{method}, {what}", *cells)
    return table


def detail_table(results: Results) -> Table:
    """Every measurement."""
    table = Table(title="Milliseconds (median), products per layer, peak memory of a training step, true errors")
    for name in ("case", "method", "training", "inference", "forward", "backward", "MB", "error", "gradient error"):
        table.add_column(name, justify="left" if name in ("case", "method") else "right")
    for case, measurements in results.items():
        for m in measurements:
            table.add_row(
                f"{case.row} {case.data}",
                m.method,
                f"{m.training.median:.2f}",
                f"{m.inference.median:.2f}",
                f"{m.forward_products:.1f}",
                f"{m.backward_products:.1f}",
                f"{m.peak_bytes / 1e6:.1f}",
                f"{m.value_error:.1e}",
                f"{m.gradient_error:.1e}",
            )
    return table


def machine() -> dict[str, object]:
    """What was measured on."""
    model = subprocess.run(["lscpu"], capture_output=True, text=True).stdout if platform.system() == "Linux" else ""
    names = [line.split(":")[1].strip() for line in model.splitlines() if line.startswith("Model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pcdeq": pcdeq.__version__,
        "load": os.getloadavg()[0],
    }


def save(results: Results, folder: Path, options: dict[str, object]) -> None:
    """Write the numbers as JSON."""
    rows = [
        {"row": case.row, "data": case.data, **asdict(measurement)}
        for case, measurements in results.items()
        for measurement in measurements
    ]
    document = {"machine": machine(), "options": {k: str(v) for k, v in options.items()}, "measurements": rows}
    target = folder / "bench.json"
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(document, indent=1))
    partial.replace(target)


if __name__ == "__main__":
    main()
