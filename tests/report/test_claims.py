"""A claim holds where the numbers say so, fails where they do not, and is never held without any."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from made_runs import make_run

from pcdeq.data import load_dataset
from pcdeq.errors import DataError
from pcdeq.recipes import find_row
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
    of_tables = ("On MNIST every", "With augmentation", "In each scenario")  # which need no runs
    about_runs = [claim for claim in claims if not claim.statement.startswith(of_tables)]
    assert len(about_runs) == len(claims) - 3 == 12
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


def test_a_run_cut_short_says_nothing_about_growth(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 39)
    assert verdicts(tmp_path, "does not grow") == ["not measured"]


@pytest.mark.parametrize(("last", "verdict"), [(10.9, "held"), (11.2, "did not hold")])
def test_a_short_run_of_our_recipe_is_whole_and_judged_by_the_papers_count(last, verdict, tmp_path):
    fast = {"settings": {"recipe": "fast"}, "paper_backward_steps": (8.0,)}
    epochs = find_row("pcdeq-1-l-tanh", recipe="fast").epochs
    make_run(
        tmp_path, "pcdeq-1-l-tanh", epochs, paper_forward_steps=lambda epoch: (10.0 if epoch < 4 else last,), **fast
    )
    assert verdicts(tmp_path, "does not grow") == [verdict]


@pytest.mark.parametrize(("last", "verdict"), [(10.9, "did not hold"), (11.2, "held")])
@pytest.mark.parametrize(("row", "title"), [("deq-l-tanh", "In DEQ"), ("mondeq-l", "In monDEQ")])
def test_growth_in_rivals(row, title, last, verdict, tmp_path):
    steps = lambda epoch: (10.0 if epoch < 20 else last,)  # noqa: E731
    make_run(tmp_path, row, 40, forward_steps=steps, backward_steps=steps)
    assert verdicts(tmp_path, title) == [verdict]


def test_fewer_parameters_than_the_rivals():
    (claim,) = (claim for claim in check_claims([], subjects=[]) if "fewer parameters" in claim.statement)
    assert claim.held
    assert "mnist: at most 70,410, theirs at least 81,458" in claim.measured
    assert "cifar10, augmented: at most 661,470, theirs at least 853,612" in claim.measured


MC = ("pcdeq-1-mc-relu6", "pcdeq-1-mc-tanh", "pcdeq-1-mc-softsign", "pcdeq-2-mc-sigmoid")


def trained(folder, data: str, accuracies: tuple[float, ...]) -> None:
    """MC by our recipe, in the order of `MC`."""
    for row, accuracy in zip(MC, accuracies, strict=False):
        epochs = find_row(row, data, recipe="fast").epochs
        make_run(folder, row, epochs, settings={"recipe": "fast", "data": data}, test_accuracy=accuracy)


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ((93.1, 92.0, 92.5, 91.0), "held"),
        ((93.1, 93.2, 92.5, 91.0), "did not hold"),
        ((92.3, 92.0, 92.0, 91.0), "did not hold"),  # monDEQ-MT has 92.4
        ((93.1, 92.0, 92.5), "not measured"),
    ],
)
def test_best_on_svhn(accuracies, verdict, tmp_path):
    trained(tmp_path, "svhn", accuracies)
    assert verdicts(tmp_path, "On SVHN") == [verdict]


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ((79.0, 77.0, 78.0, 72.0), "held"),
        ((79.0, 78.0, 77.0, 72.0), "did not hold"),
        ((79.0, 77.0, 78.0), "not measured"),
    ],
)
def test_order_on_cifar10(accuracies, verdict, tmp_path):
    trained(tmp_path, "cifar10", accuracies)
    assert verdicts(tmp_path, "with MC, relu6, softsign, tanh, sigmoid") == [verdict]
    assert verdicts(tmp_path, "with SC, tanh, softsign, relu6, sigmoid") == ["not measured"]


@pytest.mark.parametrize(("steps", "verdict"), [(7.9, "held"), (8.0, "did not hold")])
def test_sigmoid(steps, verdict, tmp_path):
    make_run(tmp_path, "pcdeq-2-l-sigmoid", 3, forward_steps=lambda epoch: (steps if epoch == 2 else 4.0,))
    make_run(tmp_path, "pcdeq-1-l-tanh", 3, forward_steps=(20.0,))
    assert verdicts(tmp_path, "fewer than eight") == [verdict]


@pytest.mark.parametrize(("steps", "verdict"), [(7.9, "held"), (8.0, "did not hold")])
def test_sigmoid_by_the_papers_count_where_it_is_known(steps, verdict, tmp_path):
    make_run(tmp_path, "pcdeq-2-l-sigmoid", 3, forward_steps=(9.0,), paper_forward_steps=(steps,))
    assert verdicts(tmp_path, "fewer than eight") == [verdict]


@pytest.mark.parametrize(
    ("tanh", "relu6", "expected"),
    [(1.2, 0.7, ["held", "held"]), (0.9, 0.7, ["did not hold", "held"]), (1.2, 1.01, ["held", "did not hold"])],
)
def test_lipschitz(tanh, relu6, expected, tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 40, largest_singular_value=lambda epoch: (0.5 if epoch == 1 else tanh,))
    make_run(tmp_path, "pcdeq-1-l-relu6", 40, largest_singular_value=lambda epoch: (relu6 if epoch == 4 else 0.5,))
    assert verdicts(tmp_path, "Lipschitz") + verdicts(tmp_path, "ReLU6 it stays") == expected


def test_a_short_run_says_nothing_about_most_of_training(tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 10, largest_singular_value=(0.5,))
    assert verdicts(tmp_path, "Lipschitz") == ["not measured"]


@pytest.mark.parametrize(("accuracy", "verdict"), [(98.35, "held"), (97.95, "did not hold")])
def test_accuracy_within_the_papers(accuracy, verdict, tmp_path):
    make_run(tmp_path, "pcdeq-1-l-tanh", 40, test_accuracy=accuracy)
    assert verdicts(tmp_path, "The table's accuracies") == [verdict]


@pytest.mark.parametrize(("accuracy", "verdict"), [(99.9, "held"), (98.16, "held"), (98.14, "did not hold")])
def test_our_recipe_may_be_better(accuracy, verdict, tmp_path):
    epochs = find_row("pcdeq-1-l-tanh", recipe="fast").epochs
    make_run(tmp_path, "pcdeq-1-l-tanh", epochs, test_accuracy=accuracy, settings={"recipe": "fast"})
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
    told = "no pictures of mnist: name their folder with --data-dir or PCDEQ_DATA"
    assert (subjects, reason) == ([], told)
    (claim,) = (claim for claim in check_claims([], subjects, reason) if claim.statement.startswith("Plain iteration"))
    assert (claim.verdict, claim.measured) == ("not measured", told)


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


def test_a_reason_names_the_runs_that_are_not_counted(tmp_path):
    make_run(tmp_path, "pcdeq-2-l-sigmoid", 2, steps_per_epoch=9)
    make_run(tmp_path, "pcdeq-2-l-sigmoid", 2, seed=1, settings={"lr": 0.5})
    (claim,) = (claim for claim in check_claims(lines_in(tmp_path), []) if claim.statement.startswith("With sigmoid"))
    assert claim.verdict == "not measured"
    assert claim.measured == "no run with sigmoid (runs with --lr 0.5, --steps-per-epoch 9 are not counted)"
    make_run(tmp_path, "pcdeq-2-l-sigmoid", 2, seed=2)
    (claim,) = (claim for claim in check_claims(lines_in(tmp_path), []) if claim.statement.startswith("With sigmoid"))
    assert "not counted" not in claim.measured
