"""Write results/README.md from the runs kept in results/runs: ``python scripts/results_table.py``."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from pcdeq.recipes import find_row
from pcdeq.training import Run, find_runs

RESULTS = Path(__file__).parents[1] / "results"
HEADER = """# Measured results

Made by `python scripts/results_table.py` from the metrics in [`runs/`](runs). Accuracy is that of the last epoch that
was trained, on the test set, mean and standard deviation over the runs; where fewer epochs were trained than in the
paper, the published accuracy is not comparable. Seconds are of one or two CPU cores that were shared with other work.

| data | row | runs | epochs (paper) | loss | test accuracy | published | steps, both ways | s per epoch | command |
|---|---|---|---|---|---|---|---|---|---|
"""
FOOTER = """
Speed: [bench](bench/bench.md), [profile](bench/profile.md), [scaling](bench/scaling.md).
Guarantees: [certificates.md](certificates.md). Memory of a training step of every row: [memory.md](memory.md).
"""


def main() -> None:
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in find_runs(RESULTS / "runs"):
        groups.setdefault((run.config.data, run.config.row, len(run.metrics)), []).append(run)
    lines = [line(*key, runs) for key, runs in sorted(groups.items())]
    (RESULTS / "README.md").write_text(HEADER + "\n".join(lines) + "\n" + FOOTER)


def line(data: str, name: str, epochs: int, runs: list[Run]) -> str:
    """One row of the table."""
    row = find_row(name, data)
    last = [run.metrics[-1] for run in runs]
    accuracies = [metrics.test_accuracy for metrics in last]
    spread = f" ± {stdev(accuracies):.2f}" if len(runs) > 1 else ""
    forward, backward = (
        fmean(step for metrics in last for step in getattr(metrics, name))
        for name in ("forward_steps", "backward_steps")
    )
    seconds = fmean(metrics.seconds for run in runs for metrics in run.metrics)
    options = "" if epochs == row.epochs else f" --epochs {epochs}"
    options += " --seed K" if len(runs) > 1 else ""
    return (
        f"| {data} | {row.title} | {len(runs)} | {epochs} ({row.epochs}) | {fmean(m.loss for m in last):.4f} | "
        f"{fmean(accuracies):.2f}{spread} | {row.accuracy} | {forward:.1f} / {backward:.1f} | {seconds:.1f} | "
        f"`pcdeq train {row.name} --data {data}{options}`{f', K = 0 to {len(runs) - 1}' if len(runs) > 1 else ''} |"
    )


if __name__ == "__main__":
    main()
