"""Memory of the CPU that is kept, not given back to the system, while a network is trained."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# Usual is where glibc's own rule ends after large blocks: those above 32 MB are mapped one by one, at most 65536 of
# them, and the heap shrinks when 64 MB at its end are free. Kept: none is mapped, and the heap all but never shrinks.
_USUAL = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20))
_KEPT = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, (1 << 31) - 1))


@contextmanager
def kept_memory() -> Iterator[None]:
    """Hand out again what tensors gave back.

    glibc returns large blocks to the system, which hands them out anew page by page, filled with zeros: with the
    tensors of every layer of every step that is a sixth of the time of SC, and a tenth of MC's. Elsewhere nothing
    changes.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    try:
        for option, value in _KEPT:
            libc.mallopt(option, value)
        yield
    finally:
        for option, value in _USUAL:
            libc.mallopt(option, value)
        libc.malloc_trim(0)
