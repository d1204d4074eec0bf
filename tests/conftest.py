"""What every test starts from: one thread, a fixed seed, reproducible hypothesis examples."""

from __future__ import annotations

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # the tensors are tiny: threads only cost

hypothesis.settings.register_profile(
    "pcdeq",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("pcdeq")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
