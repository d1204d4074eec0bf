"""The few numbers a sample by which a solve is steered: norms, limits, counts.

On a CPU they are numpy's, as a call of torch takes ten times as long for a batch's worth of them; elsewhere they stay
tensors of the device, so that nobody waits for it. What is computed with them is written once, for either library.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

Numbers = Any  # an array of numpy, or a tensor
READABLE = frozenset(("cpu",))  # devices whose memory the host reads without waiting


def at_hand(like: Tensor) -> bool:
    """Whether the numbers in such a tensor can be read without waiting, and nobody must see what becomes of them."""
    plain = type(like) is Tensor and like.device.type in READABLE and not is_functorch_wrapped_tensor(like)
    return plain and not torch.compiler.is_compiling()


def numbers(tensor: Tensor) -> Numbers:
    """The tensor's numbers: as an array, which shares its memory, where they are at hand."""
    return tensor.numpy() if at_hand(tensor) else tensor


def host_numbers(tensor: Tensor) -> Numbers:
    """The tensor's numbers as an array, for which the host waits where they are not at hand."""
    if at_hand(tensor):
        return tensor.numpy()
    return np.array(tensor.tolist(), np.float64 if tensor.dtype is torch.float64 else np.float32)


def alike(tensor: Tensor, values: Numbers) -> Numbers:
    """The tensor's numbers in the form of others, whose tensor was at hand or was not."""
    return tensor if isinstance(values, Tensor) else tensor.numpy()


def by_memory(states: Tensor) -> Tensor:
    """A view in the order in which the numbers lie, be channels first or last, so that a sample is one piece."""
    return states if states.is_contiguous() else states.movedim(1, -1)


def rows(states: Tensor, samples: Tensor) -> Tensor:
    """Some of the samples, in the same layout."""
    if states.is_contiguous() or states.ndim < 3:
        return states.index_select(0, samples)
    return by_memory(states).index_select(0, samples).movedim(-1, 1)


def library(values: Numbers) -> ModuleType:
    """numpy or torch; ``where``, ``minimum`` and ``maximum`` mean the same in both."""
    return torch if isinstance(values, Tensor) else np


def plus_product(values: Numbers, a: Numbers, b: Numbers, factor: float) -> Numbers:
    """values + factor a b, which is one operator of a device."""
    return torch.addcmul(values, a, b, value=factor) if isinstance(values, Tensor) else values + factor * a * b


def spread(values: Numbers, like: Tensor) -> Tensor:
    """One number a sample, or one for all, in a shape that broadcasts over (samples, *state)."""
    values = values.reshape(-1, *[1] * (like.ndim - 1))
    values = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return values if values.dtype in (like.dtype, torch.bool) else values.to(like.dtype)
