"""Where the time of one MC training step goes, by the authors' pattern and by ours; writes results/bench/profile.md."""

from __future__ import annotations

import torch
from cases import Case
from measure import Contestant, count_products, interleave
from prepare import batches_of
from report import write
from run import RESULTS, machine, peak_flops
from torch.profiler import ProfilerActivity, profile

from pcdeq.models import equilibrium_layers

STEPS = 10
# What an operation is part of, by the beginning of its name; the first that fits counts.
PARTS = {
    "equilibria, forward": ("EquilibriumFunction", "pcdeq"),
    "convolutions": ("aten::mkldnn_convolution", "aten::_slow_conv2d", "aten::convolution_backward", "aten::thnn"),
    "batch norm": ("_BatchNorm", "aten::native_batch_norm", "aten::batch_norm"),
    "pooling": ("_MaxPool", "aten::max_pool", "aten::avg_pool", "aten::_max_pool"),
    "activation": ("aten::tanh", "aten::softplus", "aten::clamp", "aten::sigmoid", "aten::expm1", "aten::rsub"),
    "norms and sums": ("aten::linalg_vector_norm", "aten::norm", "aten::sum", "aten::_weight_norm"),
    "additions, copies": ("aten::add", "aten::sub", "aten::mul", "aten::copy_", "aten::clone", "aten::div"),
    "next points, samples left out": ("aten::lerp", "aten::index"),
    "optimiser": ("Optimizer", "aten::_fused_adam", "aten::_foreach"),
}


def part_of(name: str) -> str:
    if name.startswith("EquilibriumFunctionBackward"):
        return "equilibria, backward"
    return next((part for part, starts in PARTS.items() if name.startswith(starts)), "all else")


def shares(contestant: Contestant) -> dict[str, float]:
    """Milliseconds of a step by part."""
    contestant.train()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            contestant.train()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        part = part_of(event.key)
        found[part] = found.get(part, 0.0) + event.self_cpu_time_total / 1e3 / STEPS
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def floor(contestant: Contestant) -> tuple[float, float]:
    """Multiply-adds of the products of a step, in units of 1e9, and milliseconds at this machine's best rate."""
    forward, backward = count_products(contestant)
    operations = 0.0
    shapes: list[tuple[int, ...]] = []
    layers = equilibrium_layers(contestant.model)
    handles = [layer.register_forward_hook(lambda _, __, z: shapes.append(tuple(z.shape))) for layer in layers]
    with torch.no_grad():
        contestant.model(contestant.batches[0][0])
    for handle in handles:
        handle.remove()
    for samples, channels, height, width in shapes:
        operations += samples * height * width * 9 * channels**2 * (forward + backward + 1)  # and one for dW
    return operations / 1e9, 2e3 * operations / peak_flops()


def main() -> None:
    torch.set_num_threads(2)
    case = Case("mc", "mnist", "tanh")
    batches, _ = batches_of(case.data)
    contestants = {method: Contestant(method, case, batches) for method in ("hook", "without-c", "pcdeq")}
    times = interleave({method: c.train for method, c in contestants.items()}, 3.0)
    lines = [
        "# Where the time of a training step goes",
        "",
        "MC tanh, MNIST shape, batch 64, 2 threads, trained weights: `python benchmarks/profile_step.py`.",
        f"Machine: {machine()}. Milliseconds of a step by torch's profiler, which slows small operations down, before",
        "(the authors' pattern, `hook`) and after, in plain torch (`without-c`, where what is left to the equilibria",
        "themselves is Python and numpy) and with the C kernels (`pcdeq`).",
    ]
    parts = {method: shares(contestant) for method, contestant in contestants.items()}
    for method, found in parts.items():
        lines += ["", f"**{method}**: {times[method].median:.0f} ms a step without the profiler", "", "| part | ms |"]
        lines += ["|---|---|", *(f"| {part} | {ms:.1f} |" for part, ms in found.items() if ms > 0.05)]
    operations, least = floor(contestants["pcdeq"])
    equilibria = sum(ms for part, ms in parts["pcdeq"].items() if part.startswith("equilibria"))
    lines += [
        "",
        f"The floor: the products of pcdeq's step, with W, with its adjoint and for dW, are {operations:.1f}e9",
        f"multiply-adds by the definition of a convolution, {least:.0f} ms at the rate of a large matrix product on",
        f"this machine; the equilibria took {equilibria:.0f} ms, all that is not a product included (activations,",
        "residuals, dot products, safeguards, copies, weight norm). Winograd's way needs a quarter of the",
        "multiplications, but on few channels and small images its transforms and the filling up of tiles and vectors",
        "take half of that back. All else is explicit layers, which pass over memory once or twice each.",
    ]
    write(RESULTS / "profile.md", ("\n".join(lines) + "\n").encode())
    print("\n".join(lines))


if __name__ == "__main__":
    main()
