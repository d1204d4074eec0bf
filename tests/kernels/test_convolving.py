"""Convolutions in float64 by the kernel: those of torch, in every size and order, as plain sums, or declined."""

from __future__ import annotations

import math

import pytest
import torch
from twins import LAST

from pcdeq.kernels import binding

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())

# inputs, outputs, height, width: channels around the eight of a vector and the sixteen of two, pixels around six
SIZES = [(1, 1, 1, 1), (1, 12, 28, 28), (3, 8, 5, 6), (5, 9, 4, 7), (2, 16, 6, 1), (7, 17, 9, 13), (20, 33, 3, 8)]
# kernel, stride, padding
WAYS = [((3, 3), 1, (1, 1)), ((3, 3), 2, (0, 0)), ((1, 1), 1, (0, 0)), ((5, 3), 3, (4, 1)), ((2, 4), 1, (0, 3))]


@pytest.fixture(params=[1, 2])
def number(request, threads):
    """Of threads; a kernel that has none leaves large work to torch."""
    if request.param > binding._KERNELS.MOST_THREADS:
        pytest.skip("built without OpenMP")
    threads(request.param)


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_that_of_torch(size, way, layout, number):
    (inputs, outputs, *space), (kernel, stride, padding) = size, way
    if any(n + 2 * p < k for n, p, k in zip(space, padding, kernel, strict=True)):
        assert convolve(torch.randn(2, inputs, *space).double(), torch.randn(1, inputs, *kernel).double(), way) is None
        return
    torch.manual_seed(0)
    x = torch.randn(3, inputs, *space).double().contiguous(memory_format=layout)
    weight = torch.randn(outputs, inputs, *kernel).double()
    exact = torch.conv2d(x, weight, stride=stride, padding=padding)
    plus = torch.randn_like(exact)
    found, more = convolve(x, weight, way), convolve(x, weight, way, plus)
    assert found is not None and more is not None
    assert found.is_contiguous(memory_format=layout) or inputs == 1  # which has both layouts
    assert torch.allclose(found, exact, rtol=0, atol=1e-12)
    assert torch.allclose(more, exact + plus, rtol=0, atol=1e-12)


def convolve(x, weight, way, plus=None):
    _, stride, padding = way
    with torch.no_grad():
        return binding.convolve(x, weight, plus, (stride, stride), padding)


def test_every_component_is_a_sum_to_a_few_roundings():
    """Of numbers from 1e-30 to 1, against sums that are rounded once."""
    torch.manual_seed(0)
    x, weight = (torch.rand(size).double() ** 70 for size in ((1, 9, 5, 5), (9, 9, 3, 3)))
    found = convolve(x, weight, WAYS[0])
    patches = torch.nn.functional.unfold(x, 3, padding=1)[0].T  # (places, terms)
    for output, row in enumerate(weight.flatten(1)):
        for place, patch in enumerate(patches):
            exact = math.fsum((row * patch).tolist())
            assert abs(float(found[0, output].flatten()[place]) - exact) <= 81 * 2.3e-16 * exact


def test_what_is_not_a_number_stays_with_its_sample(number):
    x, weight = torch.rand(3, 2, 4, 4).double(), torch.rand(2, 2, 3, 3).double()
    x[1, 0, 2, 2] = torch.nan
    found = convolve(x, weight, WAYS[0])
    assert found[[0, 2]].isfinite().all() and found[1].isnan().any()


def test_it_declines():
    x, weight = torch.rand(2, 3, 4, 4).double(), torch.rand(3, 3, 3, 3).double()
    assert convolve(x.float(), weight.float(), WAYS[0]) is None
    assert convolve(x, weight.float(), WAYS[0]) is None
    assert convolve(x[0], weight, WAYS[0]) is None
    assert binding.convolve(x, weight, None, (1, 2), (1, 1)) is None
    assert binding.convolve(x, weight.requires_grad_(), None, (1, 1), (1, 1)) is None
