"""`pcdeq certify` and `pcdeq check`: what they print, and how they end."""

import json

import pytest
import torch

from pcdeq.cli import main
from pcdeq.operators import Operator
from pcdeq.recipes import TrainConfig
from pcdeq.training import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(8,), out=tmp_path_factory.mktemp("run") / "r")
    return str(train(config, progress="none").path)


def test_certify_counts_what_it_proved(folder, capsys):
    assert main(["certify", folder, "--images", "40", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["images"] == 40
    assert result["certified"] == round(40 * result["share"])
    assert main(["certify", folder, "--images", "40", "--radius", "1.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["certified"] < result["certified"]


def test_check_names_the_guarantee(folder, capsys):
    assert main(["check", folder, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is True
    assert report["layers"][0]["kind"] == 1


def test_check_fails_with_the_reason_where_no_guarantee_holds(folder, capsys, monkeypatch):
    monkeypatch.setattr(Operator, "effective_weight", lambda self: torch.full((8, 8), -0.01))
    assert main(["check", folder]) == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("pcdeq: deq: no guarantee: the weight in use has 64 negative entries")
    assert "\n" not in message


@pytest.mark.parametrize("arguments", [["--images", "0"], ["--radius", "-1"]])
def test_bad_numbers_are_refused(folder, capsys, arguments):
    assert main(["certify", folder, *arguments]) == 2
    assert arguments[0].strip("-") in capsys.readouterr().err
