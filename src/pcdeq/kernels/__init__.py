"""Optional C kernels for float32 on a CPU, and the one place that loads them."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch  # its OpenMP runtime must be loaded before the kernels
from torch import Tensor

# Below this many numbers a second thread costs more than it saves.
PARALLEL_FROM = 32_768


def _load() -> Any | None:
    """The compiled module, or None where it was not built or `PCDEQ_KERNELS=0` asks for plain torch."""
    if os.environ.get("PCDEQ_KERNELS") == "0":
        return None
    try:
        return importlib.import_module("pcdeq._kernels")
    except ImportError:
        return None


KERNELS = _load()


def is_native(x: Tensor) -> bool:
    """Whether x is what the kernels take: float32 on a CPU, without gaps."""
    if x.dtype != torch.float32 or not x.is_cpu or not x.numel():
        return False
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def threads(x: Tensor) -> int:
    """How many threads are worth their while for one pass over x."""
    return torch.get_num_threads() if x.numel() >= PARALLEL_FROM else 1
