"""The command line: it teaches, it works, and bad input gets one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pcdeq
from pcdeq.cli import main, parse
from pcdeq.commands import COMMANDS, Train
from pcdeq.errors import UsageError
from pcdeq.recipes import TrainConfig
from pcdeq.training import Run, train


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    config = TrainConfig("pcdeq-1-l-tanh", epochs=2, channels=(16,), out=tmp_path_factory.mktemp("run"), device="cpu")
    return train(config, progress="none")


class TestHelp:
    @pytest.mark.parametrize("command", [[], *([kind.__name__.lower()] for kind in COMMANDS)])
    def test_every_command_explains_itself(self, command, capsys):
        with pytest.raises(SystemExit) as stop:
            main([*command, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert "usage: pcdeq" in text
        assert "(default: None)" not in text

    def test_examples_are_given(self, capsys):
        with pytest.raises(SystemExit):
            main([])
        text = capsys.readouterr().out
        assert "pcdeq train pcdeq-1-mc-relu6 --data cifar10" in text
        assert "torchrun" in text

    def test_without_torch(self):
        code = "import sys\nfrom pcdeq.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
        code += "sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, "the help imports torch"
        assert "--epochs" in done.stdout


class TestParsing:
    def test_options_are_the_configurations(self):
        command = parse(["train", "pcdeq-1-l-tanh", "--lr", "0.1", "--channels", "3", "--no-augment"])
        assert isinstance(command, Train)
        assert (command.row, command.lr, command.channels, command.augment) == ("pcdeq-1-l-tanh", 0.1, (3,), False)
        assert parse(["train"])._config() == TrainConfig()

    def test_optimizer_options(self):
        command = parse(["train", "--optimizer", "SGD", "--optimizer-options", "momentum", "0.9", "dampening", "0"])
        assert command.optimizer_options == {"momentum": 0.9, "dampening": 0.0}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["train", "--epoch", "3"], "--epoch.*did you mean --epochs"),
            (["train", "--epochs", "many"], "--epochs takes a whole number, got 'many'"),
            (["train", "--lr", "low"], "--lr takes a number, got 'low'"),
            (["train", "--channels", "3", "a"], "--channels takes whole numbers, got '3', 'a'"),
            (["train", "--epochs", "0"], "epochs must be at least 1, got 0"),
            (["train", "--schedule", "cosine"], "cosine.*one-cycle"),
            (["train", "a", "b"], "b"),
            (["trian"], "trian.*train"),
            (["list", "everything"], "everything.*rows"),
            (["evaluate"], "RUN"),
        ],
    )
    def test_one_line_says_what_is_wrong(self, arguments, message):
        with pytest.raises(UsageError, match=message) as caught:
            parse(arguments)
        assert "\n" not in str(caught.value)


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["train", "pcdeq-1-l-than"], 2, "did you mean pcdeq-1-l-tanh?"),
            (["train", "--data", "mnst"], 2, "mnist"),
            (["train", "--data", "nowhere/pictures"], 2, "nowhere/pictures"),
            (["train", "--resume", "nowhere"], 2, "not a run folder"),
            (["train", "--optimizer", "Adamm"], 2, "did you mean Adam"),
            (["train", "--tracker", "paper"], 2, "'paper' is unknown; installed:"),
            (["evaluate", "nowhere"], 2, "not a run folder"),
            (["predict", "nowhere", "a.png"], 2, "not a run folder"),
            (["data", "cifar"], 2, "cifar10"),
        ],
    )
    def test_one_line_and_nothing_written(self, arguments, code, message, here, capsys):
        assert main(arguments) == code
        output = capsys.readouterr()
        assert message in output.err
        assert output.err.count("\n") == 1
        assert not list(here.rglob("*.json"))

    def test_a_network_of_the_package_is_no_run(self, capsys):
        assert main(["evaluate", "pcdeq-1-l-tanh-mnist"]) == 2
        assert "is a network of the package, for pcdeq.load" in capsys.readouterr().err

    def test_missing_picture(self, run, capsys):
        assert main(["predict", str(run.path), "none.png"]) == 1
        assert capsys.readouterr().err == "pcdeq: there is no picture none.png\n"

    def test_one_bad_picture_among_good_ones(self, run, here, capsys):
        from PIL import Image

        Image.new("L", (28, 28)).save("black.png")
        Path("torn.png").write_bytes(Path("black.png").read_bytes()[:40])
        assert main(["predict", str(run.path), "torn.png", "black.png", "none.png"]) == 1
        output = capsys.readouterr()
        assert output.out.startswith("black.png: ")
        assert output.err.startswith("pcdeq: torn.png cannot be read as a picture")
        assert output.err.endswith("there is no picture none.png\n")

    def test_a_torn_checkpoint(self, run, here, capsys):
        shutil.copytree(run.path, "torn")
        file = Path("torn/last/training.pt")
        file.write_bytes(file.read_bytes()[:100])
        assert main(["train", "--resume", "torn", "--epochs", "9"]) == 1
        assert "train anew into another --out" in capsys.readouterr().err

    def test_resume_takes_few_changes(self, run, capsys):
        assert main(["train", "--resume", str(run.path), "--lr", "1"]) == 2
        assert "lr cannot change" in capsys.readouterr().err

    def test_a_reader_that_leaves_early(self):
        command = f"{sys.executable} -m pcdeq list | head -1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        assert done.stdout.startswith("data")


class TestCommands:
    def test_train_then_everything_else(self, here, tiny_data, capsys):
        options = ["--data", str(tiny_data), "--epochs", "2", "--channels", "16", "--device", "cpu"]
        arguments = ["train", "pcdeq-1-l-tanh", *options]
        assert main(arguments) == 0
        text = capsys.readouterr().out
        path = "runs/pcdeq-1-l-tanh-tiny-seed0"
        for part in ("test accuracy", "forward", "backward", "unconverged", f"saved in        {path}"):
            assert part in text
        names = {entry.name for entry in Path(path).iterdir()}
        pictures = {"curves.png", "steps.png", "errors-tiny.png"}
        assert names == {"config.json", "metrics.jsonl", "summary.json", "last", *pictures}

        assert main(["list", "runs"]) == 0
        assert f"{path}  pcdeq-1-l-tanh  {tiny_data}  paper   2/2" in capsys.readouterr().out

        assert main(["train", "--resume", path, "--epochs", "3", "--json"]) == 0
        epoch, summary = map(json.loads, capsys.readouterr().out.splitlines())
        assert (epoch["epoch"], summary["run"]) == (3, path)
        assert summary["accuracy"] == epoch["test_accuracy"]
        assert "published" not in summary  # the paper has no such number

        assert main([*arguments]) == 0  # the same again: another folder
        assert f"{path}-2" in capsys.readouterr().out

    def test_evaluate(self, run, capsys):
        assert main(["evaluate", str(run.path), "--json", "--device", "cpu"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["accuracy"] == run.accuracy
        assert Path(result["figure"]).exists()
        assert main(["evaluate", str(run.path)]) == 0
        assert "of 1,000 test images of mnist-mini" in capsys.readouterr().out

    def test_predict(self, run, here, capsys):
        from PIL import Image

        from pcdeq.data import load_dataset

        Image.fromarray(load_dataset("mnist-mini").test.images[0, 0].numpy()).save("digit.png")
        assert main(["predict", str(run.path), "digit.png", "digit.png"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2
        assert lines[0].startswith("digit.png: ")
        assert main(["predict", str(run.path), "digit.png", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["ranking"]) == 3

    def test_list(self, capsys):
        assert main(["list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + 49 + 64  # the paper's and ours
        (line,) = [line for line in lines if "pcDEQ-1-MC-ReLU6*" in line]
        assert "661,470" in line
        assert "89.2" in line
        assert "pcdeq train pcdeq-1-mc-relu6-aug --data cifar10 --recipe fast" in line
        (line,) = [line for line in lines if line.startswith("mnist    NODE")]
        assert line.endswith("pcdeq train node --data mnist")  # of which there is no recipe of ours
        assert main(["list", "--json"]) == 0
        assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 49 + 64

    def test_list_runs_without_any(self, here, capsys):
        assert main(["list", "runs"]) == 0
        assert "no runs" in capsys.readouterr().out

    def test_data(self, capsys):
        assert main(["data"]) == 0
        assert "cifar10" in capsys.readouterr().out
        assert main(["data", "mnist-mini"]) == 0
        assert "4,000 training" in capsys.readouterr().out

    def test_version(self, capsys):
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"pcdeq {pcdeq.__version__}\n"

    def test_as_a_module(self):
        done = subprocess.run(
            [sys.executable, "-m", "pcdeq", "train", "nope"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "100"},
        )
        assert done.returncode == 2
        assert done.stderr.startswith("pcdeq: unknown row 'nope'")
