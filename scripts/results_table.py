"""Write results/README.md from the runs kept in results/runs: ``python scripts/results_table.py``."""

from __future__ import annotations

from pathlib import Path

from pcdeq.recipes import find_row
from pcdeq.training import find_runs

RESULTS = Path(__file__).parents[1] / "results"
HEADER = """# Measured results

Made by `python scripts/results_table.py` from the metrics in [`runs/`](runs). Accuracy is that of the last epoch that
was trained, on the test set, one run each; where fewer epochs were trained than in the paper, the published accuracy
is not comparable. Times are of two CPU cores that were shared with other work.

| data | row | epochs (paper) | loss | test accuracy | published | steps forward / backward | s per epoch | command |
|---|---|---|---|---|---|---|---|---|
"""
FOOTER = """
Memory of a training step of every row: [memory.md](memory.md).
"""


def main() -> None:
    lines = []
    for run in find_runs(RESULTS / "runs"):
        config, metrics = run.config, run.metrics
        row, last = find_row(config.row, config.data), metrics[-1]
        steps = [sum(values) / len(values) for values in (last.forward_steps, last.backward_steps)]
        seconds = sum(line.seconds for line in metrics) / len(metrics)
        short = "" if len(metrics) == row.epochs else f" --epochs {len(metrics)}"
        lines.append(
            f"| {config.data} | {row.title} | {len(metrics)} ({row.epochs}) | {last.loss:.4f} | "
            f"{last.test_accuracy:.2f} | {row.accuracy} | {steps[0]:.1f} / {steps[1]:.1f} | {seconds:.1f} | "
            f"`pcdeq train {row.name} --data {config.data}{short}` |"
        )
    (RESULTS / "README.md").write_text(HEADER + "\n".join(lines) + "\n" + FOOTER)


if __name__ == "__main__":
    main()
