"""A claim holds where the numbers say so, fails where they do not, and is never held without any."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from made_runs import make_run

from pcdeq.data import load_dataset
from pcdeq.errors import DataError
from pcdeq.report.claims import check_claims
from pcdeq.report.studies import find_subjects, trace
from pcdeq.report.tables import Line, collect
from pcdeq.training import find_runs


def lines_in(folder) -> list[Line]:
    return [line for group in collect(find_runs(folder)).values() for line in group]


def verdicts(folder, word: str) -> list[str]:
    return [claim.verdict for claim in check_claims(lines_in(folder), subjects=[]) if word in claim.statement]


def test_nothing_is_held_without_runs(tmp_path):
    claims = check_claims([], subjects=[])
    about_runs = [claim for claim in claims if not claim.measured.startswith("the paper's table")]
    assert len(about_runs) == 7
    assert {claim.verdict for claim in about_runs} == {"not measured"}


@pytest.mark.parametrize(("last", "verdict"), [(10.9, "held"), (11.2, "did not hold")])
@pytest.mark.parametrize("direction", ["forward_steps", "backward_steps"])
def test_growth_of_steps(direction, last, verdict, tmp_path):
    make_run(
        tmp_path,
        "pcdeq-1-l-tanh",
        40,
        **{direction: lambda epoch: (3.0 if epoch < 10 else 10 + (last - 10) * (epoch > 30),)},
    )
    assert verdicts(tmp_path, "does not grow") == [verdict]


def test_ten_epochs_say_nothing_about_growth(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 10)
    assert verdicts(tmp_path, "does not grow") == ["not measured"]


@pytest.mark.parametrize(("steps", "verdict"), [(7.9, "held"), (8.0, "did not hold")])
def test_sigmoid(steps, verdict, tmp_path):
    make_run(tmp_path, "pcdeq-2-l-sigmoid", 3, forward_steps=lambda epoch: (steps if epoch == 2 else 4.0,))
    make_run(tmp_path, "pcdeq-1-l-tanh", 3, forward_steps=(20.0,))
    assert verdicts(tmp_path, "fewer than eight") == [verdict]


@pytest.mark.parametrize(
    ("tanh", "relu6", "expected"),
    [(1.2, 0.7, ["held", "held"]), (0.9, 0.7, ["did not hold", "held"]), (1.2, 1.01, ["held", "did not hold"])],
)
def test_lipschitz(tanh, relu6, expected, tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 12, largest_singular_value=lambda epoch: (0.5 if epoch == 1 else tanh,))
    make_run(tmp_path, "pcdeq-1-l-relu6", 12, largest_singular_value=lambda epoch: (relu6 if epoch == 4 else 0.5,))
    assert verdicts(tmp_path, "Lipschitz") + verdicts(tmp_path, "ReLU6 it stays") == expected


def test_a_short_run_says_nothing_about_most_of_training(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 10, largest_singular_value=(0.5,))
    assert verdicts(tmp_path, "Lipschitz") == ["not measured"]


@pytest.mark.parametrize(("accuracy", "verdict"), [(98.35, "held"), (97.95, "did not hold")])
def test_accuracy_within_the_papers(accuracy, verdict, tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 40, test_accuracy=accuracy)
    assert verdicts(tmp_path, "The table's accuracies") == [verdict]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """The networks of the package, on the digits of the package."""
    folder = tmp_path_factory.mktemp("runs")
    for row in ("pcdeq-1-l-tanh", "pcdeq-2-l-sigmoid"):
        make_run(folder, row, 2)
    with patch("pcdeq.training.run.load_dataset", lambda *_, **__: load_dataset("mnist-mini")):
        found, reason = find_subjects(lines_in(folder))
    assert reason is None
    return found


def test_without_data_there_is_a_reason(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 2)
    with patch("pcdeq.training.run.load_dataset", side_effect=DataError("no such file")):
        subjects, reason = find_subjects(lines_in(tmp_path))
    assert (subjects, reason) == ([], "no such file")
    (claim,) = (claim for claim in check_claims([], subjects, reason) if claim.statement.startswith("Plain iteration"))
    assert (claim.verdict, claim.measured) == ("not measured", "no such file")


def test_networks_of_the_package_stand_in(subjects):
    assert [subject.activation for subject in subjects] == ["tanh", "sigmoid"]
    claims = {claim.statement[:20]: claim for claim in check_claims([], subjects=subjects)}
    for start in ("The fixed point is u", "The asymptotic mappi", "Plain iteration conv"):
        assert claims[start].verdict == "held", claims[start]


def test_a_trace_is_bounded_by_what_is_proved(subjects):
    for subject in subjects:
        entries = trace(subject.equation())
        proved = [entry for entry in entries if entry["bound"] == entry["bound"]]
        assert len(proved) > len(entries) / 2
        for entry in proved:
            assert entry["error"] <= entry["bound"] * (1 + 1e-9) + 1e-12
        for entry in entries:
            assert entry["error"] <= entry["a_priori"] * (1 + 1e-9) + 1e-12
