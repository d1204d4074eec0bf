"""The graph that is exported, as a torch module: it says what the network says."""

from __future__ import annotations

import pytest
import torch

import pcdeq
from pcdeq.activations import ACTIVATIONS
from pcdeq.errors import UsageError
from pcdeq.export.graph import fixed_graph, loop_graph
from pcdeq.export.truncation import exact_logits
from pcdeq.injection import softplus
from pcdeq.models import MC, SC, L, Preprocessing

SHAPE = (2, 20, 20)
COLOUR = Preprocessing(mean=(0.4, 0.5), std=(0.2, 0.3), classes=tuple("abc"))


def network(kind=L, channels=(6,), **options):
    """Heavy weights, statistics of batch norm that are not those of the start, and a learned warm start."""
    model = kind(channels, SHAPE, 3, **options)
    model.preprocessing = COLOUR
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight_g"):
                parameter.fill_(0.5)
    for _ in range(3):
        model(COLOUR(torch.randint(256, (16, *SHAPE), dtype=torch.uint8))).sum().backward()
    return model.eval()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_enough_steps_give_the_exact_network(activation):
    model, pixels = network(activation=activation), torch.rand(4, *SHAPE)
    exact = exact_logits(model, pixels)
    torch.testing.assert_close(fixed_graph(model, (300,)).double()(pixels.double()), exact, atol=1e-7, rtol=0)
    model.deq.warm = None  # with which relu6, being nearly linear, is done at once
    assert not torch.allclose(fixed_graph(model, (1,)).double()(pixels.double()), exact, atol=1e-3)


@pytest.mark.parametrize(("kind", "channels"), [(L, (6,)), (SC, (3,)), (MC, (3, 4, 5))])
def test_both_forms_are_the_network(kind, channels):
    model = network(kind, channels)
    images = torch.randint(256, (5, *SHAPE), dtype=torch.uint8)
    with torch.no_grad():
        expected = model(COLOUR(images))
    logits, converged = loop_graph(model, 1e-6, 500)(images / 255)
    assert converged.all()
    scale = expected.abs().max()
    assert (logits - expected).abs().max() < 1e-3 * scale
    assert (fixed_graph(model, (60,) * len(channels))(images / 255) - expected).abs().max() < 1e-3 * scale


def test_the_exact_network_is_the_proved_one():
    # The reference that bounds are tested against lies in the box that is proved around the exact logits.
    from pcdeq.proofs.intervals import Box
    from pcdeq.proofs.network import recognise
    from pcdeq.proofs.rules import enclose

    model, images = network(), torch.randint(256, (3, *SHAPE), dtype=torch.uint8)
    box = enclose(recognise(model), Box.of(COLOUR(images).double()), 1e-10)
    exact = exact_logits(model, images / 255)
    assert box.proved.all()
    assert (exact > box.lower - 1e-5).all() and (exact < box.upper + 1e-5).all()  # folding rounds to float32


class TestLoop:
    def test_an_answer_does_not_depend_on_its_batch(self):
        model = network(activation="relu6")
        graph, pixels = loop_graph(model, 1e-3, 500), torch.rand(8, *SHAPE)
        together, _ = graph(pixels)
        alone = torch.cat([graph(pixels[i : i + 1])[0] for i in range(8)])
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-5)

    def test_samples_that_are_given_up_are_named(self):
        model, pixels = network(), torch.rand(4, *SHAPE)
        pixels[1] = torch.nan
        assert loop_graph(model, 1e-4, 500)(pixels)[1].tolist() == [True, False, True, True]
        assert loop_graph(model, 1e-6, 2)(pixels)[1].tolist() == [False] * 4

    def test_an_empty_batch(self):
        assert loop_graph(network(), 1e-4, 500)(torch.rand(0, *SHAPE))[0].shape == (0, 3)


@pytest.mark.parametrize("exporting", [False, True])
def test_a_small_softplus_keeps_its_digits(monkeypatch, exporting):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: exporting)
    x = torch.linspace(-16, 4, 401)
    exact = torch.nn.functional.softplus(x.double(), beta=5.0, threshold=1e9)
    assert (softplus(x) / exact - 1).abs().max() < 2e-5  # exp(5x) enlarges the rounding of 5x
    assert (softplus(x.double()) / exact - 1).abs().max() < 1e-13


def test_a_bad_warm_start_is_not_taken():
    model, pixels = network(), torch.rand(2, *SHAPE)
    expected = exact_logits(model, pixels)
    model.deq.warm.product.fill_(torch.nan)
    torch.testing.assert_close(fixed_graph(model, (300,)).double()(pixels.double()), expected, atol=1e-7, rtol=0)


def test_a_warm_start_saves_steps():
    pixels, model = torch.rand(16, *SHAPE), network(activation="relu6")
    warm = loop_graph(model, 1e-5, 500)
    warm(pixels)
    model.deq.warm = None
    cold = loop_graph(model, 1e-5, 500)
    cold(pixels)
    assert warm.equilibria[0].last_steps < cold.equilibria[0].last_steps


def test_training_networks_and_others_are_refused():
    with pytest.raises(UsageError, match="eval"):
        pcdeq.export.plan_export(L((4,)))
    with pytest.raises(UsageError, match="Linear"):
        pcdeq.export.plan_export(torch.nn.Linear(2, 2))
