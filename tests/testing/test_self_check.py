"""The self-check: it passes here, it fails where something is wrong, and its speed ratio is against a correct peer."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import pcdeq
from pcdeq.kernels.binding import engine
from pcdeq.testing import self_check


def lines_of(printed: str) -> dict[str, str]:
    """What is said of each question."""
    return {line[:36].strip(): line[36:].strip() for line in printed.splitlines() if len(line) > 36}


def test_a_report_of_the_cpu(capsys):
    assert self_check.main(["--device", "cpu", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert f"pcdeq {pcdeq.__version__}, torch {torch.__version__}" in printed
    assert f"engine: {engine()}" in printed
    assert printed.endswith("all OK\n")
    said = lines_of(printed)
    for question in (
        *(f"{what}, {kind}, 3 activations" for kind in self_check.LAYERS for what in ("values", "gradients")),
        *self_check.SOLVERS,
        *(f"bounds hold, {kind}; their width" for kind in self_check.LAYERS),
        "autocast to bfloat16",
        "autocast to float16",
        "all by default, TF32 if torch does",
    ):
        assert re.fullmatch(r"\d\.\de-\d\d  OK  \(.+\)", said.pop(question)), question
    for speed in ("dense, 128 x 128", "conv2d, 32 x 16 x 28 x 28"):
        assert re.fullmatch(r"[\d.]+ ms, plain [\d.]+ ms: [\d.]+", said.pop(speed))


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (lambda z: z * 1.001, "1.0e-03  FAILED, above 5e-05"),
        (lambda z: z * float("nan"), "inf  FAILED, above 5e-05"),
        (lambda z: z.missing(), "FAILED  tanh: AttributeError: 'Tensor' object has no attribute 'missing'"),
    ],
    ids=["inexact", "nan", "raises"],
)
def test_what_is_wrong_is_named_and_the_rest_goes_on(fault, verdict, monkeypatch, capsys):
    class Faulty(pcdeq.PcDEQLinear):
        def forward(self, x):
            z = super().forward(x)
            return fault(z) if z.dtype == torch.float32 else z

    monkeypatch.setitem(self_check.LAYERS, "dense", (Faulty, (32,)))
    monkeypatch.setattr(self_check, "_speeds", lambda *_, **__: [])
    assert self_check.main(["--device", "cpu", "--quick"]) == 1
    printed = capsys.readouterr().out
    said = lines_of(printed)
    assert verdict in said["values, dense, 3 activations"]
    assert " OK " in said["values, conv1d, 3 activations"]
    assert re.search(r"\d FAILED\n$", printed)


def test_the_worst_case_counts(capsys):
    numbers = {"first": 1e-9, "second": float("nan"), "third": 1e-7}
    check = self_check.Check("three", 1e-6, {name: lambda number=number: number for name, number in numbers.items()})
    assert not check.passes()
    assert capsys.readouterr().out.split()[1:] == ["inf", "FAILED,", "above", "1e-06", "(second)"]


def test_bounds_that_do_not_hold_are_found(monkeypatch):
    def too_low(layer, x):
        box = pcdeq.PcDEQ.enclose(layer, x)
        return pcdeq.Enclosure(0.99 * box.lower, 0.99 * box.upper, box.certified)

    pair = self_check.Pair("dense", "tanh", torch.device("cpu"))
    assert pair.width_of_bounds() < 1e-4
    pair.layer.enclose = lambda x: too_low(pair.layer, x)
    with pytest.raises(ArithmeticError, match="outside"):
        pair.width_of_bounds()
    pair.layer.enclose = lambda x: pcdeq.Enclosure(x, x, torch.zeros(len(x), dtype=torch.bool))
    with pytest.raises(ArithmeticError, match="no bounds for 8 of 8"):
        pair.width_of_bounds()


def test_a_solve_that_does_not_converge_fails(capsys):
    pair = self_check.Pair("dense", "tanh", torch.device("cpu"), pcdeq.Picard(tol=1e-6, max_steps=2))
    assert not self_check.Check("few steps", 1.0, {"dense": pair.value_error}).passes()
    assert "ConvergenceWarning: forward solve: 8 of 8 samples" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["mps:7", "meta", "banana"])
def test_a_device_that_is_not_there(device, capsys):
    assert self_check.main(["--device", device]) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"torch {torch.__version__} has no device '{device}' here; try --device cpu"
    ]


def test_as_a_module():
    command = [sys.executable, "-m", "pcdeq.testing", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "paste into an issue" in done.stdout
    assert "--device" in done.stdout


def test_the_plain_pattern_is_correct():
    """A ratio against something wrong would say nothing."""
    layer, x, grad = self_check.make("conv2d", "sigmoid", pcdeq.Anderson(tol=1e-12), (4, 6, 6), samples=3)
    layer, x, grad = layer.double(), x.double(), grad.double()
    results = []
    for forward in (layer, lambda x: self_check.plain_pattern(layer, x, tol=1e-12)):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        z = forward(given)
        z.backward(grad)
        results.append((z, given.grad, *(p.grad.clone() for p in layer.parameters())))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)
