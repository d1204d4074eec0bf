"""The networks' batch norm and max pooling equal torch's own, in value, gradient and running statistics."""

import copy

import pytest
import torch
from torch import nn

from pcdeq.kernels import KERNELS
from pcdeq.models.batch_norm import BatchNorm2d, MaxPool3x3

pytestmark = pytest.mark.skipif(KERNELS is None, reason="installed without a C compiler")
IMAGES = [(4, 12, 28, 28), (3, 5, 7, 9), (2, 1, 1, 3), (64, 48, 6, 6), (2, 130, 3, 3)]


def images(shape, scale=1.0, offset=0.0):
    torch.manual_seed(0)
    return (scale * torch.randn(shape) + offset).contiguous(memory_format=torch.channels_last)


def run(module, x, grad):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(x)
    y.backward(grad.to(y.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_batch_norm(shape, offset):
    fast, exact = BatchNorm2d(shape[1]), nn.BatchNorm2d(shape[1]).double()
    with torch.no_grad():
        fast.weight.uniform_(-1, 1)
        fast.bias.normal_()
    exact.load_state_dict({name: value.double() for name, value in fast.state_dict().items()})
    x = images(shape, 3.0, offset)
    grad = torch.randn_like(x)
    (y, grad_x), (true_y, true_grad_x) = run(fast, x, grad), run(exact, x.double(), grad)
    # Twice the digits that torch's float32 code has, for a mean of 17 standard deviations.
    torch.testing.assert_close(y.double(), true_y, rtol=0, atol=2e-5)
    torch.testing.assert_close(grad_x.double(), true_grad_x, rtol=0, atol=2e-5)
    for name in ("weight", "bias"):
        ours, true = getattr(fast, name).grad, getattr(exact, name).grad
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.running_mean.double(), exact.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast.running_var.double(), exact.running_var, rtol=1e-5, atol=1e-6)
    assert fast.num_batches_tracked == 1
    torch.testing.assert_close(fast.eval()(x).double(), exact.eval()(x.double()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", IMAGES)
@pytest.mark.parametrize("ties", [True, False])
def test_max_pooling(shape, ties):
    x = images(shape, 2.0)
    x = x.round() if ties else x
    grad = torch.randn_like(x)
    (y, grad_x), (true_y, true_grad_x) = run(MaxPool3x3(), x, grad), run(nn.MaxPool2d(3, 1, 1), x, grad)
    assert torch.equal(y, true_y)
    torch.testing.assert_close(grad_x, true_grad_x, rtol=0, atol=1e-5)


def test_a_nan_is_passed_on():
    x = images((1, 2, 5, 5))
    x[0, 1, 2, 2] = torch.nan
    y = MaxPool3x3()(x)
    assert torch.equal(y.isnan(), nn.MaxPool2d(3, 1, 1)(x).isnan())
    assert y.isnan().sum() == 9


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x.contiguous(), lambda x: x.bfloat16()])
def test_other_layouts_and_dtypes_are_torch_s_own(change):
    x = change(images((2, 3, 6, 6)))
    fast = BatchNorm2d(3).to(x.dtype)
    slow = nn.BatchNorm2d(3).to(x.dtype)
    torch.testing.assert_close(fast(x), slow(x))
    assert torch.equal(MaxPool3x3()(x), nn.MaxPool2d(3, 1, 1)(x))


def test_a_copy_is_independent():
    norm = BatchNorm2d(3)
    other = copy.deepcopy(norm)
    norm(images((2, 3, 4, 4)) + 5)
    assert (other.running_mean == 0).all()
