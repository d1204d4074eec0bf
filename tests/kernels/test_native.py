"""A dense layer in two calls of C gives the numbers of the general way, in value, gradients and what is remembered."""

import warnings

import pytest
import torch

import pcdeq
from pcdeq import implicit, native
from pcdeq.errors import ConvergenceWarning, PcdeqError
from pcdeq.kernels import KERNELS
from pcdeq.solvers import fused

pytestmark = pytest.mark.skipif(KERNELS is None, reason="installed without a C compiler")
NAMES = [name for name in fused.CODES if name != "linear"]
PARAMETERS = ("weight_v", "weight_g")


def make(activation="tanh", features=24, gain=2.0, **options):
    torch.manual_seed(0)
    layer = pcdeq.PcDEQLinear(features, activation, **options)
    with torch.no_grad():
        layer.operator.weight_v.uniform_()
        layer.operator.weight_g.uniform_(0, gain)
    return layer


def calls(monkeypatch):
    """The passes that the kernel made, as they are made."""
    made = []
    for name in ("forward", "backward"):
        real = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *args, name=name, real=real: (made.append(name), real(*args))[1])
    return made


def passes(layer, inputs, cotangents):
    """Values, gradients and statistics of some training steps, of which each teaches the warm start."""
    found = []
    for x, cotangent in zip(inputs, cotangents, strict=True):
        x = x.clone().requires_grad_()
        z = layer(x)
        z.backward(cotangent)
        grads = [getattr(layer.operator, name).grad for name in PARAMETERS]
        found.append((z.detach(), x.grad, *grads, layer.last_forward, layer.last_backward))
        layer.zero_grad()
    return found


def both_ways(layer, inputs, cotangents, monkeypatch):
    """The same steps by the kernel and by the general way, each from the same state, and what they leave behind."""
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    made = calls(monkeypatch)
    fast = passes(layer, inputs, cotangents)
    learned = {name: value.clone() for name, value in layer.state_dict().items()}
    assert made == ["forward", "backward"] * len(inputs)
    layer.load_state_dict(state)
    layer.warm.__init__()
    layer.warm.load_state_dict({k.removeprefix("warm."): v for k, v in state.items() if k.startswith("warm.")})
    monkeypatch.setattr(native, "applies", lambda *_: False)
    slow = passes(layer, inputs, cotangents)
    return fast, slow, learned, dict(layer.state_dict())


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize(("samples", "features"), [(64, 80), (5, 24), (1, 1), (3, 7), (6, 256)])
def test_same_numbers(activation, samples, features, monkeypatch):
    layer = make(activation, features)
    inputs, cotangents = torch.randn(2, 20, samples, features)
    fast, slow, learned, expected = both_ways(layer, inputs, cotangents, monkeypatch)
    for ours, general in zip(fast, slow, strict=True):
        assert torch.equal(ours[0], general[0])
        for mine, theirs in zip(ours[1:4], general[1:4], strict=True):  # sums in another order
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
        assert ours[4] == general[4]
        assert (ours[5].steps, ours[5].samples) == (general[5].steps, general[5].samples)
    assert learned.keys() == expected.keys()
    for name, value in learned.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", NAMES)
def test_gradients_are_those_of_float64(activation):
    layer = make(activation, solver=pcdeq.Anderson(tol=1e-6))
    x, cotangent = torch.randn(2, 5, 24)
    x = x.requires_grad_()
    assert native.applies(layer._rule(), x, *layer.operator.raw)
    layer(x).backward(cotangent)
    exact = make(activation, solver=pcdeq.Anderson(tol=1e-12)).double()
    y = x.detach().double().requires_grad_()
    exact(y).backward(cotangent.double())
    pairs = [(x.grad, y.grad)] + [
        (getattr(layer.operator, n).grad, getattr(exact.operator, n).grad) for n in PARAMETERS
    ]
    for ours, true in pairs:
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-5 * float(true.abs().max()))


def test_parameters_below_zero_and_rows_of_zeros(monkeypatch):
    layer = make(features=8)
    with torch.no_grad():
        layer.operator.weight_v[0] = 0
        layer.operator.weight_v[1] = -1
        layer.operator.weight_v[2, ::2] = -1
        layer.operator.weight_g[3] = -1
        layer.operator.weight_g[0] = 0
    fast, slow, *_ = both_ways(layer, *torch.randn(2, 3, 4, 8), monkeypatch)
    for ours, general in zip(fast, slow, strict=True):
        for mine, theirs in zip(ours[:4], general[:4], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_reported_as_ever(bad, monkeypatch):
    layer = make(features=8)
    x = torch.randn(4, 8)
    x[1, 3] = bad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast, slow, *_ = both_ways(layer, [x], [torch.ones(4, 8)], monkeypatch)
    (ours,), (general,) = fast, slow
    torch.testing.assert_close(ours[0], general[0], equal_nan=True)
    for mine, theirs in zip(ours[1:4], general[1:4], strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-5, atol=1e-5)
    for at in (4, 5):
        assert ours[at].outcome is general[at].outcome
        assert ours[at].unconverged == general[at].unconverged
    assert len(caught) % 2 == 0
    assert [str(w.message) for w in caught[: len(caught) // 2]] == [str(w.message) for w in caught[len(caught) // 2 :]]


def test_too_few_steps_are_reported(monkeypatch):
    layer = make(features=8, gain=5.0, solver=pcdeq.Anderson(tol=1e-6, max_steps=2), warm_start=False)
    made = calls(monkeypatch)
    with pytest.warns(ConvergenceWarning, match="forward solve: 4 of 4 samples not converged after 2 steps"):
        z = layer(torch.randn(4, 8))
    with pytest.warns(ConvergenceWarning, match="backward solve: 4 of 4"):
        z.sum().backward()
    assert made == ["forward", "backward"]


def test_inputs_and_gradients_with_gaps_in_memory(monkeypatch):
    layer = make(features=8)
    made = calls(monkeypatch)
    wide = torch.randn(5, 16, requires_grad=True)
    layer(wide[:, ::2]).sum().backward()  # no kernel for the first, an expanded gradient for both
    apart = wide.grad[:, ::2].clone()
    close = wide.detach()[:, ::2].contiguous().requires_grad_()
    layer(close).sum().backward()
    assert made == ["forward", "backward"]
    torch.testing.assert_close(close.grad, apart, rtol=1e-3, atol=1e-4)


def test_only_some_inputs_need_a_gradient(monkeypatch):
    layer = make(features=8)
    made = calls(monkeypatch)
    x = torch.randn(3, 8)
    layer(x).sum().backward()
    assert layer.operator.weight_v.grad is not None
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert made == ["forward", "backward"] * 2


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"weight_norm": False}, (3, 8)),
        ({"solver": pcdeq.Picard()}, (3, 8)),
        ({"solver": pcdeq.Anderson(memory=2)}, (3, 8)),
        ({"solver": pcdeq.Anderson(stop="certified")}, (3, 8)),
        ({"solver": pcdeq.Anderson(max_steps=1)}, (3, 8)),
        ({"activation": "log1p"}, (3, 8)),
        ({}, (0, 8)),
        ({}, (native.LARGEST_BATCH // 8 + 1, 8)),
    ],
)
def test_where_the_general_way_is_taken(options, shape):
    layer = pcdeq.PcDEQLinear(8, **options)
    assert not native.applies(layer._rule(), torch.randn(shape), *layer.operator.raw)


def test_a_gradient_that_shall_have_one_is_refused_as_ever():
    layer, x = make(features=8), torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(PcdeqError, match="no second derivative"):
        grad.sum().backward()


def test_backward_under_autocast_learns_in_full_precision(monkeypatch):
    layer, x = make(features=8), torch.randn(3, 8, requires_grad=True)
    made = calls(monkeypatch)
    z = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z.sum().backward()
    assert made == ["forward"]
    expected = z.detach().mean(0) @ layer.operator.effective_weight().T
    torch.testing.assert_close(layer.warm.product, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "slope", "response"])
def test_learned_buffers_of_a_wrong_shape_are_not_used(name):
    layer, x = make(features=8), torch.randn(3, 8, requires_grad=True)
    for _ in range(3):
        layer(x).sum().backward()
    state = layer.state_dict()
    state[f"warm.{name}"] = torch.ones(2, 2)
    layer.load_state_dict(state)
    rule = layer._rule()
    assert native._learned(rule, x)[1:] == (None, None, None)
    expected = implicit.solve_equation(layer.equation(x), layer.solver).value
    torch.testing.assert_close(layer(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", NAMES)
def test_a_frozen_layer_gives_the_same(activation, monkeypatch):
    layer = make(activation, features=8).eval()
    frozen = pcdeq.freeze(torch.nn.Sequential(layer))
    x, solved = torch.randn(5, 8), []
    real = native.solve
    monkeypatch.setattr(native, "solve", lambda *args: (solved.append(1), real(*args))[1])
    with torch.no_grad():
        found, expected = frozen(x), layer(x)
        assert solved
        assert torch.equal(found, expected)
        assert torch.equal(frozen(x.reshape(5, 1, 8)), expected.reshape(5, 1, 8))
        torch.testing.assert_close(frozen(x.double()).float(), expected, rtol=1e-3, atol=1e-3)


class TestStrangeTensors:
    """What users, hooks and files may put where the kernel expects its own numbers."""

    @pytest.mark.parametrize(
        "change", [lambda t: t.t().contiguous().t(), lambda t: t.double().float(), lambda t: t[..., ::1].clone()]
    )
    def test_saved_tensors_may_come_back_otherwise(self, change):
        layer, x = make(features=8), torch.randn(8, 8)
        cotangent, found = torch.randn(8, 8), []
        for unpack in (lambda t: t, lambda t: change(t) if t.ndim == 2 else t):
            here = x.clone().requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                layer(here).backward(cotangent)
            found.append((here.grad, layer.operator.weight_v.grad, layer.operator.weight_g.grad))
            layer.zero_grad()
            layer.warm.__init__()
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)

    def test_saved_tensors_of_another_dtype_are_refused_by_torch(self):
        layer, x = make(features=8), torch.randn(8, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t):
            z = layer(x)
        with pytest.raises(RuntimeError, match="dtype"):
            z.sum().backward()

    def test_learned_buffers_change_their_dtype_before_backward(self):
        layer, x = make(features=8), torch.randn(5, 8)
        for _ in range(3):
            layer(x).sum().backward()
        usual = layer.last_backward.steps
        z = layer(x)
        layer.warm.double()
        z.sum().backward()
        assert layer.last_backward.steps == usual

    @pytest.mark.parametrize("change", [torch.Tensor.bfloat16, torch.Tensor.double, lambda t: t.t().contiguous().t()])
    def test_learned_buffers_of_their_own_dtype_and_layout(self, change):
        layer, x = make(features=8), torch.randn(5, 8)
        for _ in range(3):
            layer(x).sum().backward()
        expected, usual = layer(x).detach(), layer.last_forward.steps
        state = layer.state_dict()
        state["warm.response"] = change(state["warm.response"])
        layer.load_state_dict(state, assign=True)
        z = layer(x)
        torch.testing.assert_close(z, expected, rtol=1e-3, atol=1e-3)
        assert layer.last_forward.steps <= usual + 2
        z.sum().backward()

    def test_parameters_of_a_wrong_shape_are_refused_by_torch(self):
        layer = make(features=64)
        layer.operator.weight_v = torch.nn.Parameter(torch.rand(4, 4))
        layer.operator.weight_g = torch.nn.Parameter(torch.rand(4, 1))
        with pytest.raises(RuntimeError, match=r"shape|size"):
            layer(torch.randn(3, 64))

    @pytest.mark.parametrize("shape", [(32, 32), (2, 4, 4, 2, 4, 4)])
    def test_buffers_for_a_matrix_are_nothing_to_a_convolution(self, shape):
        layer = pcdeq.PcDEQConv2d(2)
        x = torch.randn(3, 2, 4, 4, requires_grad=True)
        for _ in range(2):
            layer(x).sum().backward()
        state = layer.state_dict()
        state |= {
            "warm.mean": torch.ones(2, 4, 4),
            "warm.slope": torch.ones(2, 4, 4),
            "warm.response": torch.ones(shape),
        }
        expected = layer(x).detach()
        layer.load_state_dict(state)
        z = layer(x)
        z.sum().backward()
        torch.testing.assert_close(z, expected, rtol=1e-3, atol=1e-3)

    def test_a_lazily_negated_input(self):
        layer, numbers = make(features=1).eval(), torch.tensor([[1 + 2j]])
        x = numbers.conj().imag
        assert x.is_neg()
        with torch.no_grad():
            torch.testing.assert_close(layer(x), layer(x.clone().resolve_neg()))

    def test_a_gradient_of_zeros_that_is_not_in_memory(self):
        layer, x = make(features=4), torch.randn(4, 4, requires_grad=True)
        layer(x).backward(torch._efficientzerotensor((4, 4)))
        assert torch.equal(x.grad, torch.zeros(4, 4))


def test_a_compiled_frozen_network():
    frozen = pcdeq.freeze(torch.nn.Sequential(pcdeq.PcDEQConv2d(2).eval()))
    x = torch.randn(3, 2, 5, 5)
    assert torch.equal(torch.compile(frozen, backend="eager")(x), frozen(x))
