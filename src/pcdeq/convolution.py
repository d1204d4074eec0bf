"""Convolutions in float64: by a kernel, or by torch in pieces whose columns stay in the cache.

torch multiplies float64 as matrices, and writes out the columns of a whole batch for it, each number as often as the
kernel has places, in memory that is new each time. A few samples at a time take a third to a fifth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pcdeq.kernels import binding

# So many numbers of columns at a time: 4 MB.
COLUMNS = 500_000


def convolve(
    x: Tensor,  # (samples, channels, *space)
    weight: Tensor,  # (outputs, channels, *kernel)
    plus: Tensor | None = None,  # (samples, outputs, *space)
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
) -> Tensor:
    """A convolution padded with zeros, and what is to be added to it.

    >>> import torch
    >>> x, weight = torch.rand(40, 3, 32, 32, dtype=torch.float64), torch.rand(4, 3, 5, 5, dtype=torch.float64)
    >>> torch.allclose(convolve(x, weight), torch.conv2d(x, weight))
    True
    """
    stride, padding = tuple(stride), tuple(padding)
    if x.dtype is torch.float64:
        found = binding.convolve(x, weight, plus, stride, padding)
        if found is None and binding.are_plain(x, weight, *([] if plus is None else [plus]), dtype=x.dtype):
            found = _in_pieces(x, weight, plus, stride, padding)
        if found is not None:
            return found
    found = _convolution(x, weight, stride, padding)
    return found if plus is None else found.add_(plus)


def _in_pieces(
    x: Tensor, weight: Tensor, plus: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor | None:
    """None if it is one piece, or none of torch's."""
    if x.ndim != weight.ndim or x.shape[1] != weight.shape[1]:
        return None
    ends = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    places = [(size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in ends]
    columns = max(1, math.prod(places) * weight[0].numel())
    size = max(torch.get_num_threads(), COLUMNS // columns)
    if len(x) <= size or min(places) < 1:
        return None
    images = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if images else torch.contiguous_format
    y = torch.empty(len(x), len(weight), *places, dtype=x.dtype, device=x.device, memory_format=layout)
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        found = _convolution(x[part], weight, stride, padding)
        torch.add(found, plus[part], out=y[part]) if plus is not None else y[part].copy_(found)
    return y


def _convolution(x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
    """torch's."""
    return (torch.conv1d, torch.conv2d, torch.conv3d)[weight.ndim - 3](x, weight, None, stride, padding)
