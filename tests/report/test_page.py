"""The report as a reader gets it: one page that needs nothing else, figures in three forms, data that are right."""

from __future__ import annotations

import base64
import csv
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest
from made_runs import make_run

from pcdeq.cli import main
from pcdeq.recipes import find_row
from pcdeq.report.curves import draw_families
from pcdeq.report.tables import collect
from pcdeq.training import find_runs

ROWS = ("pcdeq-1-l-relu6", "pcdeq-1-l-tanh", "pcdeq-2-l-sigmoid")


class Page(HTMLParser):
    """Whether every tag is closed, and what refers to other files."""

    VOID = frozenset(("meta", "img", "br", "link", "input"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for number, row in enumerate(ROWS):
        for seed in (0, 1):
            make_run(folder, row, 3, seed, test_accuracy=lambda epoch, n=number, s=seed: 90.0 + n + epoch / 10 + s)
    layers = {"forward_steps": (9.0, 6.0, 3.0), "backward_steps": (8.0, 5.0, 2.0), "largest_singular_value": ()}
    make_run(folder, "pcdeq-1-mc-relu6", 2, **layers)
    return folder


@pytest.fixture(scope="module")
def folder(runs, tmp_path_factory) -> Path:
    """The page in either form, with its figures: ``figures`` beside the Markdown, ``again`` beside the HTML."""
    out = tmp_path_factory.mktemp("report")
    html = ["-o", str(out / "report.html"), "--figures", str(out / "again")]
    assert main(["report", str(runs), *html, "--no-studies"]) == 0
    assert main(["report", str(runs), "-o", str(out / "README.md"), "--no-studies"]) == 0
    return out


def test_the_page_needs_nothing_else(folder):
    page = Page()
    text = (folder / "report.html").read_text()
    page.feed(text)
    assert not page.open
    for reference in page.references:
        assert reference.startswith("data:image/svg+xml;base64,") or reference[1:] in page.ids
    assert not re.search(r"url\(|@import", text)
    shown = {base64.b64decode(source.partition(",")[2]) for source in page.references if source.startswith("data:")}
    assert shown == {path.read_bytes() for path in (folder / "again").glob("*.svg")}


def test_the_page_says_it_all(folder):
    page = Page()
    page.feed((folder / "report.html").read_text())
    text = " ".join(page.text)
    for part in ("pcDEQ-1-L-Tanh", "91.80 ± 0.71", "3 of 40", "monDEQ-SC", "did not hold", "not measured", "torch"):
        assert part in text


def test_the_verdict_is_first_and_the_rest_on_demand(folder):
    page, text = (folder / "report.html").read_text(), (folder / "README.md").read_text()
    assert text.startswith("# 0 of 12 rows above the published accuracy.")  # MNIST's
    assert page.index("0 of 12 pcDEQ rows of the paper are above") < page.index("<table")
    folded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert "pcdeq reproduce" not in folded and "| monDEQ-SC |" not in folded  # commands, rows that were not trained
    assert "`pcdeq reproduce mnist --rows pcdeq-1-sc-tanh --recipe fast`" in text
    assert re.search(r'<tr class="not-trained idle"><td[^>]*><details><summary>monDEQ-SC<', page)


def test_figures_in_three_forms(folder):
    files = {path.name for path in (folder / "figures").iterdir()}
    names = {name.rpartition(".")[0] for name in files}
    assert files == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg", "csv")}
    assert names == {
        *(f"{kind}-mnist-l" for kind in ("accuracy", "forward-steps", "backward-steps", "singular-value")),
        *(f"{kind}-mnist-mc" for kind in ("accuracy", "forward-steps", "backward-steps")),
        *(f"{kind}-steps-layers-mnist-mc" for kind in ("forward", "backward")),
    }


def test_the_data_are_those_of_the_runs(folder, runs):
    with (folder / "figures" / "accuracy-mnist-l.csv").open() as file:
        entries = [entry for entry in csv.DictReader(file) if entry["activation"] == "tanh"]
    tanh = [run for run in find_runs(runs) if run.config.row == "pcdeq-1-l-tanh"]
    for epoch, entry in enumerate(entries, start=1):
        values = [run.metrics[epoch - 1].test_accuracy for run in tanh]
        for name, value in (("mean", fmean(values)), ("low", min(values)), ("high", max(values))):
            assert float(entry[name]) == pytest.approx(value, abs=1e-3)
        assert (int(entry["epoch"]), int(entry["runs"])) == (epoch, 2)
    with (folder / "figures" / "forward-steps-mnist-mc.csv").open() as file:
        assert float(next(csv.DictReader(file))["mean"]) == pytest.approx(6.0)  # of 9, 6 and 3


@pytest.mark.parametrize("row", ["pcdeq-1-l-tanh", "pcdeq-1-mc-relu6"])
def test_steps_of_either_recipe_are_drawn_by_both_counts_and_nothing_lies_outside(row, tmp_path):
    steps = (2.0,) if "-l-" in row else (2.0, 3.0, 30.0)
    counted = {"paper_forward_steps": tuple(8 * one for one in steps), "paper_backward_steps": steps}
    columns = {"forward_steps": steps, "backward_steps": steps, **counted}
    for recipe in ("paper", "fast"):
        make_run(tmp_path, row, find_row(row, recipe=recipe).epochs, settings={"recipe": recipe}, **columns)
    charts = draw_families([line for lines in collect(find_runs(tmp_path)).values() for line in lines])
    forward = [chart for chart in charts if chart.name.startswith("forward-steps-mnist")]
    assert len(forward) == 2 and forward[1].name == f"{forward[0].name}-fast"
    for chart in forward:
        means = {entry["rule"]: entry["mean"] for entry in chart.data}
        assert means == {"solver": pytest.approx(fmean(steps)), "paper": pytest.approx(8 * fmean(steps))}
    for chart in charts:
        for axes in chart.figure.axes:
            low, high = axes.get_ylim()
            curves = [line for line in axes.get_lines() if "accuracy" not in chart.name and len(line.get_ydata()) > 2]
            assert all(low <= value <= high for line in curves for value in line.get_ydata()), chart.name


def test_a_run_without_the_papers_count_is_drawn_without_it(tmp_path):
    counted = {"paper_forward_steps": (8.0,), "paper_backward_steps": (8.0,)}
    make_run(tmp_path, "pcdeq-1-l-tanh", 3, seed=0, **counted)
    make_run(tmp_path, "pcdeq-1-l-tanh", 3, seed=1)  # of an older version
    make_run(tmp_path, "pcdeq-1-l-relu6", 3, **counted)
    charts = draw_families([line for lines in collect(find_runs(tmp_path)).values() for line in lines])
    (chart,) = (chart for chart in charts if chart.name == "forward-steps-mnist-l")
    assert {(one["rule"], one["activation"]) for one in chart.data} == {
        ("solver", "tanh"), ("solver", "relu6"), ("paper", "relu6")
    }  # fmt: skip


def test_markdown_links_to_files_that_are_there(folder):
    text = (folder / "README.md").read_text()
    links = re.findall(r"\]\((\S+?)\)", text)
    assert links
    for link in links:
        assert (folder / link).is_file(), link
    assert "| pcDEQ-1-L-Tanh | 98.2 | 91.80 ± 0.71 |" in text


def test_the_same_runs_give_the_same_figures(folder):
    figures = [*(folder / "figures").glob("*.svg"), *(folder / "figures").glob("*.csv")]
    assert figures
    for path in figures:
        assert (folder / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_same_runs_give_the_same_page(tmp_path):
    """But for the figures, which take long to draw: there are none of runs of one epoch."""
    for row in ROWS:
        make_run(tmp_path / "runs", row, 1)
    pages = [tmp_path / name for name in ("one.html", "two.html")]
    for page in pages:
        assert main(["report", str(tmp_path / "runs"), "-o", str(page), "--no-studies"]) == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert all(row in pages[0].read_text() for row in ROWS)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["report", "nowhere"], 2, "there is no folder nowhere"),
        (["report", ".", "-o", "report.pdf"], 2, "the page must be .html or .md, got report.pdf"),
        (["report", "."], 1, "has no run with a complete epoch"),
    ],
)
def test_wrong_requests_get_one_line(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written(runs, tmp_path, capsys):
    (tmp_path / "figures").write_text("a file where a folder should be")
    assert main(["report", str(runs), "-o", str(tmp_path / "report.html"), "--no-studies"]) == 1
    assert "could not write" in capsys.readouterr().err


def test_studies_on_the_networks_and_digits_of_the_package(tmp_path, monkeypatch, capsys):
    """The whole of it: a network trained in a second, its convergence, solvers and tolerances."""
    monkeypatch.chdir(tmp_path)
    options = ["--epochs", "2", "--runs", "1", "--rows", "pcdeq-2-l-*", "--device", "cpu"]
    assert main(["reproduce", "mnist-mini", *options]) == 0
    assert main(["report"]) == 0
    names = {path.stem for path in Path("figures").glob("*.svg")}
    assert {"convergence", "solvers", "tolerance", "singular-value-mnist-mini-l"} <= names
    assert main(["reproduce", "claims"]) == 0
    assert "held          The fixed point is unique" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["html", "md"])
def test_broken_runs_are_left_out_and_named(suffix, tmp_path, capsys):
    for name, file in (("config", "config.json"), ("metrics", "metrics.jsonl"), ("summary", "summary.json")):
        run = make_run(tmp_path / "runs", f"pcdeq-1-l-{'tanh' if name == 'config' else 'relu6'}", 2, seed=ord(name[0]))
        (run.path / file).write_text("{\n")
    make_run(tmp_path / "runs", "pcdeq-2-l-sigmoid", 2)
    out = tmp_path / f"report.{suffix}"
    assert main(["report", str(tmp_path / "runs"), "-o", str(out), "--no-studies"]) == 0
    told = capsys.readouterr().err
    assert told.count("pcdeq: left out: ") == out.read_text().count("Left out: ") == 3
    assert all(name in told for name in ("config.json", "metrics.jsonl", "summary.json"))


def test_any_run_is_drawn(tmp_path, capsys):
    runs = tmp_path / "runs"
    layers = {"forward_steps": (9.0, 6.0, 3.0), "backward_steps": (8.0, 5.0, 2.0), "largest_singular_value": ()}
    make_run(runs, "demo", 3, settings={"data": "mnist-mini"}, **layers)
    make_run(runs, "pcdeq-1-l-tanh", 1, steps_per_epoch=7)
    make_run(runs, "mondeq-l", 2)
    assert main(["report", str(runs), "-o", str(tmp_path / "report.html"), "--no-studies"]) == 0
    drawn = {path.stem.removeprefix("curves-") for path in (tmp_path / "figures").glob("curves-*.png")}
    assert drawn == {path.name for path in runs.iterdir()}
    assert (tmp_path / "figures" / next(iter(f"curves-{name}.csv" for name in drawn if "demo" in name))).is_file()
