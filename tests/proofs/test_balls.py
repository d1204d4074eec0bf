"""Balls hold the exact values: against float64 referees, for both kinds of radii, when solvers lie, and at edges."""

import copy

import pytest
import torch
from torch import nn
from visitors import conv, dense, norm

import pcdeq
from pcdeq.equation import Equation
from pcdeq.errors import UsageError
from pcdeq.models import Clip, build, equilibrium_layers
from pcdeq.proofs import kinds
from pcdeq.proofs.balls import Ball
from pcdeq.proofs.channels import Single, channel_sums, evaluate, surround_near
from pcdeq.proofs.folding import fold
from pcdeq.proofs.network import recognise
from pcdeq.proofs.rules import surround

EXACT = pcdeq.Anderson(tol=1e-13, max_steps=3000)
PLACES = pytest.mark.parametrize("by_place", [False, True])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def exact(model):
    twin = copy.deepcopy(model).double().eval()
    for layer in equilibrium_layers(twin):
        layer.solver = EXACT
    return twin


def fixed_point(layer, weight, x):
    equation = Equation(layer.operator.bind(weight), layer.activation, x)
    return pcdeq.solvers.run(equation.problem(), EXACT).value


def odd_network(seed):
    """Every kind of layer that has a rule for balls, with numbers of either sign."""
    torch.manual_seed(seed)
    activation = ("tanh", "relu6", "softsign", "sigmoid")[seed % 4]
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=1 + seed % 2),
        norm(nn.BatchNorm2d(3)),
        conv(3, activation),
        nn.MaxPool2d(3, stride=1, padding=1),
        norm(nn.BatchNorm2d(3)),
        nn.ReLU(),
        nn.AvgPool2d(2, padding=seed % 2),
        pcdeq.Residual(nn.Conv2d(3, 3, 1, bias=False)),
        nn.Flatten(),
        nn.LazyLinear(6),
        norm(nn.BatchNorm1d(6)),
        dense(6, activation),
    ).eval()


@PLACES
@DTYPES
@pytest.mark.parametrize("tol", [1e-5, 1e-8])
@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_a_ball_holds_the_exact_values(seed, tol, dtype, by_place):
    model, x = odd_network(seed), torch.randn(5, 2, 8, 8)
    model(x)
    layers, whole, value = fold(recognise(model)), recognise(model), x.double()
    ball = Ball.of(x, dtype, by_place)
    for layer, module in zip(whole, exact(model), strict=True):
        ball, value = layer.surround(ball, tol), module(value)
        error = (ball.centre.double() - value).abs() - 1e-12 * (1 + value.abs())
        assert (error <= ball.radius).flatten(1).all(1)[ball.proved].all()
    folded = surround(layers, Ball.of(x, dtype, by_place), tol)
    assert ((folded.centre.double() - value).abs() <= folded.radius + 1e-12).all(1)[folded.proved].all()
    assert folded.proved.all() or not by_place  # one slope for all places of a channel may be too much


@PLACES
@pytest.mark.parametrize("name", ["tanh", "relu6", "softsign", "sigmoid", "log1p", "hard-tanh", "arctan"])
@torch.no_grad()
def test_any_point_is_safe(name, by_place):
    """Points from anywhere, weights from none to far beyond 1, inputs anywhere within the reach."""
    proofs = 0
    for seed in range(60):
        torch.manual_seed(seed)
        weight = torch.rand(3, 3, 3, 3).double() ** 4 * 10.0 ** float(torch.empty(()).uniform_(-6, 1))
        layer = pcdeq.PcDEQConv2d(3, name, weight_norm=False)
        layer.operator.weight.copy_(weight)
        weight = layer.operator.weight.double()
        x = torch.rand(4, 3, 5, 5) ** 8 * 10.0 ** float(torch.empty(()).uniform_(-6, 1))
        reach = torch.rand(4, 3, *((5, 5) if by_place else ())) * 10.0 ** float(torch.empty(()).uniform_(-9, -1))
        room = reach if by_place else reach[..., None, None]
        shifted = (x + room * torch.empty_like(x).uniform_(-1, 1)).clamp(min=0).double()
        true, near = fixed_point(layer, weight, shifted), fixed_point(layer, weight, x.double()).float()
        z = near * (1 + 10.0 ** -(seed % 7) * torch.randn(near.shape))
        linear = layer.operator.bind(weight.float())
        sums = channel_sums(layer.operator.bind(weight))
        product = linear.apply if by_place else lambda d: d @ sums.T  # noqa: B023
        equation = Equation(linear, layer.activation, x)
        value, radius, proved = surround_near(equation, product, evaluate(equation, z), reach)
        radius = radius if by_place else radius[..., None, None]
        held = (value.double() - true).abs() <= radius.double() * (1 + 1e-9) + 1e-11 * true
        assert held.flatten(1).all(1)[proved].all()
        proofs += int(proved.sum())
    assert proofs > 60


def random_layer(seed, name, by_place):
    """A convolution with weights from none to far beyond 1, an input, and another one within a reach of it."""
    torch.manual_seed(seed)
    layer = pcdeq.PcDEQConv2d(3, name, weight_norm=False)
    layer.operator.weight.copy_(torch.rand(3, 3, 3, 3) ** 4 * 10.0 ** float(torch.empty(()).uniform_(-6, 1)))
    x = torch.rand(4, 3, 5, 5) ** 8 * 10.0 ** float(torch.empty(()).uniform_(-6, 1))
    reach = torch.rand(4, 3, *((5, 5) if by_place else ())) * 10.0 ** float(torch.empty(()).uniform_(-14, -1))
    room = reach if by_place else reach[..., None, None]
    return layer, x.double(), reach, (x + room.double() * torch.empty_like(x).uniform_(-1, 1)).clamp(min=0)


@PLACES
@pytest.mark.parametrize("lie", [False, True])
@pytest.mark.parametrize("name", ["tanh", "relu6", "softsign", "sigmoid", "log1p", "hard-tanh", "arctan"])
@torch.no_grad()
def test_any_correction_is_safe(name, lie, by_place):
    """Whatever the linear solve says, also what would lead below 0 or is not finite; an honest one makes it tight."""
    proofs, sharp = 0, 0
    for seed in range(40):
        layer, x, reach, shifted = random_layer(seed, name, by_place)
        weight = layer.operator.weight.double()
        true, near = fixed_point(layer, weight, shifted), fixed_point(layer, weight, x).float()
        z = near * (1 + 10.0 ** -(seed % 7) * torch.randn(near.shape))
        linear, single = (layer.operator.bind(weight.to(dtype)) for dtype in (torch.float64, torch.float32))
        sums = channel_sums(linear)

        class Liar(Single):
            def solve(self, slope, source, tol, lies=lie and seed % 2):
                found = Single.solve(self, slope, source, tol)
                wrong = found.new_tensor([torch.nan, torch.inf, -1e30, -0.1, 1.0, 1e-6])[torch.randint(6, found.shape)]
                return torch.where(torch.rand(found.shape) < 0.1, wrong, found) if lies else found

        corrector = Liar(*Single.of(linear))
        product = single.apply if by_place else lambda d: d @ sums.T  # noqa: B023
        equation = Equation(linear, layer.activation, x)
        point = evaluate(equation, z.double(), corrector)
        value, radius, proved = surround_near(equation, product, point, reach, corrector if by_place else None)
        radius = (radius if by_place else radius[..., None, None]).double()
        held = (value - true).abs() <= radius * (1 + 1e-9) + 1e-12 * true
        assert held.flatten(1).all(1)[proved].all()
        proofs += int(proved.sum())
        sharp += int((proved & (radius.flatten(1).amax(1) < 1e-5)).sum())
    assert proofs > 30 and (lie or sharp > 15)


@torch.no_grad()
def test_what_is_not_a_number_is_not_proved():
    layer = dense(4)
    for bad in (torch.nan, torch.inf):
        x = torch.rand(3, 4)
        x[1, 2] = bad
        ball = recognise(nn.Sequential(layer))[0].surround(Ball.of(x, torch.float32), 1e-4)
        assert ball.proved.tolist() == [True, False, True]


@torch.no_grad()
def test_a_float64_image_is_within_its_ball():
    numbers = torch.tensor([[0.1, 1e-50, 1.0, 1e300]], dtype=torch.float64)
    ball = Ball.of(numbers, torch.float32)
    assert ((ball.centre.double() - numbers).abs() <= ball.radius.double())[0, :3].all()
    assert ball.radius[0, 3] == torch.inf and ball.radius[0, 2] == 0


class TestFrozen:
    @pytest.mark.parametrize("row", ["pcdeq-1-l-tanh", "pcdeq-1-mc-relu6"])
    def test_it_answers_as_certify_does(self, row):
        torch.manual_seed(0)
        model, images = build(row).eval(), torch.rand(20, 1, 28, 28)
        network, expected = pcdeq.freeze(model, certified=True), pcdeq.certify(model, images)
        for count in (1, 20, 0):
            found = network(images[:count])
            assert found.classes.equal(expected.classes[:count]) and found.proved.equal(expected.proved[:count])
        with torch.no_grad():
            model.classifier.weight.neg_()  # which does not reach the copy
        assert network(images).classes.equal(expected.classes)

    def test_a_tie_is_said_not_to_be_proved(self):
        model = nn.Sequential(dense(4), nn.Linear(4, 3)).eval()
        with torch.no_grad():
            model[1].weight.zero_()
            model[1].bias.zero_()
        assert not pcdeq.freeze(model, certified=True)(torch.rand(3, 4)).proved.any()

    def test_what_cannot_be_proved_is_refused(self):
        with pytest.raises(UsageError, match="GELU"):
            pcdeq.freeze(nn.Sequential(nn.GELU(), nn.Linear(4, 2)), certified=True)
        network = pcdeq.freeze(nn.Sequential(dense(4), nn.Linear(4, 3)), certified=True)
        with pytest.raises(UsageError, match="4 features"):
            network(torch.rand(2, 5))
        with pytest.raises(UsageError, match="pixels"):
            network(torch.zeros(2, 4, dtype=torch.uint8))

    def test_a_sabotaged_solver_proves_nothing_wrong(self, monkeypatch):
        model, images = nn.Sequential(dense(6, "relu6"), nn.Linear(6, 4)).eval(), torch.randn(30, 6)
        truth, network = exact(model)(images.double()).argmax(1), pcdeq.freeze(model, certified=True)
        honest = kinds.solve_equation

        def sabotage(equation, *rest):
            solution = honest(equation, *rest)
            return solution.with_value(solution.value * torch.rand_like(solution.value) * 2)

        monkeypatch.setattr(kinds, "solve_equation", sabotage)
        found = network(images)
        assert found.classes[found.proved].equal(truth[found.proved])


class TestChannels:
    def test_pooling_across_what_is_dimension_1_carries_radii_along(self):
        """A MaxPool2d takes (n, height, width) for images without channels, and dimension 1 for their height."""
        (pool,) = recognise(nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1)))
        radius = torch.tensor([[[1.0], [0.0], [0.0]]])
        ball = pool.surround(Ball(torch.zeros(1, 3, 4), radius, torch.ones(1, dtype=torch.bool)), 1e-4)
        assert (ball.radius.expand(1, 3, 4)[0, :2] >= 1).all()

    def test_padding_moves_radii_with_their_numbers(self):
        (pad,) = recognise(nn.Sequential(nn.ZeroPad2d((0, 0, 1, -1))))
        radius = torch.tensor([[[1.0], [0.0], [0.0]]])
        ball = pad.surround(Ball(torch.ones(1, 3, 4), radius, torch.ones(1, dtype=torch.bool)), 1e-4)
        assert (ball.radius.expand(1, 3, 4)[0, 1] >= 1).all()

    def test_limits_of_a_clip_are_for_pixels_not_for_radii(self):
        clip = Clip(1)
        clip.low.fill_(-2.0)
        clip.high.fill_(-1.0)
        (layer,) = recognise(nn.Sequential(clip))
        radius = torch.full((1, 1, 2, 2), 0.25)
        ball = layer.surround(Ball(torch.full((1, 1, 2, 2), -1.5), radius, torch.ones(1, dtype=torch.bool)), 1e-4)
        assert (ball.radius.expand(1, 1, 2, 2) >= 0.25).all()
