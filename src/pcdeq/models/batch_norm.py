"""The networks' batch norm and max pooling, faster than torch's where channels are few, and a faster layout.

Drop-in subclasses: same parameters, same numbers, and torch's own code wherever the kernels do not
apply (another dtype or device, another memory format, no compiler at install time).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pcdeq.kernels import KERNELS, is_native, threads

# A dense weight with fewer numbers is too small for its layout to matter.
WIDE_FROM = 32_768


def lay_out(model: nn.Module) -> None:
    """Put each column of a wide dense weight into one piece of memory, as `channels_last` does for convolutions.

    The numbers are the same; the product of a small batch with such a weight, and that of its gradient, are faster on a
    CPU. But such a weight is not contiguous, which some tools want: so this is for our trainer and for frozen networks,
    not for those that are handed out.
    """
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.is_cpu and layer.weight.numel() >= WIDE_FROM:
            layer.weight.data = layer.weight.data.t().contiguous().t()


def _by_rows(x: Tensor) -> bool:
    """Whether the kernels take x: an image with the channels of each pixel next to each other in memory."""
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and is_native(x)


def _rows(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[1], x.shape[1]


class _BatchNorm(torch.autograd.Function):
    """Normalisation by the statistics of the batch; updates the running ones."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, momentum: float, eps: float
    ) -> Tensor:
        y, statistics = normalise(x, weight, bias, mean, variance, momentum, eps)
        ctx.save_for_backward(x, weight, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad.contiguous(memory_format=torch.channels_last)
        return *normalise_gradients(grad, *ctx.saved_tensors), None, None, None, None


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Batch norm by the kernel, and the batch's statistics; updates the running ones, the mean and the variance."""
    assert KERNELS is not None
    y, statistics = torch.empty_like(x), torch.empty(2, x.shape[1], dtype=torch.float32, device="cpu")
    pointers = (x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr(), *_pair(statistics))
    running = (mean.data_ptr(), variance.data_ptr(), momentum)
    KERNELS.batch_norm_forward(*_rows(x), *pointers, *running, eps, threads(x))
    return y, statistics


def normalise_gradients(grad: Tensor, x: Tensor, weight: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients with respect to x, weight and bias; ``grad`` must lie in memory as x does."""
    assert KERNELS is not None
    grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    inputs = (grad.data_ptr(), x.data_ptr(), weight.data_ptr(), *_pair(statistics))
    out = (grad_x.data_ptr(), grad_weight.data_ptr(), grad_bias.data_ptr())
    KERNELS.batch_norm_backward(*_rows(x), *inputs, *out, threads(x))
    return grad_x, grad_weight, grad_bias


def _pair(statistics: Tensor) -> tuple[int, int]:
    """Addresses of the mean and of 1 / sqrt(variance + eps)."""
    start = statistics.data_ptr()
    return start, start + statistics.shape[1] * statistics.element_size()


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, faster on channels-last images on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        usual = KERNELS is not None and self.affine and self.track_running_stats and self.momentum is not None
        if not usual or not _by_rows(input) or self.weight.dtype != torch.float32:
            return super().forward(input)
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        if not self.training:
            return self._infer(input, *tensors)  # pyright: ignore[reportArgumentType]
        if input.numel() == input.shape[1]:
            return super().forward(input)  # for torch's error message
        self.num_batches_tracked += 1  # pyright: ignore[reportOperatorIssue]
        return _BatchNorm.apply(input, *tensors, self.momentum, self.eps)  # pyright: ignore[reportReturnType]

    def _infer(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        assert KERNELS is not None
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad):
            return super().forward(x)
        y = torch.empty_like(x)
        pointers = (t.data_ptr() for t in (x, weight, bias, mean, variance, y))
        KERNELS.batch_norm_inference(*_rows(x), *pointers, self.eps, threads(x))
        return y


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert KERNELS is not None
        samples, channels, height, width = x.shape
        y = torch.empty_like(x)
        which = torch.empty_like(x, dtype=torch.int32)
        sizes = (samples, height, width, channels)
        KERNELS.max_pool_forward(*sizes, x.data_ptr(), y.data_ptr(), which.data_ptr(), threads(x))
        ctx.save_for_backward(which)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert KERNELS is not None
        (which,) = ctx.saved_tensors
        samples, channels, height, width = which.shape
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_x = torch.empty_like(grad)
        sizes = (samples, height, width, channels)
        KERNELS.max_pool_backward(*sizes, grad.data_ptr(), which.data_ptr(), grad_x.data_ptr(), threads(grad))
        return grad_x


class MaxPool3x3(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` with a window of 3x3 and stride 1 that keeps the size, faster on a CPU."""

    def __init__(self) -> None:
        super().__init__(3, stride=1, padding=1)

    def forward(self, input: Tensor) -> Tensor:
        if KERNELS is not None and _by_rows(input):
            return _MaxPool.apply(input)  # pyright: ignore[reportReturnType]
        return super().forward(input)  # pyright: ignore[reportReturnType]
