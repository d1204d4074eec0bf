"""A line per row: what was published, what either recipe gives, who is above, and how soon."""

from __future__ import annotations

import json

import pytest
from made_runs import make_run

from pcdeq.errors import DataError
from pcdeq.recipes import find_row
from pcdeq.report.comparison import Bench, compare, count_verdicts, verdict_in_words
from pcdeq.report.tables import collect
from pcdeq.training import find_runs

ROW = "pcdeq-1-l-tanh"  # 98.2 published
EPOCHS = find_row(ROW, recipe="fast").epochs


def made(folder, bench=None, name=ROW):
    """The comparison of a row, from the runs in a folder."""
    (found,) = (row for row in compare(collect(find_runs(folder))["mnist"], bench) if row.row.name == name)
    return found


def fast(folder, seed=0, accuracy=98.5, row=ROW, **columns):
    return make_run(folder, row, EPOCHS, seed, settings={"recipe": "fast"}, test_accuracy=accuracy, **columns)


def test_both_recipes_side_by_side(tmp_path):
    make_run(tmp_path, ROW, 40, test_accuracy=98.0)
    for seed, accuracy in enumerate((98.4, 98.6)):
        fast(tmp_path, seed, accuracy)
    make_run(tmp_path, ROW, 40, solver="paper", test_accuracy=99.9)  # another line, not shown here
    row = made(tmp_path)
    cells = row.cells()
    assert (cells["published"], cells["its schedule"], cells["our recipe"]) == ("98.2", "98.00", "98.50 ± 0.14")
    assert (cells["difference"], cells["epochs"]) == ("+0.30", f"{EPOCHS} of 40")
    assert row.commands == [
        f"pcdeq reproduce mnist --rows {ROW} --runs 2 --recipe fast",
        f"pcdeq reproduce mnist --rows {ROW} --runs 1",
    ]


@pytest.mark.parametrize(
    ("accuracy", "verdict"), [(98.21, "above"), (98.2, "equal"), (98.16, "equal"), (98.14, "below")]
)
def test_verdict(accuracy, verdict, tmp_path):
    fast(tmp_path, accuracy=accuracy)
    assert made(tmp_path).verdict == verdict


def test_our_recipe_is_shown_even_if_the_papers_schedule_is_better(tmp_path):
    make_run(tmp_path, ROW, 40, test_accuracy=98.9)
    assert made(tmp_path).verdict == "above"
    fast(tmp_path, accuracy=98.0)
    assert made(tmp_path).verdict == "below"


def test_a_run_that_was_cut_short_is_not_trained(tmp_path):
    make_run(tmp_path, ROW, EPOCHS - 1, settings={"recipe": "fast"}, test_accuracy=99.0)
    row = made(tmp_path)
    assert (row.verdict, row.shown, row.cells()["our recipe"]) == ("not trained", None, "")
    assert row.commands == [f"pcdeq reproduce mnist --rows {ROW} --recipe fast"]


def test_words_and_counts(tmp_path):
    fast(tmp_path, accuracy=98.3)
    fast(tmp_path, accuracy=98.0, row="pcdeq-1-l-relu6")
    fast(tmp_path, accuracy=99.0, row="mondeq-l")  # the paper's, but no pcDEQ
    rows = compare(collect(find_runs(tmp_path))["mnist"])
    assert count_verdicts(rows) == {"above": 1, "equal": 0, "below": 1, "not trained": 10}
    assert verdict_in_words(rows) == (
        "1 of 12 pcDEQ rows of the paper are above their published accuracy, 1 below, at most by 0.10 points, "
        "10 not yet trained to the end."
    )


def test_minutes_until_it_is_reached_and_held(tmp_path):
    """Reached in the third epoch, lost in the fifth, and held from the sixth on."""
    fast(tmp_path, accuracy=lambda epoch: 98.3 if epoch in (3, 4) or epoch >= 6 else 98.0, seconds=30.0)
    make_run(tmp_path, ROW, 40, test_accuracy=lambda epoch: 98.3 - 0.2 * (epoch == 40), seconds=30.0)
    cells = made(tmp_path).cells()
    assert (cells["min, recipe"], cells["min, schedule"]) == ("3.0", "not reached")


def test_the_authors_minutes_are_computed_from_the_benchmark(tmp_path):
    path = tmp_path / "bench.json"
    steps = [("hook", 4.0), ("hook", 6.0), ("hook", 5.0), ("pcdeq", 1.0)]
    entries = [
        {"row": ROW, "data": "mnist", "method": method, "training": {"median": median}} for method, median in steps
    ]
    path.write_text(json.dumps({"measurements": entries}))
    fast(tmp_path / "runs", accuracy=lambda epoch: 97.0 + (epoch >= 8) * 1.5)
    cells = made(tmp_path / "runs", Bench.read(path)).cells()
    assert cells["min, authors'*"] == "3.1"  # 5 ms times 938 steps times 40 epochs
    assert cells["faster*"] == "25x"  # 40 epochs of 5 ms over 8 of 1
    path.write_text("[]")
    with pytest.raises(DataError, match=r"bench\.json is not what `make bench` writes"):
        Bench.read(path)


def test_svhn_takes_the_time_of_cifar10():
    row = find_row("pcdeq-1-mc-relu6", "svhn")
    minutes = Bench({("hook", "pcdeq-1-mc-relu6", "cifar10"): 60.0}).minutes("hook", row, 50)
    assert minutes == pytest.approx(0.001 * 1145 * 50)  # 73,257 images are 1,145 steps
    assert Bench({}).minutes("hook", row, 50) is None
