"""The paper's tables with our numbers: means, spreads, differences, and nothing that was not measured."""

from __future__ import annotations

import statistics

import pytest
from made_runs import make_run

from pcdeq.recipes import find_row, rows
from pcdeq.report.tables import collect, markdown_table
from pcdeq.training import find_runs


def only(lines, name):
    return [line for line in lines if line.row.name == name]


def test_mean_and_spread(tmp_path):
    accuracies = [98.0, 98.3, 98.5]
    for seed, accuracy in enumerate(accuracies):
        make_run(tmp_path, "pcdeq-1-l-tanh", 40, seed, test_accuracy=lambda epoch, a=accuracy: a - 40 + epoch)
    (line,) = only(collect(find_runs(tmp_path))["mnist"], "pcdeq-1-l-tanh")
    assert line.accuracy == pytest.approx(statistics.mean(accuracies))
    assert line.deviation == pytest.approx(statistics.stdev(accuracies))
    assert line.difference == pytest.approx(statistics.mean(accuracies) - 98.2)
    cells = line.cells()
    assert (cells["ours %"], cells["paper %"], cells["difference"]) == ("98.27 ± 0.25", "98.2", "+0.07")
    assert (cells["runs"], cells["epochs"], cells["parameters"]) == ("3", "40 of 40", "70,410")
    assert cells["command"] == "pcdeq reproduce mnist --rows pcdeq-1-l-tanh --runs 3"


def test_a_short_run_is_not_compared(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 39)
    (line,) = only(collect(find_runs(tmp_path))["mnist"], "pcdeq-1-l-tanh")
    assert line.difference is None
    assert line.cells()["epochs"] == "39 of 40"
    assert line.command.endswith("--epochs 39")


def test_what_was_trained_differently_is_kept_apart(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 40, seed=0, test_accuracy=98.0)
    make_run(tmp_path, "pcdeq-1-l-tanh", 3, seed=1, test_accuracy=90.0)
    make_run(tmp_path, "pcdeq-1-l-tanh", 40, seed=0, solver="paper", test_accuracy=97.0)
    lines = only(collect(find_runs(tmp_path))["mnist"], "pcdeq-1-l-tanh")
    assert [(line.epochs, line.solver, line.accuracy) for line in lines] == [
        (40, "default", 98.0),
        (3, "default", 90.0),
        (40, "paper", 97.0),
    ]
    assert lines[2].cells()["row"] == "pcDEQ-1-L-Tanh, paper solver"


def test_epochs_that_were_cut_short_are_marked_and_not_compared(tmp_path):
    make_run(tmp_path, "node", 40, steps_per_epoch=150)
    make_run(tmp_path, "node", 2)
    whole, cut = only(collect(find_runs(tmp_path))["mnist"], "node")
    assert (whole.epochs, cut.epochs, cut.is_full, cut.difference) == (2, 40, False, None)
    assert cut.cells()["epochs"] == "40 of 150 steps each, of 40"
    assert cut.command == "pcdeq reproduce mnist --rows node --runs 1 --steps-per-epoch 150"


def test_other_settings_are_another_line(tmp_path):
    make_run(tmp_path / "a", "pcdeq-1-l-tanh", 40, seed=1, test_accuracy=10.0, settings={"lr": 5.0, "channels": (4,)})
    make_run(tmp_path / "b", "pcdeq-1-l-tanh", 40, seed=1, test_accuracy=98.0)
    usual, changed = only(collect([*find_runs(tmp_path / "a"), *find_runs(tmp_path / "b")])["mnist"], "pcdeq-1-l-tanh")
    assert (usual.accuracy, usual.is_full, len(usual.runs)) == (98.0, True, 1)
    assert (changed.accuracy, changed.difference) == (10.0, None)
    assert changed.cells()["row"] == "pcDEQ-1-L-Tanh, channels 4, lr 5.0"
    assert changed.command == "pcdeq train pcdeq-1-l-tanh --data mnist --seed 1 --channels 4 --lr 5.0"


def test_more_epochs_than_the_papers_are_not_compared(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 60)
    (line,) = only(collect(find_runs(tmp_path))["mnist"], "pcdeq-1-l-tanh")
    assert line.difference is None
    assert line.command.endswith("--epochs 60")


def test_a_short_run_of_our_recipe_is_whole(tmp_path):
    make_run(tmp_path / "paper", "pcdeq-1-l-tanh", 40, test_accuracy=98.0)
    make_run(tmp_path / "fast", "pcdeq-1-l-tanh", 10, test_accuracy=98.5, settings={"recipe": "fast"})
    runs = [*find_runs(tmp_path / "fast"), *find_runs(tmp_path / "paper")]
    papers, ours = only(collect(runs)["mnist"], "pcdeq-1-l-tanh")
    assert (papers.row.recipe, ours.row.recipe, ours.is_full) == ("paper", "fast", True)
    assert ours.difference == pytest.approx(0.3)
    assert ours.command == "pcdeq reproduce mnist --rows pcdeq-1-l-tanh --runs 1 --recipe fast"


def test_the_demo_has_a_command_of_its_own(tmp_path):
    make_run(tmp_path, "demo", find_row("demo").epochs)
    (line,) = only(collect(find_runs(tmp_path))["mnist"], "demo")
    assert line.command == "pcdeq train demo --data mnist --seed 0"


def test_rows_without_runs_are_shown_without_numbers(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 1)
    lines = collect(find_runs(tmp_path))["mnist"]
    assert [line.row.name for line in lines] == [row.name for row in rows("mnist")]
    cells = only(lines, "pcdeq-1-sc-relu6")[0].cells()
    assert (cells["paper %"], cells["ours %"], cells["runs"], cells["certified"]) == ("99.2", "", "", "")


def test_no_runs_but_a_data_set():
    lines = collect([], ["svhn"])
    assert list(lines) == ["svhn"]
    assert not any(line.runs for line in lines["svhn"])


def test_markdown_has_a_cell_per_column(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 1)
    text = markdown_table([line.cells() for line in collect(find_runs(tmp_path))["mnist"]])
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_a_repeated_seed_is_not_another_run(tmp_path):
    first = make_run(tmp_path, "pcdeq-1-l-tanh", 40, seed=3, test_accuracy=98.0)
    again = make_run(tmp_path / "again", "pcdeq-1-l-tanh", 40, seed=3, test_accuracy=98.0)
    other = make_run(tmp_path, "pcdeq-1-l-tanh", 40, seed=4, test_accuracy=99.0)
    (line,) = only(collect([first, again, other])["mnist"], "pcdeq-1-l-tanh")
    assert len(line.runs) == 2
    assert line.accuracy == pytest.approx(98.5)
