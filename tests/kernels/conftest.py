"""What the tests of the kernels share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def threads():
    """Sets how many threads torch may use, for the time of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
