"""The command line: it teaches, it works, and bad input gets one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pcdeq
from pcdeq.cli import main, parse
from pcdeq.commands import COMMANDS, Train
from pcdeq.commands.training import describe
from pcdeq.errors import PcdeqError, UsageError
from pcdeq.models import load
from pcdeq.models.description import Description
from pcdeq.recipes import TrainConfig
from pcdeq.training import Run, Summary, train


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

    def test_all_commands_on_one_screen_a_line_each(self, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        lines = capsys.readouterr().out.splitlines()
        assert stop.value.code == 0
        assert len(lines) <= 24 + 2
        assert max(map(len, lines)) <= 110
        for kind in COMMANDS:
            assert len([line for line in lines if line.startswith(f"  {kind.__name__.lower()} ")]) == 1

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
            (["trian"], "^unknown command 'trian'; did you mean train\\?"),
            (["conquer"], "^unknown command 'conquer'; there are train, "),
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
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "pcdeq", "list"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(writing)
        assert done.stderr == ""
        assert done.returncode == 141  # not all that was asked for was seen

    def test_results_come_before_figures_and_do_without(self, run, capsys, monkeypatch):
        def refuse(self, name, content):
            raise PcdeqError(f"could not write {self.path / name}: Permission denied")

        monkeypatch.setattr(Run, "write", refuse)
        for command, result in (("evaluate", "test images of mnist-mini"), ("certify", "class proved")):
            assert main([command, str(run.path)]) == 0
            out, err = capsys.readouterr()
            assert result in out
            assert err.splitlines()[-1].startswith("pcdeq: no figure: could not write")
            assert "Permission denied" in err and "--resume" not in err

    def test_training_time_has_that_of_the_tests(self, run):
        summary = Summary(epoch=2, parameters=1, test_images=1000, certified=None, certified_of=1000)
        told = describe(run, summary)
        assert told["seconds"] == sum(line.seconds + line.test_seconds for line in run.metrics)
        assert told["test_seconds"] == sum(line.test_seconds for line in run.metrics) > 0

    def test_deep_pictures_are_refused_not_seen_as_white(self, run, here, capsys):
        for name, kind in (("deep.png", np.uint16), ("float.tif", np.float32)):
            Image.fromarray(np.full((28, 28), 30_000, kind)).save(name)
            assert main(["predict", str(run.path), name]) == 1
            out, err = capsys.readouterr()
            assert out == ""
            assert f"{name} has more than 8 bits per channel" in err

    def test_weights_that_give_nan_are_an_error(self, run, here, capsys):
        Image.new("L", (28, 28), 9).save("digit.png")
        shutil.copytree(run.path, "nan")
        broken = Run.open("nan")
        checkpoint = broken.load()
        checkpoint.model["classifier.bias"].fill_(torch.nan)
        broken.save("last", replace(checkpoint, network=Description.of(load(run))))
        for command in (["predict", "nan", "digit.png"], ["evaluate", "nan"]):
            assert main(command) == 1
            out, err = capsys.readouterr()
            assert out == ""
            assert "gives infinite numbers or NaN" in err


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
        assert (run.path / "errors-mnist-mini.png").exists()
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
        assert main(["list", "--all"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + 49 + 72  # the paper's and ours
        (line,) = [line for line in lines if "pcDEQ-1-MC-ReLU6*" in line]
        assert "661,470" in line
        assert "89.2" in line
        assert "pcdeq train pcdeq-1-mc-relu6-aug --data cifar10 --recipe fast" in line
        (line,) = [line for line in lines if line.startswith("mnist    NODE")]
        assert line.endswith("pcdeq train node --data mnist")  # of which there is no recipe of ours
        assert main(["list", "--json"]) == 0
        assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 49 + 72

    def test_list_fits_a_screen(self, capsys):
        assert main(["list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 22
        assert max(map(len, lines)) <= 100
        (best,) = [line for line in lines if line.startswith("cifar10") and "pcDEQ MC, augmented" in line]
        assert "89.2" in best and "pcdeq-1-mc-relu6-aug" in best
        assert "`--all` all 121" in " ".join(lines)

    @pytest.mark.parametrize(
        ("words", "count"),
        [(["mnist"], 17 + 28), (["mnist", "pcdeq"], 16), (["MC-ReLU6", "cifar10"], 6), (["pcdeq-?-l-*"], 4)],
    )
    def test_list_filters(self, words, count, capsys):
        assert main(["list", *words]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 1 + count

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["list", "mnst"], "no row has 'mnst' in its name or as its data; `pcdeq list --all` shows all"),
            (["list", "mnist", "--all"], "--all shows every row: leave out mnist"),
            (["list", "--runs-dir", "x"], "--runs-dir belongs to `pcdeq list runs`"),
            (["list", "runs", "--all"], "--all is for rows"),
        ],
    )
    def test_list_refuses(self, arguments, message, capsys):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err

    def test_list_runs_names_what_is_broken(self, run, here, capsys):
        for name in ("good", "hole", "no-json"):
            shutil.copytree(run.path, f"runs/{name}")
        Path("runs/no-json/config.json").write_text("{")
        lines = Path("runs/hole/metrics.jsonl").read_text().splitlines(keepends=True)
        Path("runs/hole/metrics.jsonl").write_text(lines[1])
        assert main(["list", "runs"]) == 0
        out, err = capsys.readouterr()
        assert out.count("\n") == 2 and "runs/good" in out
        assert re.findall(r"left out: (\S+):", err) == ["runs/hole", "runs/no-json"]
        assert "lacks epoch 1" in err
        assert main(["list", "runs", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["run"] == "runs/good"

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
