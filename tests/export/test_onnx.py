"""Exported files in the runtimes that they are for: onnxruntime and torch.export."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

from pcdeq.data import load_dataset
from pcdeq.errors import PcdeqError, UsageError
from pcdeq.export import OnnxFile, compare, describe, open_exported, plan_export, require_agreement, write_export
from pcdeq.export.program import require_onnx, to_onnx
from pcdeq.export.truncation import exact_logits
from pcdeq.models import MC, L, Preprocessing, load
from pcdeq.recipes import TrainConfig
from pcdeq.training import train

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def pixels():
    return load_dataset().test.images / 255  # 1,000 MNIST digits


def trained(row, folder):
    return load(train(TrainConfig(row, epochs=1, channels=(24,), out=folder, device="cpu"), progress="none"))


@pytest.fixture(scope="module")
def sigmoid(tmp_path_factory):
    return trained("pcdeq-2-l-sigmoid", tmp_path_factory.mktemp("sigmoid"))


@pytest.fixture(scope="module")
def tanh(tmp_path_factory):
    return trained("pcdeq-1-l-tanh", tmp_path_factory.mktemp("tanh"))


def test_a_proved_depth_keeps_its_word_in_onnxruntime(sigmoid, pixels, tmp_path):
    plan = plan_export(sigmoid, error=3e-3)
    file = OnnxFile(write_export(sigmoid, tmp_path / "new" / "model.onnx", plan))
    agreement = compare(sigmoid, file, pixels)
    assert agreement.same_class == 1000
    assert agreement.difference <= plan.error <= 3e-3
    require_agreement(agreement, plan)
    told = {name.removeprefix("pcdeq."): value for name, value in file.metadata.items()}
    assert told["logit_error_basis"] == "proved for every input, in exact arithmetic"
    assert float(told["logit_error"]) == plan.error
    assert json.loads(told["steps"]) == list(plan.steps)
    assert json.loads(told["classes"]) == list("0123456789")
    assert told["input"] == "float32 (n, 1, 28, 28), pixels in [0, 1]; the normalisation is inside"
    for count in (1, 7):  # any batch
        torch.testing.assert_close(file(pixels[:count]), file(pixels)[:count], atol=1e-5, rtol=1e-5)
    # The weight is in the file once, not once a step.
    assert (tmp_path / "new" / "model.onnx").stat().st_size < 4 * 1.3 * (784 * 24 + 2 * 24 * 24)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.onnx"]


def test_a_loop_stops_by_its_residual_in_onnxruntime(tanh, pixels, tmp_path, capfd):
    plan = plan_export(tanh, "loop", tol=1e-3, max_steps=30, calibration=load_dataset().train.images[:500] / 255)
    file = OnnxFile(write_export(tanh, tmp_path / "loop.onnx", plan))
    assert file.metadata["pcdeq.logit_error_basis"] == "measured on 500 images"
    agreement = compare(tanh, file, pixels)
    assert agreement.difference <= plan.error
    with torch.no_grad():
        best, second = tanh(tanh.preprocessing.normalise(pixels)).topk(2).values.T
    decided = int((best - second > 2 * plan.error).sum())  # the rest may go either way, and there are few
    assert agreement.same_class >= decided >= 990
    logits, converged = plan.graph(pixels)
    theirs, theirs_converged = map(torch.from_numpy, file.outputs(pixels))
    torch.testing.assert_close(theirs, logits, atol=1e-4, rtol=1e-4)
    assert converged.all() and theirs_converged.all()
    # It is a loop: a slow picture, and one that never ends, change nothing for the others.
    mixed = pixels[:4].clone()
    mixed[2] = torch.nan
    theirs, theirs_converged = map(torch.from_numpy, file.outputs(mixed))
    assert theirs_converged.tolist() == [True, True, False, True]
    torch.testing.assert_close(theirs[[0, 1, 3]], logits[[0, 1, 3]], atol=1e-4, rtol=1e-4)
    assert capfd.readouterr().err == ""  # onnxruntime has nothing to complain about
    assert [value.shape[0] for value in (*file.session.get_inputs(), *file.session.get_outputs())] == ["n", "n", "n"]


def test_three_equilibria_and_a_normalisation_in_onnxruntime(tmp_path):
    model = MC((3, 4, 5), (3, 20, 20), 4, activation="sigmoid").eval()
    model.preprocessing = Preprocessing((0.4, 0.5, 0.6), (0.2, 0.3, 0.25), tuple("abcd"))
    plan, pixels = plan_export(model, error=1e-2), torch.rand(16, 3, 20, 20)
    assert len(plan.steps) == 3
    file = OnnxFile(write_export(model, tmp_path / "mc.onnx", plan))
    assert (file(pixels) - exact_logits(model, pixels)).abs().max() <= plan.error
    inputs = model.preprocessing((255 * pixels).round().to(torch.uint8))
    assert (file(pixels.mul(255).round() / 255) - model(inputs)).abs().max() < 2 * plan.error


def test_a_torch_program_keeps_its_word(sigmoid, pixels, tmp_path):
    plan = plan_export(sigmoid, error=3e-3)
    path = write_export(sigmoid, tmp_path / "model.pt2", plan, to="torch-export")
    extra = {"metadata.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    assert json.loads(extra["metadata.json"]) == describe(plan, sigmoid)
    assert (program(pixels) - exact_logits(sigmoid, pixels)).abs().max() <= plan.error
    with pytest.raises(UsageError, match="fixed number of steps"):
        write_export(sigmoid, tmp_path / "loop.pt2", plan_export(sigmoid, "loop"), to="torch-export")


def test_what_torch_cannot_export_is_told_in_one_line(tmp_path):
    def branching(x):
        return x.relu() if bool(x.sum() > 0) else x.abs()

    model = L((4,), activation="sigmoid", injection=branching).eval()
    with pytest.raises(PcdeqError, match=r"^torch \S+ could not export this network: [^\n]+$"):
        write_export(model, tmp_path / "x.pt2", plan_export(model), to="torch-export")
    assert not list(tmp_path.iterdir())


def test_a_file_that_breaks_its_word_is_refused(sigmoid, pixels):
    plan = plan_export(sigmoid, error=3e-3)
    agreement = compare(sigmoid, lambda x: plan.graph(x) + 0.004, pixels[:50])
    assert agreement.difference > 3e-3
    with pytest.raises(PcdeqError, match="a logit is off by"):
        require_agreement(agreement, plan)


def test_rounding_is_not_held_against_a_bound_in_exact_arithmetic(sigmoid, pixels, tmp_path):
    plan = plan_export(sigmoid, steps=25)  # its bound is far below what float32 can show
    assert plan.error < 1e-8
    agreement = compare(sigmoid, plan.graph, pixels[:50])
    assert agreement.difference > plan.error
    require_agreement(agreement, plan)


def test_a_loop_promises_nothing_for_what_did_not_converge(sigmoid, pixels):
    plan = plan_export(sigmoid, "loop", max_steps=2)
    assert plan.proved
    assert plan.basis == "proved for every input that converged, in exact arithmetic"
    file = open_exported(to_onnx(plan, {}))
    agreement = compare(sigmoid, file, pixels[:50])
    assert agreement.converged == 0
    with pytest.raises(PcdeqError, match="no test image converged"):
        require_agreement(agreement, plan)


def test_a_missing_extra_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        PcdeqError, match=r"ONNX needs onnxscript, which is not installed: pip install -c .*constraints\.txt"
    ):
        require_onnx("onnxscript")


def test_the_old_file_stays_if_the_new_one_cannot_be_written(sigmoid, tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PcdeqError, match="No space left"):
        write_export(sigmoid, path, plan_export(sigmoid), to="torch-export")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
