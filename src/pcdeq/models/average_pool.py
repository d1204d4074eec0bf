"""Average pooling whose gradient comes back as images lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor

from pcdeq.parametrisation import is_transformed
from pcdeq.proofs.network import know_twin


class AvgPool2d(nn.AvgPool2d):
    """`torch.nn.AvgPool2d`, with a faster backward pass on channels-last images: same numbers.

    Behind a flattening the gradient comes in the other layout. On a CPU torch's backward pass then takes the whole
    image to that one and back, not the average: a tenth of a training step of the SC networks.
    """

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        plain = not (torch.compiler.is_compiling() or is_transformed())
        if y.requires_grad and plain and _is_channels_last(input):
            y.register_hook(_lay_out)
        return y


def _lay_out(grad: Tensor | None) -> Tensor | None:
    if grad is None or is_legacy_batchedtensor(grad):  # which has no layout
        return grad
    return grad.contiguous(memory_format=torch.channels_last)


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


know_twin(AvgPool2d, nn.AvgPool2d)
