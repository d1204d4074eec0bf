"""Draws the pictures of docs/how-it-works.md into docs/img: ``python scripts/draw_docs.py``."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import pcdeq

IMAGES = Path(__file__).parents[1] / "docs" / "img"
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"


def new_figure(panels: int, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots(1, panels)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def save(figure: Figure, name: str) -> None:
    figure.savefig(IMAGES / name, dpi=130)


def one_crossing() -> None:
    """A concave curve that starts above the diagonal crosses it once; others never, or three times."""
    figure, (concave, line, bent) = new_figure(3, 3.2)
    z = torch.linspace(0, 1.15, 300)
    for ax, fn, title in (
        (concave, lambda z: torch.tanh(1.6 * z + 0.1), "concave, bounded: one solution"),
        (line, lambda z: 1.2 * z + 0.1, "grows like a line: none"),
        (bent, lambda z: torch.sigmoid(9 * z - 4.5), "not concave: three"),
    ):
        ax.plot(z, z, color=GREY, linewidth=0.8, linestyle="--")
        ax.plot(z, fn(z), color="black")
        cross = (fn(z) - z).sign().diff().nonzero().flatten()
        for place in z[cross].tolist():
            ax.plot(place, place, "o", color=GREEN, markersize=8, zorder=5, clip_on=False)
        ax.set(xlim=(0, 1.15), ylim=(0, 1.15), xlabel="z", aspect="equal")
        ax.set_title(title, fontsize=10)
    concave.set_ylabel("g(z), and z (dashed)")
    for start, colour in ((0.0, BLUE), (1.12, ORANGE)):
        point = start
        for _ in range(9):
            value = float(torch.tanh(torch.tensor(1.6 * point + 0.1)))
            concave.plot([point, point], [point, value], color=colour, linewidth=1.1)
            concave.plot([point, value], [value, value], color=colour, linewidth=1.1)
            point = value
    save(figure, "one-crossing.png")


def closing_in() -> None:
    """Left: two units, iterates from 0 and from sup s span boxes that shrink. Right: any size of the weights."""
    figure, (plane, sizes) = new_figure(2)
    weight, x = torch.tensor([[0.5, 0.9], [0.7, 0.3]]).double(), torch.tensor([0.15, 0.05]).double()
    low, high = torch.zeros(2).double(), torch.ones(2).double()
    lows, highs = [low], [high]
    for step in range(9):
        width, height = (high - low).tolist()
        plane.add_patch(Rectangle(tuple(low.tolist()), width, height, color=GREEN, alpha=0.10, linewidth=0))
        plane.add_patch(Rectangle(tuple(low.tolist()), width, height, fill=False, edgecolor=GREEN, linewidth=0.7))
        low, high = (torch.tanh(weight @ z + x) for z in (low, high))
        lows.append(low)
        highs.append(high)
        if step == 8:
            plane.plot(*low, "o", color="black", markersize=5, zorder=6)
            plane.annotate("z*", low.tolist(), xytext=(8, -12), textcoords="offset points")
    plane.plot(*torch.stack(lows).T, color=BLUE, marker="o", markersize=4, label="from 0")
    plane.plot(*torch.stack(highs).T, color=ORANGE, marker="o", markersize=4, label="from sup s")
    plane.set(xlabel="first unit", ylabel="second unit", xlim=(0, 1.03), ylim=(0, 1.03))
    plane.set_title("each pair of iterates is a box that holds z*", fontsize=10)
    plane.legend(frameon=False, loc="lower right")
    torch.manual_seed(0)
    base = torch.rand(40, 40).double()
    base /= base.sum(1, keepdim=True)
    x = pcdeq.PcDEQLinear(40).inject(torch.randn(40).double() - 0.5)
    for norm, colour in ((0.5, BLUE), (1.0, ORANGE), (5.0, GREEN), (100.0, "black")):
        point, iterates = torch.zeros(40).double(), []
        for _ in range(200):
            point = torch.tanh(norm * base @ point + x)
            iterates.append(point)
        errors = torch.stack([(z - point).abs().max() for z in iterates[:26]])
        sizes.semilogy(errors.clamp(min=1e-17), color=colour, marker="o", markersize=3, label=f"row sums {norm:g}")
    sizes.set(xlabel="plain steps", ylabel="largest error", ylim=(1e-15, 2))
    sizes.set_title("whatever the weights: 40 units, tanh", fontsize=10)
    sizes.legend(frameon=False)
    save(figure, "closing-in.png")


def adjoint() -> None:
    """Left: both solves shrink geometrically. Right: what the cheap gradients leave out."""
    torch.manual_seed(0)
    layer = pcdeq.PcDEQLinear(40, "tanh", warm_start=False, weight_norm=False).double()
    with torch.no_grad():
        layer.operator.weight.uniform_().div_(22)
    raw, grad = torch.randn(1, 40).double() - 0.8, torch.randn(1, 40).double()
    exact = gradient(layer, raw, grad, "implicit", tol=1e-13)
    figure, (steps, errors) = new_figure(2)
    with torch.no_grad():
        equation = layer.equation(raw)
        z, forward = equation.at_zero(), []
        for _ in range(40):
            new = equation(z)
            forward.append(float((new - z).norm() / new.norm()))
            z = new
        slope, y, backward = equation.slope(z), grad, []
        for _ in range(40):
            new = equation.map.adjoint(slope * y) + grad
            backward.append(float((new - y).norm() / new.norm()))
            y = new
    steps.semilogy(forward, color=BLUE, marker="o", markersize=3, label="forward: z = s(Wz + x)")
    steps.semilogy(backward, color=ORANGE, marker="s", markersize=3, label="backward: y = Jᵀy + v")
    steps.set(xlabel="plain steps", ylabel="relative residual")
    steps.set_title("two equations of one form", fontsize=10)
    steps.legend(frameon=False)
    tolerances = [10.0**-k for k in range(1, 11)]
    for name, options, colour in (
        ("implicit", {}, BLUE),
        ("phantom, 5 steps", {"gradient_steps": 5}, GREEN),
        ("jacobian-free", {}, ORANGE),
    ):
        kind = name.split(",")[0]
        found = [gradient(layer, raw, grad, kind, tol, **options) for tol in tolerances]
        relative = [float((g - exact).norm() / exact.norm()) for g in found]
        errors.loglog(tolerances, relative, color=colour, marker="o", markersize=3, label=name)
    errors.invert_xaxis()
    errors.set(xlabel="tolerance of both solves", ylabel="relative error of the gradient")
    errors.set_title("only the implicit gradient becomes exact", fontsize=10)
    errors.legend(frameon=False)
    save(figure, "adjoint.png")


def gradient(layer: pcdeq.PcDEQ, raw: torch.Tensor, grad: torch.Tensor, kind: str, tol: float, **options: int):
    twin = pcdeq.PcDEQLinear(
        40, "tanh", weight_norm=False, warm_start=False, gradient=kind, solver=pcdeq.Anderson(tol=tol), **options
    ).double()
    twin.load_state_dict(layer.state_dict())
    x = raw.clone().requires_grad_()
    twin(x).backward(grad)
    return x.grad


if __name__ == "__main__":
    one_crossing()
    closing_in()
    adjoint()
