"""One revision's part of against.py: a process that measures what it is asked to, and answers in JSON, line by line.

It runs on whatever pcdeq is first in PYTHONPATH, so here and in what it imports (cases.py, measure.py, peers.py) only
public names of pcdeq that are old enough appear.

A question is an object with ``case`` (topology, data, activation), ``tolerances`` (forward and backward, or null: then
they are chosen) and ``memory`` (whether to measure it), or with ``certify`` (a network of the package) and ``data``.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cases import BATCH, Batch, Case
from measure import Contestant, Referee, Timing, interleave, peak_memory
from safetensors.torch import load_file

import pcdeq


class Worker:
    """Measures on images that lie in a folder."""

    def __init__(self, images: Path, seconds: float) -> None:
        self.images, self.seconds = images, seconds

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "certify" in question:
            return self.certify(question["certify"], question["data"])
        return self.measure(Case(*question["case"]), question["tolerances"], question["memory"])

    def measure(self, case: Case, tolerances: list[float] | None, memory: bool) -> dict[str, Any]:
        """Milliseconds of training and inference of pcdeq and of the authors' pattern, in turns."""
        batches = read_batches(self.images / f"{case.data}.safetensors")
        ours, hook = (Contestant(method, case, batches) for method in ("pcdeq", "hook"))
        found: dict[str, Any] = {}
        if tolerances is None:
            referee = Referee(case, batches[0][0])
            limits = referee.errors(hook)
            found["errors"] = {"pcdeq": ours.tighten(referee, limits), "hook": limits}
        else:
            ours.tolerances = (tolerances[0], tolerances[1])
        found["tolerances"] = ours.tolerances
        found["training"] = medians(interleave({"pcdeq": ours.train, "hook": hook.train}, self.seconds))
        if memory:
            found["peak bytes"] = peak_memory(ours.train)
        ours.deploy()
        hook.deploy()
        found["inference"] = medians(interleave({"pcdeq": ours.infer, "hook": hook.infer}, self.seconds))
        return found

    def certify(self, name: str, data: str) -> dict[str, Any]:
        """The share of a batch that is proved, and the milliseconds of the proofs and of a plain pass."""
        model = pcdeq.load(name).eval()
        (images, _), *_ = read_batches(self.images / f"{data}.safetensors")
        images = images.contiguous(memory_format=torch.channels_last)

        @torch.no_grad()
        def plain() -> None:
            model(images)

        times = interleave({"certify": lambda: pcdeq.certify(model, images), "plain": plain}, self.seconds)
        return {"share": pcdeq.certify(model, images).share, "images": len(images), "times": medians(times)}


def medians(times: dict[str, Timing]) -> dict[str, float]:
    return {name: timing.median for name, timing in times.items()}


@cache
def read_batches(path: Path) -> list[Batch]:
    """The batches that `against.py` has written."""
    tensors = load_file(path)
    return list(zip(tensors["images"].split(BATCH), tensors["labels"].split(BATCH), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    replies, sys.stdout = sys.stdout, sys.stderr  # what others print is no answer
    worker = Worker(options.images, options.seconds)
    print(json.dumps({"package": pcdeq.__file__}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
