"""The three topologies, and every row of the paper built from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pcdeq.errors import UsageError
from pcdeq.layers import PcDEQConv2d, PcDEQLinear
from pcdeq.models import MC, SC, TC, L, Preprocessing, build, equilibrium_layers
from pcdeq.operators import project_
from pcdeq.recipes import own_rows, rows
from pcdeq.solvers import Picard

PCDEQS = [row for row in (*rows(), *own_rows()) if row.family == "pcdeq"]
SHAPES = {"mnist": (1, 28, 28), "svhn": (3, 32, 32), "cifar10": (3, 32, 32)}


@pytest.mark.parametrize("row", PCDEQS, ids=lambda row: f"{row.dataset}-{row.name}")
class TestEveryRow:
    def test_has_its_exact_count(self, row):
        model = build(row.name, row.dataset)
        assert sum(parameter.numel() for parameter in model.parameters()) == row.parameters

    def test_trains_one_step(self, row):
        model = build(row.name, row.dataset).train()
        before = {name: tensor.clone() for name, tensor in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=row.lr, weight_decay=row.weight_decay, fused=True)
        images, labels = torch.rand(2, *SHAPES[row.dataset]), torch.tensor([0, 1])
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        project_(model)
        assert torch.isfinite(loss)
        for name, parameter in model.named_parameters():
            assert torch.isfinite(parameter).all(), name
            # Before batch norm a bias cancels, so its gradient may round to nothing.
            if "lift" not in name or "bias" not in name or "norm" in name:
                assert not torch.equal(parameter, before[name]), name
        for layer in equilibrium_layers(model):
            assert layer.last_forward.unconverged == 0
            assert layer.last_backward.unconverged == 0


def test_topologies_are_the_papers():
    conv = [nn.Conv2d, nn.BatchNorm2d, PcDEQConv2d, nn.MaxPool2d, nn.BatchNorm2d]
    head = [nn.AvgPool2d, nn.Flatten, nn.Linear]
    dense = [nn.Flatten, nn.Linear, nn.BatchNorm1d, PcDEQLinear, nn.BatchNorm1d, nn.Linear]
    for model, kinds in ((L((8,)), dense), (SC((8,)), conv + head), (MC((4, 5, 6)), 3 * conv + head)):
        assert len(model) == len(kinds)
        assert all(isinstance(layer, kind) for layer, kind in zip(model, kinds, strict=True)), model


def test_our_topology_has_nothing_between_its_equilibria_that_widens_bounds():
    conv = [nn.Conv2d, nn.BatchNorm2d, PcDEQConv2d, nn.BatchNorm2d]
    model = TC((4, 5), (3, 9, 12))
    kinds = [*conv, *conv, nn.Flatten, nn.Linear]
    assert all(isinstance(layer, kind) for layer, kind in zip(model, kinds, strict=True)), model
    assert model.classifier.in_features == 5 * 3 * 3
    assert model(torch.rand(2, 3, 9, 12)).shape == (2, 10)


@pytest.mark.parametrize(("edge", "sizes"), [(28, (28, 13, 6)), (32, (32, 15, 7))])
def test_resolutions_of_mc(edge, sizes):
    model, seen = MC((2, 3, 4), (1, edge, edge)), []
    for layer in equilibrium_layers(model):
        layer.register_forward_hook(lambda _, __, output: seen.append(output.shape[-1]))
    model.eval()(torch.rand(1, 1, edge, edge))
    assert tuple(seen) == sizes


@pytest.mark.parametrize("topology", [L, SC, MC])
@pytest.mark.parametrize("image_shape", [(1, 28, 28), (3, 32, 48), (2, 64, 40)])
def test_any_image_that_is_large_enough(topology, image_shape):
    model = topology((3,) * topology.widths, image_shape, num_classes=4)
    assert model(torch.rand(2, *image_shape)).shape == (2, 4)


@pytest.mark.parametrize(("topology", "edge"), [(SC, 7), (MC, 18)])
def test_image_too_small(topology, edge):
    topology((3,) * topology.widths, (1, edge + 1, edge + 1))
    with pytest.raises(UsageError, match=f"{edge} x {edge} pixels are too small"):
        topology((3,) * topology.widths, (1, edge, edge))


@pytest.mark.parametrize(
    ("name", "channels"), [("pcdeq-1-mc-tanh", (3,)), ("pcdeq-1-l-tanh", (1, 2)), ("pcdeq-1-sc-tanh", (0,))]
)
def test_channels_that_do_not_fit(name, channels):
    with pytest.raises(UsageError, match="channels of"):
        build(name, channels=channels)


def test_wrong_input_shape_is_named():
    with pytest.raises(UsageError, match=r"\(1, 28, 28\), got a batch of shape \(2, 3, 28, 28\)"):
        build("pcdeq-1-sc-tanh", channels=(2,))(torch.rand(2, 3, 28, 28))


def test_build_adapts_to_the_data():
    model = build("pcdeq-1-mc-relu6", "my/pictures", image_shape=(3, 40, 40), num_classes=7)
    assert model.classifier.out_features == 7
    assert model.lift1.out_channels == 20  # colour: CIFAR-10's row


def test_build_hands_options_to_the_layers():
    model = build("pcdeq-1-mc-relu6", solver=Picard(tol=1e-3, stop="batch"))
    assert all(layer.solver == Picard(tol=1e-3, stop="batch") for layer in equilibrium_layers(model))
    assert {layer.activation.name for layer in equilibrium_layers(model)} == {"relu6"}
    with pytest.raises(TypeError):
        build("pcdeq-1-mc-relu6", solvr=None)


def test_a_slice_is_a_plain_sequence():
    model = SC((3,)).eval()
    features = model[:-1](torch.rand(2, 1, 28, 28))
    assert features.shape == (2, 3 * 9)
    assert type(model[:-1]) is nn.Sequential
    assert model[-1] is model.classifier


def test_memory_format_does_not_change_the_result():
    model = MC((3, 4, 5)).eval()
    images = torch.rand(2, 1, 28, 28)
    plain = model(images)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    torch.testing.assert_close(model(images), plain, rtol=1e-3, atol=1e-4)


def test_preprocessing_normalises_as_training_does():
    from pcdeq.data import Batches, Split

    images = torch.randint(0, 256, (3, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    batches = Batches(Split(images, torch.zeros(3, dtype=torch.int64)), 3, mean=mean, std=std)
    torch.testing.assert_close(Preprocessing(mean, std, ("a",))(images), next(iter(batches))[0])
