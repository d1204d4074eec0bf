"""Draws docs/img/architecture.svg from the contract on imports in pyproject.toml: rerun it when that changes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "img" / "architecture.svg"

WHAT = {
    "cli": "parse, call, print; errors become one line",
    "commands": "one dataclass a command: its fields are the options",
    "report": "tables, figures, claims, the page",
    "reproduce": "many runs: one by one, Ray",
    "export": "the Hub, ONNX, torch.export",
    "training": "loop, run folder, evaluation",
    "guarantees": "certify, check, theory",
    "models": "the paper's networks by name",
    "testing": "what a part must do",
    "layers": "PcDEQ: injection + operator + activation + solver",
    "solving": "what a solve leaves",
    "implicit": "the one autograd function: solve forward, solve the adjoint backward",
    "native": "a small dense layer in two calls of C",
    "rule": "a layer, but its tensors",
    "rates": "steps known in advance",
    "sensitivity": "bounds on gradients",
    "enclosure": "bounds on z*",
    "injection": "input -> [0, inf)",
    "warmstart": "where to start",
    "equation": "z = s(Wz + x): one map, one activation, one batch",
    "activations": "s: value, slope, sup",
    "operators": "W >= 0: apply, adjoint",
    "solvers": "Picard, Anderson, Newton",
    "files": "whole or not at all",
    "errors": "one type, few children",
    "kernels": "C, where it pays",
    "data": "images as tensors",
    "recipes": "the paper's tables",
}
COLOURS = ("#f1e6f7", "#e3ecf9", "#e2f3ec", "#fbf1dd", "#eeeeee")
WIDTH, ROW, GAP, LEFT, SIDE = 900, 46, 9, 16, 190


def colour(modules: list[str]) -> str:
    """By what the row is about: commands, runs, networks and layers, the mathematics of one layer, the ground."""
    groups = (
        {"cli", "commands"},
        {"report", "reproduce", "export", "training"},
        {"guarantees", "models", "layers", "implicit", "native"},
        {"errors", "kernels", "files"},
    )
    for group, shade in zip(groups, (*COLOURS[:3], COLOURS[4]), strict=True):
        if group & set(modules):
            return shade
    return COLOURS[3]


def box(x: float, y: float, width: float, height: float, name: str, shade: str) -> str:
    middle = x + width / 2
    name_y, what_y = (y + height / 2 - 4, y + height / 2 + 13) if name in WHAT else (y + height / 2 + 5, 0)
    place = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<rect {place} rx="6" fill="{shade}" stroke="#999"/>',
        f'<text x="{middle:.0f}" y="{name_y:.0f}" class="name">{name}</text>',
    ]
    if name in WHAT:
        lines.append(f'<text x="{middle:.0f}" y="{what_y:.0f}" class="what">{escape(WHAT[name])}</text>')
    return "\n".join(lines)


def main() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = [re.findall(r"pcdeq\.(\w+)", row) for row in contracts[0]["layers"]]
    beside = re.findall(r"pcdeq\.(\w+)", " ".join(contracts[1]["source_modules"]))
    height = len(rows) * (ROW + GAP) + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" text-anchor="middle">',
        "<style>.name { font-size: 15px; font-weight: 600 } .what { font-size: 12px; fill: #444 }</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    main_width = WIDTH - 2 * LEFT - SIDE - 2 * GAP
    for index, modules in enumerate(rows):
        width = (main_width - GAP * (len(modules) - 1)) / len(modules)
        for column, name in enumerate(modules):
            parts.append(
                box(LEFT + column * (width + GAP), 14 + index * (ROW + GAP), width, ROW, name, colour(modules))
            )
    side_x, top = WIDTH - LEFT - SIDE, 14 + 3 * (ROW + GAP)
    side_height = ((len(rows) - 1) * (ROW + GAP) - 3 * (ROW + GAP) - GAP * len(beside)) / len(beside)
    for index, name in enumerate(beside):
        parts.append(box(side_x, top + index * (side_height + GAP), SIDE, side_height, name, COLOURS[1]))
    note = "A module imports only from rows below its own; data and recipes import only errors. import-linter keeps it."
    parts += [f'<text x="{WIDTH / 2:.0f}" y="{height - 18}" class="what">{note}</text>', "</svg>\n"]
    TARGET.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
