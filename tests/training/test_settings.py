"""What a recipe may use beside its rates: smoothed labels, averaged weights, a loose start, exact statistics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import pcdeq
from pcdeq.data import Batches, load_dataset
from pcdeq.errors import UsageError
from pcdeq.models import L, load
from pcdeq.recipes import TrainConfig
from pcdeq.training import evaluate, resume, session, train, trainer
from pcdeq.training.averaging import RISE
from pcdeq.training.objective import plain_loss
from pcdeq.training.optim import learning_rate


def test_each_is_off_unless_asked_for():
    config = TrainConfig("pcdeq-1-mc-relu6", data="mnist").resolve()
    assert (config.smoothing, config.average, config.loosen, config.recalibrate) == (0.0, 0.0, 1.0, False)
    assert config.scale_rate == 1.0
    assert config.batch_size == 64


def test_the_average_is_tested_and_saved_and_training_goes_on_without_it(tiny, tmp_path, monkeypatch):
    seen = []
    step = session.Session.step

    def record(self, number):
        step(self, number)
        seen.append((number, self.network.classifier.weight.detach().clone()))

    monkeypatch.setattr(session.Session, "step", record)
    average = train(replace(tiny, average=0.9), progress="none")
    steps, seen = seen, []
    train(replace(tiny, out=tmp_path / "without"), progress="none")
    assert [number for number, _ in steps] == list(range(1, len(steps) + 1))
    assert all(torch.equal(one[1], two[1]) for one, two in zip(steps, seen, strict=True))  # the same dynamics
    wanted = None
    for number, weight in steps:
        keep = min(0.9, (1 + number) / (RISE + number))
        wanted = initial(tiny) if wanted is None else wanted
        wanted = keep * wanted + (1 - keep) * weight
    network = load(average)
    torch.testing.assert_close(network.classifier.weight.detach(), wanted)
    assert evaluate(average)[0].accuracy == average.accuracy
    assert bool((network.deq.operator.weight_v >= 0).all())
    assert torch.equal(average.load().trained["classifier.weight"], steps[-1][1])


def initial(config: TrainConfig) -> torch.Tensor:
    return session.open_session(config, quiet=True).network.classifier.weight.detach().clone()


def test_scales_learn_at_their_part_of_the_rate(tiny, monkeypatch):
    """After one step of AdamW without decay each parameter has moved by its rate, wherever its gradient is not 0."""
    moved = {}
    step = session.Session.step

    def record(self, number):
        before = {name: parameter.detach().clone() for name, parameter in self.network.named_parameters()}
        step(self, number)
        if number == 1:
            rate = learning_rate(self.config, 0.0)
            for name, parameter in self.network.named_parameters():
                moved[name] = (parameter.detach() - before[name]).abs().max().item() / rate

    monkeypatch.setattr(session.Session, "step", record)
    settings = {"epochs": 1, "lr": 1e-3, "schedule": "one-cycle", "lr_step": None, "weight_decay": 0.0}
    run = train(replace(tiny, scale_rate=0.03, **settings), progress="none")
    assert moved.pop("deq.operator.weight_g") == pytest.approx(0.03, rel=0.01)
    moved.pop("lift.bias")  # which batch norm takes out again: it has no gradient but rounding
    assert moved and all(part == pytest.approx(1.0, rel=0.01) for part in moved.values())
    groups = run.load().optimizer["param_groups"]
    assert groups[1]["lr"] == pytest.approx(0.03 * groups[0]["lr"])


def test_a_resumed_run_keeps_the_rate_of_its_scales(tiny, tmp_path):
    settings = {"scale_rate": 0.03, "schedule": "constant", "lr_step": None}
    whole = train(replace(tiny, epochs=2, out=tmp_path / "whole", **settings), progress="none")
    parted = train(replace(tiny, epochs=1, out=tmp_path / "parted", **settings), progress="none")
    parted = resume(parted, epochs=2, progress="none")
    one, two = load(whole).state_dict(), load(parted).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_smoothing_is_descended_and_not_reported():
    torch.manual_seed(0)
    network, images, labels = L((8,)), torch.rand(5, 1, 28, 28), torch.arange(5)
    logits, loss, descended = plain_loss(network, images, labels, smoothing=0.2)
    mean = -logits.log_softmax(1).mean(1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum"))
    torch.testing.assert_close(descended, 0.8 * loss + 0.2 * mean.sum())


def test_a_loose_start_saves_steps_and_ends_at_the_tolerance(tiny, monkeypatch, tmp_path):
    used = []
    add = trainer.add_gradients

    def watch(*arguments):
        add(*arguments)
        layer = arguments[1].deq
        used.append((layer.solver.tol, layer.adjoint_solver.tol))

    monkeypatch.setattr(trainer, "add_gradients", watch)
    loose = train(replace(tiny, epochs=5, loosen=100.0), progress="none")
    plain = train(replace(tiny, epochs=5, out=tmp_path / "plain"), progress="none")
    tolerances = [forward for forward, backward in used if forward == backward][: len(used) // 2]
    assert tolerances[0] == pytest.approx(1e-2) and tolerances == sorted(tolerances, reverse=True)
    assert set(tolerances[-len(tolerances) // 5 :]) == {1e-4}
    assert loose.metrics[0].forward_steps[0] < 0.8 * plain.metrics[0].forward_steps[0]
    (layer,) = pcdeq.models.equilibrium_layers(load(loose))
    assert layer.solver.tol == 1e-4


def test_statistics_at_the_end_are_those_of_all_training_images(tiny, tmp_path):
    run = train(replace(tiny, recalibrate=True), progress="none")
    without = train(replace(tiny, out=tmp_path / "without"), progress="none")
    dataset, network = load_dataset(str(tiny.data)), load(run)
    mean, std = run.preprocessing.mean, run.preprocessing.std
    (images, _), *_ = Batches(dataset.train, len(dataset.train), mean=mean, std=std)
    first = network.lift(images.flatten(1))
    torch.testing.assert_close(network.lift_norm.running_mean, first.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(network.lift_norm.running_var, first.var(0), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(load(without).lift_norm.running_mean, first.mean(0), atol=1e-5, rtol=1e-5)
    assert evaluate(run)[0].accuracy == run.accuracy
    assert [line.test_loss for line in run.metrics[:-1]] == [line.test_loss for line in without.metrics[:-1]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"loosen": 10.0}, "the tightening of the tolerance was"), ({"recalibrate": True}, "the new statistics of batch")],
)
def test_what_is_laid_out_for_a_number_of_epochs_keeps_it(settings, message, tiny):
    run = train(replace(tiny, epochs=1, lr_step=None, **settings), progress="none")
    with pytest.raises(UsageError, match=f"{message}.* planned for 1 epochs; they cannot be changed"):
        resume(run, epochs=2, progress="none")


@pytest.mark.parametrize(
    "wrong",
    [
        {"smoothing": 1.0},
        {"average": -0.1},
        {"average": 1.0},
        {"loosen": 0.5},
        {"loosen": float("inf")},
        {"scale_rate": 0.0},
    ],
)
def test_impossible_values(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be"):
        TrainConfig(**wrong)
