"""Two processes on one machine: the same gradients, nearly the same training."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pcdeq.training import Run, train

WORKER = Path(__file__).with_name("two_processes.py")
spec = importlib.util.spec_from_file_location("two_processes", WORKER)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)


def test_gradients_are_those_of_one_process(both):
    first, second = (torch.load(both / f"gradients{rank}.pt", weights_only=True) for rank in (0, 1))
    for index, count in enumerate(2 * worker.BATCHES):
        model = worker.make_model()
        images, labels = worker.make_batch(count)
        F.cross_entropy(model(images), labels).backward()
        for parameter, one, two in zip(model.parameters(), first[index], second[index], strict=True):
            assert torch.equal(one, two)
            torch.testing.assert_close(parameter.grad, one, rtol=1e-3, atol=1e-5)


def test_training_is_nearly_that_of_one_process(both, tiny, tmp_path):
    config = replace(tiny, epochs=4, lr=3e-3, lr_step=None, channels=(16,), batch_size=50, out=tmp_path / "one")
    alone = train(config, progress="none").metrics
    together = Run.open(both / "plain").metrics
    # Batch norm sees 25 images in each process instead of 50: the curves agree, the bits do not.
    for one, two in zip(alone, together, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=0.05)
    assert together[0].loss != alone[0].loss


def test_one_process_speaks(both):
    assert len((both / "out").read_text().splitlines()) == 4 + 1 + 2 + 1  # the epochs and the summary of either run
