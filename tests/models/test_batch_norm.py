"""The networks' batch norm equals torch's own, in value, gradient, running statistics and what it refuses."""

import copy

import pytest
import torch
from torch import nn

from pcdeq.kernels import binding
from pcdeq.models.batch_norm import BatchNorm2d

needs_kernels = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())
IMAGES = [(4, 12, 28, 28), (3, 5, 7, 9), (2, 1, 1, 3), (64, 48, 6, 6), (2, 130, 3, 3)]


def images(shape, scale=1.0, offset=0.0):
    torch.manual_seed(0)
    return (scale * torch.randn(shape) + offset).contiguous(memory_format=torch.channels_last)


def run(module, x, grad):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(x)
    y.backward(grad.to(y.dtype))
    return y.detach(), x.grad


@needs_kernels  # it asks for more digits than torch has
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


@needs_kernels
def test_the_kernel_is_used(monkeypatch):
    def fail(self, x):
        raise AssertionError("torch's own was called")

    monkeypatch.setattr(nn.BatchNorm2d, "forward", fail)
    norm, x = BatchNorm2d(3), images((2, 3, 6, 6))
    norm(x.requires_grad_()).sum().backward()
    with torch.no_grad():
        norm.eval()(x)


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x.contiguous(), lambda x: x.bfloat16()])
def test_other_layouts_and_dtypes_are_torch_s_own(change):
    x = change(images((2, 3, 6, 6)))
    fast = BatchNorm2d(3).to(x.dtype)
    slow = nn.BatchNorm2d(3).to(x.dtype)
    assert torch.equal(fast(x), slow(x))


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.0}, {"momentum": 0.9}],
)
@pytest.mark.parametrize("training", [True, False])
def test_every_option_of_torch_s(options, training):
    fast, slow = BatchNorm2d(3, **options), nn.BatchNorm2d(3, **options)
    for _ in range(2):
        y, expected = fast(images((2, 3, 6, 6))), slow(images((2, 3, 6, 6)))
        torch.testing.assert_close(y, expected)
    torch.testing.assert_close(fast.train(training)(images((2, 3, 6, 6))), slow.train(training)(images((2, 3, 6, 6))))
    for name, value in slow.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value)


# What read or wrote beyond the memory of its tensors when kernels were given addresses.
MISFITS = {
    "16 channels for 8": (images((2, 16, 6, 6)), lambda norm: None),
    "half-precision bias": (images((2, 8, 6, 6)), lambda norm: setattr(norm.bias, "data", torch.zeros(8).half())),
    "half-precision statistics": (
        images((2, 8, 6, 6)),
        lambda norm: setattr(norm, "running_mean", torch.zeros(8).half()),
    ),
    "swapped weight": (images((2, 8, 6, 6)), lambda norm: setattr(norm.weight, "data", torch.ones(2))),
    "swapped statistics": (images((2, 8, 6, 6)), lambda norm: setattr(norm, "running_var", torch.ones(2))),
    "one number a channel": (images((1, 8, 1, 1)), lambda norm: None),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("training", [True, False])
def test_what_does_not_fit_is_torch_s_to_refuse(name, training):
    x, change = MISFITS[name]
    results = []
    for kind in (BatchNorm2d, nn.BatchNorm2d):
        norm = kind(8).train(training)
        change(norm)
        try:
            results.append(norm(x))
        except (RuntimeError, ValueError) as error:
            results.append(f"{type(error).__name__}: {error}")
    if isinstance(results[1], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results)


def test_a_copy_is_independent():
    norm = BatchNorm2d(3)
    other = copy.deepcopy(norm)
    norm(images((2, 3, 4, 4)) + 5)
    assert (other.running_mean == 0).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_transforms_of_torch_func():
    norm, x = BatchNorm2d(3).eval(), images((2, 3, 4, 4))
    plain = nn.BatchNorm2d(3).eval()
    for make in (lambda m: torch.func.vmap(m)(x[None]), lambda m: torch.func.jvp(m, (x,), (x,))[1],
                 lambda m: torch.func.grad(lambda t: m(t).square().sum())(x)):  # fmt: skip
        torch.testing.assert_close(make(norm), make(plain))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("training", [True, False])
def test_forward_mode_is_not_lost(training):
    x, tangent = images((2, 3, 4, 4)), torch.randn(2, 3, 4, 4)
    found = []
    for kind in (BatchNorm2d, nn.BatchNorm2d):
        with torch.autograd.forward_ad.dual_level(), torch.no_grad():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            found.append(torch.autograd.forward_ad.unpack_dual(kind(3).train(training)(dual)).tangent)
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
def test_traced_it_is_torch_s(training):
    x = images((2, 3, 4, 4))
    with torch.no_grad():
        traced = torch.jit.trace(BatchNorm2d(3).train(training), x, check_trace=False)
        assert "batch_norm" in str(traced.graph)
