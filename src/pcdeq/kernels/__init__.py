"""Optional C kernels for float32 on a CPU, and the one place that loads them."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch  # its OpenMP runtime must be loaded before the kernels
from torch import Tensor
from torch.nn import Parameter

# Below this many numbers a second thread costs more than it saves.
PARALLEL_FROM = 32_768
_FLOAT32 = torch.float32
# What the functions of the compiled module take; module.c has the same number.
INTERFACE = 2


def _load() -> Any | None:
    """The compiled module, or None where it was not built or `PCDEQ_KERNELS=0` asks for plain torch."""
    if os.environ.get("PCDEQ_KERNELS") == "0":
        return None
    try:
        kernels = importlib.import_module("pcdeq._kernels")
    except ImportError:
        return None
    if getattr(kernels, "INTERFACE", None) != INTERFACE:
        warnings.warn("the C kernels of pcdeq are of another version and not used: install it anew", stacklevel=2)
        return None
    return kernels


KERNELS = None


def in_memory(x: Tensor) -> bool:
    """Whether x is what the kernels take, but for its layout: numbers of float32 in the memory of this process.

    Not, that is, a subclass, which may hold its numbers elsewhere, nor one of torch's lazy tensors.
    """
    kind = type(x)
    if not (kind is Tensor or kind is Parameter) or x.dtype is not _FLOAT32 or not x.is_cpu or x.is_neg():
        return False
    try:
        return x.data_ptr() != 0 or not x.numel()
    except RuntimeError:  # sparse, or within one of torch.func's transforms
        return False


def is_plain(x: Tensor) -> bool:
    """The same, in torch's usual layout without gaps."""
    return in_memory(x) and x.is_contiguous()


def is_native(x: Tensor) -> bool:
    """The same, not empty, and without gaps in one of the layouts that images have."""
    if not in_memory(x) or not x.numel():
        return False
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def threads(x: Tensor) -> int:
    """How many threads are worth their while for one pass over x."""
    return torch.get_num_threads() if x.numel() >= PARALLEL_FROM else 1
