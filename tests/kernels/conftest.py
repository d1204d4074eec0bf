"""What the tests of the kernels share."""

from __future__ import annotations

import pytest

from pcdeq.kernels import binding


@pytest.fixture
def kernel_threads(threads):
    """The same, for kernels that have threads."""
    if binding._KERNELS.MOST_THREADS == 1:
        pytest.skip("built without OpenMP")
    return threads
