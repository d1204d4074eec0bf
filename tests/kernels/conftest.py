"""What the tests of the kernels share."""

from __future__ import annotations

import pytest
import torch

from pcdeq.kernels import binding


@pytest.fixture
def threads():
    """Sets how many threads torch may use, for the time of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def kernel_threads(threads):
    """The same, for kernels that have threads."""
    if binding._KERNELS.MOST_THREADS == 1:
        pytest.skip("built without OpenMP")
    return threads
