"""Gradients with respect to weights by the kernel: those of torch, in every size and order, or declined."""

from __future__ import annotations

import pytest
import torch
import twins
from specimens import SPECIMENS, TAKEN, UNREADABLE, guards_survive, quiet
from torch.nn.functional import max_pool2d, pad
from twins import LAST

import pcdeq
from pcdeq.kernels import binding
from pcdeq.operators import ConvMap

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())

# samples, channels, height, width: tiles of four and not; channels around the eight of a vector and the sixteen of two,
# and more than 64; images of more tiles and of fewer than are transformed at a time, and a rest of them
SIZES = [(8, 1, 8, 8), (33, 3, 4, 4), (12, 8, 3, 17), (9, 9, 17, 3), (4, 12, 28, 28), (70, 16, 5, 6), (11, 33, 9, 13)]
SIZES += [(2, 90, 45, 46), (1, 5, 9, 600)]
# Of the sum, over tiles, of the products of their largest numbers: of 3,600 hostile gradients the worst had 57.
ROUNDING = 64 * 1.2e-7


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
    exact, size = twins.weight_gradient(z.double(), u.double()), by_tiles(z, u)[:, :, None, None]
    assert found.shape == exact.shape and ((found - exact).abs() <= ROUNDING * size).all()


def by_tiles(z, u):
    """The sum over tiles of max|u| max|z|, (channels of u, channels of z)."""
    down, across = (-size % 4 for size in z.shape[2:])
    inputs = max_pool2d(pad(z.double().abs(), (1, across + 1, 1, down + 1)), 6, 4)
    outputs = max_pool2d(pad(u.double().abs(), (0, across, 0, down)), 4, 4)
    return torch.einsum("nost,nist->oi", outputs, inputs)


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_that_of_torch(size, layout):
    z, u = make(size, layout)
    found = gradient(z, u)
    assert_is_right(found, z, u)
    assert torch.equal(gradient(z, u.contiguous()), found)  # each may lie in its own way


def powers(size, seed):
    """Numbers of all sizes, of either sign, many of them 0."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(size, generator=random) * 10 ** (4 * torch.randn(size, generator=random)).clamp(-9, 9)
    return numbers * (torch.rand(size, generator=random) < 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_hostile_numbers(seed):
    z, u = powers((9, 6, 7, 11), seed).abs(), powers((9, 6, 7, 11), seed + 100)
    assert_is_right(gradient(z, u), z, u)


@pytest.mark.parametrize("size", [(70, 16, 5, 6), (5, 48, 20, 20), (2, 90, 45, 46)], ids=str)
def test_threads_give_identical_bits(size, kernel_threads):
    z, u = make(size, LAST)
    kernel_threads(1)
    one = gradient(z, u)
    for count in (2, 3, 7):
        kernel_threads(count)
        assert torch.equal(gradient(z, u), one)


def test_what_would_overflow_is_left_to_plain_sums():
    z, u = make((9, 3, 8, 8))
    assert gradient(z, 1e30 * u) is not None
    assert gradient(z, 3e36 * u) is None
    layer = ConvMap(torch.rand(3, 3, 3, 3))
    assert layer.weight_gradient(z, 3e36 * u).isfinite().all()
    for wrong in (torch.nan, torch.inf):
        u[0, 0, 0, 0] = wrong
        assert gradient(z, u) is None


def test_it_declines():
    assert gradient(*make((500, 3, 2, 9))) is None  # tiles that are mostly empty
    assert gradient(*make((7, 3, 8, 8))) is None  # few tiles
    z, u = make((9, 3, 8, 8))
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
    given = dict(zip("zu", make((8, 5, 6, 7)), strict=True))
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
