"""Draws docs/img/architecture.svg from the contract on imports in pyproject.toml: rerun it when that changes."""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "img" / "architecture.svg"

WHAT = {
    "cli": "parse, call, print; errors become one line",
    "commands": "one dataclass a command: its fields are the options",
    "report": "tables, figures, claims, the page",
    "reproduce": "many runs, also on Ray",
    "export": "ONNX, torch.export",
    "play": "a page to draw on",
    "training": "loop, run folder, evaluation",
    "concave": "a map of yours, bounded",
    "models": "networks by name, baselines",
    "theory": "what is known of any map",
    "proofs.worst_case": "the certified loss",
    "proofs.certify": "classes, proved",
    "proofs.check": "which theorem holds",
    "testing": "for those who extend it",
    "proofs.network": "the recogniser: a network as known layers",
    "proofs.leads": "of a class over the others, by linear bounds",
    "proofs.kinds": "one entry a kind of layer, with all its rules",
    "proofs.affine": "weights, batch norm",
    "proofs.windows": "pooling, padding",
    "proofs.curves": "activations",
    "proofs.composed": "residual, unknown",
    "proofs.relaxed": "lines about a maximum",
    "proofs.folding": "what can be one layer",
    "proofs.rules": "what a kind of layer must know",
    "proofs.linear": "linear bounds on z* (T10)",
    "proofs.precision": "full, whatever surrounds it",
    "proofs.intervals": "boxes, rounded outward",
    "proofs.balls": "radii about a plain pass",
    "proofs.channels": "z* by a radius a channel",
    "residual": "x + f(x), known to all of them",
    "proofs.trusted": "is it what it is called?",
    "layers": "PcDEQ: injection + operator + activation + solver",
    "unrolling": "layers as plain steps",
    "implicit": "an equilibrium with its gradient, or a cheap variant",
    "derivatives": "two autograd functions: the solve, and the linear solve of its derivatives",
    "operations": "both solves, and both as operators of torch",
    "maps": "the fixed point of any map of yours",
    "proofs.certified": "a solve until a bound or a question is met",
    "proofs.gradient": "bounds on gradients",
    "proofs.order": "bounds on z*",
    "proofs.rates": "steps known in advance",
    "injection": "input -> [0, inf)",
    "equation": "z = s(Wz + x) and its adjoint, as problems",
    "sparse": "W as a list of entries",
    "activations": "s: value, slope, sup",
    "operators": "W >= 0: apply, adjoint",
    "convolution": "in float64: by a kernel, or a few samples at a time",
    "solvers": "one loop; init and step",
    "parametrisation": "W from what is learned",
    "autograd": "a gradient put in place of another",
    "files": "whole or not at all",
    "recalibration": "batch norms as they are",
    "trees": "tensors in tuples and dicts",
    "kernels": "C, and the one way to it",
    "extras": "what is not installed, and how to",
    "errors": "one type, few children",
    "data": "images as tensors",
    "recipes": "the paper's tables",
}
# By what a module is about: commands, runs, networks and layers, proofs, the equation, the ground, the data.
COLOURS = {
    "#f1e6f7": {"cli", "commands"},
    "#e3ecf9": {"report", "reproduce", "export", "training", "play"},
    "#e2f3ec": {
        "models",
        "layers",
        "implicit",
        "derivatives",
        "operations",
        "unrolling",
        "maps",
        "residual",
        "testing",
    },
    "#fde6e1": {"proofs", "theory", "concave"},
    "#fbf1dd": {"injection", "equation", "sparse", "activations", "operators", "parametrisation", "solvers"},
    "#eeeeee": {"autograd", "convolution", "files", "kernels", "recalibration", "trees", "extras", "errors"},
    "#e9f1f4": {"data", "recipes"},
}
WIDTH, SIDE, LEFT, TOP, GAP = 900, 130, 16, 14, 8
LINE, CHARACTER, LETTER = 16, 6.2, 8.5  # pixels: the height of a line, the width of a character, of one of a name
INDENT = 160  # of what a module is, where it stands beside its name
STYLE = ".name { font-size: 14px; font-weight: 600; fill: #111 } .what { font-size: 12px; fill: #444 }"
NOTE = "A module imports only from rows below its own; data and recipes import only errors. import-linter keeps it."


def lines_of(name: str, width: float) -> list[str]:
    """What a module is, in lines that fit."""
    return textwrap.wrap(WHAT[name], int((width - 10) / CHARACTER))


def widths_of(names: list[str], whole: float) -> list[float]:
    """Of the modules of a row: room for the name, and a part of what is left."""
    least = [LETTER * max(len(name), 12) + 10 for name in names]
    rest = (whole - GAP * (len(names) - 1) - sum(least)) / len(names)
    return [width + rest for width in least]


def height_of(names: list[str], widths: list[float]) -> float:
    """Of a row: a module alone has its name and what it is on one line."""
    if len(names) == 1:
        return 2 * LINE
    return (1.8 + max(len(lines_of(*pair)) for pair in zip(names, widths, strict=True))) * LINE


def box(x: float, y: float, width: float, height: float, name: str) -> list[str]:
    """One module."""
    (shade,) = (shade for shade, names in COLOURS.items() if name.split(".")[0] in names)
    place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    parts = [f'<rect {place} rx="5" fill="{shade}" stroke="#999"/>']
    middle, centre = x + width / 2, y + height / 2 + 5
    if height <= 2 * LINE:
        name_x, what_x = x + 14, x + INDENT
        parts.append(f'<text x="{name_x:.0f}" y="{centre:.0f}" class="name" text-anchor="start">{name}</text>')
        what = f'y="{centre:.0f}" class="what" text-anchor="start">{escape(WHAT[name])}'
        return [*parts, f'<text x="{what_x:.0f}" {what}</text>']
    lines = lines_of(name, width)
    first = centre - LINE * len(lines) / 2
    parts.append(f'<text x="{middle:.0f}" y="{first:.0f}" class="name">{name}</text>')
    for number, line in enumerate(lines, start=1):
        parts.append(f'<text x="{middle:.0f}" y="{first + LINE * number:.0f}" class="what">{escape(line)}</text>')
    return parts


def main() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = [re.findall(r"pcdeq\.([\w.]+)", row) for row in contracts[0]["layers"]]
    beside = re.findall(r"pcdeq\.([\w.]+)", " ".join(contracts[1]["source_modules"]))
    if wrong := set(WHAT) ^ {*(name for names in rows for name in names), *beside}:
        raise SystemExit(f"WHAT must say what each module of pyproject.toml is, no other: {', '.join(sorted(wrong))}")
    inner, y, parts, edges = WIDTH - 2 * LEFT - SIDE - 2 * GAP, TOP, [], {}
    for names in rows:
        x, widths = LEFT, widths_of(names, inner)
        height = height_of(names, widths)
        for name, width in zip(names, widths, strict=True):
            parts += box(x, y, width, height, name)
            x += width + GAP
            edges[name] = y
        y += height + GAP
    top, bottom = edges["training"], edges["errors"] - GAP  # beside the rows that use them
    each = (bottom - top - GAP * (len(beside) - 1)) / len(beside)
    for index, name in enumerate(beside):
        parts += box(WIDTH - LEFT - SIDE, top + index * (each + GAP), SIDE, each, name)
    size = f'viewBox="0 0 {WIDTH} {y + 28:.0f}" width="{WIDTH}" height="{y + 28:.0f}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" text-anchor="middle">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{y + 28:.0f}" fill="white"/>',
    ]
    note = f'<text x="{WIDTH / 2:.0f}" y="{y + 14:.0f}" class="what">{NOTE}</text>'
    TARGET.write_text("\n".join([*head, *parts, note, "</svg>\n"]))


if __name__ == "__main__":
    main()
