"""Every baseline row: its size, its training, and what it answers to tools that are about pcDEQ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.errors import UsageError
from pcdeq.models import build, equilibrium_layers, load
from pcdeq.models.registry import NETWORKS
from pcdeq.recipes import TrainConfig, own_rows, rows
from pcdeq.training import train
from pcdeq.training.session import open_session

PUBLISHED = [row for row in rows() if row.family != "pcdeq"]
# A small one of each kind: name, widths.
SMALL = {
    "mondeq-l": (8,),
    "mondeq-sc": (2,),
    "mondeq-mt": (2, 2, 2),
    "node": (2,),
    "anode": (2, 1),
    "deq-l-tanh": (8,),
    "deq-sc-sigmoid": (2,),
    "deq-mc-relu6": (2, 2, 2),
    "explicit-l-softsign": (8,),
    "explicit-sc-tanh": (2,),
    "explicit-mc-tanh": (2, 2, 2),
}
small = pytest.mark.parametrize("name", SMALL)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.dataset}-{row.name}")
def test_parameters_meet_the_published_count(row):
    found = count(build(row.name, row.dataset))
    published = float(row.params.replace("K", "e3").replace("M", "e6"))
    assert found == row.parameters
    assert abs(found / published - 1) < 0.03


@pytest.mark.parametrize("row", [row for row in own_rows("mnist") if row.family != "pcdeq"], ids=lambda row: row.name)
def test_our_rows_have_the_size_of_the_pcdeq(row):
    kind = 2 if row.activation == "sigmoid" else 1
    assert count(build(row.name)) == row.parameters == count(build(f"pcdeq-{kind}-{row.topology}-{row.activation}"))


def test_every_row_has_a_network():
    assert {(row.family, row.topology) for row in (*rows(), *own_rows())} == set(NETWORKS)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> str:
    """A data set of 96 digits to train on and 20 to test."""
    mini = load_dataset("mnist-mini")
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    train, test = (
        (s.images[:: len(s) // n][:n].numpy(), s.labels[:: len(s) // n][:n].numpy())
        for s, n in ((mini.train, 96), (mini.test, 20))
    )
    np.savez(path, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])
    return str(path)


@small
def test_trains_saves_and_loads(name, digits, tmp_path):
    config = TrainConfig(name, data=digits, channels=SMALL[name], epochs=2, batch_size=32, out=tmp_path / "run")
    run = train(config, progress="none")
    metrics = run.metrics[-1]
    model = load(run)
    layers = equilibrium_layers(model)
    assert len(metrics.forward_steps) == len(metrics.backward_steps) == len(layers)
    assert len(layers) == (0 if "explicit" in name else 3 if "-mc" in name else 1)
    assert all(steps >= 1 for steps in metrics.forward_steps + metrics.backward_steps)
    assert metrics.unconverged == 0 and metrics.loss < 4
    images = torch.rand(3, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(load(run)(images), model(images))


@small
class TestOtherTools:
    def model(self, name):
        torch.manual_seed(0)
        return build(name, channels=SMALL[name]).eval()

    def test_freeze(self, name):
        model, images = self.model(name), torch.rand(2, 1, 28, 28)
        with torch.no_grad():
            torch.testing.assert_close(pcdeq.freeze(model)(images), model(images), rtol=1e-3, atol=1e-3)

    def test_projection_leaves_it_alone(self, name):
        model = self.model(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        pcdeq.project_(model)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    def test_guarantees_are_refused_in_one_line(self, name):
        model, images = self.model(name), torch.rand(2, 1, 28, 28)
        with pytest.raises(UsageError, match="no pcDEQ layer"):
            pcdeq.check(model, images)
        with pytest.raises(UsageError, match="nothing is known about"):
            pcdeq.certify(model, images)
        with pytest.raises(UsageError, match="checkpoints fit the L, SC and MC"):
            pcdeq.load_reference(model, {})

    def test_certified_training_is_refused(self, name, digits, tmp_path):
        config = TrainConfig(name, data=digits, channels=SMALL[name], epochs=1, robust_radius=0.1, out=tmp_path / "run")
        with pytest.raises(UsageError, match="nothing is known about"):
            train(config, progress="none")


def test_solver_settings_reach_the_layers():
    session = open_session(TrainConfig("mondeq-l", channels=(4,), tol=1e-2, max_steps=7, solver="anderson"), quiet=True)
    (layer,) = equilibrium_layers(session.network)
    assert (type(layer.solver).__name__, layer.solver.tol, layer.adjoint_solver.max_steps) == ("Anderson", 1e-2, 7)
    session = open_session(TrainConfig("node", channels=(2,), tol=1e-2), quiet=True)
    assert equilibrium_layers(session.network)[0].solver.tol == 1e-2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"row": "node", "solver": "anderson"}, "dopri5"),
        ({"row": "explicit-l-tanh", "tol": 1e-3}, "nothing to solve"),
        ({"row": "explicit-l-tanh", "solver": "picard"}, "solves nothing"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        open_session(TrainConfig(**settings), quiet=True)


def test_sizes_that_tiers_cannot_halve():
    with pytest.raises(UsageError, match="multiples of 4"):
        build("mondeq-mt", image_shape=(1, 30, 30), num_classes=3)
    assert build("mondeq-sc", image_shape=(1, 30, 30), channels=(2,))(torch.rand(1, 1, 30, 30)).shape == (1, 10)
