"""The run folder: what it says, and that no crash can spoil it."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pcdeq import files
from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.models import Preprocessing
from pcdeq.recipes import TrainConfig
from pcdeq.training import Checkpoint, EpochMetrics, Run, find_runs

GREY = Preprocessing((0.0,), (1.0,), ("no", "yes"))


def new_run(path: Path, **settings) -> Run:
    config = TrainConfig("pcdeq-1-l-tanh", out=path, **settings).resolve()
    return Run.create(config, GREY, (1, 28, 28))


def checkpoint(epoch: int, size: int = 5) -> Checkpoint:
    state = {"state": {0: {"step": torch.tensor(float(epoch))}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
    return Checkpoint(epoch, {"weight": torch.full((size,), float(epoch))}, state)


def metrics(epoch: int) -> EpochMetrics:
    return EpochMetrics(epoch, 0.5, 80.0, 0.6, 75.0, None, 1e-3, (9.0,), (7.5,), 0, (0.3,), 1.0, 0.1)


class TestFolder:
    def test_describes_itself(self, tmp_path):
        run = new_run(tmp_path / "r", epochs=3)
        again = Run.open(tmp_path / "r")
        assert again.config == run.config == TrainConfig("pcdeq-1-l-tanh", out=tmp_path / "r", epochs=3).resolve()
        assert (again.preprocessing, again.image_shape) == (GREY, (1, 28, 28))
        description = json.loads((tmp_path / "r" / "config.json").read_text())
        assert description["versions"]["torch"] == torch.__version__
        assert {"git", "command", "started", "machine"} <= description.keys()
        assert all(value is not None for name, value in description["config"].items() if name in ("lr", "epochs"))

    def test_names_are_never_used_twice(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        config = TrainConfig("pcdeq-1-l-tanh", data="some/where/mine.npz").resolve((1, 28, 28))
        paths = [Run.create(config, GREY, (1, 28, 28)).path for _ in range(3)]
        assert [path.name for path in paths] == [f"pcdeq-1-l-tanh-mine-seed0{end}" for end in ("", "-2", "-3")]
        assert [run.path for run in find_runs()] == sorted(paths)

    def test_explicit_folder_must_be_empty(self, tmp_path):
        (tmp_path / "mine").mkdir()
        new_run(tmp_path / "mine")  # empty: fine
        before = (tmp_path / "mine" / "config.json").read_bytes()
        with pytest.raises(UsageError, match=r"not empty.*--resume"):
            new_run(tmp_path / "mine", seed=1)
        assert (tmp_path / "mine" / "config.json").read_bytes() == before
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match="not empty"):
            new_run(tmp_path / "file")

    def test_not_a_run(self, tmp_path):
        with pytest.raises(UsageError, match="not a run folder"):
            Run.open(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"config": 3}', '{"config": {"epoch": 3}, "data": {}}'])
    def test_damaged_configuration(self, tmp_path, content):
        run = new_run(tmp_path / "r")
        (run.path / "config.json").write_text(content)
        with pytest.raises(PcdeqError):
            _ = Run.open(run.path).config

    def test_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(PcdeqError, match="could not create the run folder"):
            new_run(tmp_path / "file" / "r")


class TestMetrics:
    def test_lines_come_back(self, tmp_path):
        run = new_run(tmp_path / "r")
        lines = [metrics(1), replace(metrics(2), validation_accuracy=70.0)]
        for line in lines:
            run.append_metrics(line)
        assert run.metrics == lines
        assert run.accuracy == 75.0

    @pytest.mark.parametrize("torn", [b'{"epoch": 3, "lo', b"{", metrics(3).__repr__().encode()])
    def test_a_torn_line_does_not_count(self, tmp_path, torn):
        run = new_run(tmp_path / "r")
        for epoch in (1, 2):
            run.append_metrics(metrics(epoch))
        with (run.path / "metrics.jsonl").open("ab") as file:
            file.write(torn)
        assert [line.epoch for line in run.metrics] == [1, 2]
        run.rewind(run.config, checkpoint(2))
        run.append_metrics(metrics(3))
        assert [line.epoch for line in run.metrics] == [1, 2, 3]

    def test_lines_after_the_checkpoint_are_dropped(self, tmp_path):
        run = new_run(tmp_path / "r")
        for epoch in (1, 2, 3):
            run.append_metrics(metrics(epoch))
        run.rewind(run.config, checkpoint(2))
        assert [line.epoch for line in run.metrics] == [1, 2]

    def test_a_damaged_line_in_the_middle_is_an_error(self, tmp_path):
        run = new_run(tmp_path / "r")
        (run.path / "metrics.jsonl").write_text('{"epo\n{}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl"):
            _ = run.metrics

    def test_no_file_is_an_empty_file(self, tmp_path):
        run = new_run(tmp_path / "r")
        (run.path / "metrics.jsonl").unlink()
        assert (run.metrics, run.accuracy) == ([], None)

    def test_a_hole_is_an_error(self, tmp_path):
        run = new_run(tmp_path / "r")
        for epoch in (1, 3):
            run.append_metrics(metrics(epoch))
        with pytest.raises(DataError, match=r"metrics\.jsonl lacks epoch 2"):
            _ = run.metrics


class TestDisagreement:
    """Of metrics and checkpoint: the checkpoint knows all lines, and what cannot be known is an error."""

    @pytest.mark.parametrize("kept", [None, (), (1,), (1, 3), (2, 3), (1, 2, 3, 4)])
    def test_metrics_are_those_of_the_checkpoint(self, tmp_path, kept):
        run = new_run(tmp_path / "r")
        run.save("last", replace(checkpoint(3), metrics=tuple(map(metrics, (1, 2, 3)))))
        for epoch in kept or ():
            run.append_metrics(metrics(epoch))
        if kept is None:
            (run.path / "metrics.jsonl").unlink()
        run.rewind(run.config, run.load())
        assert run.metrics == [metrics(1), metrics(2), metrics(3)]

    @pytest.mark.parametrize("kept", [(), (1,), (1, 3), (2, 3)])
    def test_without_them_it_stops(self, tmp_path, kept):
        """As with checkpoints of older versions."""
        run = new_run(tmp_path / "r")
        run.save("last", checkpoint(3))
        for epoch in kept:
            run.append_metrics(metrics(epoch))
        before = (run.path / "metrics.jsonl").read_bytes()
        with pytest.raises(DataError, match="not every epoch up to 3"):
            run.rewind(run.config, run.load())
        assert (run.path / "metrics.jsonl").read_bytes() == before

    def test_metrics_without_a_checkpoint(self, tmp_path):
        run = new_run(tmp_path / "r")
        run.append_metrics(metrics(1))
        with pytest.raises(DataError, match="no checkpoint last/"):
            run.rewind(run.config, None)
        assert len(run.metrics) == 1

    @pytest.mark.parametrize("name", ["training.pt", "model.safetensors"])
    def test_a_file_of_another_run(self, tmp_path, name):
        runs = [new_run(tmp_path / f"seed{seed}", seed=seed) for seed in (0, 1)]
        for run in runs:
            run.save("last", checkpoint(1))
        content = (runs[0].path / "last" / name).read_bytes()
        (runs[1].path / "last" / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"(?s){name}.*of another run"):
            runs[1].load()

    def test_what_may_change_does_not_make_it_another(self, tmp_path):
        run = new_run(tmp_path / "r", epochs=2)
        run.save("last", checkpoint(1))
        (run.path / "metrics.jsonl").write_text(f"{metrics(1).to_json()}\n")
        config = replace(run.config, epochs=9, device="cpu", data_dir=tmp_path, data="/elsewhere/mnist-mini")
        assert run.rewind(config, run.load()).load().epoch == 1


class TestCheckpoint:
    def test_comes_back(self, tmp_path):
        run = new_run(tmp_path / "r")
        assert not run.has("last")
        for epoch in (1, 2):
            run.save("last", checkpoint(epoch))
        loaded = run.load()
        assert loaded.epoch == 2
        assert torch.equal(loaded.model["weight"], torch.full((5,), 2.0))
        assert loaded.optimizer["param_groups"][0]["betas"] == (0.9, 0.99)
        assert sorted(path.name for path in run.path.iterdir()) == ["config.json", "last", "metrics.jsonl"]

    def test_missing(self, tmp_path):
        run = new_run(tmp_path / "r")
        with pytest.raises(UsageError, match="no epoch was completed"):
            run.load()
        with pytest.raises(UsageError, match="--validation"):
            run.load("best")

    @pytest.mark.parametrize("name", ["training.pt", "model.safetensors"])
    @pytest.mark.parametrize("length", [0, 20, -20])
    def test_truncated(self, tmp_path, name, length):
        run = new_run(tmp_path / "r")
        run.save("last", checkpoint(1))
        path = run.path / "last" / name
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(DataError, match=name):
            run.load()

    def test_a_pickle_that_runs_code_is_refused(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "owned",))

        run = new_run(tmp_path / "r")
        run.save("last", checkpoint(1))
        torch.save({"epoch": 1, "optimizer": Evil()}, run.path / "last" / "training.pt")
        with pytest.raises(DataError):
            run.load()
        assert not (tmp_path / "owned").exists()


def survive_kill(run: Run, action, call: int) -> bool:
    """Run an action in a child that is killed -9 at its n-th flush or rename; say if it got that far."""
    child = os.fork()
    if child == 0:
        count = 0

        def deadly(original):
            def wrapper(*arguments, **keywords):
                nonlocal count
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **keywords)

            return wrapper

        os.fsync = deadly(os.fsync)
        Path.replace = deadly(Path.replace)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


class TestTwoAtOnce:
    def test_the_second_is_told(self, tmp_path):
        run = new_run(tmp_path / "r")
        told = pytest.raises(UsageError, match="being trained by another process")
        with run.alone(), told, Run.open(run.path).alone():
            pass
        with run.alone():
            pass

    def test_a_killed_process_leaves_no_lock(self, tmp_path):
        run = new_run(tmp_path / "r")
        child = os.fork()
        if child == 0:
            with run.alone():
                os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL  # it held the lock as it died
        with run.alone():
            pass


class TestKill:
    def test_a_checkpoint_is_old_or_new_at_every_point(self, tmp_path):
        epochs = []
        for call in range(1, 30):
            run = new_run(tmp_path / f"r{call}")
            run.save("last", checkpoint(1))
            killed = survive_kill(run, lambda run=run: run.save("last", checkpoint(2)), call)
            loaded = run.load()
            assert torch.equal(loaded.model["weight"], torch.full((5,), float(loaded.epoch)))
            assert loaded.optimizer["state"][0]["step"] == loaded.epoch
            epochs.append(loaded.epoch)
            run.save("last", checkpoint(3))  # whatever was left lying about does not matter
            assert run.load().epoch == 3
            assert sorted(path.name for path in run.path.iterdir()) == ["config.json", "last", "metrics.jsonl"]
            if not killed:
                break
        assert epochs == sorted(epochs)
        assert set(epochs) == {1, 2}
        assert len(epochs) > 5  # two files, two folders, two renames

    def test_metrics_lose_no_complete_line(self, tmp_path):
        for call in range(1, 30):
            run = new_run(tmp_path / f"r{call}")
            run.append_metrics(metrics(1))
            run.append_metrics(metrics(2))
            killed = survive_kill(run, lambda run=run: run.rewind(run.config, checkpoint(1)), call)
            assert [line.epoch for line in run.metrics] in ([1, 2], [1])
            if not killed:
                return
        raise AssertionError("never finished")


class TestDiskFull:
    def test_the_advice_fits(self, tmp_path, monkeypatch):
        def no_write(file, content):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        run = new_run(tmp_path / "r")
        monkeypatch.setattr(files, "write_through", no_write)
        with pytest.raises(PcdeqError, match=r"Read-only file system; .*: see that it can be written, then "):
            run.save("last", checkpoint(1))

    @pytest.mark.parametrize("after", [0, 1])
    def test_clear_error_and_the_old_checkpoint_stays(self, tmp_path, monkeypatch, after):
        run = new_run(tmp_path / "r")
        run.save("last", checkpoint(1))
        original, calls = files.write_through, []

        def full(file, content):
            calls.append(content)
            if len(calls) > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(file, content)

        monkeypatch.setattr(files, "write_through", full)
        with pytest.raises(PcdeqError, match=r"No space left on device.*intact.*--resume") as caught:
            run.save("last", checkpoint(2))
        assert caught.value.exit_code == 1
        assert run.load().epoch == 1
        assert sorted(path.name for path in run.path.iterdir()) == ["config.json", "last", "metrics.jsonl"]

    def test_in_the_first_epoch_nothing_is_claimed_to_be_kept(self, tmp_path, monkeypatch):
        run = new_run(tmp_path / "r")

        def full(file, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(files, "write_through", full)
        with pytest.raises(PcdeqError, match=r"No space left on device; nothing was kept yet: make room.*--resume"):
            run.save("last", checkpoint(1))

    def test_a_real_limit(self, tmp_path):
        run = new_run(tmp_path / "r")
        run.save("last", checkpoint(1))
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with pytest.raises(PcdeqError, match=r"could not write .*too large"):
                run.save("last", checkpoint(2, size=100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert run.load().epoch == 1
