"""A data set small enough to train on many times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pcdeq.data import load_dataset
from pcdeq.recipes import TrainConfig


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


def _spread(total: int, count: int):
    import torch

    return torch.linspace(0, total - 1, count).long()


@pytest.fixture
def tiny(tiny_data: Path, tmp_path: Path) -> TrainConfig:
    """A run of a second: the L network, narrow, four epochs with a drop of the rate between them."""
    return TrainConfig(
        "pcdeq-1-l-tanh",
        data=str(tiny_data),
        channels=(12,),
        batch_size=32,
        epochs=4,
        lr_step=2,
        device="cpu",
        out=tmp_path / "run",
    )
