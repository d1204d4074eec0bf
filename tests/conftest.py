"""What every test starts from: one thread, a fixed seed, reproducible hypothesis examples."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from pcdeq.data import load_dataset

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


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 digits to train on and 50 to test; 150 = 4 batches of 32 and a smaller one."""
    mini = load_dataset("mnist-mini")
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    # Every 26th of 4,000: the file is sorted by class or not, all classes are there.
    train, test = mini.train.select(_spread(len(mini.train), 150)), mini.test.select(_spread(len(mini.test), 50))
    np.savez(
        path,
        x_train=train.images.numpy(),
        y_train=train.labels.numpy(),
        x_test=test.images.numpy(),
        y_test=test.labels.numpy(),
    )
    return path


def _spread(total: int, count: int) -> torch.Tensor:
    return torch.linspace(0, total - 1, count).long()


@pytest.fixture
def threads():
    """Sets how many threads torch may use, for the time of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
