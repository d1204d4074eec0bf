"""Odd surroundings: what a program may have switched on around a proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from pcdeq.kernels import binding


@contextmanager
def _precision(word: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(word)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Plain torch, as on a machine without a compiler."""
    held, binding.solve = binding.solve, lambda *arguments, **options: None
    try:
        yield
    finally:
        binding.solve = held


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "onednn off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "medium precision": lambda: _precision("medium"),
    "deterministic": _deterministic,
    "denormals flushed": _flushing,
    "kernels off": without_kernels,
}
