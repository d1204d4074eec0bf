"""The C kernel takes the same steps as the reference in plain torch, and gives the same answers."""

from dataclasses import replace

import pytest
import torch
from problems import FACTS, by_threads, contract, fixed_point_of
from torch.nn import functional as F

import pcdeq
from pcdeq.implicit import solve_adjoint
from pcdeq.kernels import KERNELS
from pcdeq.operators import DenseMap
from pcdeq.solvers import Guess, Problem, SolveStats, Weight, fused

pytestmark = pytest.mark.skipif(KERNELS is None, reason="installed without a C compiler")
NAMES = [name for name in fused.CODES if name != "linear"]


def make(kind, activation, gain, seed=0):
    torch.manual_seed(seed)
    layer = pcdeq.PcDEQLinear(24, activation) if kind == "dense" else pcdeq.PcDEQConv2d(5, activation)
    x = torch.randn(6, 24) if kind == "dense" else torch.randn(6, 5, 9, 7)
    with torch.no_grad():
        layer.operator.weight_v.uniform_()
        layer.operator.weight_g.uniform_(0, gain)
    if kind == "channels last":
        layer, x = layer.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return layer, x


def matrix_of(weight, state):
    """W on flattened samples, in float64: column i is the image of unit vector i."""
    if weight.ndim == 2:
        return weight.double()
    n = state.numel()
    return F.conv2d(torch.eye(n).double().reshape(n, *state), weight.double(), padding=1).reshape(n, n).T


def equal_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("kind", ["dense", "conv", "channels last"])
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("gain", [0.5, 3.0, 20.0])
def test_forward_takes_the_same_steps(kind, activation, gain):
    layer, x = make(kind, activation, gain)
    solver = pcdeq.Anderson(tol=1e-4)
    with torch.no_grad():
        problem = layer.equation(x).problem()
        assert fused.applies(problem)
        fast, plain = solver.solve(problem), solver.solve_plain(problem)
    assert torch.equal(fast.steps, plain.steps)
    assert fast.converged.all()
    # Both stop at a relative residual of 1e-4 along the same path; what differs is the rounding of the activation.
    torch.testing.assert_close(fast.value, plain.value, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(fast.residual, plain.residual, rtol=0.05, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "channels last"])
@pytest.mark.parametrize("activation", ["tanh", "relu6", "sigmoid"])
def test_backward_takes_the_same_steps(kind, activation):
    layer, x = make(kind, activation, 1.5)
    solver = pcdeq.Anderson(tol=1e-5)
    with torch.no_grad():
        equation = layer.equation(x)
        slope = equation.slope(pcdeq.Anderson(tol=1e-6).solve(equation.problem()).value)
        grad = torch.randn_like(x)
        fast = solve_adjoint(equation.map, slope, grad, solver)
        plain = solver.solve_plain(Problem(lambda u: slope * (equation.map.adjoint(u) + grad), slope * grad))
    assert torch.equal(fast.steps, plain.steps)
    torch.testing.assert_close(fast.value, plain.value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", NAMES)
def test_values_are_accurate_from_tiny_to_huge(activation):
    # With W = 0 the solution is s(x) itself, here from subnormal to beyond saturation.
    x = torch.cat([torch.logspace(-37, 4, 2000), torch.linspace(0.1, 50, 2000)])[None]
    layer = pcdeq.PcDEQLinear(4000, activation, weight_norm=False, injection=lambda x: x)
    with torch.no_grad():
        layer.operator.weight.zero_()
        problem = layer.equation(x).problem()
        value = pcdeq.Anderson().solve(problem).value
    exact = layer.activation.value((x + layer.floor).double())
    torch.testing.assert_close(value.double(), exact, rtol=5e-7, atol=0)


def test_a_nan_stops_its_sample_only():
    layer, x = make("dense", "tanh", 1.0)
    x[2, 3] = torch.nan
    with torch.no_grad():
        solution = pcdeq.Anderson().solve(layer.equation(x).problem())
    assert solution.outcome is pcdeq.Outcome.NONFINITE
    assert solution.converged.tolist() == [True, True, False, True, True, True]


def test_a_custom_activation_by_a_known_name_is_not_mistaken_for_it():
    half = pcdeq.Activation("tanh", lambda y: torch.tanh(y) / 2, supremum=0.5)
    with torch.no_grad():
        layer = pcdeq.PcDEQLinear(3, half)
        assert not fused.applies(layer.equation(torch.zeros(1, 3)).problem())
        assert float(layer(torch.full((1, 3), 50.0)).max()) <= 0.5


def test_two_hundred_training_steps_give_the_same_loss_curve(monkeypatch):
    def curve():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), pcdeq.PcDEQLinear(16), torch.nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        x, losses = torch.randn(64, 8), []
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        for _ in range(200):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pcdeq.project_(model)
            losses.append(loss.item())
        return torch.tensor(losses)

    fast = curve()
    monkeypatch.setattr(fused, "applies", lambda problem: False)
    torch.testing.assert_close(fast, curve(), rtol=0.01, atol=1e-4)
    assert fast[-1] < 0.5 * fast[0]


@pytest.mark.parametrize("kind", ["dense", "conv", "channels last"])
@pytest.mark.parametrize("activation", ["tanh", "relu6", "hard-sigmoid"])
def test_the_solution_is_the_fixed_point(kind, activation):
    layer, x = make(kind, activation, 1.0)
    tol, equation = 1e-6, contract(layer).equation(x)
    with torch.no_grad():
        solution = pcdeq.Anderson(tol=tol).solve(equation.problem())
    assert solution.converged.all()
    matrix = matrix_of(equation.map.weight.detach(), x.shape[1:]).numpy()
    for value, offset in zip(solution.value, equation.x.detach(), strict=True):
        exact = torch.from_numpy(fixed_point_of(matrix, offset.double().flatten().numpy(), FACTS[activation]))
        # For a contraction by 1/2: |g(z) - z*| <= |g(z) - z| <= tol |g(z)|, and twice the rounding of g, here 1e-6.
        error = (value.double().flatten() - exact).norm() / exact.norm()
        assert error < tol + 2e-6


@pytest.mark.parametrize("kind", ["dense", "conv", "channels last"])
def test_the_adjoint_solves_the_transposed_system(kind):
    layer, x = make(kind, "tanh", 1.0)
    with torch.no_grad():
        linear = contract(layer, 1.5).equation(x).map
        slope, grad, tol = 0.6 * torch.rand_like(x), torch.randn_like(x), 1e-5
        solution = solve_adjoint(linear, slope, grad, pcdeq.Anderson(tol=tol))
    assert solution.converged.all()
    matrix = matrix_of(linear.weight, x.shape[1:])
    for value, d, v in zip(solution.value, slope, grad, strict=True):
        jacobian = d.double().reshape(-1, 1) * matrix.T
        inverse = torch.linalg.inv(torch.eye(len(jacobian)) - jacobian)
        exact = inverse @ (d * v).double().flatten()
        # The error of the last value is J (I - J)^-1 times the residual, which is tol and the rounding of a step.
        bound = (torch.linalg.matrix_norm(jacobian @ inverse, 2) * (tol + 1e-6) + 1e-6) * value.norm()
        assert (value.double().flatten() - exact).norm() < bound


BIG = {"dense": (9, 250), "conv": (9, 12, 9, 7), "channels last": (9, 12, 9, 7)}  # worth a second thread


def directions(kind, activation="tanh"):
    """The two ways to solve, forward and adjoint, each with an input."""
    layer = pcdeq.PcDEQLinear(250, activation) if kind == "dense" else pcdeq.PcDEQConv2d(12, activation)
    layout = torch.channels_last if kind == "channels last" else torch.contiguous_format
    with torch.no_grad():
        layer.operator.weight_v.uniform_()
        layer.operator.weight_g.uniform_(0, 1)
    linear = contract(layer, 0.8).equation(torch.zeros(BIG[kind])).map
    solver, slope = pcdeq.Anderson(tol=1e-5), torch.rand(1, *BIG[kind][1:])

    @torch.no_grad()
    def forward(x):
        return solver.solve(pcdeq.equation.Equation(linear, layer.activation, x).problem())

    @torch.no_grad()
    def adjoint(grad):
        return solve_adjoint(linear, slope.expand_as(grad), grad, solver)

    linear.weight = linear.weight.detach()
    x = torch.rand(BIG[kind]).contiguous(memory_format=layout)
    return ((forward, x), (adjoint, x - 0.5))


@pytest.mark.parametrize("kind", BIG)
def test_threads_change_no_bit(kind):
    for solve, x in directions(kind):
        one, two = by_threads(1, lambda: solve(x)), by_threads(2, lambda: solve(x))  # noqa: B023
        assert equal_bits(one.value, two.value) and equal_bits(one.residual, two.residual)
        assert torch.equal(one.steps, two.steps) and one.summary == two.summary


@pytest.mark.parametrize("kind", BIG)
@pytest.mark.parametrize("activation", ["softsign", "relu6", "sigmoid"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_sample_leaves_its_neighbours_alone(kind, activation, bad):
    for solve, x in directions(kind, activation):
        clean = solve(x)
        for position in range(len(x)):
            spoilt = x.clone()
            spoilt[position, position::5] = bad
            solution, others = solve(spoilt), [i for i in range(len(x)) if i != position]
            assert equal_bits(solution.value[others], clean.value[others])
            assert equal_bits(solution.residual[others], clean.residual[others])
            assert torch.equal(solution.steps[others], clean.steps[others])
            if bad != bad:
                assert not solution.converged[position] and solution.outcome is pcdeq.Outcome.NONFINITE
                assert solution.value[position].isnan().any()


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_a_bad_sample_leaves_its_neighbours_alone_after_a_warm_start(kind):
    layer, x = make(kind, "tanh", 1.0)
    contract(layer)(x).sum().backward()
    with torch.no_grad():
        for position in range(len(x)):
            spoilt, others = x.clone(), [i for i in range(len(x)) if i != position]
            spoilt[position, 1] = torch.nan
            clean, solution = (
                pcdeq.implicit.solve_equation(layer.equation(y), layer.solver, layer.warm) for y in (x, spoilt)
            )
            assert equal_bits(solution.value[others], clean.value[others])


@pytest.mark.parametrize("kind", BIG)
def test_a_sample_alone_is_solved_as_in_its_batch(kind):
    for solve, x in directions(kind):
        together = solve(x)
        for i in range(len(x)):
            alone = solve(x[i : i + 1])
            assert equal_bits(alone.value[0], together.value[i]) and alone.steps[0] == together.steps[i]


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_the_step_limit_is_respected_and_reported(kind, max_steps, taken):
    layer, x = make(kind, "tanh", 20.0)
    solver = pcdeq.Anderson(tol=1e-5, max_steps=max_steps)
    with torch.no_grad():
        problem = replace(layer.equation(0.1 * x - 1).problem(), steps=taken)
        fast, plain = solver.solve(problem), solver.solve_plain(problem)
    assert fast.steps.max() <= max(max_steps, taken)
    assert torch.equal(fast.steps, plain.steps) and torch.equal(fast.converged, plain.converged)
    assert fast.outcome is plain.outcome
    torch.testing.assert_close(fast.value, plain.value, rtol=2e-5, atol=2e-6)
    assert SolveStats.of(fast) == SolveStats.of(replace(fast, summary=None))


@pytest.mark.parametrize("kind", ["dense", "conv", "channels last"])
def test_a_start_given_equals_that_of_the_pieces(kind):
    layer, x = make(kind, "sigmoid", 3.0)
    with torch.no_grad():
        problem = layer.equation(x).problem()
        assert problem.pieces is not None
        offset = problem.pieces.offset
        base = torch.rand(x.shape[1:])
        guessed = replace(problem, pieces=replace(problem.pieces, guess=Guess(lambda: base, base)))
        for made, start in ((problem, torch.sigmoid(offset)), (guessed, torch.sigmoid(base + offset))):
            torch.testing.assert_close(made.first(), start)
            one, other = pcdeq.Anderson().solve(made), pcdeq.Anderson().solve(replace(made, start=start))
            assert torch.equal(one.steps, other.steps)
            # torch's sigmoid and the kernel's differ by some ulps in the start, which no step enlarges by much.
            torch.testing.assert_close(one.value, other.value, rtol=1e-5, atol=1e-6)
        # A start wins over a guess.
        away = replace(guessed, start=torch.ones_like(x))
        plain = pcdeq.Anderson().solve_plain(away)
        assert torch.equal(pcdeq.Anderson().solve(away).steps, plain.steps)


@pytest.mark.parametrize("tol", [1e-5, 1e-6, 9e-7, 1e-7])
def test_only_tolerances_below_a_millionth_ask_torch_for_convolutions(tol):
    layer, x = make("conv", "tanh", 1.0)
    asked = []
    with torch.no_grad():
        problem = contract(layer).equation(x).problem()
        pieces = problem.pieces
        assert pieces is not None
        counted = replace(pieces, product=lambda z: asked.append(1) or pieces.product(z))
        solution = pcdeq.Anderson(tol=tol).solve(replace(problem, pieces=counted))
        assert bool(asked) is (tol < 1e-6)
        assert solution.converged.all()
        exact = pcdeq.Anderson(tol=1e-14).solve(layer.double().equation(x.double()).problem()).value
    noise = 2e-6 if tol >= 1e-6 else 5e-7
    assert ((solution.value - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max() < tol + noise


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("max_steps", [3, 200])
@pytest.mark.parametrize("bad", [0.0, torch.nan])
def test_the_summary_is_that_of_the_tensors(kind, max_steps, bad):
    layer, x = make(kind, "softsign", 3.0)
    x[3] += bad
    with torch.no_grad():
        solution = pcdeq.Anderson(max_steps=max_steps).solve(layer.equation(x).problem())
    assert solution.summary is not None
    assert repr(solution.summary) == repr(SolveStats.of(replace(solution, summary=None)))  # a NaN is not itself


GARBAGE = [torch.nan, torch.inf, -torch.inf, -1.0, -1e6]


@pytest.mark.parametrize("kind", ["dense", "conv", "channels last"])
@pytest.mark.parametrize("bad", GARBAGE)
def test_garbage_in_warm_start_buffers_changes_no_equilibrium(kind, bad):
    layer, x = make(kind, "tanh", 1.0)
    contract(layer)(x).sum().backward()
    with torch.no_grad():
        exact = pcdeq.Anderson(tol=1e-6).solve(layer.equation(x).problem()).value
    kept = {name: buffer.clone() for name, buffer in layer.warm.named_buffers()}
    for name in ("product", "mean", "response"):
        for some in (slice(None), slice(1), slice(3, None, 7)):
            layer.warm.load_state_dict(kept)
            getattr(layer.warm, name).view(-1)[some] = bad
            solution = layer.solve(x)
            # A contraction by 1/2 and a residual of at most 1e-4, as in test_the_solution_is_the_fixed_point.
            error = (solution.value - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
            assert solution.converged.all() and error.max() < 1e-4 + 4e-6


@pytest.mark.parametrize("bad", GARBAGE)
@pytest.mark.parametrize("name", ["slope", "response"])
def test_garbage_in_warm_start_buffers_changes_no_gradient(bad, name):
    layer, x = make("dense", "tanh", 1.0)
    contract(layer)(x).sum().backward()
    slope, grad, solver = torch.rand_like(x), torch.rand_like(x), pcdeq.Anderson(tol=1e-4)
    with torch.no_grad():
        linear = layer.equation(x).map
        exact = solve_adjoint(linear, slope, grad, pcdeq.Anderson(tol=1e-6)).value
        kept = getattr(layer.warm, name).clone()
        for some in (slice(None), slice(1), slice(3, None, 7)):
            getattr(layer.warm, name).copy_(kept).view(-1)[some] = bad
            solution = solve_adjoint(linear, slope, grad, solver, layer.warm)
            assert solution.converged.all()
            assert ((solution.value - exact).norm(dim=1) / exact.norm(dim=1)).max() < 1e-4 + 4e-6


def test_an_infinite_adjoint_guess_is_no_guess():
    # One unit is not saturated: its column of W is large, the spectral radius of DW is not.
    slope, grad = torch.full((2, 8), 0.01), torch.ones(2, 8)
    slope[:, 0] = 1.0
    linear = DenseMap(2.0 * (1 - torch.eye(8)))
    guess = torch.full((8, 8), torch.inf)
    warm = pcdeq.warmstart.WarmStart()
    warm.load_state_dict({
        "product": torch.ones(8), "mean": torch.ones(8), "slope": torch.ones(8), "response": guess,
        "observed": torch.tensor(1),
    })  # fmt: skip
    with torch.no_grad():
        assert warm.adjoint(grad).evaluate().isfinite().all()
        cold, solution = (solve_adjoint(linear, slope, grad, pcdeq.Anderson(), w) for w in (None, warm))
    assert cold.converged.all() and solution.converged.all()


def test_a_box_away_from_zero_counts_nothing_twice():
    # Five channels are filled up to eight; what is filled up must not enter the residual.
    layer, x = make("conv", "sigmoid", 1.0)
    with torch.no_grad():
        problem = replace(layer.equation(x).problem(), box=(0.25, 1.0))
        fast, plain = pcdeq.Anderson().solve(problem), pcdeq.Anderson().solve_plain(problem)
    assert fast.converged.all() and torch.equal(fast.steps, plain.steps)
    torch.testing.assert_close(fast.value, plain.value, rtol=2e-5, atol=2e-6)


def test_a_weight_on_another_device_is_refused():
    # The kernels work with addresses, so this would end the process.
    with pytest.raises(pcdeq.PcdeqError, match="the layer is on meta but its input is on cpu"):
        pcdeq.PcDEQLinear(4).to("meta")(torch.randn(2, 4))
    weight = Weight("dense", torch.empty(4, 4, device="meta"))
    with torch.no_grad():
        problem = pcdeq.PcDEQLinear(4).equation(torch.zeros(2, 4)).problem()
        assert not fused._knows(problem, replace(problem.pieces, weight=weight), 1e-4)
