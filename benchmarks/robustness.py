"""Natural, attacked and certified accuracy over radii: this writes results/robustness.md and its picture.

Needs the data sets (`PCDEQ_DATA`). Networks: those of the package, by their names. Rows of earlier calls are kept, so
that networks that take long can be measured on fewer images and apart.

    python benchmarks/robustness.py pcdeq-1-l-relu6-mnist pcdeq-1-l-tanh-mnist --images 10000
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from report import write
from torch import Tensor, nn

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.proofs.attack import RESTARTS, STEPS, withstood
from pcdeq.proofs.certify import BATCH

RESULTS = Path(__file__).parents[1] / "results"
KEPT = RESULTS / "robustness.json"  # rows, also of earlier calls
RADII = (0.002, 0.005, 0.01, 0.02, 0.03)
BY_HAND = "## Trained against noise"  # what stands from here on in the file is left as it is
HEADER = f"""# Robustness: what is known on both sides

Made by `python benchmarks/robustness.py NETWORK --images N --radii R`, one thread, some rows at a time; its numbers
are kept in robustness.json.

Of so many test images, spread over the test set: *natural*, the class is right; *attacked*, no picture within the
radius in each pixel (from 0 to 1) was found that is given another class (projected gradient, {STEPS} steps, {RESTARTS}
restarts); *linear*, the right class is proved for all of them by intervals or linear bounds (T10); *intervals*, by
intervals alone (T8). Rounding is covered (T9). Between linear and attacked nobody knows. *ms*: milliseconds an image of
the proof by linear bounds, beside other work on the machine: with MC seconds, and so there are few images of it.

| network | images | radius | natural | attacked | linear | intervals | ms |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


class Row(NamedTuple):
    """A network at a radius: so many images, and which share of them, in percent; milliseconds an image."""

    network: str
    radius: float
    images: int
    natural: float
    attacked: float
    linear: float
    intervals: float
    cost: float


def share(kept: Tensor) -> float:
    return 100 * float(kept.double().mean())


def proved_right(model: nn.Module, images: Tensor, labels: Tensor, radius: float, bounds: str) -> Tensor:
    scale = model.preprocessing
    parts = [
        pcdeq.certify(model, batch, radius=scale.scaled(radius), limits=scale.limits(), bounds=bounds)
        for batch in images.split(BATCH)
    ]
    return torch.cat(
        [part.proved & (part.classes == some) for part, some in zip(parts, labels.split(BATCH), strict=True)]
    )


def attacked(model: nn.Module, images: Tensor, labels: Tensor, radius: float) -> Tensor:
    scale = model.preprocessing
    pairs = zip(images.split(BATCH), labels.split(BATCH), strict=True)
    return torch.cat([withstood(model, *pair, radius=scale.scaled(radius), limits=scale.limits()) for pair in pairs])


def row(name: str, count: int, radius: float) -> Row:
    """What is known of a network at a radius, on so many images that are spread over the test set."""
    model = pcdeq.load(name).eval()
    test = load_dataset(model.training_facts.data, quiet=True).test
    chosen = torch.linspace(0, len(test.labels) - 1, min(count, len(test.labels))).long()
    images, labels = model.preprocessing(test.images[chosen]), test.labels[chosen]
    with torch.no_grad():
        natural = torch.cat([model(batch).argmax(1) for batch in images.split(BATCH)]) == labels
    start = time.perf_counter()
    linear = proved_right(model, images, labels, radius, "linear")
    cost = 1000 * (time.perf_counter() - start) / len(images)
    intervals = proved_right(model, images, labels, radius, "intervals")
    kept = attacked(model, images, labels, radius)
    assert bool((kept >= linear).all()), "an attack broke a proof"
    return Row(name, radius, len(images), share(natural), share(kept), share(linear), share(intervals), cost)


def draw(curves: dict[str, list[Row]]) -> Figure:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, found) in enumerate(curves.items()):
        radii = [0.0, *(row.radius for row in found)]
        for column, style, what in (
            ("attacked", ":", "attacked"), ("linear", "-", "proved, linear"), ("intervals", "--", "proved, intervals"),
        ):  # fmt: skip
            shares = [found[0].natural, *(getattr(row, column) for row in found)]
            label = name if column == "linear" else (what if not colour else None)
            axes.plot(radii, shares, style, color=f"C{colour}", marker=".", label=label)
    axes.set(xlabel="distance in each pixel, 0 to 1", ylabel="% of test images", ylim=(0, 101))
    axes.legend(frameon=False, fontsize=7)
    return figure


def write_page(rows: list[Row]) -> None:
    text = HEADER
    for row in rows:
        shares = (row.natural, row.attacked, row.linear, row.intervals)
        text += f"| {row.network} | {row.images:,} | {row.radius:g} | "
        text += " | ".join(f"{number:.1f}" for number in shares) + f" | {row.cost:.1f} |\n"
    text += "\n![robustness](robustness.png)\n"
    by_hand = (RESULTS / "robustness.md").read_text().partition(BY_HAND)
    text += "".join(("\n", *by_hand[1:])) if by_hand[1] else ""
    curves = {name: [row for row in rows if row.network == name] for name in dict.fromkeys(row.network for row in rows)}
    drawn = {name: found for name, found in curves.items() if found[-1].radius >= RADII[1]}  # MC would be a corner
    draw(drawn).savefig(RESULTS / "robustness.png", dpi=150)
    write(RESULTS / "robustness.md", text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", help="names of the package's networks, as pcdeq.load takes them")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--radii", type=float, nargs="*", default=RADII)
    options = parser.parse_args()
    for name in options.networks:
        for radius in sorted(options.radii):
            found = row(name, options.images, radius)
            print(*found, flush=True)
            keep(found)
            if not found.linear:
                break


def keep(found: Row) -> None:
    """Write the page anew with a row, in the place of an older one like it."""
    kept = [Row(**old) for old in json.loads(KEPT.read_text())] if KEPT.exists() else []
    kept = [old for old in kept if (old.network, old.radius) != (found.network, found.radius)] + [found]
    kept.sort(key=lambda row: (row.network.split("-")[2], row.network, row.radius))
    write(KEPT, (json.dumps([row._asdict() for row in kept], indent=1) + "\n").encode())
    write_page(kept)


if __name__ == "__main__":
    main()
