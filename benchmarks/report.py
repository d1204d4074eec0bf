"""What a benchmark leaves behind: bench.json, bench.md and bench.png."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from measure import OURS
from rich.table import Table
from tables import (
    COLUMNS,
    Run,
    details,
    geometric_mean,
    groups,
    name_of,
    others,
    ratio_table,
    single_ratios,
    target_table,
)

COLOURS = {"hook": "#4477aa", "torchdeq": "#ee6677", "torchdeq-anderson": "#ccbb44", "explicit": "#228833"}


def save(runs: list[Run], operators: Table, folder: Path, facts: dict[str, object]) -> None:
    """Write the numbers, the tables and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"run": number, "row": case.row, "data": case.data, "dtype": case.dtype, **asdict(measurement)}
        for number, run in enumerate(runs)
        for case, measurements in run.items()
        for measurement in measurements
    ]
    write(folder / "bench.json", json.dumps({**facts, "measurements": rows}, indent=1).encode())
    write(folder / "bench.md", markdown(runs, operators, facts).encode())
    picture = io.BytesIO()
    figure(runs).savefig(picture, format="png", dpi=150)
    write(folder / "bench.png", picture.getvalue())


def write(path: Path, content: bytes) -> None:
    """All or nothing."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_bytes(content)
    partial.replace(path)


def markdown(runs: list[Run], operators: Table, facts: dict[str, object]) -> str:
    """The tables for a reader of the repository."""
    lines = ["# Speed", "", "Made by `make bench`. " + "; ".join(f"{k}: {v}" for k, v in facts.items()) + ".", ""]
    lines += [
        "`pcdeq` has its C kernels, `without-c` is what runs on machines without: the same in plain torch. All have",
        "the same optimiser (torch's fused AdamW) and layout of images. float64 is eager torch for all.",
        "",
    ]
    for table in (target_table(runs), ratio_table(runs), operators):
        lines += [f"**{table.title}**", "", *as_markdown(table), ""]
    lines += ["![ratios](bench.png)", "", "Milliseconds (medians), products with W for each layer and sample, peak"]
    lines += [
        "memory of a training step in MB (tensors of torch, without the scratch memory of the C kernels, below 15 MB",
        "here), true errors of equilibria and gradients against float64:",
        "",
    ]
    lines += [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *details(runs))]
    return "\n".join(lines) + "\n"


def as_markdown(table: Table) -> list[str]:
    heads = [str(column.header) for column in table.columns]
    cells = zip(*(list(column.cells) for column in table.columns), strict=True)
    return [f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *cells)]


def figure(runs: list[Run]) -> Figure:
    """Bars: how many times longer each method takes."""
    mpl.use("agg")
    methods = others(runs[0])
    picture = Figure(figsize=(10, 4), layout="constrained")
    present = {m.method for measurements in runs[0].values() for m in measurements}
    ours = next(method for method in OURS if method in present)
    for place, what in enumerate(("training", "inference"), start=1):
        axes = picture.add_subplot(1, 2, place)
        found = [group for group in groups(runs[0]) if single_ratios(runs, group, ours, methods[0], what)]
        for offset, method in enumerate(methods):
            ratios = [single_ratios(runs, group, ours, method, what) for group in found]
            heights = [geometric_mean(single) if single else float("nan") for single in ratios]
            places = [index + 0.2 * offset for index in range(len(found))]
            bars = axes.bar(places, heights, 0.19, label=method, color=COLOURS.get(method))
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks([index + 0.1 * (len(methods) - 1) for index in range(len(found))], map(name_of, found))
        axes.set_yscale("log")
        axes.set_title(f"{what}: time over {ours}'s, higher is slower")
        axes.spines[["top", "right"]].set_visible(False)
    picture.axes[1].legend(frameon=False, loc="upper right")
    return picture
