"""Linear bounds (T10): below whatever samples and attacks find, with hostile weights too; far above intervals."""

from __future__ import annotations

import itertools

import pytest
import torch
from problems import FACTS
from torch import nn
from visitors import dense, norm

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.equation import Equation
from pcdeq.errors import UsageError
from pcdeq.injection import BETA, largest_curvature
from pcdeq.operators import DenseMap
from pcdeq.proofs.attack import withstood
from pcdeq.proofs.linear import Corners, Functional, Pixels, largest_eigenvalue
from pcdeq.proofs.order import enclose_near

EXACT = pcdeq.Newton(tol=1e-13, max_steps=500)


def weight(kind, n=6):
    drawn = torch.rand(n, n, dtype=torch.float64)
    match kind:
        case "usual":
            return drawn / n
        case "tiny":
            return drawn * 1e-8
        case "huge":
            return drawn * 1e4
        case "zero rows":
            return drawn * (torch.arange(n) % 2)[:, None]
        case "nearly singular":
            return 0.999999 * drawn / torch.linalg.eigvals(drawn).abs().max()
        case "mixed":
            return drawn * 10.0 ** torch.randint(-8, 5, (n, n))
    raise AssertionError(kind)


KINDS = ["usual", "tiny", "huge", "zero rows", "nearly singular", "mixed"]


def equilibria(linear, activation, x):
    equation = Equation(linear, activation, x)
    return pcdeq.solvers.run(equation.problem(), EXACT).value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("curved", [False, True])
def test_no_sample_crosses_a_bound(kind, name, curved):
    torch.manual_seed(KINDS.index(kind))
    layer = pcdeq.PcDEQLinear(6, name, weight_norm=False)
    linear, activation = DenseMap(weight(kind)), layer.activation

    def solve(x):
        equation = Equation(linear, activation, x)
        return equation, enclose_near(equation, equilibria(linear, activation, x))

    low = torch.randn(20, 6, dtype=torch.float64) * 10.0 ** torch.randint(-3, 2, (20, 1))
    high = low + torch.rand(20, 6, dtype=torch.float64) * 10.0 ** torch.randint(-4, 2, (20, 1))
    corners = Corners(solve, low, high, layer.inject, activation.kind)
    image = torch.arange(20).repeat(4)
    wanted = Functional(torch.randn(80, 6, dtype=torch.float64), torch.zeros(80, dtype=torch.float64), image)
    middle = (low + high) / 2 if curved else None
    found = corners.pull(wanted, middle)
    for share in (0.0, 1.0, *torch.rand(6)):
        for spread in (0.0, 1.0):
            y = low + (high - low) * (share + spread * (torch.rand(20, 6).double() - share))
            z = equilibria(linear, activation, layer.inject(y))
            above = (wanted.coefficient * z[image]).sum(1)
            below = (found.coefficient * y[image]).sum(1) + found.constant
            if found.remainder is not None:
                below = below - 0.5 * (found.remainder * (y - middle)[image] ** 2).sum(1)
            scale = (wanted.coefficient.abs() * z[image]).sum(1) + (found.coefficient * y[image]).abs().sum(1)
            assert (below <= above + 1e-9 * scale + 1e-12).all()
    if kind == "usual":
        assert found.constant.isfinite().all()


def test_the_curvature_of_the_injection_is_the_largest_between_the_ends():
    low = torch.randn(2000, dtype=torch.float64) * 3
    high = low + torch.rand(2000, dtype=torch.float64) * 4
    found = largest_curvature(low, high)
    inside = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, 1001, dtype=torch.float64)
    curvature = (BETA * torch.sigmoid(BETA * inside) * torch.sigmoid(-BETA * inside)).amax(1)
    assert (found >= curvature * (1 - 1e-12)).all() and (found <= curvature * 1.01 + 1e-12).all()


def test_the_largest_eigenvalue_is_bounded_closely():
    factors = torch.randn(200, 30, 30, dtype=torch.float64) * 10.0 ** torch.randint(-20, 20, (200, 1, 1))
    matrices = factors @ factors.mT
    exact = torch.linalg.eigvalsh(matrices)[:, -1]
    found = largest_eigenvalue(matrices)
    assert (found >= exact).all() and (found <= 1.06 * exact).all()
    assert largest_eigenvalue(torch.zeros(1, 3, 3, dtype=torch.float64)).item() == 0


def test_a_quadratic_form_is_bounded_over_all_corners():
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=10)), dtype=torch.float64)
    for seed in range(20):
        torch.manual_seed(seed)
        matrix = torch.randn(4, 10, dtype=torch.float64)
        radius = torch.rand(3, 10, dtype=torch.float64) * (torch.rand(3, 10) > 0.2)
        k = torch.rand(3, 4, dtype=torch.float64) * (torch.rand(3, 4) > 0.3)
        found = Pixels(matrix, radius).largest_form(k, torch.arange(3))
        steps = corners * radius[:, None]  # (3, corners, 10): a convex form is largest at one of them
        largest = 0.5 * (k[:, None] * (steps @ matrix.T) ** 2).sum(2).amax(1)
        assert (found >= largest).all()
        chords = 0.5 * (k * (radius @ matrix.abs().T) ** 2).sum(1)
        assert (found <= chords * (1 + 1e-8)).all()


@pytest.mark.parametrize("name", ["tanh", "relu6", "softsign", "sigmoid"])
def test_no_attack_breaks_a_proved_class(name):
    for seed, (scale, radius) in enumerate([(0.5, 0.02), (3.0, 0.1), (20.0, 0.01)]):
        torch.manual_seed(seed)
        lift = nn.Linear(12, 8)
        nn.init.normal_(lift.weight, std=scale / 3)
        model = nn.Sequential(lift, norm(nn.BatchNorm1d(8)), dense(8, name), norm(nn.BatchNorm1d(8)), nn.Linear(8, 4))
        model, images = model.double().eval(), torch.randn(60, 12, dtype=torch.float64)
        intervals, linear = (
            pcdeq.certify(model, images, radius=radius, bounds=kind) for kind in ("intervals", "linear")
        )
        best = pcdeq.certify(model, images, radius=radius)
        kept = withstood(model, images, linear.classes, radius=radius)
        assert kept[linear.proved].all()
        assert linear.proved.equal(best.proved) and (best.proved >= intervals.proved).all()
        assert linear.classes.equal(model(images).argmax(1))


@pytest.mark.parametrize(("row", "radius"), [("relu6", 0.01), ("tanh", 0.005), ("sigmoid", 0.01)])
def test_it_proves_most_of_what_intervals_leave(row, radius):
    kind = 2 if row == "sigmoid" else 1
    model = pcdeq.load(f"pcdeq-{kind}-l-{row}-mnist").eval()
    test = load_dataset("mnist-mini").test
    images, limits = model.preprocessing(test.images[:40]), model.preprocessing.limits()
    reach = model.preprocessing.scaled(radius)
    intervals = pcdeq.certify(model, images, radius=reach, limits=limits, bounds="intervals")
    best = pcdeq.certify(model, images, radius=reach, limits=limits)
    assert intervals.share < 0.5 and best.share > 0.8


def test_words_that_are_no_bounds():
    model = nn.Sequential(dense(), nn.Linear(5, 2)).eval()
    with pytest.raises(UsageError, match="bounds must be 'best', 'intervals' or 'linear', got 'crown'"):
        pcdeq.certify(model, torch.randn(1, 5), radius=0.1, bounds="crown")
    assert len(pcdeq.certify(model.double(), torch.randn(0, 5).double(), radius=0.1, bounds="linear").proved) == 0


def test_an_attack_finds_what_a_step_along_the_gradient_finds():
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).double().eval()
    model[0].weight.data = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    images = torch.tensor([[0.5, 0.0, 0.0], [0.2, 0.0, 0.0]], dtype=torch.float64)  # leads 0.5 and 0.2
    labels = torch.zeros(2, dtype=torch.int64)
    for radius, expected in [(0.05, [True, True]), (0.1, [True, False]), (0.2, [False, False])]:  # 3.5 r may be lost
        assert withstood(model, images, labels, radius=radius).tolist() == expected
    limits = torch.tensor(0.0), torch.tensor(0.0)  # no component may leave its place but towards 0
    assert withstood(model, images, labels, radius=0.1, limits=limits).tolist() == [True, True]
    assert withstood(model, images, 1 - labels, radius=0.0).tolist() == [False, False]
    with pytest.raises(UsageError, match="steps and restarts must be at least 1, got 0 and 3"):
        withstood(model, images, labels, radius=0.1, steps=0)
