"""Networks that ship with the package: they load by name and are as good as the run that made them."""

from __future__ import annotations

import pytest
import torch

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.errors import UsageError
from pcdeq.recipes import find_row
from pcdeq.training.pretrained import network_parts, pack, pretrained_names, read_pretrained


@pytest.mark.parametrize("name", pretrained_names())
def test_the_network_is_the_rows(name):
    network = pcdeq.load(name)
    description, _ = read_pretrained(name)
    config, *_ = network_parts(description)
    assert name == f"{config.row}-{config.data}"
    row = find_row(config.row, config.data)
    assert sum(parameter.numel() for parameter in network.parameters()) == row.parameters
    assert description["epoch"] == row.epochs
    assert not network.training


@pytest.mark.parametrize("name", [name for name in pretrained_names() if name.endswith("-mnist")])
def test_it_reads_digits(name):
    network, digits = pcdeq.load(name), load_dataset("mnist-mini").test
    with torch.inference_mode():
        right = network(network.preprocessing(digits.images)).argmax(1) == digits.labels
    assert right.double().mean() > 0.96


def test_a_name_that_is_not_there():
    with pytest.raises(UsageError, match="did you mean pcdeq-1-l-tanh-mnist"):
        pcdeq.load("pcdeq-1-l-than-mnist")
    with pytest.raises(UsageError, match=r"is not a run folder"):
        pcdeq.load("runs/pcdeq-1-l-tanh-mnist")


def test_packing_keeps_every_bit(tiny):
    run = pcdeq.train(tiny, progress="none")
    content = pack(run)
    assert str(run.path).encode() not in content  # nobody's folders are shipped
    from safetensors.torch import load

    tensors = load(content)
    for name, tensor in run.load_weights().items():
        assert torch.equal(tensors[name], tensor)
