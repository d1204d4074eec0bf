"""Training with the certified loss: it makes predictions provable, resumes exactly and works in two processes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pcdeq
from pcdeq.cli import main
from pcdeq.data import load_dataset
from pcdeq.errors import UsageError
from pcdeq.models import Clip, L, Network, Preprocessing, load
from pcdeq.proofs.intervals import ends
from pcdeq.proofs.worst_case import worst_case_scores
from pcdeq.recipes import TrainConfig
from pcdeq.training import Interrupted, Run, resume, train, trainer
from pcdeq.training.objective import LARGEST_WEIGHT, RISE, CertifiedLoss, WorstCase, objective_after, plain_loss
from pcdeq.training.session import open_session

RADIUS = 0.1


@pytest.fixture
def robust(tiny) -> TrainConfig:
    return replace(tiny, robust_radius=RADIUS, lr_step=None)


def certified_accuracy(run: Run, dataset) -> float:
    """The share of test images whose right class is proved for every picture within the radius."""
    images, labels = run.preprocessing(dataset.test.images), dataset.test.labels
    scale = run.preprocessing
    certificate = pcdeq.certify(load(run), images, radius=scale.scaled(RADIUS), limits=scale.limits())
    return float((certificate.proved & (certificate.classes == labels)).double().mean())


def test_more_is_certified_than_after_plain_training(tmp_path):
    dataset = load_dataset("mnist-mini")
    config = TrainConfig("pcdeq-1-l-relu6", channels=(32,), epochs=6, device="cpu")
    plain = train(replace(config, out=tmp_path / "plain", lr=5e-3, lr_step=5), progress="none")
    robust = train(replace(config, out=tmp_path / "robust", robust_radius=RADIUS), progress="none")
    assert certified_accuracy(plain, dataset) < 0.1
    assert certified_accuracy(robust, dataset) > 0.65
    assert robust.accuracy > 85


def test_the_schedule_and_the_channels():
    config = TrainConfig("pcdeq-1-sc-tanh", epochs=10, robust_radius=RADIUS).resolve()
    colour = Preprocessing(mean=(0.0,) * 3, std=(0.1, 0.2, 0.4), classes=("a", "b"))
    found = [objective_after(config, colour, done) for done in (0, 5 * RISE, 10 * RISE, 9.9)]
    assert [objective.weight for objective in found] == [0, LARGEST_WEIGHT / 2, LARGEST_WEIGHT, LARGEST_WEIGHT]
    for objective, risen in zip(found, (0, 0.5, 1, 1), strict=True):
        reach = risen * config.training_radius * torch.tensor([10.0, 5.0, 2.5])
        torch.testing.assert_close(objective.radius.flatten(), reach)
    assert objective_after(replace(config, robust_radius=None), colour, 3) is plain_loss


def test_the_network_begins_with_a_clip_that_hides_noise_on_black_and_white(robust):
    session = open_session(robust, quiet=True)
    network, scale = session.network, session.preprocessing
    assert isinstance(network[0], Clip)
    reach = session.config.training_radius
    assert RADIUS < reach < 0.5
    pixels = torch.tensor([0.0, reach, 0.5, 1 - reach, 1.0]).view(-1, 1, 1, 1)
    noisy = network[0](scale.normalise(pixels + torch.tensor([1, -1, 0, 1, -1]).view(-1, 1, 1, 1) * reach))
    clipped = scale.normalise(pixels.clamp(reach, 1 - reach))
    torch.testing.assert_close(noisy, clipped)
    assert not isinstance(open_session(replace(robust, robust_radius=None), quiet=True).network[0], Clip)
    # A radius beyond one half leaves nothing to see, but is no error.
    limits = open_session(replace(robust, robust_radius=0.9), quiet=True).network[0]
    assert (limits.low < limits.high).all()


def test_explicit_layers_begin_with_weights_that_keep_the_width_of_bounds(robust):
    for row, channels in (("pcdeq-1-l-tanh", (400,)), ("pcdeq-1-mc-tanh", (40, 50, 60))):
        config = replace(robust, row=row, channels=channels)
        network = open_session(config, quiet=True).network
        plain = open_session(replace(config, robust_radius=None), quiet=True).network
        layers = [layer for layer in network if isinstance(layer, nn.Linear | nn.Conv2d)]
        sums = [layer.weight.abs().flatten(1).sum(1).mean().item() for layer in layers]
        assert sums == pytest.approx([2.0] * len(layers), rel=0.15)
        assert plain.classifier.weight.abs().sum(1).mean() > 3


def test_the_clip_is_saved_and_restored(robust, tmp_path):
    run = train(replace(robust, epochs=1), progress="none")
    network = load(run)
    images = network.preprocessing(load_dataset("mnist-mini").test.images[:8])
    again = Network.from_pretrained(network.save_pretrained(tmp_path / "saved"))
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert torch.equal(again[0].low, run.preprocessing.normalise(torch.tensor(run.config.training_radius)))
    torch.testing.assert_close(pcdeq.freeze(again)(images), network(images), rtol=1e-4, atol=1e-4)


def test_the_certified_loss_is_above_the_loss_under_attack(robust):
    run = train(robust, progress="none")
    network, scale, test = load(run), run.preprocessing, load_dataset("mnist-mini").test
    images, labels = scale(test.images[:64]), test.labels[:64]
    radius, limits = scale.scaled(RADIUS), scale.limits()
    with torch.no_grad():
        certified = F.cross_entropy(
            worst_case_scores(network, images, labels, radius, limits)[1], labels, reduction="none"
        )
    low, high = ends(images, radius, limits)
    near = low + torch.rand(images.shape) * (high - low)
    for _ in range(10):
        near.requires_grad_()
        loss = F.cross_entropy(network(near), labels, reduction="none")
        assert (loss <= certified + 1e-4).all()
        (grad,) = torch.autograd.grad(loss.sum(), near)
        near = torch.minimum(torch.maximum(near.detach() + radius / 4 * grad.sign(), low), high)
    assert loss.mean() > F.cross_entropy(network(images), labels)


def test_its_own_rates_unless_told(robust):
    by_row, told = TrainConfig("pcdeq-1-l-tanh", robust_radius=0.1), {"lr": 0.5, "epochs": 3, "batch_size": 7}
    ours = by_row.resolve()
    assert (ours.schedule, ours.lr_step) == ("one-cycle", None)
    changed = replace(by_row, **told).resolve()
    assert {name: getattr(changed, name) for name in told} == told
    assert TrainConfig("pcdeq-1-l-tanh", robust_radius=0.1, recipe="fast").resolve().epochs == 10
    assert TrainConfig("mondeq-mt", robust_radius=0.1).resolve().epochs == TrainConfig("mondeq-mt").resolve().epochs


def test_how_far_noise_reaches_follows_the_recipe_unless_told():
    config = TrainConfig("pcdeq-1-tc-relu6", data="cifar10", robust_radius=0.02)
    assert config.resolve().training_radius == pytest.approx(1.1 * 0.02)
    assert replace(config, data="mnist").resolve().training_radius == pytest.approx(1.5 * 0.02)
    assert replace(config, robust_reach=2.0).resolve().training_radius == pytest.approx(2 * 0.02)
    assert config.resolve().flip
    with pytest.raises(UsageError, match="robust_reach is in units of robust_radius"):
        replace(config, robust_radius=None, robust_reach=2.0).resolve()


def test_reported_is_the_loss_on_the_images():
    torch.manual_seed(0)
    network, images, labels = L((8,)), torch.rand(6, 1, 28, 28), torch.arange(6)
    limits = (torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    objective = CertifiedLoss(torch.full((1, 1, 1), 0.1), limits, 0.25)
    logits, loss, descended = objective(WorstCase(network), images, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum"))
    assert descended > loss


def test_resume_is_exact(robust, tmp_path, monkeypatch):
    whole = train(robust, progress="none")
    gradients, calls = trainer.add_gradients, []

    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == 5 + 3:  # five batches an epoch: while the radius rises
            raise KeyboardInterrupt
        gradients(*arguments)

    monkeypatch.setattr(trainer, "add_gradients", interrupt)
    with pytest.raises(Interrupted) as caught:
        train(replace(robust, out=tmp_path / "stopped"), progress="none")
    monkeypatch.undo()
    resumed = resume(caught.value.run, progress="none")
    assert resumed.config.robust_radius == RADIUS
    one, two = whole.load(), resumed.load()
    assert one.epoch == two.epoch == 4
    assert all(torch.equal(tensor, two.model[name]) for name, tensor in one.model.items())
    assert [line.loss for line in whole.metrics] == [line.loss for line in resumed.metrics]
    with pytest.raises(UsageError, match="planned for 4 epochs"):
        resume(resumed, epochs=5, progress="none")


def test_a_run_folder_from_before_the_option(tiny):
    run = train(replace(tiny, epochs=1, lr_step=None), progress="none")
    description = json.loads((run.path / "config.json").read_text())
    del description["config"]["robust_radius"]
    (run.path / "config.json").write_text(json.dumps(description))
    assert Run.open(run.path).config.robust_radius is None
    assert len(resume(run.path, epochs=2, progress="none").metrics) == 2


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"accumulate": 2}, {"row": "demo", "channels": (3, 4, 5), "lr_step": None}]
)
def test_with_other_settings(robust, settings):
    run = train(replace(robust, epochs=3, **settings), progress="none")
    assert run.metrics[-1].loss < run.metrics[0].loss


def arguments(config: TrainConfig) -> list[str]:
    return [
        *("train", config.row, "--data", config.data, "--out", str(config.out), "--device", "cpu", "--json"),
        *("--channels", "16", "--batch-size", "50", "--epochs", "2", "--robust-radius", str(config.robust_radius)),
    ]


def test_the_command_line(robust, capsys):
    assert main(arguments(robust)) == 0
    assert Run.open(robust.out).config.robust_radius == RADIUS
    capsys.readouterr()
    assert main([*arguments(robust)[:-1], "1.5"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "robust_radius must be above 0 and below 1, got 1.5" in line
    assert main(["train", "--resume", str(robust.out), "--robust-radius", "0.2"]) != 0
    assert "robust_radius cannot change" in capsys.readouterr().err


def test_two_processes(robust, both):
    alone = train(replace(robust, epochs=2, lr_step=None, channels=(16,), batch_size=50), progress="none")
    # Batch norm sees 25 images in each process instead of 50: the curves agree, the bits do not.
    together = Run.open(both / "robust")
    assert together.config.robust_radius == RADIUS
    for one, two in zip(alone.metrics, together.metrics, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=0.05)
