"""This code against another revision of it, both measured in turns: `make bench AGAINST=REV`.

The other revision is unpacked beside (.bench/REV) and built. In each run both have a process of their own, and these
take turns, case by case: first one, next time the other. In each process pcdeq and `hook`, the authors' pattern, take
turns as well, on the same trained weights and images and with the same optimiser; what is compared is the ratio of the
two, whose range over the runs shows the noise. pcdeq's tolerance is chosen once for each revision and case, so that its
errors of value and gradient are no worse than hook's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from against_report import markdown
from cases import ACTIVATIONS, Case, cases
from prepare import batches_of
from report import write
from revisions import KEPT, Revision, fetch, this_tree
from run import RESULTS, machine
from safetensors.torch import save_file

# Networks of the package whose proofs are timed.
CERTIFIED = {
    "pcdeq-1-l-tanh-mnist": "mnist",
    "pcdeq-2-l-sigmoid-mnist": "mnist",
    "pcdeq-1-mc-relu6-mnist": "mnist",
    "pcdeq-1-mc-relu6-cifar10": "cifar10",
}
SIDES = ("that", "this")
Numbers = dict[str, Any]


class Worker:
    """A process in which one revision measures what it is asked."""

    def __init__(self, revision: Revision, images: Path, options: argparse.Namespace) -> None:
        self.revision = revision
        script = Path(__file__).with_name("worker.py")
        self.process = subprocess.Popen(
            [sys.executable, script, images, f"--seconds={options.seconds}", f"--threads={options.threads}"],
            env=os.environ | {"PYTHONPATH": str(revision.source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package = Path(self._reply()["package"])
        if not package.is_relative_to(revision.source):
            raise SystemExit(f"{revision.name} should be measured, but {package} was imported")

    def ask(self, **question: Any) -> Numbers:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def _reply(self) -> Numbers:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.revision.name} ended; why, is above")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()


class Comparison:
    """What was measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.revisions = {"that": fetch(options.revision), "this": this_tree()}
        shapes = tuple(options.data.split(","))
        topologies, activations = (tuple(getattr(options, name).split(",")) for name in ("topologies", "activations"))
        self.cases = cases(topologies, shapes, activations)
        self.certified = {
            name: data for name, data in CERTIFIED.items() if data in shapes and name.split("-")[2] in topologies
        }
        self.images = KEPT / "images"
        self.facts: Numbers = {
            "command": f"make bench AGAINST={options.revision} BENCH='{' '.join(sys.argv[2:])}'",
            "revisions": {side: revision.name for side, revision in self.revisions.items()},
            "kernels": os.environ.get("PCDEQ_KERNELS", "1"),
            "machine": machine(),
            "images": write_images({case.data for case in self.cases} | set(self.certified.values()), self.images),
            "seconds": options.seconds,
        }
        self.tolerances = known_tolerances(options.out, self.facts, list(self.revisions.values()))
        self.measurements: list[Numbers] = []
        self.certificates: list[Numbers] = []

    def run(self, number: int) -> None:
        """Measure everything once, in two new processes."""
        workers = {side: Worker(self.revisions[side], self.images, self.options) for side in SIDES}
        turn = number
        for case in self.cases:
            for side in SIDES if (turn := turn + 1) % 2 else reversed(SIDES):
                self.measurements.append({"run": number, "side": side, **self.measure(workers[side], case, number)})
        for name, data in self.certified.items():
            for side in SIDES if (turn := turn + 1) % 2 else reversed(SIDES):
                found = workers[side].ask(certify=name, data=data)
                self.certificates.append({"run": number, "side": side, "network": name, **found})
        for worker in workers.values():
            worker.close()

    def measure(self, worker: Worker, case: Case, number: int) -> Numbers:
        known = self.tolerances.setdefault(worker.revision.name, {})
        key = f"{case.row} {case.data}"
        labels = (case.topology, case.data, case.activation)
        found = worker.ask(case=labels, tolerances=known.get(key), memory=number == 0)
        known[key] = found["tolerances"]
        print(f"{worker.revision.name} {key}: {shown(found)}", file=sys.stderr, flush=True)
        return {"topology": case.topology, "data": case.data, "activation": case.activation, **found}

    def save(self) -> str:
        """Write what is known and return the page."""
        numbers = {
            **self.facts,
            "tolerances": self.tolerances,
            "measurements": self.measurements,
            "certificates": self.certificates,
        }
        page = markdown(numbers)
        out: Path = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        write(out / "against.json", json.dumps(numbers, indent=1).encode())
        write(out / "against.md", page.encode())
        return page


def shown(found: Numbers) -> str:
    times = (f"{what} {found[what]['hook'] / found[what]['pcdeq']:.2f}" for what in ("training", "inference"))
    return ", ".join(times)


def write_images(shapes: set[str], folder: Path) -> list[str]:
    """The batches of each shape as files, the same for both revisions; returns where they are from."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for shape in sorted(shapes):
        batches, source = batches_of(shape)
        images, labels = (torch.cat(parts).contiguous() for parts in zip(*batches, strict=True))
        save_file({"images": images, "labels": labels}, folder / f"{shape}.safetensors")
        sources.append(f"{shape}: {source}")
    return sources


def known_tolerances(out: Path, facts: Numbers, revisions: list[Revision]) -> dict[str, dict[str, list[float]]]:
    """What an earlier comparison chose on the same images, for revisions that cannot have changed since."""
    path = out / "against.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    same = all(kept.get(key) == facts[key] for key in ("images", "kernels"))
    fixed = [revision.name for revision in revisions if revision.is_fixed]
    return {name: found for name, found in kept["tolerances"].items() if name in fixed} if same else {}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="commit, tag or branch to compare with")
    parser.add_argument("--topologies", default="l,sc,mc")
    parser.add_argument("--data", default="mnist,cifar10", help="shapes of images; L has only mnist")
    parser.add_argument("--activations", default=",".join(ACTIVATIONS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each method, in training and in inference")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    comparison = Comparison(options)
    page = ""
    for number in range(options.runs):
        print(f"run {number + 1} of {options.runs}", file=sys.stderr, flush=True)
        comparison.run(number)
        page = comparison.save()  # after each run, so that an interruption loses one
    print(page)


if __name__ == "__main__":
    main()
