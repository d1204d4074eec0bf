"""The page as a reader gets it: one file that needs nothing else, of networks that it can show; others are refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.cli import main
from pcdeq.errors import UsageError
from pcdeq.models import L, Preprocessing
from pcdeq.operators import DenseMap, Operator
from pcdeq.play import SHIPPED, write_page
from pcdeq.play.page import LARGEST

DIGITS = Preprocessing((0.1307,), (0.3081,), tuple("0123456789"))


def small(activation="tanh", cls=L, channels=(8,), **options):
    network = cls(channels, activation=activation, **options).eval()
    network.preprocessing = DIGITS
    return network


def test_the_networks_of_the_package_make_one_page(tmp_path, capsys):
    page = tmp_path / "new" / "page.html"
    assert main(["play", "-o", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert page.stat().st_size < LARGEST == 2_000_000
    stored = json.loads(re.search(r'id="networks">(.*?)</script>', text)[1])
    assert [one["name"] for one in stored] == list(SHIPPED)
    assert {one["activation"] for one in stored} == {"tanh", "softsign", "relu6", "sigmoid"}
    # Nothing is fetched, and the browser is told not to.
    assert "default-src 'none'" in text
    assert not re.search(r"(?:src|href)=.(?!data:)|url\(|@import|fetch\(|XMLHttp|WebSocket", text)
    assert set(re.findall(r"https?://\S+?(?=\")", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_the_page_is_readable(tmp_path):
    """View-source shows the files as they were written, before the weights."""
    from importlib.resources import files

    text = write_page({"it": small()}, tmp_path / "page.html").read_text()
    parts = [files("pcdeq.play").joinpath(name).read_text() for name in ("page.css", "numerics.js", "view.js")]
    assert all(part in text for part in parts)
    assert text.index('id="networks"') > max(map(text.index, parts))
    lines = [line for line in text.splitlines() if 'id="networks"' not in line]
    assert max(map(len, lines)) <= 120


def train(row, data, out):
    options = ["--channels", "8", "--epochs", "1", "--data", str(data), "--device", "cpu"]
    assert main(["train", row, *options, "--out", out]) == 0


def test_a_run_and_a_link(tiny_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("pcdeq-1-l-tanh", tiny_data, "run")
    assert main(["play", "run"]) == 0
    assert '"name": "run"' in (tmp_path / "play.html").read_text()
    page = write_page({"run": pcdeq.load("run")}, tmp_path / "linked.html", certify="certify.html?a&b")
    assert 'href="certify.html?a&amp;b"' in page.read_text()


class Halved(Operator):
    """A matrix of another kind."""

    def __init__(self, features):
        super().__init__((features, features), state_ndim=1, weight_norm=False)

    def bind(self, weight):
        return DenseMap(weight / 2)


def with_deq(**options):
    network = small()
    network.deq = pcdeq.PcDEQ(options.pop("operator", pcdeq.operators.Dense(8)), **options).eval()
    return network


def two_layers():
    network = small()
    network.deq_norm = pcdeq.PcDEQLinear(8).eval()
    return network


def of_own_activation():
    own = pcdeq.Activation("tanh", lambda y: y / (2 + y), supremum=1.0)
    return with_deq(activation=own)


def in_colour():
    network = L((8,), image_shape=(3, 32, 32)).eval()
    network.preprocessing = Preprocessing((0.5,) * 3, (0.5,) * 3, tuple("0123456789"))
    return network


def with_relu():
    network = small()
    network.lift_norm = nn.ReLU()
    return network


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: pcdeq.load("pcdeq-1-mc-relu6-mnist"), "lift1 (Conv2d): a page to play with takes dense layers only"),
        (lambda: with_deq(operator=Halved(8)), "deq (PcDEQ): its operator is Halved"),
        (lambda: with_deq(injection=torch.exp), "deq (PcDEQ): it has an injection of your own"),
        (of_own_activation, "deq (PcDEQ): its activation 'tanh' is your own"),
        (two_layers, "it has 2 equilibrium layers: the page shows exactly one"),
        (with_relu, "lift_norm (ReLU): a page to play with takes dense layers only"),
        (in_colour, "it takes pictures of 3 channels"),
        (lambda: L((8,)).eval(), "it does not say how pixels become its input"),
        (lambda: small(channels=(600,)), "above 2: give fewer or narrower networks"),
    ],
)
def test_what_it_cannot_show_is_refused(make, reason, tmp_path):
    with pytest.raises(UsageError, match=re.escape(reason)):
        write_page({"it": make()}, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_baseline_is_refused_by_the_command(tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train("deq-l-tanh", tiny_data, "baseline")
    capsys.readouterr()
    assert main(["play", "baseline"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nothing is known about this kind of layer" in line
    assert not (tmp_path / "play.html").exists()


def test_networks_that_do_not_go_together(tmp_path):
    page = tmp_path / "page.html"
    with pytest.raises(UsageError, match="one network for each, not a \\(tanh\\), b \\(tanh\\)"):
        write_page({"a": small(), "b": small()}, page)
    with pytest.raises(UsageError, match="a, b have images of other sizes"):
        write_page({"a": small(), "b": small("relu6", image_shape=(1, 20, 20))}, page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["play", "-o", "page.pdf"], "the page must be .html, got page.pdf"),
        (["play", "nowhere"], "nowhere is neither a folder"),
    ],
)
def test_wrong_requests_get_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())
