"""Training: it learns, it resumes bit for bit, and it says what went wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from processes import program
from torch import nn

from pcdeq import files
from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.layers import PcDEQLinear
from pcdeq.models import MC, equilibrium_layers, load
from pcdeq.recipes import TrainConfig
from pcdeq.training import Interrupted, Run, resume, train, trainer
from pcdeq.training.optim import learning_rate, make_optimizer, restore_optimizer
from pcdeq.training.tally import Tally
from pcdeq.training.trainer import add_gradients


def assert_same_state(first: Run, second: Run) -> None:
    """Every tensor of model and optimiser, every number of the metrics but the times."""
    one, two = first.load(), second.load()
    assert one.epoch == two.epoch
    assert one.model.keys() == two.model.keys()
    for name, tensor in one.model.items():
        assert torch.equal(tensor, two.model[name]), name
    assert (one.trained is None) == (two.trained is None)
    for name, tensor in (one.trained or {}).items():
        assert torch.equal(tensor, two.trained[name]), name
    assert one.optimizer["param_groups"] == two.optimizer["param_groups"]
    for index, state in one.optimizer["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, two.optimizer["state"][index][name]), (index, name)
    clock = {"seconds": 0.0, "test_seconds": 0.0}
    assert [replace(line, **clock) for line in first.metrics] == [replace(line, **clock) for line in second.metrics]


class TestTraining:
    def test_it_learns_and_logs(self, tiny):
        run = train(replace(tiny, epochs=6, lr=1e-2, lr_step=None), progress="none")
        metrics = run.metrics
        assert [line.epoch for line in metrics] == [1, 2, 3, 4, 5, 6]
        assert metrics[-1].loss < 0.5 * metrics[0].loss
        assert run.accuracy == metrics[-1].test_accuracy > 60
        assert all(len(line.forward_steps) == len(line.backward_steps) == 1 for line in metrics)
        assert all(1 <= line.forward_steps[0] < 50 for line in metrics)
        assert all(line.unconverged == 0 for line in metrics)
        assert not (run.path / "best").exists()
        network = load(run)
        weight = network.deq.operator.effective_weight()
        assert metrics[-1].largest_singular_value[0] == pytest.approx(torch.linalg.svdvals(weight)[0].item(), rel=1e-4)
        assert bool((network.deq.operator.weight_v >= 0).all())
        assert not network.training

    def test_same_seed_same_run_other_seed_another(self, tiny, tmp_path):
        first = train(replace(tiny, epochs=1, lr_step=None), progress="none")
        second = train(replace(tiny, epochs=1, lr_step=None, out=tmp_path / "b"), progress="none")
        other = train(replace(tiny, epochs=1, lr_step=None, out=tmp_path / "c", seed=1), progress="none")
        assert_same_state(first, second)
        assert first.metrics[0].loss != other.metrics[0].loss

    def test_an_epoch_of_a_few_steps(self, tiny, tmp_path, monkeypatch):
        seen, gradients = [], trainer.add_gradients

        def count(accelerator, model, images, *others):
            seen.append(len(images))
            gradients(accelerator, model, images, *others)

        monkeypatch.setattr(trainer, "add_gradients", count)
        whole = train(replace(tiny, epochs=2, steps_per_epoch=3, schedule="one-cycle", lr_step=None), progress="none")
        assert seen == [tiny.batch_size] * 6
        # The schedule counts such an epoch as a whole one: the last rate is that after 1 + 2/3 of 2 epochs.
        assert whole.metrics[-1].learning_rate == learning_rate(whole.config, 1 + 2 / 3)
        longer = train(replace(tiny, epochs=1, steps_per_epoch=10_000, out=tmp_path / "longer"), progress="none")
        usual = train(replace(tiny, epochs=1, out=tmp_path / "usual"), progress="none")
        assert_same_state(longer, usual)

    def test_best_epoch_with_a_validation_split(self, tiny):
        run = train(replace(tiny, validation=0.2), progress="none")
        scores = [line.validation_accuracy for line in run.metrics]
        best = run.load("best")
        assert best.epoch == 1 + scores.index(max(scores))
        assert best.best_accuracy == max(scores) == run.load().best_accuracy
        assert run.accuracy == run.metrics[-1].test_accuracy  # reported is the last, not the best

    def test_unconverged_solves_are_counted(self, tiny):
        run = train(replace(tiny, epochs=1, lr_step=None, solver="picard", max_steps=2, tol=1e-7))
        assert run.metrics[0].unconverged >= 150  # images, in one direction at least

    def test_paper_rule_reaches_the_layers(self, tiny):
        run = train(replace(tiny, epochs=1, lr_step=None, solver="paper", tol=1e-2), progress="none")
        (layer,) = equilibrium_layers(load(run))
        assert (layer.solver.stop, layer.solver.tol, layer.adjoint_solver.stop) == ("batch", 1e-2, "batch")

    def test_mixed_precision(self, tiny):
        run = train(replace(tiny, epochs=2, lr_step=None, precision="bf16"), progress="none")
        assert run.metrics[-1].loss < run.metrics[0].loss

    def test_a_last_batch_of_one_image_is_left_out(self, tiny):
        run = train(replace(tiny, epochs=1, lr_step=None, batch_size=149), progress="none")
        assert run.metrics[0].loss > 0

    def test_deterministic_leaves_torch_as_it_was(self, tiny):
        train(replace(tiny, epochs=1, lr_step=None, deterministic=True), progress="none")
        assert not torch.are_deterministic_algorithms_enabled()

    def test_tensorboard(self, tiny):
        run = train(replace(tiny, epochs=1, lr_step=None, tracker="tensorboard"), progress="none")
        assert list(run.path.glob("tensorboard/events*"))

    def test_json_lines(self, tiny, capsys):
        run = train(replace(tiny, epochs=2, lr_step=None), progress="json")
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["epoch"] for line in lines] == [1, 2]
        assert lines[-1]["test_accuracy"] == run.accuracy

    def test_the_bar_does_not_disturb(self, tiny, capsys):
        train(replace(tiny, epochs=2, lr_step=None), progress="bar")
        assert "epoch 2/2" in capsys.readouterr().out


class TestResume:
    def test_after_the_end_with_more_epochs(self, tiny, tmp_path):
        whole = train(tiny, progress="none")
        half = train(replace(tiny, epochs=2, out=tmp_path / "half"), progress="none")
        assert_same_state(whole, resume(half.path, epochs=4, progress="none"))
        assert Run.open(half.path).config.epochs == 4

    @pytest.mark.parametrize(
        "settings", [{}, {"optimizer": "adam"}, {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}]
    )
    def test_a_checkpoint_in_another_layout(self, tiny, tmp_path, settings):
        """As written by a version that laid wide weights out by columns: an optimiser's memory is not mixed up."""
        config = replace(tiny, channels=(48,), **settings)
        whole = train(config, progress="none")
        half = train(replace(config, epochs=2, out=tmp_path / "half"), progress="none")
        checkpoint = half.load()
        for state in checkpoint.optimizer["state"].values():
            turned = {name: value.t().contiguous().t() for name, value in state.items() if value.ndim == 2}
            state.update(turned)
        half.save("last", checkpoint)
        assert_same_state(whole, resume(half.path, epochs=4, progress="none"))

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"row": "demo", "channels": (3, 4, 5), "lr_step": None, "augment": True},
            {"average": 0.9, "smoothing": 0.1, "loosen": 100.0, "recalibrate": True},
        ],
    )
    def test_after_an_interruption_in_the_third_epoch(self, tiny, tmp_path, monkeypatch, settings):
        config = replace(tiny, validation=0.1, **settings)
        whole = train(config, progress="none")
        gradients, calls = trainer.add_gradients, []

        def interrupt(*arguments):
            calls.append(1)
            if len(calls) == 2 * 5 + 3:  # five batches an epoch
                raise KeyboardInterrupt
            gradients(*arguments)

        monkeypatch.setattr(trainer, "add_gradients", interrupt)
        with pytest.raises(Interrupted, match="pcdeq train --resume") as caught:
            train(replace(config, out=tmp_path / "stopped"), progress="none")
        monkeypatch.undo()
        assert len(caught.value.run.metrics) == 2
        assert_same_state(whole, resume(caught.value.run, progress="none"))
        assert caught.value.run.load("best").epoch == whole.load("best").epoch

    def test_before_the_first_epoch_was_done(self, tiny, tmp_path, monkeypatch):
        whole = train(replace(tiny, epochs=2), progress="none")
        monkeypatch.setattr(trainer, "add_gradients", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(Interrupted) as caught:
            train(replace(tiny, epochs=2, out=tmp_path / "stopped"), progress="none")
        monkeypatch.undo()
        assert_same_state(whole, resume(caught.value.run, progress="none"))

    def test_a_disk_that_was_full(self, tiny, tmp_path, monkeypatch):
        whole = train(tiny, progress="none")
        original, calls = files.write_through, []

        def full(file, content):
            calls.append(1)
            if len(calls) > 12:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(file, content)

        monkeypatch.setattr(files, "write_through", full)
        with pytest.raises(PcdeqError, match="No space left"):
            train(replace(tiny, out=tmp_path / "full"), progress="none")
        monkeypatch.undo()
        run = Run.open(tmp_path / "full")
        assert 1 <= run.load().epoch < 4
        assert_same_state(whole, resume(run, progress="none"))

    def test_a_finished_run_is_left_as_it_is(self, tiny):
        run = train(tiny, progress="none")
        before = run.load()
        resume(run, progress="none")
        assert all(torch.equal(tensor, run.load().model[name]) for name, tensor in before.model.items())
        assert len(run.metrics) == 4

    def test_a_finished_run_that_lost_its_last_line(self, tiny):
        run = train(tiny, progress="none")
        path = run.path / "metrics.jsonl"
        whole = path.read_bytes()
        for kept in (b"".join(whole.splitlines(keepends=True)[:-1]), b""):
            path.write_bytes(kept)
            assert resume(run, progress="none").accuracy == run.metrics[-1].test_accuracy
            assert path.read_bytes() == whole

    def test_a_checkpoint_that_is_gone(self, tiny):
        run = train(replace(tiny, epochs=1, lr_step=None), progress="none")
        shutil.rmtree(run.path / "last")
        before = (run.path / "metrics.jsonl").read_bytes()
        with pytest.raises(DataError, match="no checkpoint last/ to go on from"):
            resume(run, progress="none")
        assert (run.path / "metrics.jsonl").read_bytes() == before

    def test_weights_of_another_run(self, tiny, tmp_path):
        config = replace(tiny, epochs=1, lr_step=None)
        runs = [train(replace(config, seed=seed, out=tmp_path / f"{seed}"), progress="none") for seed in (0, 1)]
        shutil.rmtree(runs[0].path / "last")
        shutil.copytree(runs[1].path / "last", runs[0].path / "last")
        for use in (load, partial(resume, epochs=2, progress="none")):
            with pytest.raises(DataError, match="of another run"):
                use(runs[0])
        assert load(runs[1]) is not None

    def test_what_cannot_be_resumed(self, tiny, tmp_path):
        run = train(tiny, progress="none")
        with pytest.raises(UsageError, match="has 4 epochs already"):
            resume(run, epochs=3, progress="none")
        cycle = train(replace(tiny, schedule="one-cycle", lr_step=None, epochs=1, out=tmp_path / "c"), progress="none")
        with pytest.raises(UsageError, match="one-cycle"):
            resume(cycle, epochs=2, progress="none")
        with pytest.raises(UsageError, match="not a run folder"):
            resume(tmp_path, progress="none")

    def test_data_that_changed(self, tiny, tmp_path):
        import numpy as np

        arrays = dict(np.load(tiny.data))
        np.savez(tmp_path / "mine.npz", **arrays)
        run = train(replace(tiny, data=str(tmp_path / "mine.npz"), epochs=2), progress="none")
        np.savez(tmp_path / "mine.npz", **{k: v[..., :20] if k.startswith("x") else v for k, v in arrays.items()})
        with pytest.raises(DataError, match="has changed"):
            resume(run, epochs=4, progress="none")


KILLED_IN_MID_WRITE = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from pcdeq.cli import main
from pcdeq import files
write, calls = files.write_through, []
def deadly(file, content):
    calls.append(file.name)
    if sum(name.endswith("training.pt") for name in calls) == 2:
        file.write(content[: len(content) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, content)
files.write_through = deadly
main(sys.argv[1:])
"""


def command_line(config: TrainConfig) -> list[str]:
    return [
        *("train", config.row, "--data", config.data, "--out", str(config.out), "--device", "cpu"),
        *("--channels", *map(str, config.channels), "--batch-size", str(config.batch_size)),
        *("--epochs", str(config.epochs), "--lr-step", str(config.lr_step)),
    ]


class TestProcesses:
    def test_kill_9_in_the_middle_of_a_checkpoint(self, tiny, tmp_path):
        whole = train(tiny, progress="none")
        config = replace(tiny, out=tmp_path / "killed")
        command = [sys.executable, "-c", KILLED_IN_MID_WRITE, *command_line(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
        run = Run.open(tmp_path / "killed")
        assert (run.path / "last.tmp" / "training.pt").exists()
        assert (run.load().epoch, len(run.metrics)) == (1, 1)
        assert_same_state(whole, resume(run, progress="none"))

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_ctrl_c_and_what_schedulers_send_end_it_at_once_and_say_how_to_go_on(self, tiny, tmp_path, number, code):
        config = replace(tiny, epochs=100_000, out=tmp_path / "stopped")
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
        try:
            with program(*command_line(config)) as process:
                metrics = tmp_path / "stopped" / "metrics.jsonl"
                deadline = time.monotonic() + 60
                while not (metrics.exists() and metrics.stat().st_size > 1000) and time.monotonic() < deadline:
                    time.sleep(0.05)
                process.send_signal(number)
                start = time.monotonic()
                _, errors = process.communicate(timeout=30)
        finally:
            signal.signal(signal.SIGINT, before)
        assert time.monotonic() - start < 10
        assert process.returncode == code, errors
        assert errors.count("\n") == 1
        assert f"pcdeq train --resume {config.out}" in errors
        run = Run.open(config.out)
        done = run.load().epoch
        assert done >= 1
        if number == signal.SIGINT:
            assert len(resume(run, epochs=done + 1, progress="none").metrics) == done + 1


class TestGradients:
    def make(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), PcDEQLinear(8, warm_start=False), nn.Linear(8, 3))

    @pytest.mark.parametrize("parts", [1, 2, 3, 50])
    def test_parts_of_a_batch_add_up(self, parts):
        images, labels = torch.rand(11, 1, 4, 4), torch.arange(11) % 3
        whole = self.make()
        nn.functional.cross_entropy(whole(images), labels).backward()
        split = self.make()
        accelerator = Accelerator(cpu=True)
        tally = Tally(equilibrium_layers(split))
        add_gradients(accelerator, split, images, labels, 11, parts, tally)
        for one, two in zip(whole.parameters(), split.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-5)
        loss, _, count, passes, unconverged, forward, backward = tally.sums()
        assert (count, passes, unconverged) == (11, min(parts, 5), 0)
        assert loss / 11 == pytest.approx(nn.functional.cross_entropy(whole(images), labels).item(), rel=1e-3)
        assert forward > 0 < backward

    def test_fused_adamw_agrees_on_channels_last_weights(self):
        results = []
        for options in ({}, {"foreach": 0.0}):
            torch.manual_seed(0)
            model = MC((3, 4, 5))
            config = TrainConfig(optimizer_options=options).resolve()
            optimizer = make_optimizer(config, model, torch.device("cpu"))
            assert bool(optimizer.defaults["fused"]) == (not options)
            assert model.deq2.operator.weight_v.is_contiguous(memory_format=torch.channels_last)
            for _ in range(3):
                optimizer.zero_grad()
                sum((parameter * torch.randn(parameter.shape)).sum() for parameter in model.parameters()).backward()
                optimizer.step()
            results.append([parameter.detach().clone() for parameter in model.parameters()])
        for fused, plain in zip(*results, strict=True):
            torch.testing.assert_close(fused, plain)


class TestOptimizer:
    def test_a_state_in_another_order_in_memory(self):
        """Checkpoints of earlier versions have that of wide dense weights by columns."""

        def descend(change):
            torch.manual_seed(0)
            layer = nn.Linear(5, 7)
            optimizer = make_optimizer(TrainConfig().resolve(), layer, torch.device("cpu"))
            for step in range(4):
                if step == 2:
                    saved = optimizer.state_dict()
                    for state in saved["state"].values():
                        state.update({name: change(state[name]) for name in ("exp_avg", "exp_avg_sq")})
                    restore_optimizer(optimizer, saved)
                optimizer.zero_grad()
                layer(torch.randn(3, 5)).square().sum().backward()
                optimizer.step()
            return layer.weight

        assert torch.equal(descend(lambda t: t.t().contiguous().t()), descend(lambda t: t))

    @pytest.mark.parametrize("name", ["SGD", "adam", "RMSprop", "NAdam", "Adagrad", "RAdam", "Adafactor"])
    def test_any_of_torch_optim(self, name):
        config = TrainConfig(optimizer=name).resolve()
        optimizer = make_optimizer(config, nn.Linear(2, 2), torch.device("cpu"))
        assert type(optimizer).__name__.lower() == name.lower()
        assert optimizer.param_groups[0]["weight_decay"] == config.weight_decay

    def test_options_that_are_switches(self):
        options = {"momentum": 0.9, "nesterov": 1.0}
        config = TrainConfig(optimizer="SGD", optimizer_options=options).resolve()
        group = make_optimizer(config, nn.Linear(2, 2), torch.device("cpu")).param_groups[0]
        assert (group["momentum"], group["nesterov"]) == (0.9, True)
        assert group["nesterov"] is True

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"optimizer": "AdamX"}, "did you mean Adam"),
            ({"optimizer": "LBFGS"}, "unknown optimizer"),
            ({"optimizer": "SGD", "optimizer_options": {"beta": 1.0}}, "no option 'beta'"),
            ({"optimizer": "Rprop"}, "no weight decay"),
            ({"optimizer": "SGD", "optimizer_options": {"momentum": -1.0}}, "momentum"),
            ({"optimizer": "Muon"}, "Muon does not take"),
        ],
    )
    def test_mistakes(self, settings, message):
        with pytest.raises(UsageError, match=message):
            make_optimizer(TrainConfig(**settings).resolve(), nn.Linear(2, 2), torch.device("cpu"))

    def test_one_cycle_rises_falls_and_ends_near_nothing(self):
        config = TrainConfig(epochs=10, lr=1.0).resolve()
        rates = [learning_rate(config, step / 10) for step in range(100)]
        peak = rates.index(max(rates))
        assert rates[0] == pytest.approx(0.04)
        assert rates[peak] == 1.0
        assert peak == 20
        assert rates[:peak] == sorted(rates[:peak])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        assert rates[-1] < 0.001

    def test_the_papers_single_drop(self):
        config = TrainConfig("pcdeq-1-l-tanh", epochs=100).resolve()
        assert [learning_rate(config, done) for done in (0, 29.999, 30, 60, 99)] == pytest.approx(
            [1e-3, 1e-3, 1e-4, 1e-4, 1e-4]
        )


class TestMistakes:
    def test_nothing_is_left_behind(self, tiny, tmp_path):
        for bad in (
            {"row": "pcdeq-1-l-tan"},
            {"data": "mnst"},
            {"optimizer": "x"},
            {"tracker": "x"},
            {"channels": (1, 2)},
        ):
            with pytest.raises(PcdeqError):
                train(replace(tiny, **bad), progress="none")
        assert not tiny.out.exists()

    def test_too_few_images_for_batch_norm(self, tiny):
        with pytest.raises(UsageError, match="2 images each"):
            train(replace(tiny, batch_size=3, accumulate=2), progress="none")

    def test_no_such_device(self, tiny):
        if torch.cuda.is_available():
            pytest.skip("there is one")
        with pytest.raises(UsageError, match="no cuda device"):
            train(replace(tiny, device="cuda"), progress="none")

    def test_a_loss_that_is_not_finite(self, tiny):
        with pytest.raises(PcdeqError, match="the loss became nan in epoch 1: lower lr"):
            train(replace(tiny, optimizer="SGD", lr=1e30), progress="none")

    def test_a_last_step_too_far(self, tiny):
        with pytest.raises(PcdeqError, match="the loss became nan in epoch 1: lower lr"):
            train(replace(tiny, lr=1e30, steps_per_epoch=1), progress="none")


def test_a_typo_in_the_row_is_told_before_data_are_read(tmp_path):
    (tmp_path / "pictures").mkdir()  # in which there is nothing to read
    with pytest.raises(UsageError, match="did you mean pcdeq-1-sc-tanh"):
        train(TrainConfig("pcdeq-1-sc-tahn", data=str(tmp_path / "pictures"), out=tmp_path / "run"))
