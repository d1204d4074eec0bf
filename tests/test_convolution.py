"""Convolutions in float64 without kernels: those of torch, in pieces where a batch is large."""

from __future__ import annotations

import pytest
import torch

import pcdeq
from pcdeq import convolution
from pcdeq.convolution import convolve
from pcdeq.kernels import binding

# channels and space; kernel, stride, padding
CASES = {
    "rows": ((5, 40), (3,), (1,), (1,)),
    "images": ((4, 9, 11), (3, 3), (1, 1), (1, 1)),
    "every other place": ((4, 9, 12), (3, 5), (2, 2), (0, 2)),
    "strides apart": ((3, 8, 9), (2, 2), (1, 3), (0, 0)),
    "volumes": ((2, 5, 6, 4), (3, 3, 3), (1, 1, 1), (1, 1, 1)),
}
LAYOUTS = (torch.contiguous_format, torch.channels_last)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(binding, "_KERNELS", None)


@pytest.fixture
def small(monkeypatch, threads):
    """Pieces of a sample or two, and how many there were."""
    threads(1)
    monkeypatch.setattr(convolution, "COLUMNS", 1)
    pieces, plain = [], convolution._convolution
    monkeypatch.setattr(convolution, "_convolution", lambda x, *rest: pieces.append(len(x)) or plain(x, *rest))
    return pieces


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_pieces_make_what_the_whole_does(case, layout, small):
    (channels, *space), kernel, stride, padding = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(7, channels, *space, dtype=torch.float64)
    x = x.contiguous(memory_format=layout) if x.ndim == 4 else x
    weight = torch.randn(6, channels, *kernel, dtype=torch.float64)
    whole = (torch.conv1d, torch.conv2d, torch.conv3d)[len(kernel) - 1](x, weight, None, stride, padding)
    plus = torch.randn_like(whole)
    found = convolve(x, weight, None, stride, padding)
    assert small == [1] * 7
    assert torch.allclose(found, whole, rtol=0, atol=1e-12)
    assert torch.allclose(convolve(x, weight, plus, stride, padding), whole + plus, rtol=0, atol=1e-12)
    assert x.ndim != 4 or found.is_contiguous(memory_format=layout)


def test_a_batch_that_fits_is_one_piece(monkeypatch, threads):
    threads(1)
    x, weight = torch.rand(4, 2, 5, 5).double(), torch.rand(2, 2, 3, 3).double()
    monkeypatch.setattr(convolution, "COLUMNS", 4 * 25 * 18)
    assert convolution._in_pieces(x, weight, None, (1, 1), (1, 1)) is None
    monkeypatch.setattr(convolution, "COLUMNS", 4 * 25 * 18 - 1)
    assert convolution._in_pieces(x, weight, None, (1, 1), (1, 1)) is not None


def test_every_thread_has_a_sample(small, threads):
    threads(2)
    convolve(torch.rand(5, 2, 5, 5).double(), torch.rand(2, 2, 3, 3).double(), None, (1, 1), (1, 1))
    assert small == [2, 2, 1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # which torch itself uses to import its rules for jvp
def test_what_torch_must_see_is_left_to_it(small):
    """Gradients, forward derivatives, batches of batches and tensors without numbers."""
    x, weight = torch.rand(3, 2, 5, 5).double(), torch.rand(2, 2, 3, 3).double()

    def product(x):
        return convolve(x, weight, None, (1, 1), (1, 1))

    assert torch.autograd.gradcheck(product, x.clone().requires_grad_())
    small.clear()
    torch.func.jvp(product, (x,), (x,))
    torch.vmap(product)(x[None])
    convolve(x.to("meta"), weight.to("meta"))
    assert 1 not in small


def test_torch_says_what_does_not_fit():
    with pytest.raises(RuntimeError, match="expected"):
        convolve(torch.rand(3, 3, 5, 5).double(), torch.rand(2, 2, 3, 3).double())
    with pytest.raises(RuntimeError, match="Kernel size"):
        convolve(torch.rand(3, 2, 2, 2).double(), torch.rand(2, 2, 3, 3).double())


@torch.no_grad()
def test_a_layer_in_float64_takes_it(small):
    layer = pcdeq.PcDEQConv2d(3, activation="tanh").double()
    layer.solve(torch.randn(4, 3, 6, 6, dtype=torch.float64))
    assert small and {*small} == {1}
