"""A frozen network gives the answers of the model that it was made from."""

import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.models import L, equilibrium_layers
from pcdeq.models.batch_norm import BatchNorm2d

SHAPES = {"l": (1, 28, 28), "sc": (1, 28, 28), "mc": (3, 32, 32)}


def trained(row, **options):
    """A network whose batch norms have statistics, weights and biases of all signs."""
    torch.manual_seed(0)
    topology = row.split("-")[2]
    channels = {"l": (20,), "sc": (5,), "mc": (4, 6, 8)}[topology]
    model = pcdeq.build(row, image_shape=SHAPES[topology], channels=channels, **options)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.1, 2)
    return model.eval(), torch.randn(7, *SHAPES[topology])


@pytest.mark.parametrize("row", ["pcdeq-1-l-tanh", "pcdeq-2-sc-sigmoid", "pcdeq-1-mc-relu6"])
def test_the_answers_are_the_same(row):
    model, images = trained(row, solver=pcdeq.Anderson(tol=1e-11))
    model, images = model.double(), images.double()
    frozen = pcdeq.freeze(model)
    assert len(frozen) < len(model)
    assert not any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in frozen)
    torch.testing.assert_close(frozen(images), model(images), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("row", ["pcdeq-1-l-tanh", "pcdeq-1-sc-softsign", "pcdeq-2-mc-sigmoid"])
def test_in_float32_they_differ_by_rounding(row):
    model, images = trained(row, solver=pcdeq.Anderson(tol=1e-6))
    expected = model.double()(images.double())
    frozen = pcdeq.freeze(model.float())
    assert frozen(images).dtype == torch.float32
    scale = expected.abs().max().item()
    torch.testing.assert_close(frozen(images).double(), expected, rtol=0, atol=2e-4 * scale)


def test_the_model_stays_as_it_was_and_the_copy_keeps_its_weights():
    model, images = trained("pcdeq-1-mc-tanh")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    frozen = pcdeq.freeze(model)
    before = frozen(images)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.equal(frozen(images), before)


def test_a_batch_norm_that_fits_nowhere_stays():
    torch.manual_seed(0)
    model = nn.Sequential(
        BatchNorm2d(2), nn.MaxPool2d(2), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3, padding=1), pcdeq.PcDEQConv2d(3)
    ).eval()  # fmt: skip
    for layer in (model[0], model[2]):
        layer.running_mean.normal_()
    frozen = pcdeq.freeze(model)
    assert len(frozen) == len(model)
    images = torch.randn(2, 2, 8, 8)
    torch.testing.assert_close(frozen(images), model(images))


def test_a_frozen_network_has_no_gradients_and_cannot_be_trained():
    model, images = trained("pcdeq-1-l-tanh")
    frozen = pcdeq.freeze(model)
    assert not frozen(images).requires_grad
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    with pytest.raises(pcdeq.PcdeqError, match="cannot be trained"):
        frozen.train()


def test_a_solve_that_does_not_converge_warns():
    model, images = trained("pcdeq-1-l-tanh", solver=pcdeq.Picard(max_steps=1))
    with torch.no_grad():
        for layer in equilibrium_layers(model):
            layer.operator.weight_g.fill_(5.0)
    with pytest.warns(UserWarning, match="not converged"):
        pcdeq.freeze(model)(images)


def test_what_is_not_a_sequence_of_layers_is_refused():
    with pytest.raises(pcdeq.PcdeqError, match="whose layers follow each other"):
        pcdeq.freeze(L((8,)).deq)
