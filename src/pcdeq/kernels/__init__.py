"""Optional C kernels for float32 on a CPU, and the one place that loads them."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch  # noqa: F401  its OpenMP runtime must be loaded before the kernels


def _load() -> Any | None:
    """The compiled module, or None where it was not built or `PCDEQ_KERNELS=0` asks for plain torch."""
    if os.environ.get("PCDEQ_KERNELS") == "0":
        return None
    try:
        return importlib.import_module("pcdeq._kernels")
    except ImportError:
        return None


KERNELS = _load()
