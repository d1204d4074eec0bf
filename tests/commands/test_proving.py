"""`pcdeq certify` and `pcdeq check`: what they print, and how they end."""

import json
from pathlib import Path

import pytest
import torch

from pcdeq.cli import main
from pcdeq.data import load_dataset
from pcdeq.models import load
from pcdeq.operators import Operator
from pcdeq.proofs.certify import certify
from pcdeq.recipes import TrainConfig
from pcdeq.training import Run, train


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


def test_a_radius_has_its_own_picture_and_an_explanation(folder, capsys):
    assert main(["certify", folder, "--images", "10", "--radius", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "not proved is not refuted" in text
    assert "--robust-radius" in text
    assert text.strip().endswith("certificate-0.5.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "0"], "images must be at least 1, got 0"),
        (["--radius", "-1"], "radius must be a number >= 0, got -1.0"),
    ],
)
def test_bad_numbers_are_refused(folder, capsys, arguments, message):
    assert main(["certify", folder, *arguments]) == 2
    assert capsys.readouterr().err == f"pcdeq: {message}\n"


def test_certify_draws_the_margins_and_the_curve_of_robustness(folder, capsys):
    assert main(["certify", folder, "--images", "60", "--curve", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (Path(folder) / "certificate.png").read_bytes().startswith(b"\x89PNG")
    shares = [result["curve"][radius] for radius in sorted(result["curve"], key=float)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(result["certified_and_right"] / 60)
    assert main(["certify", folder, "--images", "60", "--curve"]) == 0
    assert "within 0.1: " in capsys.readouterr().out


def test_the_radius_is_a_distance_between_pixels(folder):
    # All inputs whose pixels differ by at most 0.01, from 0 to 1, are those within 0.01 / std once normalised.
    run, data = Run.open(folder), load_dataset("mnist-mini")
    images, model = data.test.images[:40], load(folder)
    radius = run.preprocessing.scaled(0.01)
    certificate = certify(model, run.preprocessing(images), radius=radius)
    assert certificate.share > 0
    for sign in (-1, 1):
        moved = run.preprocessing(images) + sign * 0.01 / torch.tensor(data.std).view(-1, 1, 1)
        same = model(moved).argmax(1) == certificate.classes
        assert same[certificate.proved].all()
