"""How an input becomes nonnegative: the paper's two injections, and their gradients.

They are written out, instead of left to autograd, because torch's softplus takes longer than a
convolution, and so that a layer can be one node of the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pcdeq.kernels import KERNELS, is_native, threads

BETA = 5.0  # the paper's


class Softplus(torch.autograd.Function):
    """log(1 + exp(5x)) / 5 + floor: positive, for pcDEQ-1."""

    @staticmethod
    def value(x: Tensor, floor: float) -> Tensor:
        if KERNELS is None or not is_native(x):
            return F.softplus(x, beta=BETA) + floor
        y = torch.empty_like(x)
        KERNELS.softplus(x.numel(), BETA, floor, x.data_ptr(), y.data_ptr(), threads(x))
        return y

    @staticmethod
    def gradient(x: Tensor, grad: Tensor) -> Tensor:
        if KERNELS is None or not is_native(x) or torch.is_grad_enabled():
            return grad * torch.sigmoid(BETA * x)
        grad = grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
        result = torch.empty_like(x)
        pointers = (x.data_ptr(), grad.data_ptr(), result.data_ptr())
        KERNELS.softplus_gradient(x.numel(), BETA, *pointers, threads(x))
        return result

    @staticmethod
    def forward(ctx, x: Tensor, floor: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return Softplus.value(x, floor)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return Softplus.gradient(x, grad), None


class Relu:
    """max(x, 0) + floor: nonnegative, for pcDEQ-2."""

    @staticmethod
    def value(x: Tensor, floor: float) -> Tensor:
        return F.relu(x) + floor if floor else F.relu(x)

    @staticmethod
    def gradient(x: Tensor, grad: Tensor) -> Tensor:
        return grad * (x > 0)

    apply = value  # torch differentiates it
