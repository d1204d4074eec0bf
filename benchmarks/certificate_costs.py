"""What a proof costs: this writes results/certificate-costs.md.

The denominator is everywhere the plain pass of the same network over the same images: `model.eval()`, inference mode,
in batches of 250, or of the size of the call. Both are measured in turns, with C kernels and without; medians.
Topologies may be named, `python benchmarks/certificate_costs.py mc sc`: the rows of the others stay as they are.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from cases import ACTIVATIONS, Case
from certificates import pick_images
from measure import seconds_of, without_kernels
from report import write
from torch import Tensor, nn

import pcdeq

GROUPS = (("l", "mnist", 5_000), ("sc", "mnist", 64), ("mc", "mnist", 512), ("mc", "cifar10", 256))
TURNS, CALLS = 3, 8
HEADER = """# What a proof costs

Made by `python benchmarks/certificate_costs.py`, {threads} threads. Seconds of a proof over those of the plain pass of
the same network over the same images (`model.eval()`, inference mode, batches of 250 or of the call), measured in
turns, medians of {turns}. Weights: those of the package where it has them, else a short training. Images are spread
over the test set; *proved* is the share of these. (results/certificates.md has the costs before.)

- *certify*: `pcdeq.certify(model, images)`; *without C*: both with PCDEQ_KERNELS=0.
- *frozen, 64* and *frozen, 1*: `pcdeq.freeze(model, certified=True)`, in calls of 64 images and of one.
- *enclose*: `layer.enclose(x)` over `layer.solve(x)`, 16 images, the worst layer.

Three equilibria in line, as MC has, enlarge what each leaves open up to a million times. So all but the last are solved
as in a plain pass and then corrected by one linear solve, which is small and for that in float32; only one product
a layer is in float64 ([theory](../docs/theory.md), T3). `layer.enclose` gives bounds as tight as the solve, place by
place: two products and a linear solve beyond it.

| network | data | images | proved | certify | without C | frozen, 64 | frozen, 1 | enclose |
|---|---|---|---|---|---|---|---|---|
"""


def ratio(proof: Callable[[], object], plain: Callable[[], object], turns: int = TURNS) -> float:
    """How many times as long the proof takes."""
    proof(), plain()
    times = [(seconds_of(proof), seconds_of(plain)) for _ in range(turns)]
    return statistics.median(a for a, _ in times) / statistics.median(b for _, b in times)


def passes(model: nn.Module, images: Tensor, size: int) -> Callable[[], None]:
    @torch.inference_mode()
    def run() -> None:
        for part in images.split(size):
            model(part)

    return run


def row(case: Case, count: int) -> str:
    images = pick_images(case, count)[0].contiguous(memory_format=torch.channels_last)
    model = case.model().eval()
    share = pcdeq.certify(model, images).share
    found = []
    for kernels in (nullcontext, without_kernels):
        with kernels():
            found.append(ratio(lambda: pcdeq.certify(model, images), passes(model, images, 250)))
    frozen = pcdeq.freeze(model, certified=True)
    frozen(images[:64])  # it learns which attempts are worth it
    for size in (64, 1):
        few = images[: size * CALLS if size == 1 else max(size, min(count, 256))]
        found.append(ratio(lambda: [frozen(part) for part in few.split(size)], passes(model, few, size)))  # noqa: B023
    found.append(max(_enclose(model, images[:16])))
    costs = " | ".join(f"{cost:.1f}" for cost in found)
    return f"| {case.topology.upper()} {case.activation} | {case.data} | {count:,} | {100 * share:.1f} % | {costs} |"


@torch.no_grad()
def _enclose(model: nn.Module, x: Tensor) -> list[float]:
    found = []
    for layer in model.children():
        if isinstance(layer, pcdeq.PcDEQ):
            found.append(ratio(lambda: layer.enclose(x), lambda: layer.solve(x)))  # noqa: B023
        x = layer(x)
    return found


def main() -> None:
    path = Path(__file__).parents[1] / "results" / "certificate-costs.md"
    lines = {key(line): line for line in path.read_text().splitlines() if "%" in line and line.startswith("|")}
    for topology, data, count in GROUPS:
        for activation in ACTIVATIONS if topology in (sys.argv[1:] or ["l", "sc", "mc"]) else ():
            line = row(Case(topology, data, activation), count)
            lines[key(line)] = line
            print(line, flush=True)
    page = HEADER.format(threads=torch.get_num_threads(), turns=TURNS) + "\n".join(lines.values()) + "\n"
    write(path, page.encode())


def key(line: str) -> tuple[str, ...]:
    """The network and the data of a row."""
    return tuple(line.split("|")[1:3])


if __name__ == "__main__":
    main()
