"""A description: the network it is of comes back, and what it cannot say is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

import pcdeq
from pcdeq.errors import UsageError
from pcdeq.models import L, Preprocessing
from pcdeq.models import description as descriptions
from pcdeq.models.description import Description, solver_from_dict, solver_to_dict
from pcdeq.models.registry import NETWORKS, make_network
from pcdeq.recipes import TrainConfig, own_rows, rows

DIGITS = Preprocessing((0.1,), (0.3,), tuple("0123456789"))
SMALL = {("anode", "ode"): (3, 2)}
FOUND = [key for key in NETWORKS if key[1] != "ode" or find_spec("torchdiffeq")]  # which is of an extra


@pytest.mark.parametrize(("family", "topology"), FOUND)
def test_every_network_comes_back(family, topology):
    row = next(row for row in (*rows("mnist"), *own_rows("mnist")) if (row.family, row.topology) == (family, topology))
    channels = SMALL.get((family, topology), (3,) * NETWORKS[family, topology].widths)
    tol = None if family == "explicit" else 1e-5
    config = TrainConfig(row.name, data="mnist", channels=channels, tol=tol).resolve()
    network = make_network(config, (1, 28, 28), DIGITS).eval()
    description = Description.read(json.loads(Description.of(network).to_json()))
    copy = description.make().eval()
    assert (type(copy), copy.channels, copy.preprocessing) == (type(network), channels, DIGITS)
    assert Description.of(copy) == description == Description.of(network)
    copy.load_state_dict(network.state_dict())
    images = torch.rand(2, 1, 28, 28)
    with torch.no_grad():
        assert copy(images).equal(network(images))


@pytest.mark.parametrize(("family", "topology"), FOUND)
def test_it_is_made_without_memory_where_that_is_wished(family, topology):
    with torch.device("meta"):
        network = NETWORKS[family, topology](SMALL.get((family, topology), (3,) * NETWORKS[family, topology].widths))
    assert all(parameter.is_meta for parameter in network.parameters())


def test_values_that_are_no_json_are_refused_when_a_network_is_described():
    model = L((4,))
    with pytest.raises(UsageError, match=r"means must be finite, .*nan"):
        Preprocessing((float("nan"),), (1.0,), tuple("0123456789"))
    model.preprocessing = Preprocessing((0.0,), (1.0,), ("one", "two"))
    with pytest.raises(UsageError, match="not of 1 channels and 10 classes"):
        Description.of(model)


@dataclass(frozen=True)
class Certified:
    solver: pcdeq.solvers.Solver


class TestSolvers:
    @pytest.mark.parametrize("solver", [pcdeq.Picard(tol=1e-6), pcdeq.Anderson(memory=3, stop="batch"), pcdeq.Newton()])
    def test_they_come_back(self, solver):
        assert solver_from_dict(json.loads(json.dumps(solver_to_dict(solver)))) == solver

    def test_one_that_wraps_another(self, monkeypatch):
        monkeypatch.setitem(descriptions.SOLVERS, "Certified", Certified)
        solver = Certified(pcdeq.Anderson(tol=1e-3))
        plain = solver_to_dict(solver)
        assert plain == {"name": "Certified", "solver": solver_to_dict(solver.solver)}
        assert solver_from_dict(plain) == solver
        assert solver_from_dict(solver_to_dict(pcdeq.Anderson(tol=1e-3)) | {"stop": "certified"}) == solver

    def test_one_of_your_own_is_refused(self):
        class Own(pcdeq.Picard):
            pass

        with pytest.raises(UsageError, match="of your own is code"):
            solver_to_dict(Own())

    @pytest.mark.parametrize(
        "given", [None, [], {}, {"name": ["Picard"]}, {"name": "Solver"}, {"name": "Picard", "a": 1}]
    )
    def test_what_is_none(self, given):
        with pytest.raises(UsageError):
            solver_from_dict(given)
