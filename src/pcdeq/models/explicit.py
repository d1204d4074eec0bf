"""The networks' batch norm and max pooling, faster than torch's where channels are few.

Drop-in subclasses: same parameters, same numbers, and torch's own code wherever the kernels do not
apply (another dtype or device, another memory format, no compiler at install time).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pcdeq.kernels import KERNELS

# Below this many numbers a second thread costs more than it saves.
PARALLEL_FROM = 32_768


def _threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() >= PARALLEL_FROM else 1


def _by_rows(x: Tensor) -> bool:
    """Whether x is float32 on a CPU with the channels of each place next to each other in memory."""
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    if x.ndim == 4:
        return plain and x.is_contiguous(memory_format=torch.channels_last)
    return plain and x.ndim == 2 and x.is_contiguous()


class _BatchNorm(torch.autograd.Function):
    """Normalisation by the statistics of the batch; gives the mean and variance too, without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert KERNELS is not None
        channels = x.shape[1]
        y = torch.empty_like(x)
        mean, inverse, variance = torch.empty(3, channels).unbind()
        out = (y.data_ptr(), mean.data_ptr(), inverse.data_ptr(), variance.data_ptr())
        inputs = (x.data_ptr(), weight.data_ptr(), bias.data_ptr())
        KERNELS.batch_norm_forward(x.numel() // channels, channels, *inputs, *out, eps, _threads(x))
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert KERNELS is not None
        x, weight, mean, inverse = ctx.saved_tensors
        grad = _laid_out_like(grad, x)
        grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        inputs = (grad.data_ptr(), x.data_ptr(), weight.data_ptr(), mean.data_ptr(), inverse.data_ptr())
        out = (grad_x.data_ptr(), grad_weight.data_ptr(), grad_bias.data_ptr())
        channels = x.shape[1]
        KERNELS.batch_norm_backward(x.numel() // channels, channels, *inputs, *out, _threads(x))
        return grad_x, grad_weight, grad_bias, None


def _laid_out_like(grad: Tensor, x: Tensor) -> Tensor:
    if x.ndim == 4:
        return grad.contiguous(memory_format=torch.channels_last)
    return grad.contiguous()


class _FastBatchNorm(nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        applies = KERNELS is not None and self.affine and self.track_running_stats and _by_rows(input)
        if not applies or self.momentum is None or self.weight.dtype != torch.float32:
            return super().forward(input)
        if not self.training:
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)  # pyright: ignore
            shift = self.bias - self.running_mean * scale  # pyright: ignore
            shape = (1, -1, *[1] * (input.ndim - 2))
            return torch.addcmul(shift.view(shape), input, scale.view(shape))
        count = input.numel() // input.shape[1]
        if count < 2:
            return super().forward(input)  # for torch's error message
        y, mean, variance = _BatchNorm.apply(input, self.weight, self.bias, self.eps)  # pyright: ignore
        with torch.no_grad():
            self.num_batches_tracked += 1  # pyright: ignore
            self.running_mean.lerp_(mean, self.momentum)  # pyright: ignore
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)  # pyright: ignore
        return y


class BatchNorm1d(_FastBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, faster on a CPU."""


class BatchNorm2d(_FastBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, faster on channels-last images on a CPU."""


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert KERNELS is not None
        samples, channels, height, width = x.shape
        y = torch.empty_like(x)
        which = torch.empty_like(x, dtype=torch.int32)
        sizes = (samples, height, width, channels)
        KERNELS.max_pool_forward(*sizes, x.data_ptr(), y.data_ptr(), which.data_ptr(), _threads(x))
        ctx.save_for_backward(which)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert KERNELS is not None
        (which,) = ctx.saved_tensors
        samples, channels, height, width = which.shape
        grad = _laid_out_like(grad, which)
        grad_x = torch.empty_like(grad)
        sizes = (samples, height, width, channels)
        KERNELS.max_pool_backward(*sizes, grad.data_ptr(), which.data_ptr(), grad_x.data_ptr(), _threads(grad))
        return grad_x


class MaxPool3x3(nn.MaxPool2d):
    """`torch.nn.MaxPool2d` with a window of 3x3 and stride 1 that keeps the size, faster on a CPU."""

    def __init__(self) -> None:
        super().__init__(3, stride=1, padding=1)

    def forward(self, input: Tensor) -> Tensor:
        if KERNELS is not None and input.ndim == 4 and _by_rows(input):
            return _MaxPool.apply(input)  # pyright: ignore[reportReturnType]
        return super().forward(input)  # pyright: ignore[reportReturnType]
