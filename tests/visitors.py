"""Networks, and all analyses that go through them layer by layer, compared with what the networks compute."""

from __future__ import annotations

import torch

import pcdeq
from pcdeq.export.graph import loop_graph
from pcdeq.models import Network
from pcdeq.proofs.certify import class_decided
from pcdeq.proofs.order import Enclosure
from pcdeq.proofs.worst_case import worst_case_scores

EXACT = pcdeq.Anderson(tol=1e-12, max_steps=2000)
RADIUS = 0.05


def deq(layer, **options):
    """An equilibrium layer with weights that matter."""
    found = layer(solver=EXACT, **options)
    with torch.no_grad():
        found.operator.weight_v.uniform_(0.1, 1)
        found.operator.weight_g.uniform_(0, 0.6)
    return found


def norm(module):
    """A batch norm whose numbers are of either sign."""
    with torch.no_grad():
        module.running_mean.normal_()
        module.running_var.uniform_(0.2, 2)
        if module.weight is not None:
            module.weight.normal_()
            module.bias.normal_()
    return module


def dense(features=5, activation="tanh", **options):
    return deq(lambda **more: pcdeq.PcDEQLinear(features, activation, **more), **options)


def conv(channels=3, activation="sigmoid", **options):
    return deq(lambda **more: pcdeq.PcDEQConv2d(channels, activation, **more), **options)


def noise(x, seed, radius=RADIUS):
    generator = torch.Generator().manual_seed(seed)
    direction = 2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1
    return radius * (direction if seed % 2 else direction.sign())


def leads(scores, labels):
    return scores - scores.gather(1, labels[:, None])


def certified(model, x, expected):
    certificate = pcdeq.certify(model, x)
    assert certificate.proved.any()  # these are no close calls
    right = certificate.classes == expected.argmax(1)
    assert right[certificate.proved].all()
    top = expected.topk(2).values
    assert (certificate.margin <= top[:, 0] - top[:, 1] + 1e-7)[certificate.proved].all()


def robust(model, x, expected):
    certificate = pcdeq.certify(model, x, radius=RADIUS)
    for seed in range(4):
        classes = model(x + noise(x, seed)).argmax(1)
        assert (classes == certificate.classes)[certificate.proved].all()


def settled(model, x, expected):
    certain = torch.ones(len(x), dtype=torch.bool)
    assert class_decided(model)(Enclosure(x, x, certain)).any()
    decided = class_decided(model)(Enclosure(x - RADIUS, x + RADIUS, certain))
    for seed in range(4):
        assert (model(x + noise(x, seed)).argmax(1) == expected.argmax(1))[decided].all()


def loss(model, x, expected):
    labels = expected.argmax(1)
    scores, worst = worst_case_scores(model, x, labels, RADIUS)
    torch.testing.assert_close(scores, expected, rtol=1e-7, atol=1e-7)
    for seed in range(4):
        assert (leads(model(x + noise(x, seed)), labels) <= worst + 1e-7).all()


def frozen(model, x, expected):
    torch.testing.assert_close(pcdeq.freeze(model)(x.clone()), expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(model(x.clone()), expected, rtol=1e-9, atol=1e-9)  # which is as it was


class Exported(Network):
    """A network of layers that were made elsewhere, which stay as they are."""

    widths = 1

    @classmethod
    def layers(cls, channels, image_shape, num_classes, options):
        return cls.made

    @classmethod
    def of(cls, layers, image_shape):
        cls.made = layers
        network = cls((1,), image_shape, 3)
        network.training = False
        return network


def exported(model, x, expected):
    graph = loop_graph(Exported.of({"whole": model}, tuple(x.shape[1:])), 1e-12, 1000)
    logits, converged = graph(x.clone())
    assert converged.all()
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


VISITORS = [certified, robust, settled, loss, frozen, exported]
