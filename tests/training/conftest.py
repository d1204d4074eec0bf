"""A run short enough to be made many times, and what two processes make together, once."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.fixture(scope="session")
def both(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have made: the gradients of either, ``plain`` and ``robust``, their runs, and ``out``."""
    folder = tmp_path_factory.mktemp("both")
    same = ("--data", str(tiny_data), "--device", "cpu", "--channels", "16", "--batch-size", "50", "--json")
    plain = ("train", "pcdeq-1-l-tanh", *same, "--out", str(folder / "plain"), "--epochs", "4", "--lr", "3e-3")
    robust = ("train", "pcdeq-1-l-tanh", *same, "--out", str(folder / "robust"), "--epochs", "2")
    worker, out = Path(__file__).with_name("two_processes.py"), ""
    # One start each: a process that is done leaves the group, in which the other may still be.
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", worker, folder)
    for command in (plain, (*robust, "--robust-radius", "0.1")):
        done = subprocess.run(
            [*start, *command],
            capture_output=True,
            text=True,
            timeout=180,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        out += done.stdout
    (folder / "out").write_text(out)
    return folder
