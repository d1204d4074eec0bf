"""The steps that the paper counts are counted at the end of each epoch, and nothing is learned from it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn import functional as F

import pcdeq
from pcdeq.models import MC, equilibrium_layers
from pcdeq.models.baselines.explicit import ExplicitL
from pcdeq.training import EpochMetrics, train
from pcdeq.training.counting import count_papers_steps


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(8, 1, 28, 28, generator=generator), torch.arange(8)) for _ in range(2)]


def test_it_counts_what_a_network_with_the_papers_solver_takes(batches):
    torch.manual_seed(0)
    ours, papers = (
        MC((3, 4, 5), activation="relu6"),
        MC((3, 4, 5), activation="relu6", solver=pcdeq.Picard(stop="batch")),
    )
    papers.load_state_dict(ours.state_dict())
    counted = count_papers_steps(ours, batches)
    papers.eval()
    steps = []
    for images, labels in batches:
        F.cross_entropy(papers(images), labels).backward()
        layers = equilibrium_layers(papers)
        steps.append([(layer.last_forward.steps, layer.last_backward.steps) for layer in layers])
    for index in range(3):
        for direction in range(2):
            assert counted[direction][index] == sum(found[index][direction] for found in steps) / 2
    assert max(counted[0]) > 3


def test_the_network_stays_as_it_is(batches):
    network = MC((3, 4, 5), activation="tanh").train()
    network(batches[0][0]).sum().backward()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    layers = equilibrium_layers(network)
    known = [(layer.solver, layer.adjoint_solver, layer.last_forward, layer.last_backward) for layer in layers]
    count_papers_steps(network, batches)
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(torch.equal(one.grad, two) for one, two in zip(network.parameters(), gradients, strict=True))
    assert [(one.solver, one.adjoint_solver, one.last_forward, one.last_backward) for one in layers] == known


def test_a_network_without_a_pcdeq_has_none(batches):
    assert count_papers_steps(ExplicitL((8,), activation="tanh"), batches) == ((), ())


def test_they_are_in_the_metrics_and_do_not_depend_on_how_it_was_trained(tiny, tmp_path):
    run = train(replace(tiny, epochs=2, lr_step=None), progress="none")
    papers = train(replace(tiny, epochs=2, lr_step=None, solver="paper", out=tmp_path / "paper"), progress="none")
    for one, two in zip(run.metrics, papers.metrics, strict=True):
        assert len(one.paper_forward_steps) == len(one.paper_backward_steps) == 1
        assert one.paper_forward_steps == pytest.approx(two.paper_forward_steps, abs=1)
        assert one.paper_forward_steps == pytest.approx(two.forward_steps, abs=2)  # of training, on other batches


def test_lines_of_before_have_none(tiny):
    (line,) = train(replace(tiny, epochs=1, lr_step=None), progress="none").metrics
    old = {name: value for name, value in asdict(line).items() if not name.startswith("paper")}
    assert EpochMetrics.from_json(json.dumps(old)) == replace(line, paper_forward_steps=(), paper_backward_steps=())
