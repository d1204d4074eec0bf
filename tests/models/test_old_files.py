"""Files written before networks had one description: they load and say what they said.

``old/`` was made by the code of d2c670d: a run and a saved folder of tiny L networks, and logits.json, what these and
the networks of the package answered, solved to 1e-12 in float64 (those that the package still has).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import pcdeq
from pcdeq.models import Network, Preprocessing, equilibrium_layers, load, pretrained_names
from pcdeq.models.registry import make_network
from pcdeq.models.store import read_header, to_bytes
from pcdeq.recipes import TrainConfig
from pcdeq.training import Run

OLD = Path(__file__).parent / "old"
LOGITS = json.loads((OLD / "logits.json").read_text())


def exact_logits(network: Network) -> torch.Tensor:
    network = network.double()
    for layer in equilibrium_layers(network):
        layer.solver = pcdeq.Anderson(tol=1e-12, max_steps=5000)
    pixels = torch.linspace(-1, 2, 2 * math.prod(network.image_shape), dtype=torch.float64).sin()
    with torch.no_grad():
        return network(pixels.reshape(2, *network.image_shape))


def assert_same(network: Network, name: str) -> None:
    torch.testing.assert_close(
        exact_logits(network), torch.tensor(LOGITS[name], dtype=torch.float64), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("name", [name for name in LOGITS if name.startswith("pcdeq-")])
def test_networks_of_the_package(name):
    assert name in pretrained_names()
    assert_same(load(name), name)


class TestRun:
    def test_it_answers_as_before(self):
        network = load(OLD / "run")
        assert [layer.solver.tol for layer in equilibrium_layers(network)] == [1e-5]
        assert network.preprocessing.classes == ("dark", "grey", "light")
        facts = network.training_facts
        assert (facts.row, facts.data, facts.epochs, facts.seed) == ("pcdeq-1-l-tanh", "tiny.npz", 2, 0)
        assert_same(network, "run")
        assert_same(load(OLD / "run", "best"), "run-best")

    def test_its_checkpoint_can_be_gone_on_from(self):
        checkpoint = Run.open(OLD / "run").load()
        assert checkpoint.epoch == 2
        assert checkpoint.optimizer["param_groups"][0]["lr"] == 1e-3

    def test_what_is_saved_of_it_has_todays_form(self, tmp_path):
        folder = load(OLD / "run").save_pretrained(tmp_path)
        assert json.loads((folder / "config.json").read_text())["family"] == "pcdeq"
        assert_same(load(folder), "run")

    def test_one_that_was_killed_between_two_renames(self, tmp_path):
        shutil.copytree(OLD / "run", tmp_path / "run")
        (tmp_path / "run" / "last").rename(tmp_path / "run" / "last.old")
        assert_same(load(tmp_path / "run"), "run")

    @pytest.mark.parametrize("row", ["mondeq-l", "node", "deq-l-tanh", "explicit-mc-relu6", "pcdeq-2-mc-sigmoid"])
    def test_of_every_family(self, row, tmp_path):
        config = TrainConfig(row, data="mnist", channels=(2, 2, 2) if "-mc" in row else (2,)).resolve()
        grey = Preprocessing((0.5,), (0.25,), tuple("0123456789"))
        network = make_network(config, (1, 28, 28), grey).eval()
        (tmp_path / "last").mkdir()
        (tmp_path / "last" / "model.safetensors").write_bytes(to_bytes(network.state_dict(), None))
        data = {"image_shape": [1, 28, 28], "mean": [0.5], "std": [0.25], "classes": list("0123456789")}
        (tmp_path / "config.json").write_text(json.dumps({"config": config.to_dict(), "data": data}))
        images = torch.rand(2, 1, 28, 28)
        with torch.no_grad():
            assert load(tmp_path)(images).equal(network(images))


def test_a_folder_for_the_hub():
    network = Network.from_pretrained(OLD / "saved")
    (layer,) = equilibrium_layers(network)
    assert (layer.solver, layer.floor) == (pcdeq.Picard(tol=1e-6, stop="batch"), 0.25)
    assert layer.adjoint_solver == pcdeq.Anderson(memory=2)
    assert network.training_facts.row == "pcdeq-1-l-tanh"
    assert_same(network, "saved")
    assert read_header(OLD / "saved" / "model.safetensors") is None
