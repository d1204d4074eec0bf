"""Memory that is kept while a network is trained."""

import ctypes
import platform

import pytest
import torch

from pcdeq.training.memory import kept_memory

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Usage(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def own_blocks() -> int:
    """How many blocks of memory are the system's own."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Usage
    return ask().hblks


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
class TestKeptMemory:
    def test_large_tensors_are_of_the_heap_inside_and_of_the_system_outside(self):
        before = own_blocks()
        with kept_memory():
            inside = torch.zeros(10_000_000)
            assert own_blocks() == before
        outside = torch.zeros(10_000_000)
        assert own_blocks() > before
        assert inside.equal(outside)

    def test_an_error_ends_it_too(self):
        before = own_blocks()
        with pytest.raises(ZeroDivisionError), kept_memory():
            raise ZeroDivisionError
        outside = torch.zeros(10_000_000)
        assert own_blocks() > before, outside
