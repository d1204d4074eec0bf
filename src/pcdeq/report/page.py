"""One page of many runs: tables, figures, claims and environment, as self-contained HTML or as Markdown."""

from __future__ import annotations

import base64
import html
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pcdeq._version import __version__
from pcdeq.errors import PcdeqError
from pcdeq.files import write_file
from pcdeq.report.charts import Chart
from pcdeq.report.claims import Claim, check_claims
from pcdeq.report.curves import draw_families
from pcdeq.report.studies import draw_studies, find_subjects
from pcdeq.report.tables import TEXT_COLUMNS, Line, collect, markdown_table
from pcdeq.training import Run, find_runs

TITLE = "Positive concave deep equilibrium models, reproduced"
NOTES = (
    "Accuracy is that of the last epoch on the test set, in percent: mean ± standard deviation over the runs. Nothing "
    "was selected on test data. Where fewer epochs were trained than in the paper, the table says so and gives no "
    "difference. Steps are the mean per solve in the last epoch, over layers and runs, with the solver that the row "
    "names (else ours, which starts from a running mean and is accelerated, so its steps are fewer than the paper's). "
    "Certified: predictions proved to be those of the exact equilibrium network. Seconds: median per epoch, on the "
    "machine below, which may have been busy with other work."
)


@dataclass(frozen=True)
class Content:
    """What is on the page, whatever its format."""

    tables: dict[str, list[Line]]
    charts: list[Chart]
    claims: list[Claim]
    environments: list[str]
    missing: str | None  # why there are no studies
    source: Path


def write_report(
    runs_dir: Path, out: Path, figures: Path, *, studies: bool = True, data_dir: Path | None = None
) -> Content:
    """Write the page to ``out`` and every figure as PNG, SVG and CSV to ``figures``."""
    runs = find_runs(runs_dir)
    if not any(run.metrics for run in runs):
        raise PcdeqError(f"{runs_dir} has no run with a complete epoch; `pcdeq reproduce` makes runs")
    tables = collect(runs)
    lines = [line for group in tables.values() for line in group]
    subjects, missing = [], "without studies, trained networks are not looked at"
    if studies:
        subjects, missing = find_subjects(lines, data_dir)
    content = Content(
        tables=tables,
        charts=[*draw_families(lines), *draw_studies(subjects)],
        claims=check_claims(lines, subjects, missing),
        environments=_environments(runs),
        missing=missing,
        source=runs_dir,
    )
    for chart in content.charts:
        chart.save(figures)
    text = as_html(content) if out.suffix == ".html" else as_markdown(content, out, figures)
    write_file(out, text.encode())
    return content


def _environments(runs: Sequence[Run]) -> list[str]:
    """What the runs were made with, each combination once, with how many runs."""
    counts: Counter[str] = Counter()
    for run in runs:
        description = run.description
        values = {**description.get("versions", {}), **description.get("machine", {})}
        commit = (description.get("git") or {}).get("commit")
        values["commit"] = commit[:10] if commit else None
        counts[", ".join(f"{key} {value}" for key, value in values.items() if value is not None)] += 1
    return [f"runs {count}, {text}" for text, count in counts.most_common()]


def as_markdown(content: Content, out: Path, figures: Path) -> str:
    """For a repository: tables and links to the pictures beside it."""
    parts = [f"# {TITLE}", f"Made by `pcdeq report {content.source} -o {out}` (pcdeq {__version__}). {NOTES}"]
    for data, lines in content.tables.items():
        cells = [line.cells() for line in lines]
        for entry in cells:
            entry["command"] = f"`{entry['command']}`"
        parts += [f"## {_heading(data)}", markdown_table(cells)]
    parts += ["## Claims of the paper's text", markdown_table([claim.cells() for claim in content.claims])]
    parts.append("## Figures")
    folder = os.path.relpath(figures, out.parent)
    for chart in content.charts:
        link = f"{folder}/{chart.name}"
        parts.append(f"![{chart.name}]({link}.png)\n\n{chart.caption} ([SVG]({link}.svg), [data]({link}.csv))")
    if content.missing:
        parts.append(f"Figures of trained networks are missing: {content.missing}")
    parts += ["## Environment", *content.environments]
    return "\n\n".join(parts) + "\n"


def as_html(content: Content) -> str:
    """One file that needs nothing else."""
    own = files("pcdeq.report")
    style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    sections = [
        *(
            f'<h2 id="{data}">{html.escape(_heading(data))}</h2>{_table([line.cells() for line in lines])}'
            for data, lines in content.tables.items()
        ),
        '<h2 id="claims">Claims of the paper\'s text</h2>',
        _table([claim.cells() for claim in content.claims]),
        f'<h2 id="figures">Figures</h2><div class="figures">{"".join(map(_figure, content.charts))}</div>',
        f"<p>Figures of trained networks are missing: {html.escape(content.missing)}</p>" if content.missing else "",
        '<h2 id="environment">Environment</h2>',
        *(f'<p class="soft">{html.escape(one)}</p>' for one in content.environments),
    ]
    links = [*content.tables, "claims", "figures", "environment"]
    menu = "".join(f'<a href="#{name}">{html.escape(_heading(name))}</a>' for name in links)
    body = f'<h1>{TITLE}</h1><nav>{menu}</nav><p class="soft">{NOTES} Press a heading to sort.</p>{"".join(sections)}'
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{style}</style>"
    )
    footer = f'<p class="soft">Made by pcdeq {__version__} from {html.escape(str(content.source))}.</p>'
    body += f"{footer}<script>{script}</script>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _heading(name: str) -> str:
    """A data set's or section's name for people.

    >>> _heading("cifar10"), _heading("claims"), _heading("/data/my-pictures.npz")
    ('CIFAR-10', 'Claims', 'my-pictures.npz')
    """
    known = {"mnist": "MNIST", "svhn": "SVHN", "cifar10": "CIFAR-10"}
    return known.get(name) or (Path(name).name if "/" in name else name.capitalize())


def _table(entries: Sequence[dict[str, str]]) -> str:
    """With headings to press; rows that were not run are pale."""
    heads = "".join(
        f'<th scope="col" class="{_class(column)}" aria-sort="none"><button>{column}</button></th>'
        for column in entries[0]
    )
    rows = "".join(
        f'<tr class="{"" if entry.get("runs", "1") else "idle"}">{"".join(map(_cell, entry, entry.values()))}</tr>'
        for entry in entries
    )
    table = f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll"><table class="sortable">{table}</table></div>'


def _class(column: str) -> str:
    return f"text {column}" if column in TEXT_COLUMNS else column.split()[0].replace("/", "-")


def _cell(column: str, text: str) -> str:
    verdict = {"held": " held", "did not hold": " failed"}.get(text, "")
    return f'<td class="{_class(column)}{verdict}">{html.escape(text)}</td>'


def _figure(chart: Chart) -> str:
    """As a picture of its own, so that names inside one drawing cannot meet those of another."""
    width, height = chart.figure.get_size_inches()
    picture = base64.b64encode(chart.svg).decode()
    wide = ' class="wide"' if width > 8 else ""
    caption = html.escape(chart.caption)
    size = f'width="{round(100 * width)}" height="{round(100 * height)}"'
    return (
        f'<figure{wide}><img loading="lazy" alt="{caption}" {size} src="data:image/svg+xml;base64,{picture}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
