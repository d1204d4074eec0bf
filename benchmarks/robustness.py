"""Natural, attacked and certified accuracy over radii: this writes results/robustness.md and its picture.

Needs the data sets (`PCDEQ_DATA`). Networks: those of the package, by their names, or run folders.

    python benchmarks/robustness.py pcdeq-1-l-relu6-mnist pcdeq-1-l-tanh-mnist --images 10000
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from report import write
from torch import Tensor, nn

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.proofs.attack import RESTARTS, STEPS, withstood
from pcdeq.proofs.certify import BATCH

RESULTS = Path(__file__).parents[1] / "results"
RADII = (0.002, 0.005, 0.01, 0.02, 0.03)
BY_HAND = "## Trained against noise"  # what stands from here on in the file is left as it is
HEADER = f"""# Robustness: what is known on both sides

Made by `{{command}}`, {{threads}} thread(s).

Of the test images ({{images:,}}, spread over the test set): *natural*, the class is right; *attacked*, no picture
within the radius in each pixel (from 0 to 1) was found that is given another class (projected gradient, {STEPS} steps,
{RESTARTS} restarts); *linear*, the right class is proved for all of them by intervals or linear bounds (T10);
*intervals*, by intervals alone (T8). Rounding is covered (T9). Between linear and attacked nobody knows. The radii end
where nothing is proved. *ms*: milliseconds an image of the proof by linear bounds.

| network | radius | natural | attacked | linear | intervals | ms |
|---|---:|---:|---:|---:|---:|---:|
"""


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


def rows(name: str, count: int, radii: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Of each radius: natural, attacked, linear, intervals, milliseconds."""
    model = pcdeq.load(name).eval()
    test = load_dataset(model.training_facts.data, quiet=True).test
    chosen = torch.linspace(0, len(test.labels) - 1, min(count, len(test.labels))).long()
    images, labels = model.preprocessing(test.images[chosen]), test.labels[chosen]
    with torch.no_grad():
        natural = torch.cat([model(batch).argmax(1) for batch in images.split(BATCH)]) == labels
    found = []
    for radius in sorted(radii):
        start = time.perf_counter()
        linear = proved_right(model, images, labels, radius, "linear")
        cost = 1000 * (time.perf_counter() - start) / len(images)
        intervals = proved_right(model, images, labels, radius, "intervals")
        kept = attacked(model, images, labels, radius)
        assert bool((kept >= linear).all()), "an attack broke a proof"
        found.append((radius, share(natural), share(kept), share(linear), share(intervals), cost))
        print(name, *(f"{number:.3g}" for number in found[-1]), flush=True)
        if not linear.any():
            break
    return found


def draw(curves: dict[str, list[tuple[float, ...]]]) -> Figure:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, found) in enumerate(curves.items()):
        radii = [0.0, *(row[0] for row in found)]
        for column, style, what in ((2, ":", "attacked"), (3, "-", "proved, linear"), (4, "--", "proved, intervals")):
            shares = [found[0][1], *(row[column] for row in found)]
            label = name if column == 3 else (what if not colour else None)
            axes.plot(radii, shares, style, color=f"C{colour}", marker=".", label=label)
    axes.set(xlabel="distance in each pixel, 0 to 1", ylabel="% of test images", ylim=(0, 101))
    axes.legend(frameon=False, fontsize=7)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", help="names of the package's networks, as pcdeq.load takes them")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--radii", type=float, nargs="*", default=RADII)
    options = parser.parse_args()
    curves = {name: rows(name, options.images, tuple(options.radii)) for name in options.networks}
    command = f"python benchmarks/robustness.py {' '.join(options.networks)} --images {options.images}"
    text = HEADER.format(command=command, threads=torch.get_num_threads(), images=options.images)
    for name, found in curves.items():
        for radius, *numbers, cost in found:
            text += (
                f"| {name} | {radius:g} | " + " | ".join(f"{number:.1f}" for number in numbers) + f" | {cost:.1f} |\n"
            )
    text += "\n![robustness](robustness.png)\n"
    by_hand = (RESULTS / "robustness.md").read_text().partition(BY_HAND)
    text += "".join(("\n", *by_hand[1:])) if by_hand[1] else ""
    draw(curves).savefig(RESULTS / "robustness.png", dpi=150)
    write(RESULTS / "robustness.md", text.encode())


if __name__ == "__main__":
    main()
