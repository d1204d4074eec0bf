"""A run short enough to be made many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from pcdeq.recipes import TrainConfig


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
