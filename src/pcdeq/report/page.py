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
from pcdeq.report.comparison import Bench, Comparison, compare, count_verdicts, verdict_in_words
from pcdeq.report.curves import draw_families, draw_others
from pcdeq.report.studies import draw_studies, find_subjects
from pcdeq.report.tables import TEXT_COLUMNS, Line, collect, markdown_table
from pcdeq.training import Run, readable_runs

TITLE = "Positive concave deep equilibrium models, reproduced"
NOTES = (
    "Accuracy is that of the last epoch on the test set, in percent: mean ± standard deviation over the runs. No run "
    "or epoch was selected on test data (results/recipes.md: how recipes were). "
    "Our recipe: the same network and data, other rates and few epochs. Its schedule: the "
    "paper's hyperparameters. Both with our solver. Difference: our recipe, where there is one, less the published "
    "figure. Minutes: of training, until the published accuracy is reached, to its digit, and held to the end; by the "
    "clock of the machine below, which may have been busy with other work. (*) Computed: all epochs of the paper at "
    "the speed of a step in the authors' pattern of code, which `make bench` measures on two quiet cores. Faster: that "
    "over our recipe's epochs at the speed of our step, measured in the same turns."
)
DETAILS = (
    "Every line of runs that were trained alike, also those cut short, with another solver or other settings. Steps: "
    "forward / backward, the mean per solve in the last epoch, over layers and runs. Those of our solver, which is "
    "accelerated and starts from a running mean, are fewer than the paper's steps, which are counted beside it at the "
    "end of each epoch: plain iteration from 0, until the whole batch moves by less than 1e-4. Certified: predictions "
    "proved to be those of the exact equilibrium network. Seconds: the median of an epoch."
)


@dataclass(frozen=True)
class Content:
    """What is on the page, whatever its format."""

    tables: dict[str, list[Line]]
    rows: dict[str, list[Comparison]]
    charts: list[Chart]
    claims: list[Claim]
    environments: list[str]
    missing: str | None  # why there are no studies
    broken: list[str]  # the runs that cannot be read, each with why
    source: Path
    bench: Path | None

    @property
    def all_rows(self) -> list[Comparison]:
        """Of all data sets."""
        return [row for rows in self.rows.values() for row in rows]

    @property
    def title(self) -> str:
        """How many rows are above the published figure, where any could be."""
        counts = count_verdicts(self.all_rows)
        total = sum(counts.values())
        return f"{counts['above']} of {total} rows above the published accuracy. {TITLE}" if total else TITLE


def write_report(
    runs_dir: Path,
    out: Path,
    figures: Path,
    *,
    studies: bool = True,
    data_dir: Path | None = None,
    bench: Path | None = None,
) -> Content:
    """Write the page to ``out`` and every figure as PNG, SVG and CSV to ``figures``."""
    times = None if bench is None else Bench.read(bench)
    runs, broken = readable_runs(runs_dir)
    if not any(run.metrics for run in runs):
        found = f" that can be read ({'; '.join(broken)})" if broken else ""
        raise PcdeqError(f"{runs_dir} has no run with a complete epoch{found}; `pcdeq reproduce` makes runs")
    tables = collect(runs)
    lines = [line for group in tables.values() for line in group]
    subjects, missing = [], "without studies, trained networks are not looked at"
    if studies:
        subjects, missing = find_subjects(lines, data_dir)
    content = Content(
        tables=tables,
        rows={data: compare(lines, times) for data, lines in tables.items()},
        charts=[*draw_families(lines), *draw_others(lines), *draw_studies(subjects)],
        claims=check_claims(lines, subjects, missing),
        environments=_environments(runs),
        missing=missing,
        broken=broken,
        source=runs_dir,
        bench=bench,
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


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def as_markdown(content: Content, out: Path, figures: Path) -> str:
    """For a repository: tables and links to the pictures beside it."""
    bench = "" if content.bench is None else f" --bench {content.bench}"
    made = f"Made by `pcdeq report {content.source} -o {out}{bench}` (pcdeq {__version__})."
    parts = [f"# {content.title}", f"**{verdict_in_words(content.all_rows)}** {NOTES} {made}"]
    for data, rows in content.rows.items():
        parts.append(f"## {_heading(data)}")
        if ran := [row.cells() for row in rows if row.shown is not None]:
            parts.append(markdown_table(ran))
        if idle := [row for row in rows if row.shown is None]:
            cells = [{**_first(row.cells()), "command": f"`{row.to_come}`"} for row in idle]
            parts.append(_folded(f"{_rows(len(idle))} not trained to the end, with their commands", cells))
        lines = [line.cells() for line in content.tables[data] if line.runs]
        for entry in lines:
            entry["command"] = f"`{entry['command']}`"
        if lines:
            parts.append(_folded("Every run: steps, certificates, seconds, commands", lines, DETAILS))
    claims = markdown_table([claim.cells() for claim in content.claims])
    parts += ["## Claims of the paper's text", _count_claims(content.claims), claims]
    parts.append("## Figures")
    folder = os.path.relpath(figures, out.parent)
    for chart in content.charts:
        link = f"{folder}/{chart.name}"
        parts.append(f"![{chart.name}]({link}.png)\n\n{chart.caption} ([SVG]({link}.svg), [data]({link}.csv))")
    if content.missing:
        parts.append(f"Figures of trained networks are missing: {content.missing}")
    parts += [f"Left out: {reason}" for reason in content.broken]
    parts += ["## Environment", *content.environments]
    return "\n\n".join(parts) + "\n"


def _first(cells: dict[str, str]) -> dict[str, str]:
    """What is known of a row before it is trained."""
    return {name: cells[name] for name in ("row", "published")}


def _folded(title: str, entries: Sequence[dict[str, str]], note: str = "") -> str:
    """A table in Markdown that is shown when asked for."""
    return f"<details><summary>{title}</summary>\n\n{note}\n\n{markdown_table(entries)}\n\n</details>"


def as_html(content: Content) -> str:
    """One file that needs nothing else."""
    own = files("pcdeq.report")
    style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    sections = [
        *(_section(data, rows, content.tables[data]) for data, rows in content.rows.items()),
        f'<h2 id="claims">Claims of the paper\'s text</h2><p>{_count_claims(content.claims)}</p>',
        _table([claim.cells() for claim in content.claims]),
        f'<h2 id="figures">Figures</h2><div class="figures">{"".join(map(_figure, content.charts))}</div>',
        f"<p>Figures of trained networks are missing: {html.escape(content.missing)}</p>" if content.missing else "",
        *(f"<p>Left out: {html.escape(reason)}</p>" for reason in content.broken),
        '<h2 id="environment">Environment</h2>',
        *(f'<p class="soft">{html.escape(one)}</p>' for one in content.environments),
    ]
    links = [*content.tables, "claims", "figures", "environment"]
    menu = "".join(f'<a href="#{name}">{html.escape(_heading(name))}</a>' for name in links)
    idle = sum(row.shown is None for row in content.all_rows)
    ask = (
        f'<label><input type="checkbox" id="idle"> also the {_rows(idle)} not trained to the end</label>'
        if idle
        else ""
    )
    notes = html.escape(f"{NOTES} Press a heading to sort, a row for its command.")
    verdict = f'<p class="summary">{html.escape(verdict_in_words(content.all_rows))}</p>'
    body = f'<h1>{TITLE}</h1>{verdict}<nav>{menu}{ask}</nav>{"".join(sections)}<p class="soft">{notes}</p>'
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{style}</style>"
    )
    footer = f'<p class="soft">Made by pcdeq {__version__} from {html.escape(str(content.source))}.</p>'
    body += f"{footer}<script>{script}</script>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _section(data: str, rows: Sequence[Comparison], lines: Sequence[Line]) -> str:
    """A data set: its rows side by side and, when asked for, every line of runs."""
    entries = [row.cells() | {"command": "\n".join(row.commands)} for row in rows]
    looks = [f"{row.verdict.replace(' ', '-')}{' idle' if row.shown is None else ''}" for row in rows]
    every = [line.cells() for line in lines if line.runs]
    more = (
        f"<details><summary>Every run: steps, certificates, seconds</summary>"
        f'<p class="soft">{html.escape(DETAILS)}</p>{_table(every)}</details>'
        if every
        else ""
    )
    return f'<h2 id="{data}">{html.escape(_heading(data))}</h2>{_table(entries, looks)}{more}'


def _count_claims(claims: Sequence[Claim]) -> str:
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("held", "did not hold", "not measured")) + "."


def _heading(name: str) -> str:
    """A data set's or section's name for people.

    >>> _heading("cifar10"), _heading("claims"), _heading("/data/my-pictures.npz")
    ('CIFAR-10', 'Claims', 'my-pictures.npz')
    """
    known = {"mnist": "MNIST", "svhn": "SVHN", "cifar10": "CIFAR-10"}
    return known.get(name) or (Path(name).name if "/" in name else name.capitalize())


def _table(entries: Sequence[dict[str, str]], looks: Sequence[str] = ()) -> str:
    """With headings to press; the command of a row, if it has one, folded under its name."""
    columns = [column for column in entries[0] if column != "command"]
    heads = "".join(
        f'<th scope="col" class="{_class(column)}" aria-sort="none"><button>{html.escape(column)}</button></th>'
        for column in columns
    )
    rows = "".join(
        f'<tr class="{look}">{"".join(_cell(column, entry) for column in columns)}</tr>'
        for entry, look in zip(entries, looks or [""] * len(entries), strict=True)
    )
    return f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'


def _class(column: str) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in column).strip("-")
    return f"text {name}" if column in TEXT_COLUMNS else name


def _cell(column: str, entry: dict[str, str]) -> str:
    text = html.escape(entry[column])
    verdict = {"held": " held", "did not hold": " failed"}.get(entry[column], "")
    if column == "row" and "command" in entry:
        commands = "".join(f"<code>{html.escape(command)}</code>" for command in entry["command"].split("\n"))
        text = f"<details><summary>{text}</summary>{commands}</details>"
    # The name of its column, for narrow screens, on which a row is a card.
    return f'<td class="{_class(column)}{verdict}" data-name="{html.escape(column)}">{text}</td>'


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
