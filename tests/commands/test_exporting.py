"""`pcdeq export`: what it writes, what it prints, and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from pcdeq.cli import main
from pcdeq.extras import command
from pcdeq.models import Network
from pcdeq.recipes import TrainConfig
from pcdeq.training import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = TrainConfig("pcdeq-2-l-sigmoid", epochs=1, channels=(8,), out=tmp_path_factory.mktemp("run") / "r")
    return str(train(config, progress="none").path)


def test_a_program_is_written_and_compared(folder, tmp_path, capsys):
    out = tmp_path / "model.pt2"
    arguments = ["export", folder, "--to", "torch-export", "-o", str(out), "--compare", "100"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == out.stat().st_size
    assert result["basis"] == "proved for every input, in exact arithmetic"
    assert result["compared"]["same_class"] == result["compared"]["images"] == 100
    assert result["compared"]["difference"] <= result["error"] <= 0.01
    extra = {"metadata.json": ""}
    torch.export.load(out, extra_files=extra)
    told = json.loads(extra["metadata.json"])
    assert told["pcdeq.row"] == "pcdeq-2-l-sigmoid" and float(told["pcdeq.test_accuracy"]) > 50
    assert main([*arguments, "--steps", "4"]) == 0
    text, told = capsys.readouterr()
    assert [line.split()[0] for line in told.splitlines()] == ["finding", "writing", "comparing"]  # what takes long
    assert "steps           4\n" in text and "proved for every input" in text and "100 of 100 test images" in text


def test_metadata_do_not_tell_where_data_lie(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"data": "mnist-mini"', '"data": "/home/someone/mnist-mini"'))
    out = tmp_path / "x.pt2"
    options = ["--to", "torch-export", "--calibration", "0", "--compare", "0", "--out", str(out)]
    assert main(["export", str(tmp_path / "run"), *options]) == 0
    extra = {"metadata.json": ""}
    torch.export.load(out, extra_files=extra)
    assert json.loads(extra["metadata.json"])["pcdeq.data"] == "mnist-mini"


def test_a_folder_for_the_hub(folder, capsys):
    assert main(["export", folder, "--to", "hub"]) == 0
    assert "from_pretrained" in capsys.readouterr().out
    assert Network.from_pretrained(f"{folder}/hub").num_classes == 10


def test_upload(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Network, "push_to_hub", lambda self, name: f"https://huggingface.co/{name}")
    assert main(["export", folder, "--to", "hub", "-o", str(tmp_path), "--push-to", "me/it", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pushed_to"] == "https://huggingface.co/me/it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--form", "loop", "--steps", "3"], "--steps belongs to --form fixed"),
        (["--tol", "1e-3"], "--tol belongs to --form loop"),
        (["--push-to", "me/it"], "--push-to belongs to --to hub"),
        (["--to", "hub", "--error", "1"], "--error belongs to a file: --to onnx or torch-export"),
        (["--to", "hub", "--form", "fixed"], "--form belongs to a file: --to onnx or torch-export"),
        (["--to", "hub", "--compare", "9"], "--compare belongs to a file: --to onnx or torch-export"),
        (["--error", "1", "--steps", "3"], "either --error or --steps"),
        (["--to", "torch-export", "--form", "loop"], "--form loop is for --to onnx"),
        (["--to", "tensorflow"], "tensorflow"),
        (["--error", "-1"], "error must be above 0"),
        (["--steps", "0"], "steps must be from 1"),
        (["--calibration", "-1"], "calibration must be at least 0"),
        (["--checkpoint", "best"], "no checkpoint 'best'"),
    ],
)
def test_bad_arguments_get_one_line(folder, tmp_path, capsys, arguments, message):
    assert main(["export", folder, *arguments, "--out", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_gets_one_line(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", folder]) == 1
    assert capsys.readouterr().err.endswith(f"ONNX needs onnx, which is not installed: {command('onnx')}\n")


def test_a_place_that_cannot_be_written_gets_one_line(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = ["export", folder, "--to", "torch-export", "--compare", "0", "--out", str(tmp_path / "file" / "x.pt2")]
    assert main(arguments) == 1
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith("pcdeq: could not write")
    assert complaint.endswith("file is a file, not a folder")


def test_help_needs_neither_torch_nor_onnx():
    code = "import sys\nfrom pcdeq.cli import main\ntry: main(['export', '--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(bool({'torch', 'onnx', 'huggingface_hub'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pixels in [0, 1]" in " ".join(done.stdout.split())
