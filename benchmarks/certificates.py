"""What the guarantees are worth on trained networks: this writes results/certificates.md.

Needs MNIST and CIFAR-10 (`PCDEQ_DATA`). The networks are those of the speed benchmark (benchmarks/weights, a short
training each) and, for robustness, an ordinary L network, an explicit network of the same shape, trained here, and a
run given by `--robust RUN`: in results, of `pcdeq train pcdeq-1-l-tanh --data mnist --robust-radius 0.1 --epochs 20`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cases import ACTIVATIONS, Case
from matplotlib.figure import Figure
from measure import Referee
from report import write
from torch import Tensor, nn
from torch.nn import functional as F

import pcdeq
from pcdeq.data import Batches, Dataset, load_dataset
from pcdeq.models import equilibrium_layers
from pcdeq.models.networks import Preprocessing
from pcdeq.proofs.certify import robustness_curve

RESULTS = Path(__file__).parents[1] / "results"
# Network, data and how many test images.
CASES = [
    *((Case("l", "mnist", activation), 10_000) for activation in ACTIVATIONS),
    *((Case("mc", "mnist", activation), 10_000) for activation in ACTIVATIONS),
    *((Case("sc", "mnist", activation), 1_000) for activation in ("relu6", "tanh")),
    *((Case("mc", "cifar10", activation), 1_000) for activation in ("relu6", "tanh")),
]
HEADER = """# What is proved about trained networks

Made by `python benchmarks/certificates.py --robust RUN`, {threads} threads, float32 unless noted, tolerance 1e-4.
Weights: those of the package where it has them, else a short training (benchmarks/cases.py says how long).

- *width / error*: half the width of `layer.enclose`, at its widest component, over the true error of the solve there,
  at its largest component; the median over 64 images (16 of SC), at the worst layer. The second number is that
  of the layer in float64.
- *certified*: test images whose class is proved to be that of the exact equilibrium network (`pcdeq.certify`).
- *cost*: seconds of `certify` over those of a plain forward pass (model.eval(), no_grad, batches of 250).

| network | data | width / error, float32 layer | float64 layer | images | certified | right | cost |
|---|---|---|---|---|---|---|---|
"""


def pick_images(case: Case, count: int) -> tuple[Tensor, Tensor]:
    data = load_dataset(case.data, quiet=True)
    chosen = torch.linspace(0, len(data.test.labels) - 1, count).long()
    prepare = Preprocessing(data.mean, data.std, data.classes)
    return prepare(data.test.images[chosen]), data.test.labels[chosen]


def width_over_error(case: Case, images: Tensor) -> tuple[float, float]:
    """The worst layer's median ratio of half the width to the true error, in float32 and in float64."""
    referee = Referee(case, images)
    layers = equilibrium_layers(case.model().eval())
    ratios = []
    for layer, x, (truth, _) in zip(layers, referee.inputs, referee.truth, strict=True):
        with torch.no_grad():
            error = (layer.solve(x).value.double() - truth).abs().flatten(1).amax(1)
            single = layer.enclose(x).width.flatten(1).amax(1) / 2
            double = layer.double().enclose(x.double()).width.flatten(1).amax(1) / 2
            error64 = (layer.solve(x.double()).value - truth).abs().flatten(1).amax(1)
        ratios.append((float((single / error).median()), float((double / error64).median())))
    return max(r for r, _ in ratios), max(r for _, r in ratios)


def seconds(action: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def row(case: Case, count: int) -> str:
    images, labels = pick_images(case, count)
    model = case.model().eval()
    certificate = pcdeq.certify(model, images)
    right = float((certificate.classes == labels).double().mean())
    few = images[: 64 if case.topology == "sc" else 500].contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def forward() -> None:
        for part in few.split(250):
            model(part)

    cost = seconds(lambda: pcdeq.certify(model, few)) / seconds(forward)
    single, double = width_over_error(case, images[:64])
    name = f"{case.topology.upper()} {case.activation}"
    return (
        f"| {name} | {case.data} | {single:.2f} | {double:.2f} | {count:,} | {100 * certificate.share:.2f} % | "
        f"{100 * right:.2f} % | {cost:.1f}x |"
    )


def explicit_network(data: Dataset, epochs: int = 10) -> nn.Sequential:
    """An explicit network of L's shape, a dense layer with ReLU in place of the equilibrium, trained alike."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 80),
        nn.BatchNorm1d(80),
        nn.Linear(80, 80),
        nn.ReLU(),
        nn.BatchNorm1d(80),
        nn.Linear(80, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = Batches(data.train, 64, mean=data.mean, std=data.std, shuffle=True)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for images, labels in batches:
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def robustness(robust: list[Path]) -> list[str]:
    """The table of curves, and its picture."""
    data = load_dataset("mnist", quiet=True)
    case, scale = Case("l", "mnist", "relu6"), Preprocessing(data.mean, data.std, data.classes)
    images, labels = pick_images(case, 10_000)
    models: dict[str, nn.Module] = {
        "L relu6, ordinary training": case.model().eval(),
        "MC relu6, ordinary training (1,000 images)": Case("mc", "mnist", "relu6").model().eval(),
        "explicit network of L's shape": explicit_network(data),
    }
    models |= {f"{folder.name}, certified training": pcdeq.load(folder).eval() for folder in robust}
    curves = {
        name: robustness_curve(model, *((images, labels) if "MC" not in name else pick_images(case, 1_000)), scale)
        for name, model in models.items()
    }
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot(list(curve), [100 * share for share in curve.values()], marker="o", label=name)
    axes.set(xlabel="distance in each pixel, 0 to 1", ylabel="proved and right, % of test images", ylim=(0, 101))
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(RESULTS / "robustness.png", dpi=150)
    radii = list(next(iter(curves.values())))
    lines = [
        "",
        "## Robustness",
        "",
        "Share of MNIST test images whose right class is proved for every picture within a distance in each pixel",
        "(from 0 to 1, also in the pictures that count): the exact hull through each equilibrium layer (T8), interval",
        "bounds through the others. Certified training: `pcdeq train pcdeq-1-l-tanh --data mnist --robust-radius 0.1",
        "--epochs 20`, half of the row's epochs.",
        "",
        "| network | " + " | ".join(f"{radius:g}" for radius in radii) + " |",
        "|---|" + "---|" * len(radii),
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{100 * share:.1f}" for share in curve.values()) + " |"
        for name, curve in curves.items()
    ]
    return [*lines, "", "![robustness](robustness.png)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robust", type=Path, nargs="*", default=[], help="runs of certified training")
    options = parser.parse_args()
    lines = []
    for case, count in CASES:
        lines.append(row(case, count))
        print(lines[-1], flush=True)
    lines += robustness(options.robust)
    write(
        RESULTS / "certificates.md", (HEADER.format(threads=torch.get_num_threads()) + "\n".join(lines) + "\n").encode()
    )


if __name__ == "__main__":
    main()
