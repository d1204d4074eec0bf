"""What a proof costs: this writes results/certificate-costs.md.

The denominator is everywhere the plain pass of the same network over the same images: `model.eval()`, inference mode,
in batches of 250, or of the size of the call. Both are measured in turns, with C kernels and without; medians. Each
network has a process of its own: what ran before it in the same one decides how much of the plain pass is page faults.
Topologies may be named, `python benchmarks/certificate_costs.py mc sc`: the rows of the others stay as they are.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from cases import ACTIVATIONS, Case
from certificates import pick_images
from measure import seconds_of, without_kernels
from report import write
from torch import Tensor, nn

import pcdeq

# Networks, data, images that a call of certify gets, and images of what is measured on few.
GROUPS = (
    ("l", "mnist", 5_000, 5_000),
    ("sc", "mnist", 500, 64),
    ("mc", "mnist", 500, 512),
    ("mc", "cifar10", 500, 256),
)
TURNS, CALLS, FEWEST = 3, 8, 10
Proof = Callable[[pcdeq.PcDEQ, Tensor], object]  # about an equilibrium, for an input
HEADER = """# What a proof costs

Made by `python benchmarks/certificate_costs.py`, {threads} threads. Seconds of a proof over those of the plain pass of
the same network over the same images (`model.eval()`, inference mode, batches of 250 or of the call), measured in
turns, medians, each network in a process of its own. Weights: those of the package where it has them, else a short
training. (results/certificates.md has the costs before.)

- *certify*: `pcdeq.certify(model, images)`, over the whole test set, in calls of 500 images (L: 5,000; ten of them), of
  which the medians are taken (it takes 64 images at a time, the plain pass 250); *proved* is the share of the test set.
- *without C*: both with PCDEQ_KERNELS=0, on so many images, spread over the test set: 5,000 (L), 64 (SC), 512 and 256.
- *frozen, 64* and *frozen, 1*: `pcdeq.freeze(model, certified=True)`, in calls of 64 images and of one.
- *enclose*: `layer.enclose(x)` over `layer.solve(x)`, 16 images, the worst layer; *to 0.01*: with `width=0.01`;
  *Certified*: `layer.solve(x, solver=Certified(Anderson(tol=1e-3)))`, an error that is proved, over the same.

Three equilibria in line, as MC has, enlarge what each leaves open up to a million times. So all but the last are solved
as in a plain pass and then corrected by one linear solve, which is small and for that in float32; only one product
a layer is in float64 ([theory](../docs/theory.md), T3). `layer.enclose` gives bounds as tight as the solve, place by
place: two products and a linear solve beyond it. For bounds that are some ten times as wide, and so for
`layer.enclose(x, width=0.01)`, one product is enough where the channels alone prove them.

Why tight bounds do not come at 1.5 times: of a `layer.solve`, which is a solve and a plain product that confirms
it, one product in float64 alone takes 0.3 to 0.6 (SC) and 0.14 to 0.75 (MC, most with sigmoid, whose solves have few
steps), one in float32 0.07 to 0.34; candidates take a linear solve beside them (16 images, one thread, a throw-away
script).

The plain pass makes tensors of 20 MB, whose memory a young process gets anew each time, page by page. In one that has
run other networks it takes less: for 500 images of CIFAR-10 MC sigmoid 110 ms where it took 160. There `certify`, which
works in pieces and takes as long in both, is at 3.6 to 3.9 (tanh 3.2 to 3.4) in place of 2.7 to 3.1 (2.5 to 2.6).

| network | data | proved | certify | without C | frozen, 64 | frozen, 1 | enclose | to 0.01 | Certified |
|---|---|---|---|---|---|---|---|---|---|
"""


def ratio(proof: Callable[[], object], plain: Callable[[], object], turns: int = TURNS) -> float:
    """How many times as long the proof takes."""
    proof(), plain()
    return ratio_of_medians((seconds_of(proof), seconds_of(plain)) for _ in range(turns))


def ratio_of_medians(times: Iterable[tuple[float, float]]) -> float:
    proofs, passes = zip(*times, strict=True)
    return statistics.median(proofs) / statistics.median(passes)


def passes(model: nn.Module, images: Tensor, size: int) -> Callable[[], None]:
    @torch.inference_mode()
    def run() -> None:
        for part in images.split(size):
            model(part)

    return run


def row(case: Case, call: int, few: int) -> str:
    model = case.model().eval()
    cost, share = whole(model, pick_images(case, 10_000)[0], call)
    images = pick_images(case, few)[0].contiguous(memory_format=torch.channels_last)
    found = [cost]
    with without_kernels():
        found.append(ratio(lambda: pcdeq.certify(model, images), passes(model, images, 250)))
    frozen = pcdeq.freeze(model, certified=True)
    frozen(images[:64])  # it learns which attempts are worth it
    for size in (64, 1):
        given = images[: size * CALLS if size == 1 else max(size, min(few, 256))].split(size)
        found.append(ratio(lambda: [frozen(part) for part in given], passes(model, torch.cat(given), size)))  # noqa: B023
    certified = pcdeq.Certified(pcdeq.Anderson(tol=1e-3))
    proofs: list[Proof] = [
        lambda layer, x: layer.enclose(x),
        lambda layer, x: layer.enclose(x, width=0.01),
        lambda layer, x: layer.solve(x, solver=certified),
    ]
    found += [max(by_layer(model, images[:16], proof)) for proof in proofs]
    costs = " | ".join(f"{cost:.1f}" for cost in found)
    return f"| {case.topology.upper()} {case.activation} | {case.data} | {100 * share:.2f} % | {costs} |"


def whole(model: nn.Module, images: Tensor, call: int) -> tuple[float, float]:
    """Over all test images: what certify costs, and the share that it proves."""
    shares, times, parts = [], [], images.split(call)
    for part in parts * -(-FEWEST // len(parts)):
        part = part.contiguous(memory_format=torch.channels_last)
        plain = seconds_of(passes(model, part, 250))
        times.append((seconds_of(lambda: shares.append(pcdeq.certify(model, part).share)), plain))  # noqa: B023
    return ratio_of_medians(times), statistics.fmean(shares)


@torch.no_grad()
def by_layer(model: nn.Module, x: Tensor, proof: Proof) -> list[float]:
    """What a proof about each equilibrium costs, over its solve."""
    found = []
    for layer in model.children():
        if isinstance(layer, pcdeq.PcDEQ):
            found.append(ratio(lambda: proof(layer, x), lambda: layer.solve(x)))  # noqa: B023
        x = layer(x)
    return found


def main() -> None:
    path = Path(__file__).parents[1] / "results" / "certificate-costs.md"
    lines = {key(line): line for line in path.read_text().splitlines() if "%" in line and line.startswith("|")}
    for topology, data, call, few in GROUPS:
        for activation in ACTIVATIONS if topology in (sys.argv[1:] or ["l", "sc", "mc"]) else ():
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                line = process.submit(row, Case(topology, data, activation), call, few).result()
            lines[key(line)] = line
            print(line, flush=True)
    page = HEADER.format(threads=torch.get_num_threads()) + "\n".join(lines.values()) + "\n"
    write(path, page.encode())


def key(line: str) -> tuple[str, ...]:
    """The network and the data of a row."""
    return tuple(line.split("|")[1:3])


if __name__ == "__main__":
    main()
