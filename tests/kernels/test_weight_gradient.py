"""Gradients with respect to weights by the kernel: those of torch, in every size and order, or declined."""

from __future__ import annotations

import pytest
import torch
import twins
from specimens import SPECIMENS, TAKEN, UNREADABLE, guards_survive, quiet
from twins import LAST

import pcdeq
from pcdeq.kernels import binding
from pcdeq.operators import ConvMap

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())

# samples, channels, height, width: tiles of four and not, channels around the eight of a vector and the sixteen of two,
# parts of some samples, of one, and of some that leave a rest
SIZES = [
    (1, 1, 1, 1),
    (3, 3, 4, 4),
    (2, 8, 1, 7),
    (5, 9, 6, 1),
    (4, 12, 28, 28),
    (70, 16, 5, 6),
    (3, 33, 9, 13),
    (2, 90, 45, 46),
]
# Of the sum of what is added, absolutely: some roundings of float32, as Winograd's transforms enlarge them.
ROUNDING = 16 * 1.2e-7


@pytest.fixture(autouse=True)
def _one_thread(threads):
    """A kernel that has no others leaves large work to torch."""
    threads(1)


def gradient(z, u, channels=None):
    channels = z.shape[1] if channels is None else channels
    weight = torch.zeros(channels, channels, 3, 3)
    with torch.no_grad():
        return binding.weight_gradient(z, u, weight)


def make(size, layout=torch.contiguous_format):
    torch.manual_seed(0)
    return (t.contiguous(memory_format=layout) for t in (torch.rand(size), torch.randn(size)))


def assert_is_right(found, z, u):
    exact, size = (twins.weight_gradient(z.double(), v) for v in (u.double(), u.double().abs()))
    assert found.shape == exact.shape and ((found - exact).abs() <= ROUNDING * size).all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_that_of_torch(size, layout):
    z, u = make(size, layout)
    found = gradient(z, u)
    assert_is_right(found, z, u)
    assert torch.equal(gradient(z, u.contiguous()), found)  # each may lie in its own way


@pytest.mark.parametrize("size", [(70, 16, 5, 6), (5, 48, 20, 20), (2, 90, 45, 46)], ids=str)
def test_threads_give_identical_bits(size, kernel_threads):
    z, u = make(size, LAST)
    kernel_threads(1)
    one = gradient(z, u)
    for count in (2, 3, 7):
        kernel_threads(count)
        assert torch.equal(gradient(z, u), one)


def test_what_would_overflow_is_left_to_plain_sums():
    z, u = make((2, 3, 8, 8))
    assert gradient(z, 1e30 * u) is not None
    assert gradient(z, 3e36 * u) is None
    layer = ConvMap(torch.rand(3, 3, 3, 3))
    assert layer.weight_gradient(z, 3e36 * u).isfinite().all()
    for wrong in (torch.nan, torch.inf):
        u[0, 0, 0, 0] = wrong
        assert gradient(z, u) is None


def test_it_declines():
    z, u = make((2, 3, 8, 8))
    assert gradient(z.double(), u.double()) is None
    assert gradient(z, u[:1]) is None
    assert gradient(z[0], u[0]) is None
    assert gradient(z.requires_grad_(), u) is not None  # no graph is wanted
    assert binding.weight_gradient(z, u, torch.zeros(3, 3, 3, 3)) is None
    z = z.detach()
    for shape in ((3, 3, 5, 5), (3, 3, 1, 1), (3, 2, 3, 3), (2, 2, 3, 3), (3, 3, 3)):
        assert binding.weight_gradient(z, u, torch.zeros(shape)) is None


@quiet
@pytest.mark.parametrize("specimen", SPECIMENS)
@pytest.mark.parametrize("which", ["z", "u"])
def test_whatever_it_is_given(which, specimen):
    given = dict(zip("zu", make((4, 5, 6, 7)), strict=True))
    given[which] = SPECIMENS[specimen](given[which])
    found = gradient(given["z"], given["u"], channels=5)
    assert found is not None or specimen not in TAKEN
    assert guards_survive(given[which])
    if found is not None:
        assert specimen not in UNREADABLE
        assert_is_right(found, *(t.detach().resolve_neg() for t in given.values()))


def test_layers_take_it(monkeypatch):
    """The gradient of a loss with respect to all parameters, with and without."""
    torch.manual_seed(0)
    layer, x = pcdeq.PcDEQConv2d(6, activation="relu6"), torch.randn(8, 6, 9, 9)
    calls, found = [], []
    kernel = binding.weight_gradient
    monkeypatch.setattr(binding, "weight_gradient", lambda *given: calls.append(kernel(*given)) or calls[-1])
    for answer in (kernel, lambda *_: None):
        if answer is not kernel:
            monkeypatch.setattr(binding, "weight_gradient", answer)
        layer.zero_grad()
        layer(x).square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    assert len(calls) == 1 and calls[0] is not None
    for ours, plain in zip(*found, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-3, atol=1e-5 * float(plain.abs().max()))
