"""Keep runs in the repository: ``python scripts/keep_runs.py RUNS_DIR [PATTERN]``.

What tables and figures are made of (config.json, metrics.jsonl, summary.json) goes to results/runs, and the weights of
first seeds, if they are of a pcDEQ of the paper, trained in full with the usual solver, into the package, where
`pcdeq.load` finds them: those of our recipe, where it was run, else of the paper's. Of pictures in colour, whose
networks are larger, there is one MC and one SC a data set, and none of the large networks with augmentation, so that
the package stays below 8 MB. Weights of other rows replace the short trainings of `benchmarks/weights`.

Runs against noise (`--robust-radius`) go to results/robust, and those of first seeds on MNIST into the package, too, as
ROW-DATA-robustRADIUS.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from pcdeq.files import write_file
from pcdeq.models import load
from pcdeq.models.description import Description
from pcdeq.models.store import to_bytes
from pcdeq.recipes import PAPER_DATASETS
from pcdeq.report.tables import collect
from pcdeq.training import Run, find_runs, read_summary, summarise

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pcdeq" / "weights"
BENCHMARK = ROOT / "benchmarks" / "weights"


def main(runs_dir: str, pattern: str = "*") -> None:
    for run in find_runs(Path(runs_dir)):
        if not run.path.match(pattern) or not run.metrics:
            continue
        if read_summary(run) is None:
            if not run.has("last"):
                print(f"{run.path.name}: left out, it has neither a summary nor weights")
                continue
            summarise(run)
        robust = run.config.robust_radius
        kept = ROOT / "results" / ("runs" if robust is None else "robust") / run.path.name
        kept.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "metrics.jsonl", "summary.json"):
            shutil.copy(run.path / name, kept / name)
        where = keep_weights(run)
        print(run.path.name, run.accuracy, "" if where is None else f"with weights in {where.relative_to(ROOT)}")


# Activations of each class whose weights the package carries.
ALL = ("relu6", "tanh", "softsign", "sigmoid")
SHIPPED = {
    "mnist": {"l": ALL, "sc": ("tanh",), "mc": ALL},
    "svhn": {"sc": ("tanh",), "mc": ("relu6",)},
    "cifar10": {"sc": ("tanh",), "mc": ("relu6",)},
}


def keep_weights(run: Run) -> Path | None:
    """Where its weights were put: into the package, or among those of the benchmark if it measures that row."""
    config = run.config
    if not run.has("last") or config.seed != 0 or config.data not in PAPER_DATASETS:
        return None
    name = f"{config.row}-{config.data}"
    if config.robust_radius is not None:
        if config.data != "mnist":
            return None
        return write_weights(run, PACKAGE / f"{name}-robust{config.robust_radius:g}.safetensors")
    (line,) = (line for line in collect([run])[config.data] if line.runs)
    ours = replace(config, recipe="fast").run_name
    whole = line.published is not None and line.is_full and line.solver == "default"
    best = config.recipe == "fast" or not (ROOT / "results" / "runs" / ours).exists()
    if line.row.family != "pcdeq" or not (whole and best):
        return None
    measured = BENCHMARK / f"{name}.safetensors"
    if line.row.activation in SHIPPED[config.data].get(line.row.kind, ()):
        measured.unlink(missing_ok=True)
        return write_weights(run, PACKAGE / measured.name)
    return write_weights(run, measured) if measured.exists() else None


def write_weights(run: Run, path: Path) -> Path:
    network = load(run)
    write_file(path, to_bytes(network.state_dict(), Description.of(network)))
    return path


if __name__ == "__main__":
    main(*sys.argv[1:])
