"""Exported networks against PyTorch: agreement and speed, on trained runs.

    python benchmarks/export.py RUN ... [--images 1000] [--data-dir DIR]

For each run both ONNX forms and the torch.export program: do they give PyTorch's class, how far is a logit from the
exact network's, next to the bound in the file, and how long do they take, as a ratio to `pcdeq.freeze` in PyTorch, for
batches of 1 and of 64. Both run in turn in one process on one thread, so that other work slows both. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from pcdeq.data import load_dataset
from pcdeq.export import compare, describe, open_exported, plan_export
from pcdeq.export.program import render
from pcdeq.models import freeze, load
from pcdeq.training import Run

CASES = (("onnx", "fixed"), ("onnx", "loop"), ("torch-export", "fixed"))
ROUNDS = 15


def ratio(ours, theirs, inputs: torch.Tensor, pixels: torch.Tensor, batch: int) -> float:
    """PyTorch's time over the file's: the median over rounds that take turns."""
    batches = list(zip(inputs.split(batch), pixels.split(batch), strict=True))[:64]
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for ours_in, _ in batches:
            ours(ours_in)
        middle = time.perf_counter()
        for _, theirs_in in batches:
            theirs(theirs_in)
        times.append((middle - start) / (time.perf_counter() - middle))
    return median(times)


def spread(images: torch.Tensor, count: int) -> torch.Tensor:
    return images[torch.linspace(0, len(images) - 1, min(count, len(images))).long()].float() / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--calibration", type=int, default=500)
    parser.add_argument("--error", type=float, default=0.01)
    parser.add_argument("--data-dir", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| run | file | MB | steps | bound on a logit | basis | same class | off by | batch 1 | batch 64 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for path in options.runs:
        run = Run.open(path)
        model, dataset = load(run), load_dataset(run.config.data, data_dir=options.data_dir)
        pixels = spread(dataset.test.images, options.images)
        calibration = spread(dataset.train.images, options.calibration)
        inputs, fast = run.preprocessing.normalise(pixels), freeze(model)
        for to, form in CASES:
            plan = plan_export(model, form, error=options.error, calibration=calibration)
            content = render(plan, to, describe(plan, model))
            exported = open_exported(content)
            with torch.no_grad():
                seen = compare(model, exported, pixels)
                speed = [ratio(fast, exported, inputs, pixels, batch) for batch in (1, 64)]
            steps = "loop" if plan.steps is None else ", ".join(map(str, plan.steps))
            print(
                f"| {run.path.name} | {to}, {form} | {len(content) / 1e6:.2f} | {steps} | {plan.error:.2g} "
                f"| {plan.basis} | {seen.same_class} of {seen.images} | {seen.difference:.2g} "
                f"| {speed[0]:.2f} | {speed[1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
