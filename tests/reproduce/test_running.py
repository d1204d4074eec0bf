"""In a real process and on a real Ray cluster: done, resumed, killed, interrupted, the same numbers every time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from io import StringIO
from pathlib import Path

import pytest
from processes import program
from rich.console import Console

from pcdeq.cli import main
from pcdeq.reproduce import Board, plan
from pcdeq.reproduce.on_ray import read_progress
from pcdeq.reproduce.worker import Pulse, work
from pcdeq.training import Run

ROW = "pcdeq-1-l-tanh"
EPOCHS = 30  # of half a second and less


def command(runs: Path, *options: str, data: str = "mnist-mini") -> list[str]:
    return ["reproduce", data, "--runs-dir", str(runs), "--device", "cpu", "--json", *options]


def learned(run: Path) -> list[dict]:
    """The metrics but for the time they took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


def wait_for(condition, seconds: float = 200.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def epochs_of(run: Path) -> int:
    return len(Run.open(run).metrics) if (run / "config.json").is_file() else 0


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[dict]:
    """The run as it is when nobody disturbs it."""
    (job,) = plan(
        ("mnist-mini",), pattern=ROW, runs=1, runs_dir=tmp_path_factory.mktemp("runs"), epochs=EPOCHS, device="cpu"
    )
    work(job)
    return learned(job.folder)


class TestTheWholePipeline:
    OPTIONS = ("--rows", "pcdeq-?-l-*s*i*", "--runs", "1", "--epochs", "1")  # softsign and sigmoid

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, tmp_path_factory) -> Path:
        folder, out = tmp_path_factory.mktemp("pipeline"), StringIO()
        with contextlib.redirect_stdout(out):
            assert main(command(folder, *cls.OPTIONS)) == 0
        (folder / "out").write_text(out.getvalue())
        return folder

    def test_a_table_of_all_rows(self, runs):
        entries = [json.loads(line) for line in (runs / "out").read_text().splitlines()]
        assert [entry["row"] for entry in entries] == ["pcDEQ-1-L-Softsign", "pcDEQ-2-L-Sigmoid"]
        for entry in entries:
            assert float(entry["ours %"]) > 80
            assert entry["parameters"] == "70,410"
            assert entry["certified"] == "100.0 % of 1,000"
            assert entry["epochs"] == "1 of 40"
            assert entry["difference"] == ""  # one epoch is not comparable with the paper's forty
        assert (runs / "table.md").read_text().count("\n") == 2 + 2

    def test_what_is_done_is_skipped(self, runs, capsys):
        before = {path: path.stat().st_mtime_ns for path in runs.glob("*/*.json*")}
        assert main(command(runs, *self.OPTIONS)) == 0
        assert {path: path.stat().st_mtime_ns for path in runs.glob("*/*.json*")} == before
        assert capsys.readouterr().out == (runs / "out").read_text()

    def test_a_deleted_run_comes_back_as_it_was(self, runs, capsys):
        folder = runs / "pcdeq-2-l-sigmoid-mnist-mini-seed0"
        before, others = learned(folder), {path: path.stat().st_mtime_ns for path in runs.glob("*softsign*/*")}
        summary = (folder / "summary.json").read_bytes()
        shutil.rmtree(folder)
        assert main(command(runs, *self.OPTIONS)) == 0
        assert learned(folder) == before
        assert (folder / "summary.json").read_bytes() == summary
        assert {path: path.stat().st_mtime_ns for path in runs.glob("*softsign*/*")} == others
        told = [json.loads(line) | {"s/epoch": ""} for line in capsys.readouterr().out.splitlines()]
        assert told == [json.loads(line) | {"s/epoch": ""} for line in (runs / "out").read_text().splitlines()]

    def test_the_printed_command_makes_the_row(self, runs):
        entry = json.loads((runs / "out").read_text().splitlines()[0])
        program, *arguments = entry["command"].split()
        assert program == "pcdeq"
        assert main([*arguments, "--runs-dir", str(runs), "--device", "cpu"]) == 0


class TestDisturbed:
    def test_everything_is_killed(self, reference, tmp_path):
        arguments = command(tmp_path, "--rows", ROW, "--runs", "1", "--epochs", str(EPOCHS))
        folder = tmp_path / f"{ROW}-mnist-mini-seed0"
        with program(*arguments):
            wait_for(lambda: epochs_of(folder) >= 2)
            assert epochs_of(folder) < EPOCHS, "too late to disturb it"
        assert not list(folder.glob("progress*"))  # which is for those who are on another machine
        assert main(arguments) == 0
        assert learned(folder) == reference

    def test_a_worker_of_ray_is_killed(self, reference, tmp_path):
        folder = tmp_path / f"{ROW}-mnist-mini-seed0"
        options = ("--rows", ROW, "--runs", "1", "--epochs", str(EPOCHS), "--on", "ray")
        with program(*command(tmp_path, *options)) as process:
            wait_for(lambda: epochs_of(folder) >= 2)
            assert epochs_of(folder) < EPOCHS, "too late to disturb it"
            victim = wait_for(lambda: read_progress(folder))["process"]
            os.kill(victim, signal.SIGKILL)
            out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
        assert learned(folder) == reference
        (entry,) = map(json.loads, out.splitlines())
        assert entry["epochs"] == f"{EPOCHS} of 40"
        assert not list(folder.glob("*.tmp"))

    def test_control_c(self, tmp_path):
        arguments = command(tmp_path, "--rows", ROW, "--runs", "1", "--epochs", str(EPOCHS))
        folder = tmp_path / f"{ROW}-mnist-mini-seed0"
        with program(*arguments) as process:
            wait_for(lambda: epochs_of(folder) >= 1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=200)
        assert process.returncode == 130
        assert err.splitlines()[-1] == "pcdeq: interrupted; repeat the command to go on"
        assert 1 <= epochs_of(folder) < EPOCHS

    def test_an_error_that_nobody_foresaw_does_not_stop_the_others_either(
        self, tiny_data, tmp_path, monkeypatch, capsys
    ):
        def fail(job, tell):
            if ROW in job.name:
                raise ZeroDivisionError("no such thing\nas this")
            work(job, tell)

        monkeypatch.setattr("pcdeq.reproduce.local.work", fail)
        options = ("--rows", "pcdeq-?-l-*n*", "--runs", "1", "--epochs", "1")
        assert main(command(tmp_path, *options, data=str(tiny_data))) == 1
        *_, line = capsys.readouterr().err.splitlines()
        assert f"{ROW}-tiny-seed0: ZeroDivisionError: no such thing as this" in line
        assert epochs_of(tmp_path / "pcdeq-1-l-softsign-tiny-seed0") == 1

    def test_one_that_fails_does_not_stop_the_others(self, tiny_data, tmp_path, capsys):
        options = ("--rows", "pcdeq-?-l-*n*", "--runs", "1")
        assert main(command(tmp_path, *options, "--epochs", "1", data=str(tiny_data))) == 0
        capsys.readouterr()
        broken = tmp_path / f"{ROW}-tiny-seed0" / "last" / "training.pt"
        broken.write_bytes(b"no checkpoint")
        assert main(command(tmp_path, *options, "--epochs", "2", data=str(tiny_data))) == 1
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("pcdeq: 1 of 2 runs failed; repeat the command to retry them:")
        assert "training.pt cannot be read" in line
        assert epochs_of(tmp_path / "pcdeq-1-l-softsign-tiny-seed0") == 2
        assert epochs_of(tmp_path / f"{ROW}-tiny-seed0") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "mnist,svhn,cifar10,all,claims"),
        (["reproduce", "imagenet"], "what is 'imagenet'? Choose mnist, svhn, cifar10, all or claims"),
        (["reproduce", "mnist-mini", "--rows", "gelu"], "no row of mnist-mini matches 'gelu'"),
        (["reproduce", "mnist-mini", "--runs", "0"], "runs must be at least 1, got 0"),
        (["reproduce", "mnist-mini", "--parallel", "2"], "--parallel"),
        (["reproduce", "mnist-mini", "--cpus", "2"], "--cpus belong to --on ray"),
        (["reproduce", "mnist-mini", "--gpus", "0"], "--gpus belong to --on ray"),
        (["reproduce", "claims", "--gpus", "1"], "--gpus is for training"),
        (["reproduce", "claims", "--steps-per-epoch", "3"], "--steps-per-epoch is for training"),
        (["reproduce", "mnist-mini", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (["reproduce", "mnist-mini", "--on", "slurm"], "slurm"),
    ],
)
def test_wrong_requests_get_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.glob("**/metrics.jsonl"))


def test_too_large_a_request_for_the_cluster(tmp_path):
    arguments = command(tmp_path, "--rows", ROW, "--runs", "1", "--on", "ray", "--cpus", "4096")
    with program(*arguments) as process:
        _, err = process.communicate(timeout=400)
    assert process.returncode == 2, err
    assert "a run asks for 4096 CPU, the cluster has" in err.splitlines()[-1]


def test_the_board_on_a_terminal(tiny_data, tmp_path):
    jobs = plan(
        (str(tiny_data),), pattern="pcdeq-1-l-*", runs=1, runs_dir=tmp_path, image_channels=1, epochs=1, channels=(12,)
    )
    screen = StringIO()
    work(jobs[0])
    with Board(jobs, Console(file=screen, force_terminal=True, width=140)) as board:
        board.set(jobs[0], "done")
        board.set(jobs[1], "running")
        board.tell(jobs[1], Pulse(0.4, 1.25))
        board.set(jobs[2], "failed", "no room on the disk")
    text = screen.getvalue()
    for part in (
        "1 running, 0 waiting, 1 done, 1 failed",
        "1/1",
        "0.4/1",
        "1.2500",
        "no room on the disk",
        jobs[1].name,
    ):
        assert part in text
    assert board.failures == {jobs[2].name: "no room on the disk"}
