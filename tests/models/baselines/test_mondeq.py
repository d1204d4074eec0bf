"""monDEQ: its operators are monotone, its resolvents inverses, its equilibria and gradients right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pcdeq.errors import UsageError
from pcdeq.models.baselines.mondeq import TUNE_EVERY, MonDEQ
from pcdeq.models.baselines.monotone import ConvMonotone, DenseMonotone, Monotone, TieredMonotone, convolve
from pcdeq.models.baselines.splitting import Splitting, search_alpha
from pcdeq.proofs.certified import Certified
from pcdeq.solvers import Anderson, Picard

SHAPES = {"dense": (7,), "conv": (2, 6, 4), "tiers": (2, 8, 8)}  # of an input
EXACT = Picard(tol=1e-12, max_steps=20_000)


def make(kind: str, m: float = 1.0, scale: float = 1.0) -> Monotone:
    """An operator with random parameters, in float64."""
    torch.manual_seed(len(kind))
    operator: Monotone
    if kind == "dense":
        operator = DenseMonotone(7, m)
    elif kind == "conv":
        operator = ConvMonotone(2, (6, 4), m, border=1)
    else:
        operator = TieredMonotone((2, 3, 2), (8, 8), m, border=2)
    operator.double()
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.copy_(scale * (torch.randn_like(parameter) if parameter.ndim else 2 * torch.rand(()) + 1))
    return operator


def inputs(kind: str, samples: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, *SHAPES[kind], generator=generator, dtype=torch.float64)


def matrix_of(operator: Monotone, kind: str, transposed: bool = False) -> torch.Tensor:
    """W, column by column."""
    state = operator.lift(inputs(kind, 1)).shape[1:]
    units = torch.eye(state.numel(), dtype=torch.float64).reshape(-1, *state)
    return operator.product(units, transposed).detach().flatten(1).T


kinds = pytest.mark.parametrize("kind", SHAPES)


@kinds
class TestOperator:
    @pytest.mark.parametrize("m", [0.1, 1.0])
    @pytest.mark.parametrize("scale", [0.3, 3.0])
    def test_strongly_monotone_for_random_parameters(self, kind, m, scale):
        weight = matrix_of(make(kind, m, scale), kind)
        rest = torch.eye(len(weight), dtype=torch.float64) - weight
        smallest = torch.linalg.eigvalsh((rest + rest.T) / 2).min()
        assert smallest >= m - 1e-9 * scale**2
        assert not torch.allclose(weight, weight.T)

    def test_transposed_product(self, kind):
        operator = make(kind)
        torch.testing.assert_close(matrix_of(operator, kind, transposed=True), matrix_of(operator, kind).T)

    @pytest.mark.parametrize("alpha", [0.1, 1.0])
    def test_resolvent_against_a_dense_solve(self, kind, alpha):
        operator = make(kind, m=0.5)
        weight = matrix_of(operator, kind)
        identity = torch.eye(len(weight), dtype=torch.float64)
        system = identity + alpha * (identity - weight)
        u = torch.randn_like(operator.lift(inputs(kind)))
        resolvent = operator.resolvent(alpha)
        dense = torch.linalg.solve(system, u.flatten(1).T).T.reshape(u.shape)
        torch.testing.assert_close(resolvent(u), dense)
        transposed = torch.linalg.solve(system.T, u.flatten(1).T).T.reshape(u.shape)
        torch.testing.assert_close(resolvent(u, transposed=True), transposed)

    def test_lipschitz_constant(self, kind):
        operator = make(kind)
        weight = matrix_of(operator, kind)
        true = torch.linalg.matrix_norm(torch.eye(len(weight), dtype=torch.float64) - weight, ord=2)
        estimate = operator.lipschitz(operator.lift(inputs(kind, 1)), steps=200)
        assert 0.99 * true < estimate <= true * (1 + 1e-9)


def as_matrix(fn, shape) -> torch.Tensor:
    """The matrix of a linear map of images."""
    units = torch.eye(torch.Size(shape).numel(), dtype=torch.float64).reshape(-1, *shape)
    return fn(units).detach().flatten(1).T


def test_tiers_have_the_published_form():
    """W = (1 - m) I - AᵀA + B - Bᵀ, so its symmetric part is (1 - m) I - AᵀA, A being block bidiagonal."""
    operator = make("tiers", m=0.25)
    edges = [0, 2 * 64, 2 * 64 + 3 * 16, 2 * 64 + 3 * 16 + 2 * 4]
    a = torch.zeros(edges[-1], edges[-1], dtype=torch.float64)
    for tier, (shape, kernel) in enumerate(zip(operator.shapes, (t.a() for t in operator.tiers), strict=True)):
        rows = slice(edges[tier], edges[tier + 1])
        a[rows, rows] = as_matrix(lambda z, kernel=kernel: convolve(z, kernel), shape)
        if tier < 2:
            down = operator.down[tier]()
            below = slice(edges[tier + 1], edges[tier + 2])
            a[below, rows] = as_matrix(lambda z, down=down: convolve(z, down, stride=2), shape)
    weight = matrix_of(operator, "tiers")
    identity = torch.eye(len(weight), dtype=torch.float64)
    torch.testing.assert_close((weight + weight.T) / 2, 0.75 * identity - a.T @ a)


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_one_tier_has_the_published_form(kind):
    operator = make(kind, m=0.25)
    if kind == "dense":
        a, b = operator.a.weight.detach(), operator.b.weight.detach()
    else:
        a, b = (as_matrix(lambda z, k=k: convolve(z, k), SHAPES[kind]) for k in (operator.a(), operator.b()))
    weight = matrix_of(operator, kind)
    torch.testing.assert_close(weight, 0.75 * torch.eye(len(weight)).double() - a.T @ a + b - b.T)


def test_tiers_are_block_lower_triangular():
    weight = matrix_of(make("tiers"), "tiers")
    first, second = 2 * 8 * 8, 2 * 8 * 8 + 3 * 4 * 4
    assert (weight[:first, first:] == 0).all()
    assert (weight[first:second, second:] == 0).all()
    assert (weight[second:, :first] == 0).all()  # only adjacent tiers touch
    assert (weight[first:second, :first] != 0).any()


@kinds
@pytest.mark.parametrize("method", ["peaceman-rachford", "forward-backward"])
class TestSplitting:
    def solve(self, kind, method, **options):
        operator = make(kind, scale=0.3)
        x = operator.lift(inputs(kind)).detach()
        return operator, x, Splitting.of(operator, method, 0.5, x, **options)

    def test_satisfies_the_equation(self, kind, method):
        operator, x, splitting = self.solve(kind, method)
        solution = splitting.equilibrium(x, EXACT)
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, operator.prox(operator.product(solution.value) + x))
        assert (solution.value > 0).any() and (solution.value == 0).any()

    def test_adjoint_satisfies_its_equation(self, kind, method):
        operator, x, splitting = self.solve(kind, method)
        z = splitting.equilibrium(x, EXACT).value
        grad = torch.randn_like(z)
        solution = splitting.adjoint(z, grad, EXACT)
        assert solution.converged.all()
        right = (z > 0) * (operator.product(solution.value, transposed=True) + grad)
        torch.testing.assert_close(solution.value, right)


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_peaceman_rachford_converges_for_every_alpha(alpha, damping):
    operator = make("dense", m=0.5, scale=0.5)
    x = inputs("dense")
    solution = Splitting.of(operator, "peaceman-rachford", alpha, x, damping).equilibrium(x, EXACT)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value, torch.relu(operator.product(solution.value) + x))


def test_anderson_needs_fewer_steps():
    operator, x = make("dense", m=0.5, scale=0.5), inputs("dense")
    splitting = Splitting.of(operator, "peaceman-rachford", 0.1, x)
    plain, fast = (splitting.equilibrium(x, solver) for solver in (EXACT, Anderson(tol=1e-12, max_steps=2000)))
    assert fast.converged.all() and fast.steps.max() < plain.steps.max()
    torch.testing.assert_close(fast.value, plain.value)


@kinds
@pytest.mark.parametrize("method", ["peaceman-rachford", "forward-backward"])
def test_gradients_against_unrolled(kind, method):
    operator = make(kind, scale=0.2)
    layer = MonDEQ(operator, splitting=method, solver=EXACT).double().eval()
    x = inputs(kind).requires_grad_()
    z = layer(x)
    cotangent = torch.randn_like(z)
    wanted = [x, *operator.parameters()]
    implicit = torch.autograd.grad(z, wanted, cotangent)
    offset = operator.lift(x)
    state = operator.prox(offset)
    for _ in range(60):  # forward-backward with a step that is good for so small a weight
        state = operator.prox(state + 0.7 * (operator.product(state) + offset - state))
    unrolled = torch.autograd.grad(operator.read(state), wanted, cotangent)
    torch.testing.assert_close(implicit, unrolled, rtol=1e-6, atol=1e-8)


def test_projections_keep_the_border_at_zero():
    z = torch.rand(1, 1, 6, 6) + 1
    inside = nn.functional.pad(z[:, :, 2:-2, 2:-2], (2, 2, 2, 2))
    assert ConvMonotone(1, (6, 6), border=2).prox(z).equal(inside)
    assert ConvMonotone(1, (6, 6), border=2).prox(-z).equal(torch.zeros_like(z))
    tiers = TieredMonotone((1, 1), (8, 8), border=2)
    first, second = tiers.split(tiers.prox(torch.ones(1, 64 + 16)))
    assert first.sum() == 16 and first[0, 0, 2:6, 2:6].sum() == 16
    assert second.sum() == 4 and second[0, 0, 1:3, 1:3].sum() == 4


def test_nothing_passes_over_the_border():
    """Circular convolutions wrap around, but not what they meet in the border's zeros: as with padding."""
    torch.manual_seed(0)
    layer = MonDEQ(ConvMonotone(2, (9, 9), border=1), solver=EXACT).double().eval()
    kernels = [layer.operator.a(), layer.operator.b()]
    x = nn.functional.pad(torch.randn(2, 2, 7, 7, dtype=torch.float64), (1, 1, 1, 1))
    z = layer(x)[:, :, 1:-1, 1:-1]

    def padded(image: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(image, kernel, padding=1)

    def back(image: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv_transpose2d(image, kernel, padding=1)

    # A reaches one pixel into the border before Aᵀ comes back, so A is taken on the whole image.
    ata = nn.functional.conv_transpose2d(nn.functional.conv2d(z, kernels[0], padding=2), kernels[0], padding=2)
    product = -ata + padded(z, kernels[1]) - back(z, kernels[1])
    torch.testing.assert_close(z, torch.relu(product + x[:, :, 1:-1, 1:-1]))


class TestLayer:
    def test_statistics_of_both_directions(self):
        layer = MonDEQ(ConvMonotone(3, (8, 8)))
        layer(torch.randn(5, 3, 8, 8, requires_grad=True)).sum().backward()
        for stats in (layer.last_forward, layer.last_backward):
            assert stats is not None and stats.samples == 5 and stats.unconverged == 0
            assert 1 < stats.steps < 50

    def test_a_step_limit_is_counted(self):
        layer = MonDEQ(DenseMonotone(4), solver=Picard(max_steps=1))
        with pytest.warns(UserWarning, match="3 of 3 samples not converged"):
            layer(torch.randn(3, 4))
        assert layer.last_forward is not None and layer.last_forward.unconverged == 3

    def test_alpha_is_searched_in_training_only(self):
        layer = MonDEQ(DenseMonotone(6), alpha=0.001, solver=Picard(max_steps=5000))
        x = torch.randn(8, 6)
        layer.eval()(x)
        assert layer.alpha == pytest.approx(0.001)
        slow = layer.last_forward.steps
        layer.train()(x)
        assert layer.alpha > 0.1 and layer.last_forward.steps < slow / 10
        layer.alpha.fill_(0.001)
        layer(x)
        assert layer.alpha == pytest.approx(0.001)  # not at every pass
        layer.passes.fill_(TUNE_EVERY)
        layer(x)
        assert layer.alpha > 0.1

    def test_search_takes_the_last_of_the_fewest(self):
        assert search_alpha({1.0: 6, 0.5: 6, 0.25: 8}.__getitem__, present=1.0) == 0.5
        assert search_alpha({1.0: 5, 0.5: 6}.__getitem__, present=0.25) == 1.0
        assert search_alpha({1.0: None, 0.5: 20, 0.25: None}.__getitem__, present=1.0) == 0.5

    def test_a_search_that_finds_nothing_changes_nothing(self):
        assert search_alpha(lambda alpha: None, present=0.5) == 0.5
        layer = MonDEQ(DenseMonotone(6), alpha=0.5, solver=Picard(max_steps=2))
        with pytest.warns(UserWarning, match="not converged"):
            layer.train()(torch.randn(8, 6))
        assert layer.alpha == 0.5

    def test_weights_learn(self):
        torch.manual_seed(0)
        model = nn.Sequential(MonDEQ(DenseMonotone(8)), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        x, labels = torch.randn(64, 8), torch.randint(2, (64,))
        losses = []
        for _ in range(40):
            loss = nn.functional.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0]

    def test_no_samples(self):
        assert MonDEQ(DenseMonotone(4))(torch.zeros(0, 4)).shape == (0, 4)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ({"splitting": "newton"}, "unknown splitting"),
            ({"alpha": 0.0}, "alpha must be positive"),
            ({"damping": 1.0}, "damping must be"),
            ({"solver": Certified(Picard())}, "solver must be Picard"),
        ],
    )
    def test_wrong_options(self, bad, message):
        with pytest.raises(UsageError, match=message):
            MonDEQ(DenseMonotone(4), **bad)
