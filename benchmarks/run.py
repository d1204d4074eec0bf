"""Speed of pcdeq against its peers: `make bench`.

Every figure is a ratio of medians from one process in which all methods take turns, on trained
weights, 2 threads, batch 64, at the paper's tolerance: float32 with our C kernels and without them, then float64.
The last columns are the true errors, so that nobody wins by being sloppy. Then operators and waits are counted.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from pathlib import Path

import torch
from cases import ACTIVATIONS, Case, cases
from measure import METHODS, Measurement, measure
from operators import operator_table
from prepare import batches_of, make_weights
from report import save
from rich.console import Console
from rich.progress import track
from tables import detail_table, ratio_table, target_table

import pcdeq

# What is measured in float64 as well, and how: there are no kernels for it, and of SC a step takes many seconds.
DOUBLE, DOUBLE_METHODS = (("l", "mnist"), ("mc", "mnist")), ("without-c", "hook", "torchdeq")
RESULTS = Path(__file__).parents[1] / "results" / "bench"
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    asked = [tuple(getattr(options, name).split(",")) for name in ("topologies", "data", "activations")]
    chosen = cases(*asked) + [case for case in cases(*asked, dtype="float64") if (case.topology, case.data) in DOUBLE]
    for case in chosen:
        if not case.weights.exists():
            make_weights(case)
    images = {data: batches_of(data) for data in sorted({case.data for case in chosen})}
    facts = {"machine": machine(), "images": [f"{data}: {source}" for data, (_, source) in images.items()]}
    runs: list[dict[Case, list[Measurement]]] = []
    for run in range(options.runs):
        description = f"run {run + 1} of {options.runs}"
        measured = track(chosen, description=description, console=Console(stderr=True))
        runs.append(
            {
                case: measure(
                    case,
                    images[case.data][0],
                    methods_for(case, options.methods),
                    options.seconds,
                    LAYOUTS[options.layout],
                )
                for case in measured
            }
        )
    console = Console(width=150)
    operators = operator_table()
    save(runs, operators, options.out, facts | {"seconds": options.seconds, "layout": options.layout})
    console.print(target_table(runs), ratio_table(runs), operators, detail_table(runs))
    console.print(f"kept in {options.out}")


def methods_for(case: Case, asked: str | None) -> tuple[str, ...]:
    """Those asked for. By default all, where that does not take hours."""
    chosen = METHODS if asked is None else tuple(asked.split(","))
    if case.dtype == "float64":
        return tuple(m for m in chosen if m in DOUBLE_METHODS)
    if asked is not None:
        return chosen
    # A step of SC by torchdeq's Anderson takes 7 s where its plain iteration takes 1.5.
    return tuple(m for m in METHODS if (case.topology, m) != ("sc", "torchdeq-anderson"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", default="l,sc,mc")
    parser.add_argument("--data", default="mnist,cifar10", help="shapes of images; L has only mnist")
    parser.add_argument("--activations", default=",".join(ACTIVATIONS))
    parser.add_argument("--methods", help=f"of {', '.join(METHODS)} [all, but on SC not torchdeq-anderson]")
    parser.add_argument("--runs", type=int, default=3, help="the median of so many runs is reported")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each method, in training and in inference")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layout", choices=LAYOUTS, default="channels-last", help="of images, for all; the faster one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def machine() -> dict[str, object]:
    """What was measured on."""
    text = subprocess.run(["lscpu"], capture_output=True, text=True).stdout if platform.system() == "Linux" else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("Model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "GFLOP/s of a matrix product": round(peak_flops() / 1e9),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pcdeq": pcdeq.__version__,
        "load before": os.getloadavg()[2],
    }


def peak_flops() -> float:
    """Operations a second of a large product of matrices: what this machine can do at best."""
    from time import perf_counter

    a = torch.randn(1024, 1024)
    times = []
    for _ in range(20):
        start = perf_counter()
        a @ a
        times.append(perf_counter() - start)
    return 2 * 1024**3 / min(times)


if __name__ == "__main__":
    main()
