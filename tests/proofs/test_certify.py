"""What is certified is true: against float64 referees, on random networks, and when the solver is sabotaged."""

import warnings

import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.errors import ConvergenceWarning, UsageError
from pcdeq.models import build, equilibrium_layers
from pcdeq.proofs import certify as certify_module
from pcdeq.proofs import kinds
from pcdeq.proofs.intervals import Box
from pcdeq.proofs.network import recognise

ROWS = ["pcdeq-1-l-tanh", "pcdeq-1-sc-softsign", "pcdeq-1-mc-relu6", "pcdeq-2-mc-sigmoid"]


def network(row, seed=0, gain=0.6):
    """A small network with statistics and weights that are not those of the start."""
    torch.manual_seed(seed)
    channels = {"l": (10,), "sc": (4,), "mc": (3, 4, 5)}[row.split("-")[2]]
    model = build(row, channels=channels)
    for layer in equilibrium_layers(model):
        with torch.no_grad():
            layer.operator.weight_v.uniform_()
            layer.operator.weight_g.uniform_(0, gain)
    model.train()
    for _ in range(3):
        model(torch.rand(16, 1, 28, 28)).sum().backward()
    return model.eval()


def exact_logits(model, images):
    """The same network in float64, its equilibria to 1e-13, with the weights recomputed in float64."""
    exact = build_exact(model)
    with torch.no_grad():
        return exact(images.double())


def build_exact(model):
    import copy

    exact = copy.deepcopy(model).double()
    for layer in equilibrium_layers(exact):
        layer.solver = pcdeq.Anderson(tol=1e-13, max_steps=3000)
    return exact.eval()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", range(3))
def test_certified_classes_are_the_exact_network_s(row, seed):
    model, images = network(row, seed), torch.rand(24, 1, 28, 28)
    certificate = pcdeq.certify(model, images)
    logits = exact_logits(model, images)
    assert certificate.share > 0.9
    assert torch.equal(logits.argmax(1)[certificate.proved], certificate.classes[certificate.proved])
    top = logits.topk(2).values
    lead = (top[:, 0] - top[:, 1])[certificate.proved]
    assert (certificate.margin[certificate.proved] <= lead + 1e-12).all()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_box_on_the_way_holds_the_exact_value(row, dtype):
    model, images = network(row, 5), torch.rand(6, 1, 28, 28)
    box, exact, value = Box.of(images.to(dtype)), build_exact(model), images.double()
    with torch.no_grad():
        for layer, exact_layer in zip(recognise(model), exact, strict=True):
            box, value = layer.enclose(box, 1e-5), exact_layer(value)
            assert box.proved.all()
            # The referee's own rounding is about 1e-14 of what it sums up.
            slack = 1e-12 * (1 + value.abs())
            assert ((box.lower.double() <= value + slack) & (value - slack <= box.upper.double())).all()
            assert (box.upper - box.lower).max() < (0.05 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("row", ["pcdeq-1-l-tanh", "pcdeq-1-mc-relu6"])
def test_noise_within_the_radius_stays_within_the_certificate(row):
    model, images = network(row, 1), torch.rand(8, 1, 28, 28)
    radius = 0.002
    certificate = pcdeq.certify(model, images, radius=radius)
    assert certificate.proved.any()
    exact = build_exact(model)
    with torch.no_grad():
        for seed in range(10):
            noise = radius * (2 * torch.rand(images.shape, generator=torch.Generator().manual_seed(seed)) - 1).sign()
            classes = exact((images + noise).double()).argmax(1)
            assert torch.equal(classes[certificate.proved], certificate.classes[certificate.proved])


def test_a_larger_radius_proves_less():
    model, images = network("pcdeq-1-l-tanh"), torch.rand(40, 1, 28, 28)
    shares = [pcdeq.certify(model, images, radius=radius).share for radius in (0.0, 0.003, 0.03, 0.3)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert shares[-1] < 0.1


def test_a_sabotaged_solver_proves_nothing_wrong(monkeypatch):
    model, images = network("pcdeq-1-l-tanh"), torch.rand(20, 1, 28, 28)
    honest = kinds.solve_equation

    def sabotage(equation, *rest):
        solution = honest(equation, *rest)
        wrong = solution.value * torch.rand_like(solution.value) * 2
        wrong[::3] = torch.nan
        wrong[1::3] = 0
        return solution.with_value(wrong)

    monkeypatch.setattr(kinds, "solve_equation", sabotage)
    certificate = pcdeq.certify(model, images)
    truth = exact_logits(model, images).argmax(1)
    assert torch.equal(truth[certificate.proved], certificate.classes[certificate.proved])
    assert not certificate.proved[::3].any()


def test_a_tie_is_not_proved():
    model = network("pcdeq-1-l-tanh")
    with torch.no_grad():
        model.classifier.weight[1:] = model.classifier.weight[:1]
        model.classifier.bias[1:] = model.classifier.bias[:1]
    assert not pcdeq.certify(model, torch.rand(5, 1, 28, 28)).proved.any()


def test_float64_decides_what_float32_cannot(monkeypatch):
    model, images = network("pcdeq-1-l-tanh"), torch.rand(1, 1, 28, 28)
    logits = exact_logits(model, images)[0]
    first, second = logits.topk(2).indices.tolist()
    with torch.no_grad():  # bring the two leaders within 1e-6 of each other
        model.classifier.bias[first] -= (logits[first] - logits[second] - 1e-6).float()
    lead = exact_logits(model, images)[0].topk(2).values
    assert 0 < float(lead[0] - lead[1]) < 1e-5
    assert pcdeq.certify(model, images).proved.all()
    monkeypatch.setattr(certify_module, "BOXES", certify_module.BOXES[:1])
    monkeypatch.setattr(certify_module, "BALLS", certify_module.BALLS[:1])
    assert not pcdeq.certify(model, images).proved.any()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.GELU(), nn.Linear(4, 2)), "GELU"),
        (nn.Linear(4, 2), "Sequential"),
        (nn.Sequential(nn.Linear(4, 2), nn.ReLU()), "classifier"),
        (nn.Sequential(pcdeq.PcDEQLinear(4, injection=torch.exp), nn.Linear(4, 2)), "injection"),
    ],
)
def test_what_cannot_be_certified_is_said(model, message):
    with pytest.raises(UsageError, match=message):
        pcdeq.certify(model.eval(), torch.rand(1, 4))


def test_training_mode_and_bad_radii_are_refused():
    model = nn.Sequential(pcdeq.PcDEQLinear(4), nn.Linear(4, 2))
    with pytest.raises(UsageError, match="eval"):
        pcdeq.certify(model.train(), torch.rand(1, 4))
    with pytest.raises(UsageError, match="radius"):
        pcdeq.certify(model.eval(), torch.rand(1, 4), radius=-1.0)


def test_images_of_another_shape_are_refused():
    model = nn.Sequential(nn.Linear(6, 4), pcdeq.PcDEQLinear(4), nn.Linear(4, 3)).eval()
    with pytest.raises(UsageError, match=r"does not take images of shape \(5,\), torch.float32"):
        pcdeq.certify(model, torch.rand(2, 5))


def test_no_images():
    model = nn.Sequential(pcdeq.PcDEQLinear(4), nn.Linear(4, 2)).eval()
    certificate = pcdeq.certify(model, torch.rand(0, 4))
    assert certificate.classes.shape == (0,)
    assert certificate.share == 1.0


def test_inputs_beyond_the_limits_do_not_count():
    # One unit that sees x >= 0 only: without the limit the box reaches below 0, where the class is another.
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2)).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[1].bias.copy_(torch.tensor([0.05, 0.0]))
    image, limits = torch.tensor([[0.0]]), (torch.tensor([0.0]), torch.tensor([1.0]))
    assert not pcdeq.certify(model, image, radius=0.1).proved.item()
    within = pcdeq.certify(model, image, radius=0.1, limits=limits)
    assert within.proved.item()
    assert within.margin.item() == pytest.approx(0.05, abs=1e-6)
    beyond = pcdeq.certify(model, torch.tensor([[-1.0]]), radius=0.1, limits=limits)  # stays in its own box
    assert beyond.classes.item() == 1 and beyond.proved.item()


def test_a_class_is_settled_by_a_rough_solve():
    model, images = network("pcdeq-1-l-tanh"), torch.rand(12, 1, 28, 28)
    inputs = model[:3](images)
    exact = certify_module.certify(model, images)
    solver = pcdeq.Anderson(tol=1e-8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a class may be too close to call
        solution = model.deq.solve(inputs, solver=solver, until=certify_module.class_decided(model[4:]))
        scores = model[4:](solution.value)
        whole = model.deq.solve(inputs, solver=pcdeq.Anderson(tol=1e-8))
    assert solution.converged.any()
    assert scores.argmax(1)[solution.converged].equal(exact.classes[solution.converged])
    assert solution.steps.double().mean() < whole.steps.double().mean()
    with pytest.raises(UsageError, match="end in a Linear"):
        certify_module.class_decided(model[:4])


@pytest.mark.parametrize("radius", [0.0, 1e-12])
def test_the_rounding_of_a_float64_image_is_in_the_box(radius):
    # The score is 2^24 (x - y) - 1/4. In float32 both inputs are 1, and the other class wins.
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[2.0**24, -(2.0**24)], [0.0, 0.0]]))
        model[1].bias.copy_(torch.tensor([-0.25, 0.0]))
    images = torch.tensor([[1 + 4e-8, 1.0], [1.0, 1.0]], dtype=torch.float64)
    certificate = certify_module.certify(model, images, radius=radius)
    assert not certificate.proved[0] or certificate.classes[0] == 0
    if not radius:  # one radius, one attempt
        assert certificate.classes.tolist() == [0, 1] and certificate.proved.all()


def test_a_box_in_another_dtype_holds_the_same_numbers():
    numbers = torch.tensor([[0.1, 1.0, -1e-50, 1e300, -1e300, torch.inf]], dtype=torch.float64)
    box = Box.of(numbers).to(torch.float32)
    assert box.lower.dtype == box.upper.dtype == torch.float32
    assert ((box.lower.double() <= numbers) & (numbers <= box.upper.double())).all()
    assert box.lower[0, 1] == box.upper[0, 1] == 1.0  # which float32 has
    assert box.lower[0, 0] < box.upper[0, 0]
    same = Box.of(numbers.float())
    assert same.to(torch.float64).lower.equal(same.lower.double())
