"""Plausible mistakes get one line that says what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.errors import UsageError
from pcdeq.models import Preprocessing, load_reference
from pcdeq.proofs.precision import full_precision

SMALL = nn.Sequential(pcdeq.PcDEQLinear(4), nn.Linear(4, 2)).eval()
GREY = Preprocessing(mean=(0.5,), std=(0.25,), classes=("0", "1"))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: pcdeq.PcDEQLinear(8, 16), "second argument is the activation, got 16: a layer keeps its width"),
        (lambda: pcdeq.PcDEQConv2d(3, 16), "second argument is the activation, got 16: a layer keeps its width"),
        (lambda: pcdeq.PcDEQLinear(4, "Tanh"), "did you mean tanh?"),
        (lambda: pcdeq.PcDEQLinear(4, "Hard_Tanh"), "did you mean hard-tanh?"),
        (lambda: pcdeq.PcDEQLinear(4, "ReLU"), "relu6 is its concave, bounded form"),
        (lambda: pcdeq.PcDEQLinear(4)(np.zeros((2, 4))), "must be a tensor, got ndarray; torch.as_tensor makes one"),
        (lambda: pcdeq.PcDEQLinear(4).solve([0.0] * 4), "must be a tensor, got list; torch.as_tensor makes one"),
        (lambda: pcdeq.PcDEQLinear(4).enclose(np.zeros((2, 4))), "must be a tensor, got ndarray"),
        (lambda: pcdeq.PcDEQLinear(4)(torch.zeros(2, 4).to(torch.float8_e4m3fn)), "use x.float()"),
        (lambda: pcdeq.PcDEQLinear(4).solve(torch.ones(2, 4).to_sparse()), "use x.to_dense()"),
        (lambda: pcdeq.certify(SMALL, np.zeros((2, 4))), "must be a tensor of some images, got ndarray"),
        (lambda: pcdeq.certify(SMALL, torch.tensor(1.0)), "must be a tensor of some images, got one number"),
        (lambda: pcdeq.fixed_point(torch.cos, torch.zeros(2), solver="picard"), "got 'picard'"),
        (lambda: pcdeq.build("pcdeq-1-mc-relu6", data="mnst"), "unknown data set 'mnst'; did you mean mnist?"),
        (lambda: pcdeq.build("pcdeq-1-mc-relu6", data="imagenet"), "give image_shape"),
        (lambda: pcdeq.load("pcdeq-1-l-tanh-mnist", "best"), "only the last epoch"),
        (lambda: pcdeq.load("pcdeq-1-l-tanh-mnist", "bestt"), "must be 'last' or 'best', got 'bestt'"),
        (lambda: GREY(torch.rand(2, 1, 4, 4)), "takes uint8 pixels, 0 to 255, got torch.float32"),
        (
            lambda: load_reference(pcdeq.build("pcdeq-1-l-tanh"), "file.pt"),
            "give the checkpoint's state_dict",
        ),
    ],
)
def test_it_says_what_to_do(mistake, message):
    with pytest.raises(UsageError) as caught:
        mistake()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pixels_are_not_certified_by_mistake():
    model = pcdeq.load("pcdeq-1-l-tanh-mnist")
    with pytest.raises(UsageError, match=r"torch.uint8 pixels; the network takes model.preprocessing\(images\)"):
        pcdeq.certify(model, torch.zeros(2, 1, 28, 28, dtype=torch.uint8))


def test_limits_may_be_numbers():
    model = nn.Sequential(pcdeq.PcDEQLinear(4), nn.Linear(4, 3)).eval()
    x = torch.rand(5, 4)
    tensors = pcdeq.certify(model, x, radius=0.1, limits=(torch.zeros(4), torch.ones(4)))
    assert pcdeq.certify(model, x, radius=0.1, limits=(0, 1)).margin.equal(tensors.margin)


def test_a_question_with_too_many_answers():
    layer, solver = pcdeq.PcDEQLinear(4), pcdeq.Anderson()
    with pytest.raises(UsageError, match=r"one truth value a sample, shape \(2,\), not torch.bool of shape \(2, 4\)"):
        layer.solve(torch.rand(2, 4), solver=solver, until=lambda box: box.lower > 0.5)


def test_pixels_from_zero_to_one():
    pixels = torch.randint(256, (2, 1, 4, 4), dtype=torch.uint8)
    torch.testing.assert_close(GREY.normalise(pixels.double() / 255), GREY(pixels).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("warm", [True, False])
def test_weights_load_with_and_without_a_warm_start(warm):
    one, other = (pcdeq.PcDEQLinear(4, warm_start=start) for start in (warm, not warm))
    one(torch.rand(3, 4)).sum().backward()
    other.load_state_dict(one.state_dict())
    assert other.operator.effective_weight().equal(one.operator.effective_weight())


def test_nothing_is_proved_with_tf32(monkeypatch):
    """No GPU here: that the switch is off inside and as it was outside is all that can be seen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    with full_precision():
        assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (False, False)
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before
