"""Memory that is kept while a network is trained."""

import ctypes
import platform

import pytest
import torch

from pcdeq.training.memory import kept_memory


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is a mapping of its own, by the bit that glibc keeps in the word before each block.

    Counts of all mappings (mallinfo2) will not do: whatever else is freed in the meantime changes them.
    """
    return bool(ctypes.c_size_t.from_address(tensor.data_ptr() - ctypes.sizeof(ctypes.c_size_t)).value & 2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
class TestKeptMemory:
    def test_large_tensors_are_of_the_heap_inside_and_of_the_system_outside(self):
        with kept_memory():
            assert not is_mapped(torch.zeros(10_000_000))
        assert is_mapped(torch.zeros(10_000_000))

    def test_an_error_ends_it_too(self):
        with pytest.raises(ZeroDivisionError), kept_memory():
            raise ZeroDivisionError
        assert is_mapped(torch.zeros(10_000_000))
