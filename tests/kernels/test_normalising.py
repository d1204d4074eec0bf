"""Batch norm by the kernels is torch's, and so is what torch promises of its gradient."""

from __future__ import annotations

import pytest
import torch
from specimens import Subclass
from torch import nn
from torch.nn.functional import batch_norm as torch_batch_norm
from twins import LAST, make_images, norm_by_kernel

from pcdeq.errors import UsageError
from pcdeq.kernels import binding

pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())

SHAPES = [(1, 1, 1, 2), (2, 3, 1, 1), (3, 1, 5, 5), (4, 5, 6, 7), (2, 8, 9, 9), (5, 33, 8, 8), (70, 16, 14, 14)]


class TestBatchNorm:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_training_is_torchs_in_float64(self, shape):
        tensors = make_images(shape)
        x, weight, bias = (t.clone().requires_grad_() for t in tensors[:3])
        mean, variance = (t.clone() for t in tensors[3:])
        y = norm_by_kernel(x, weight, bias, mean, variance)
        grad = make_images(shape, seed=1)[0]
        y.backward(grad)
        exact = [t.double().requires_grad_(index < 3) for index, t in enumerate(tensors)]
        true_y = torch_batch_norm(exact[0], *exact[3:], *exact[1:3], True, 0.3, 1e-5)
        true_y.backward(grad.double())
        assert torch.allclose(y.double(), true_y, rtol=1e-5, atol=1e-5)
        for ours, true in ((mean, exact[3]), (variance, exact[4])):
            assert torch.allclose(ours.double(), true, rtol=1e-5, atol=1e-6)
        # These are sums and differences, small where their terms cancel: rounding is that of the terms.
        terms = [10.0, *[float(grad.abs().sum((0, 2, 3)).max())] * 2]
        for ours, true, size in zip((x, weight, bias), exact[:3], terms, strict=True):
            assert float((ours.grad.double() - true.grad).abs().max()) < 1e-6 * size
        assert y.is_contiguous(memory_format=LAST) and x.grad.is_contiguous(memory_format=LAST)

    @pytest.mark.parametrize("shape", [(1, 4, 1, 1), *SHAPES], ids=str)
    def test_inference_is_torchs_in_float64(self, shape):
        x, weight, bias, mean, variance = tensors = make_images(shape)
        before = [t.clone() for t in tensors]
        y = norm_by_kernel(*tensors, training=False)
        true = torch_batch_norm(*(t.double() for t in (x, mean, variance, weight, bias)), False, 0.3, 1e-5)
        assert torch.allclose(y.double(), true, rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, tensors, before))

    def test_threads_give_identical_bits(self, kernel_threads):
        tensors, found = make_images((70, 16, 14, 14)), []
        assert tensors[0].numel() >= binding.PARALLEL_PASS
        for count in (1, 2, 3, 7):
            kernel_threads(count)
            inputs = [t.clone() for t in tensors]
            for t in inputs[:3]:
                t.requires_grad_()
            y = norm_by_kernel(*inputs)
            y.square().sum().backward()
            found.append([y, *inputs[3:], *(t.grad for t in inputs[:3])])
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))

    def test_vectors_with_gaps(self):
        x, *rest = make_images()
        apart = [torch.stack([t, t], 1)[:, 0] for t in rest]
        first, second = norm_by_kernel(x, *rest), norm_by_kernel(x, *apart)
        assert torch.equal(first, second) and all(map(torch.equal, rest, apart))
        assert torch.equal(norm_by_kernel(x, *rest, training=False), norm_by_kernel(x, *apart, training=False))

    def test_a_gradient_in_any_order(self):
        grads = []
        grad = torch.randn(4, 5, 6, 7)
        for given in (grad, grad.contiguous(memory_format=LAST), torch.stack([grad, grad], -1)[..., 1]):
            x, weight, bias, *running = make_images()
            norm_by_kernel(x.requires_grad_(), weight, bias, *running).backward(given)
            grads.append(x.grad)
        assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
        x, weight, bias, *running = make_images()
        y = norm_by_kernel(x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), *running)
        y.sum().backward()  # strides of 0
        assert torch.equal(bias.grad, torch.full((5,), 168.0)) and float(x.grad.abs().max()) < 1e-5

    @pytest.mark.parametrize("shape", [(1, 4, 1, 1), (4, 5, 6), (4, 5)], ids=str)
    def test_declines_other_shapes(self, shape):
        _, *rest = make_images((4, shape[1], 6, 7))
        assert norm_by_kernel(torch.randn(shape), *rest) is None

    def test_declines_images_in_torchs_usual_order(self):
        x, *rest = make_images()
        assert norm_by_kernel(x.contiguous(), *rest) is None

    @pytest.mark.parametrize("which", range(1, 5))
    @pytest.mark.parametrize("training", [True, False])
    def test_declines_other_channels_and_nothing_is_written(self, which, training):
        tensors = list(make_images())
        for wrong in (torch.rand(4), torch.rand(6), torch.rand(1), torch.rand(5, 1), None):
            given = [*tensors[:which], wrong, *tensors[which + 1 :]]
            before = [None if t is None else t.clone() for t in given]
            assert norm_by_kernel(*given, training=training) is None
            assert all(t is None or torch.equal(t, b) for t, b in zip(given, before, strict=True))

    def test_inference_with_a_graph_is_torchs(self):
        x, *rest = make_images()
        assert norm_by_kernel(x.requires_grad_(), *rest, training=False) is None
        with torch.no_grad():
            assert norm_by_kernel(x, *rest, training=False) is not None


class TestDeclared:
    """What torch promises of a function's gradient holds for a kernel's."""

    def gradients(self, hooks=None, norm=norm_by_kernel, dtype=torch.float32):
        x, weight, bias, mean, variance = (t.to(dtype) for t in make_images())
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        if hooks is None:
            y = norm(*leaves, mean, variance)
        else:
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                y = norm(*leaves, mean, variance)
        (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape)).sum().backward()
        return [leaf.grad for leaf in leaves]

    @pytest.mark.parametrize(
        "unpack",
        [
            lambda t: t.contiguous(),
            lambda t: t.clone(),
            lambda t: torch.stack([t, t], -1)[..., 0],
            lambda t: t.double(),
            lambda t: t.to(torch.bfloat16).double() * 0 + t.double(),
            lambda t: nn.Parameter(t),
            lambda t: t.as_subclass(Subclass),
            lambda t: t.neg().view(torch.float32).neg(),
            lambda t: torch._neg_view(-t),
        ],
    )
    def test_hooks_that_keep_the_numbers(self, unpack):
        expected = self.gradients()
        for ours, true in zip(self.gradients((lambda t: t, unpack)), expected, strict=True):
            assert torch.allclose(ours, true, rtol=1e-5, atol=1e-5) and type(ours) is torch.Tensor

    @pytest.mark.parametrize(
        "unpack", [lambda t: t[:1], lambda t: t.flatten(), lambda t: torch.cat([t, t]), lambda t: t[None]]
    )
    def test_hooks_that_change_the_size(self, unpack):
        with pytest.raises(UsageError, match="a hook for saved tensors gave back a tensor of shape"):
            self.gradients((lambda t: t, unpack))

    def test_in_place_changes_are_caught(self):
        for which in (0, 1):
            tensors = make_images()
            leaves = [t.requires_grad_() for t in tensors[:3]]
            y = norm_by_kernel(*leaves, *tensors[3:])
            with torch.no_grad():
                leaves[which].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()

    def test_swapped_data_is_no_danger(self):
        x, weight, bias, *running = make_images()
        y = norm_by_kernel(x.requires_grad_(), weight.requires_grad_(), bias, *running)
        weight.data = torch.ones(2)
        x.data = torch.ones(1, 1, 1, 1)
        with pytest.raises((UsageError, RuntimeError)):
            y.sum().backward()

    def test_second_derivatives_are_torchs(self):
        def penalty(norm, dtype):
            x, weight, bias, *running = (t.to(dtype) for t in make_images())
            leaves = [t.requires_grad_() for t in (x, weight, bias)]
            y = norm(*leaves, *running)
            (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
            (slope.square().sum() + y.sum()).backward()
            return [leaf.grad for leaf in leaves]

        def by_torch(x, weight, bias, mean, variance):
            return torch_batch_norm(x, mean, variance, weight, bias, True, 0.3, 1e-5)

        for ours, true in zip(penalty(norm_by_kernel, torch.float32), penalty(by_torch, torch.float64), strict=True):
            assert float((ours.double() - true).abs().max()) < 1e-4 * float(true.abs().max())

    def test_a_graph_is_walked_once_as_torchs_is(self):
        x, *rest = make_images()
        y = norm_by_kernel(x.requires_grad_(), *rest)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.sum().backward()
