"""The C kernels compute what their names say: compared with float64, in every shape and memory format."""

import math

import pytest
import torch
from problems import by_threads, contract
from torch import nn
from torch.nn import functional as F

import pcdeq
from pcdeq.injection import Softplus
from pcdeq.kernels import KERNELS, PARALLEL_FROM
from pcdeq.models.batch_norm import BatchNorm2d
from pcdeq.operators import ConvMap, DenseMap, _Normalised
from pcdeq.solvers import Pieces, Problem, Weight, fused

pytestmark = pytest.mark.skipif(KERNELS is None, reason="installed without a C compiler")
EPS, TINY = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).tiny


def asks_torch(z):
    raise AssertionError("the kernel should have computed this product")


def product(weight, z, transposed=False, layout=torch.contiguous_format):
    """Wz by the kernel: the first step of u = 1 (Wu + 0), from z."""
    zero = torch.zeros(z.shape).contiguous(memory_format=layout)
    weight = Weight("dense" if weight.ndim == 2 else "conv3x3", weight, transposed)
    pieces = Pieces(asks_torch, asks_torch, zero, "linear", torch.ones(z.shape), weight=weight)
    with torch.no_grad():
        return pcdeq.Anderson(max_steps=1).solve(Problem(asks_torch, start=z, pieces=pieces)).value


SIZES = [(1, 1), (1, 6), (2, 3), (3, 1), (4, 4), (5, 4), (7, 9), (8, 13), (12, 5), (33, 17)]
CHANNELS = [1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 24, 25, 32, 33, 40]


def rounding(channels):
    """Six standard deviations of the rounding of a convolution of standard normal numbers by F(4x4, 3x3).

    At the last output of a tile the squares of the transforms' coefficients add up to 90² per channel. Each
    number is rounded some four times, and each of the partial sums over channels once.
    """
    return 6 * 90 * (torch.finfo(torch.float32).eps / 2) * (channels * (4 + channels / 2)) ** 0.5


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("size", SIZES)
def test_products_are_those_of_a_convolution(size, layout):
    for channels in CHANNELS:
        weight, z = torch.randn(channels, channels, 3, 3), torch.randn(2, channels, *size)
        z = z.contiguous(memory_format=layout) if channels % 2 else z
        for transposed, convolve in ((False, F.conv2d), (True, F.conv_transpose2d)):
            exact = convolve(z.double(), weight.double(), padding=1)
            value = product(weight, z, transposed, layout)
            assert value.is_contiguous(memory_format=layout)
            torch.testing.assert_close(value.double(), exact, rtol=0, atol=rounding(channels))


@pytest.mark.parametrize("channels", [1, 8, 20, 40])
def test_products_round_so_little_that_the_finest_tolerance_is_met(channels):
    # A residual is the difference of two products: each may be wrong by half of the tolerance.
    weight, z = torch.rand(channels, channels, 3, 3), torch.rand(3, channels, 14, 11)
    exact = F.conv2d(z.double(), weight.double(), padding=1)
    error = (product(weight, z) - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert error.max() < fused.FINEST_CONV / 2


@pytest.mark.parametrize("features", [1, 3, 7, 8, 9, 31, 32, 41, 79, 80, 81, 120, 200, 255, 256])
def test_products_are_those_of_a_matrix(features):
    weight, z = torch.randn(features, features), torch.randn(5, features)
    for transposed, matrix in ((False, weight), (True, weight.T)):
        exact = z.double() @ matrix.double().T
        # The rounding of a sum, in any order: its terms' absolute values, times their number, times eps / 2.
        bound = z.double().abs() @ matrix.double().abs().T * features * torch.finfo(torch.float32).eps / 2
        assert ((product(weight, z, transposed) - exact).abs() <= bound).all()


@pytest.mark.parametrize("size", [(6, 5), (1, 1), (9, 2)])
def test_strides_of_any_kind_are_understood(size):
    height, width = size
    weight, z = torch.randn(5, 5, 3, 3), torch.randn(3, 5, height, width)
    wide, tall = torch.randn(6, 5, 2 * height, 3 * width), z.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    wide[::2, :, ::2, ::3] = z
    swapped = weight.transpose(0, 1).contiguous().transpose(0, 1)
    expected = product(weight, z)
    for strided in (wide[::2, :, ::2, ::3], tall):
        for format_ in (weight, swapped, weight.contiguous(memory_format=torch.channels_last)):
            assert torch.equal(product(format_, strided), expected)
    everywhere = z[:1, :1].expand(3, 5, height, width)
    assert torch.equal(product(weight, everywhere), product(weight, everywhere.contiguous()))
    assert torch.equal(
        product(weight[:, :, 0, 0], z[..., 0, 0]), product(weight[:, :, 0, 0].clone(), z[..., 0, 0].clone())
    )


@pytest.mark.parametrize("size", SIZES)
def test_weight_gradients_are_those_of_autograd(size):
    for channels in CHANNELS:
        samples = 1 + channels % 10
        z, y = torch.randn(samples, channels, *size), torch.randn(samples, channels, *size)
        z = z.contiguous(memory_format=torch.channels_last) if channels % 2 else z
        y = y.contiguous(memory_format=torch.channels_last) if channels % 3 else y
        weight = torch.randn(channels, channels, 3, 3)
        gradient = ConvMap(weight).weight_gradient(z, y)
        exact, sizes = (weight_gradient_of(a, b, weight) for a, b in ((z, y), (z.abs(), y.abs())))
        # The rounding of a sum in any order: the sum of absolute values, times their number, times eps / 2.
        assert ((gradient - exact).abs() <= sizes * z[:, 0].numel() * EPS / 2).all()
        assert gradient.shape == weight.shape


def weight_gradient_of(z, y, weight):
    weight = weight.double().requires_grad_()
    return torch.autograd.grad(F.conv2d(z.double(), weight, padding=1), weight, y.double())[0]


def test_weight_gradients_of_strided_images():
    z, y = torch.randn(3, 5, 6, 14)[..., ::2], torch.randn(6, 7, 3, 5).permute(2, 3, 0, 1)
    linear = ConvMap(torch.randn(5, 5, 3, 3))
    assert torch.equal(linear.weight_gradient(z, y), linear.weight_gradient(z.clone(), y.contiguous()))
    ones = torch.ones(1, 1, 1, 1).expand(3, 5, 6, 7)
    assert torch.equal(linear.weight_gradient(z, ones), linear.weight_gradient(z, ones.contiguous()))


@pytest.mark.parametrize("samples", [1, 7, 20])
def test_threads_change_no_bit_of_a_weight_gradient(samples):
    z, y = torch.randn(samples, 12, 9, 7), torch.randn(samples, 12, 9, 7)
    linear = ConvMap(torch.ones(12, 12, 3, 3))
    one, two = (by_threads(n, lambda: linear.weight_gradient(z, y)) for n in (1, 2))
    assert torch.equal(one, two)


class HalfConv(ConvMap):
    def apply(self, z):
        return super().apply(z) / 2

    weight_gradient = pcdeq.LinearMap.weight_gradient


class HalfDense(DenseMap):
    def apply(self, z):
        return super().apply(z) / 2


@pytest.mark.parametrize(("half", "whole"), [(HalfDense, pcdeq.PcDEQLinear), (HalfConv, pcdeq.PcDEQConv2d)])
def test_a_map_of_the_user_s_own_is_not_bypassed(half, whole):
    x = torch.randn(6, 5) if half is HalfDense else torch.randn(6, 5, 9, 7)
    layer = contract(whole(5, solver=pcdeq.Anderson(tol=1e-6), warm_start=False))
    layer.operator.bind = half
    with torch.no_grad():
        value = layer(x)
        layer.operator.bind = half.__mro__[1]
        expected = contract(layer, 0.25)(x)
    # Both within 1e-6 and the rounding of a step, for numbers below 1 and a contraction by 1/2.
    torch.testing.assert_close(value, expected, rtol=0, atol=4e-6)
    z, y = torch.randn(2, 5, 4, 4), torch.randn(2, 5, 4, 4)
    if half is HalfConv:
        weight = torch.randn(5, 5, 3, 3)
        exact = weight_gradient_of(z, y, weight) / 2
        torch.testing.assert_close(half(weight).weight_gradient(z, y).double(), exact, rtol=1e-5, atol=1e-5)


# From -1e30 to 1e30, dense where the function bends; more than a thread's share of numbers.
INPUTS = torch.cat([-torch.logspace(-30, 30, 9000).flip(0), torch.zeros(2), torch.linspace(-25, 25, 20_001)])
INPUTS = torch.cat([INPUTS, torch.logspace(-30, 30, 9000), torch.tensor([torch.inf, -torch.inf])])
assert len(INPUTS) > PARALLEL_FROM


@pytest.mark.parametrize("floor", [0.0, 1e-16, 0.25])
def test_softplus_is_that_of_float64(floor):
    x = INPUTS.double()
    exact = torch.logaddexp(torch.zeros_like(x), 5 * x) / 5 + floor
    value = Softplus.value(INPUTS, floor).double()
    # The exponential is good to 2e-7; 5x and what follows round four times. For x < 0 the exponential also carries
    # the rounding of 5x, at most 88: 88 eps / 2. Below exp(-87) the result is as good as 0.
    relative = torch.where((x < 0) & (x > -18), 2e-7 + 2 * EPS + 5 * x.abs() * EPS / 2, 2e-7 + 2 * EPS)
    error = (value - exact).abs().nan_to_num(0.0)  # inf - inf
    assert (error <= relative * exact.clamp(max=1e38) + TINY + EPS / 2 * floor).all()
    assert torch.equal(value.isinf(), exact.isinf())
    assert (value >= floor * (1 - EPS)).all()


def test_the_gradient_of_softplus_is_that_of_float64():
    grad = torch.randn(INPUTS.shape)
    with torch.no_grad():
        value = Softplus.gradient(INPUTS, grad).double()
    x = INPUTS.double()
    exact = grad.double() * torch.sigmoid(5 * x)
    relative = 2e-7 + 2 * EPS + torch.where((x < 0) & (x > -18), 5 * x.abs() * EPS / 2, 0.0)
    assert ((value - exact).abs() <= relative * exact.abs() + 2 * TINY * grad.abs()).all()


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 63, 65])
def test_softplus_of_any_length(length):
    x = torch.linspace(-3, 3, length)
    torch.testing.assert_close(Softplus.value(x, 0.0), F.softplus(x.double(), beta=5).float(), rtol=1e-6, atol=0)
    image = torch.randn(2, 3, 5, length)
    for x in (image.contiguous(memory_format=torch.channels_last), image[..., ::2], image.transpose(1, 3)):
        grad = torch.randn(x.shape)
        torch.testing.assert_close(Softplus.value(x, 0.0), F.softplus(x, beta=5), rtol=1e-5, atol=1e-8)
        with torch.no_grad():
            torch.testing.assert_close(Softplus.gradient(x, grad), grad * torch.sigmoid(5 * x), rtol=1e-5, atol=1e-8)


def test_threads_change_no_bit_of_softplus():
    x = INPUTS.repeat(2)
    one, two = (by_threads(n, lambda: Softplus.value(x, 0.0)) for n in (1, 2))
    assert torch.equal(one, two)


def test_softplus_of_nan_is_nan():
    x = torch.zeros(37)
    x[::5] = torch.nan
    assert torch.equal(Softplus.value(x, 0.0).isnan(), x.isnan())


def test_the_gradient_of_softplus_at_nan_is_nan():
    with torch.no_grad():
        assert Softplus.gradient(torch.tensor([torch.nan]), torch.ones(1)).isnan().all()


def test_softplus_of_the_largest_numbers_is_finite():
    assert Softplus.value(torch.tensor([1e38]), 0.0).isfinite().all()


ROWS = {
    "usual": lambda v: v,
    "zero": torch.zeros_like,
    "negative": lambda v: -v.abs() - 0.1,
    "mixed": lambda v: v - 0.5,
    "tiny": lambda v: v * 1e-30,
    "subnormal": lambda v: v * 1e-42,
    "huge": lambda v: v * 1e30,
    "one entry": lambda v: torch.where(torch.arange(v.numel()).reshape(v.shape) == 2, v, 0.0),
}


@pytest.mark.parametrize("shape", [(8, 5), (8, 3, 3, 3), (8, 9, 3, 3), (8, 1, 1, 7)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.0, 1e-20, 1e20])
def test_normalisation_is_that_of_float64(shape, layout, scale):
    v = torch.stack([change(torch.rand(shape[1:]) + 0.01) for change in ROWS.values()])
    v = v.contiguous(memory_format=layout if v.ndim == 4 else torch.contiguous_format)
    g, grad = scale * (torch.rand(8, *[1] * (len(shape) - 1)) + 0.1), torch.randn(shape)
    weight, exact = _Normalised.value(v, g), _Normalised.value(v.double(), g.double())
    # One rounding to float32; what is below the smallest normal number has fewer digits.
    assert ((weight - exact).abs() <= EPS * exact + TINY * EPS).all()
    with torch.no_grad():
        gradients = _Normalised.gradients(v, g, grad)
        exact = _Normalised.gradients(v.double(), g.double(), grad.double())
    for fast, true in zip(gradients, exact, strict=True):
        fits = true.abs() < torch.finfo(torch.float32).max
        # A gradient whose exact value is 0 by cancellation may have either sign, and so pass or not.
        rows = true.abs().flatten(1).amax(1).reshape(-1, *[1] * (len(shape) - 1))
        assert ((fast - true).abs() <= EPS * true.abs() + 1e-14 * rows + TINY * EPS)[fits].all()
        assert fast[~fits].isinf().all()
    assert (weight >= 0).all() and gradients[0].shape == v.shape and gradients[1].shape == g.shape


def test_a_row_of_zeros_learns_in_every_memory_format():
    # From the definition: v as if its norm were 1, g along the diagonal.
    for layout in (torch.contiguous_format, torch.channels_last):
        v, g = torch.zeros(2, 3, 3, 3).contiguous(memory_format=layout), torch.full((2, 1, 1, 1), 0.5)
        grad = torch.randn(2, 3, 3, 3)
        with torch.no_grad():
            grad_v, grad_g = _Normalised.gradients(v, g, grad)
        torch.testing.assert_close(grad_v, 0.5 * grad, rtol=EPS, atol=0)
        torch.testing.assert_close(grad_g.flatten(), grad.flatten(1).sum(1) / math.sqrt(27), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", ["v", "g"])
def test_a_nan_in_a_weight_stays_in_its_row(bad):
    v, g, grad = torch.rand(4, 3, 3, 3), torch.rand(4, 1, 1, 1), torch.randn(4, 3, 3, 3)
    {"v": v, "g": g}[bad].view(4, -1)[2, 0] = torch.nan
    with torch.no_grad():
        for result in (_Normalised.value(v, g), _Normalised.gradients(v, g, grad)[0]):
            assert result.flatten(1).isnan().all(1).tolist() == [False, False, True, False]
            assert result[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (3, 5, 7, 9), (9, 12, 16, 17)])
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_running_statistics_follow_those_of_the_batches(shape, momentum):
    fast = BatchNorm2d(shape[1], momentum=momentum)
    mean, variance = torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()
    for batch in range(3):
        x = (torch.randn(shape) * (batch + 1) + batch).contiguous(memory_format=torch.channels_last)
        fast(x)
        columns = x.double().transpose(0, 1).flatten(1)
        mean += momentum * (columns.mean(1) - mean)
        variance += momentum * (columns.var(1, unbiased=True) - variance)
    torch.testing.assert_close(fast.running_mean.double(), mean, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(fast.running_var.double(), variance, rtol=1e-5, atol=1e-6)
    scale = (variance + fast.eps).rsqrt()[:, None, None]
    with torch.no_grad():
        y = fast.eval()(x)
    torch.testing.assert_close(y.double(), (x - mean[:, None, None]) * scale, rtol=1e-5, atol=1e-5)


def test_threads_change_no_bit_of_batch_norm():
    x = torch.randn(9, 12, 32, 17).contiguous(memory_format=torch.channels_last)

    def run():
        norm, inner = BatchNorm2d(12), x.clone(memory_format=torch.preserve_format).requires_grad_()
        norm(inner).square().sum().backward()
        with torch.no_grad():
            return (inner.grad, norm.weight.grad, norm.running_mean, norm.running_var, norm.eval()(x))

    assert all(torch.equal(a, b) for a, b in zip(by_threads(1, run), by_threads(2, run), strict=True))


def test_batch_norm_passes_on_infinity_in_evaluation():
    x = torch.zeros(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    x[0, 0, 0, 0] = torch.inf
    with torch.no_grad():
        torch.testing.assert_close(BatchNorm2d(2).eval()(x), nn.BatchNorm2d(2).eval()(x))


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_weight_gradients_do_not_depend_on_the_default_dtype(float64_by_default):
    z = torch.ones(1, 1, 3, 3, dtype=torch.float32)
    expected = torch.tensor([[4.0, 6, 4], [6, 9, 6], [4, 6, 4]], dtype=torch.float32)
    torch.testing.assert_close(ConvMap(z).weight_gradient(z, z)[0, 0], expected)


def test_residuals_do_not_depend_on_the_default_dtype(float64_by_default):
    x = torch.zeros(3, 4, dtype=torch.float32)
    assert pcdeq.PcDEQLinear(4).float().solve(x).residual.dtype == torch.float32


def test_batch_norm_does_not_depend_on_the_default_dtype(float64_by_default):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    ours, other = (module(3).float()(x.requires_grad_()) for module in (BatchNorm2d, nn.BatchNorm2d))
    gradients = [torch.autograd.grad(y.pow(3).sum(), x)[0] for y in (ours, other)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [None, torch.contiguous_format, torch.channels_last], ids=["dense", "conv", "last"])
@pytest.mark.parametrize(("activation", "own"), [("tanh", lambda x: F.softplus(x, beta=5)), ("sigmoid", F.relu)])
@pytest.mark.parametrize("weight_norm", [True, False])
def test_one_node_of_the_graph_equals_many(layout, activation, own, weight_norm):
    x = torch.randn(6, 24) if layout is None else torch.randn(6, 5, 9, 7).contiguous(memory_format=layout)
    grad, results = torch.randn(x.shape), []
    for injection in (None, own):
        torch.manual_seed(1)
        made = pcdeq.PcDEQLinear if layout is None else pcdeq.PcDEQConv2d
        solver = pcdeq.Anderson(tol=1e-6)
        layer = made(x.shape[1], activation, injection=injection, weight_norm=weight_norm, solver=solver)
        with torch.no_grad():
            layer.operator.raw[0].uniform_(-0.1, 1)
        contract(layer).to(memory_format=layout)
        here = x.clone(memory_format=torch.preserve_format).requires_grad_()
        assert (layer.rule_of_one_node(here) is None) is (injection is not None)
        z = layer(here)
        z.backward(grad)
        results.append((z.detach(), here.grad, *(parameter.grad for parameter in layer.operator.raw)))
    # Each is within 1e-6 and twice the rounding of the exact one, for a contraction by 1/2; a gradient depends on
    # the value of z, too, with a constant of at most 4 for these activations: 2 (1 + 4) 3e-6.
    for one, many in zip(*results, strict=True):
        assert (one - many).norm() <= 3e-5 * many.norm()


def test_an_overridden_inject_is_not_bypassed():
    class Shifted(pcdeq.PcDEQLinear):
        def inject(self, x):
            return x.abs() + 1

    layer, x = Shifted(3), torch.randn(2, 3)
    with torch.no_grad():
        expected = layer(x)
    torch.testing.assert_close(layer(x).detach(), expected)
