"""The bounds of the certified loss: nothing in the box exceeds them, and they can be differentiated."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pcdeq
from pcdeq.errors import UsageError
from pcdeq.models import build, equilibrium_layers
from pcdeq.proofs.intervals import Bounds
from pcdeq.proofs.network import recognise
from pcdeq.proofs.rules import bound
from pcdeq.proofs.worst_case import worst_case_scores

ROWS = [f"pcdeq-{kind}-{size}" for size in ("l", "sc", "mc", "tc") for kind in ("1", "2")]
ACTIVATIONS = {"1": ("relu6", "tanh", "softsign"), "2": ("sigmoid",)}
NAMES = [f"{row}-{activation}" for row in ROWS for activation in ACTIVATIONS[row.split("-")[1]]]


def network(name, dtype=torch.float64):
    """A small network, its equilibria to 1e-11 in float64, with weights that are not those of the start."""
    torch.manual_seed(0)
    channels = {"l": (10,), "sc": (4,), "mc": (3, 4, 5), "tc": (3, 4)}[name.split("-")[2]]
    model = build(name, image_shape=(2, 20, 20), channels=channels, num_classes=4).to(dtype)
    for layer in equilibrium_layers(model):
        tol = 1e-11 if dtype == torch.float64 else 1e-5
        layer.solver = layer.adjoint_solver = pcdeq.Anderson(tol=tol, max_steps=2000)
        with torch.no_grad():
            layer.operator.weight_v.uniform_()
            layer.operator.weight_g.uniform_(0, 0.2)
    for parameter in (model.classifier.weight, *(m.weight for m in model if isinstance(m, nn.BatchNorm2d))):
        nn.init.normal_(parameter)  # of either sign
    for _ in range(3):
        model(torch.rand(16, 2, 20, 20, dtype=dtype))
    return model


def batch(count=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 2, 20, 20, generator=generator, dtype=dtype)
    return images, torch.arange(count) % 4


def leads(scores, labels):
    return scores - scores.gather(1, labels[:, None])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_the_box_exceeds_the_bounds(name):
    model, (images, labels) = network(name).eval(), batch()
    radius = torch.tensor([0.02, 0.05]).double().view(2, 1, 1)  # per channel
    with torch.no_grad():
        bounds = bound(recognise(model)[:-1], Bounds(images, images - radius, images + radius))
        scores, worst = worst_case_scores(model, images, labels, radius)
        torch.testing.assert_close(scores, model(images))
        noise = 2 * torch.rand(20, *images.shape, generator=torch.Generator().manual_seed(0)).double() - 1
        noise[::2] = noise[::2].sign()  # half of them at corners of the box
        features = model[:-1]((images + radius * noise).flatten(0, 1))  # (20 draws x images, features)
        found = leads(model[-1](features), labels.repeat(20)).unflatten(0, (20, -1))
        features = features.unflatten(0, (20, -1))
        assert (bounds.lower - 1e-8 <= features).all()
        assert (features <= bounds.upper + 1e-8).all()
        assert (found <= worst + 1e-8).all()


@pytest.mark.parametrize("name", ["pcdeq-1-l-relu6", "pcdeq-1-mc-tanh"])
def test_the_bounds_agree_with_the_certificate_s(name):
    model, (images, _) = network(name, torch.float32).eval(), batch(20, torch.float32)
    certificate = pcdeq.certify(model, images, radius=0.01, bounds="intervals")
    with torch.no_grad():
        _, worst = worst_case_scores(model, images, certificate.classes, 0.01)
    worst.scatter_(1, certificate.classes[:, None], -torch.inf)
    # The certificate's are wider by its margins for rounding and by its bounds on each equilibrium.
    torch.testing.assert_close(-worst.amax(1).double(), certificate.margin, atol=0.05, rtol=0.05)
    assert (certificate.margin <= 1e-4 - worst.amax(1)).all()


@pytest.mark.parametrize("activation", ["relu6", "tanh", "softsign", "sigmoid"])
def test_an_equilibrium_s_bounds_are_its_values_at_the_two_ends(activation):
    torch.manual_seed(0)
    layer = pcdeq.PcDEQLinear(7, activation, solver=pcdeq.Anderson(tol=1e-12, max_steps=2000)).double()
    clean = torch.randn(5, 7).double()
    lower, upper = clean - torch.rand(5, 7), clean + torch.rand(5, 7)
    bounds = bound(recognise(layer), Bounds(clean, lower, upper))
    for found, end in zip(bounds, (clean, lower, upper), strict=True):
        torch.testing.assert_close(found, layer.solve(end).value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_without_a_radius_the_worst_case_is_the_clean_one(name, training):
    model, (images, labels) = network(name).train(training), batch()
    scores, worst = worst_case_scores(model, images, labels, 0.0)
    torch.testing.assert_close(scores, model(images), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(worst, leads(scores, labels), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["pcdeq-1-l-tanh", "pcdeq-2-mc-sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_learns_the_statistics_of_a_plain_pass(name, dtype):
    model, (images, labels) = network(name, dtype).train(), batch(dtype=dtype)
    twin = copy.deepcopy(model)
    worst_case_scores(model, images, labels, 0.1)
    twin(images)
    for one, two in zip(model, twin, strict=True):
        if isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d):
            torch.testing.assert_close(one.running_mean, two.running_mean, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(one.running_var, two.running_var, rtol=1e-4, atol=1e-6)
            assert one.num_batches_tracked == two.num_batches_tracked
    model.eval()
    before = model.state_dict()
    worst_case_scores(model, images, labels, 0.1)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name):
    model, (images, labels) = network(name).train(), batch()
    _, worst = worst_case_scores(model, images, labels, 0.05)
    F.cross_entropy(worst, labels).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all()
        if not key.startswith("lift") or not key.endswith("bias") or "norm" in key:  # batch norm undoes that bias
            assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("activation", ["relu6", "tanh", "softsign", "sigmoid"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_agree_with_finite_differences(activation, training):
    torch.manual_seed(1)
    solver = pcdeq.Anderson(tol=1e-13, max_steps=2000)
    options = {"activation": activation, "solver": solver, "adjoint_solver": solver, "warm_start": False}
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), pcdeq.PcDEQConv2d(2, **options), nn.AvgPool2d(2), nn.Flatten()]
    layers += [nn.Linear(2, 3), nn.BatchNorm1d(3), pcdeq.PcDEQLinear(3, **options), nn.Linear(3, 3)]
    model = nn.Sequential(*layers).double().train(training)
    with torch.no_grad():
        for layer in equilibrium_layers(model):
            layer.operator.weight_v.uniform_(0.1, 1)
    images, labels = torch.rand(4, 1, 4, 4).double(), torch.tensor([0, 1, 2, 0])

    def loss(*_):
        return F.cross_entropy(worst_case_scores(model, images, labels, 0.1)[1], labels)

    # Entry by entry for one activation; for the others a random projection of all entries sees a wrong one as well.
    whole = activation == "tanh"
    assert torch.autograd.gradcheck(
        loss, tuple(model.parameters()), eps=1e-6, atol=2e-7, rtol=1e-4, fast_mode=not whole
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.GELU(), nn.Linear(4, 2)), "GELU"),
        (nn.Linear(4, 2), "Sequential"),
        (nn.Sequential(nn.Linear(4, 2), nn.ReLU()), "classifier"),
        (nn.Sequential(pcdeq.PcDEQLinear(4, injection=torch.exp), nn.Linear(4, 2)), "injection"),
        (nn.Sequential(nn.Conv2d(1, 1, 1, padding_mode="reflect"), nn.Linear(4, 2)), "reflect"),
    ],
)
def test_what_has_no_bounds_is_said(model, message):
    with pytest.raises(UsageError, match=message):
        worst_case_scores(model, torch.rand(1, 4), torch.tensor([0]), 0.1)


def test_gradients_of_images_keep_their_layout():
    """In another layout than the forward pass, every layer before would copy, or be slow."""
    layouts = []

    def watched(x):
        y = 2 * x
        y.register_hook(lambda grad: layouts.append(grad.is_contiguous(memory_format=torch.channels_last)))
        return y

    x = torch.rand(4, 3, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    bounds = Bounds(x, x, x).map(watched)
    (bounds.clean * bounds.lower - bounds.upper).square().sum().backward()
    assert layouts == [True]
    torch.testing.assert_close(x.grad, 4 * (4 * x**2 - 2 * x) * (4 * x - 1))
