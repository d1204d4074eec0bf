"""The networks' average pooling equals torch's own, bit for bit, and gets gradients in the layout of its images."""

import pytest
import torch
from torch import nn

from pcdeq.models.average_pool import AvgPool2d

LAST = torch.channels_last


def run(pool, x):
    """Value and gradient, and whether the gradient came to the pooling laid out as its images."""
    laid_out = []
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = pool(x)
    y.grad_fn.register_prehook(lambda grads: laid_out.append(grads[0].is_contiguous(memory_format=LAST)))
    weight = torch.linspace(-1, 1, y[0].numel())
    (y.flatten(1) @ weight).sum().backward()
    return y.detach(), x.grad, laid_out


@pytest.mark.parametrize("shape", [(3, 5, 28, 28), (2, 4, 32, 32), (1, 2, 9, 17)])
def test_images(shape):
    torch.manual_seed(0)
    x = torch.randn(shape).contiguous(memory_format=LAST)
    (y, grad, laid_out), (true_y, true_grad, slow) = run(AvgPool2d(8), x), run(nn.AvgPool2d(8), x)
    assert torch.equal(y, true_y) and torch.equal(grad, true_grad)
    assert laid_out == [True] and slow == [y.shape[2:] == (1, 1)]


@pytest.mark.parametrize("shape", [(3, 5, 28, 28), (5, 28, 28)])
def test_other_layouts_are_left_to_torch(shape):
    x = torch.randn(shape)
    pool = AvgPool2d(8)
    assert not pool(x.requires_grad_())._backward_hooks
    assert torch.equal(pool(x), nn.AvgPool2d(8)(x))


def test_second_derivatives():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64).contiguous(memory_format=LAST).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: AvgPool2d(4)(x).square().flatten(1).contiguous(), x)


def test_nothing_is_hung_on_without_a_gradient():
    with torch.no_grad():
        assert AvgPool2d(4)(torch.randn(1, 3, 8, 8).contiguous(memory_format=LAST))._backward_hooks is None
