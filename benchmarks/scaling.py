"""How the cost of an equilibrium layer grows with batch, pixels and tolerance; writes results/bench/scaling.md."""

from __future__ import annotations

import time

import torch
from measure import peak_memory
from report import write
from run import RESULTS

import pcdeq

CHANNELS = 12
TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


def layer_with(tol: float) -> pcdeq.PcDEQ:
    """A convolutional layer about as hard as a trained one."""
    torch.manual_seed(0)
    layer = pcdeq.PcDEQConv2d(CHANNELS, "tanh", warm_start=False, solver=pcdeq.Anderson(tol=tol))
    with torch.no_grad():
        layer.operator.weight_v.uniform_()
        layer.operator.weight_g.fill_(0.2)
    return layer


def measure(batch: int, size: int, tol: float) -> tuple[float, float, float]:
    """Milliseconds of forward and backward (the least of several), steps of the slowest sample, peak bytes."""
    layer = layer_with(tol)
    x = torch.randn(batch, CHANNELS, size, size).contiguous(memory_format=torch.channels_last).requires_grad_()

    def step() -> None:
        layer(x).sum().backward()
        x.grad = None

    times = []
    for _ in range(8):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    assert layer.last_forward is not None and layer.last_backward is not None
    steps = layer.last_forward.steps + layer.last_backward.steps
    return 1e3 * min(times), steps, peak_memory(step)


def table(title: str, name: str, cases: dict[str, tuple[int, int, float]]) -> list[str]:
    lines = [
        "",
        f"**{title}**",
        "",
        f"| {name} | ms | ms per 10,000 pixels | steps, both ways | peak MB |",
        "|---|---|---|---|---|",
    ]
    for label, (batch, size, tol) in cases.items():
        ms, steps, peak = measure(batch, size, tol)
        lines.append(f"| {label} | {ms:.1f} | {1e4 * ms / (batch * size * size):.2f} | {steps} | {peak / 1e6:.1f} |")
    return lines


def main() -> None:
    torch.set_num_threads(2)
    lines = [
        "# How the cost grows",
        "",
        "One layer of 12 channels, tanh, forward and backward: `python benchmarks/scaling.py`.",
    ]
    lines += table("with the batch", "images of 28 x 28", {f"{n}": (n, 28, 1e-4) for n in (16, 32, 64, 128, 256)})
    lines += table("with the image", "side of 16 images", {f"{n}": (16, n, 1e-4) for n in (14, 28, 56, 112, 224)})
    lines += table(
        "with the tolerance", "tol, 64 images", {f"{t:.0e}": (64, 28, t) for t in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)}
    )
    write(RESULTS / "scaling.md", ("\n".join(lines) + "\n").encode())
    print("\n".join(lines))


if __name__ == "__main__":
    main()
