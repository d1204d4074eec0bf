"""Checkpoints in the authors' layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pcdeq.errors import DataError, UsageError
from pcdeq.models import MC, SC, L, load_reference
from pcdeq.solvers import Picard

BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def batch_norm(name: str, width: int) -> dict[str, Tensor]:
    values = (torch.rand(width) + 0.5, torch.randn(width), torch.randn(width), torch.rand(width) + 0.5)
    return {f"{name}.{key}": value for key, value in zip(BATCH_NORM, (*values, torch.tensor(7)), strict=True)}


def block(name: str, *shape: int) -> dict[str, Tensor]:
    v = torch.rand(shape)
    g = torch.rand(shape[0], *[1] * (len(shape) - 1)) / 2
    return {f"{name}.deq.f.W.weight_g": g, f"{name}.deq.f.W.weight_v": v}


def affine(name: str, out: int, *rest: int) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(out, *rest) / 10, f"{name}.bias": torch.randn(out)}


def authors_l(width: int = 6) -> dict[str, Tensor]:
    parts = (affine("linear1", width, 784), batch_norm("bn1", width), block("block", width, width))
    parts += (batch_norm("bn2", width), affine("classifier", 10, width))
    return {name: tensor for part in parts for name, tensor in part.items()}


def authors_sc(width: int = 3) -> dict[str, Tensor]:
    parts = (affine("conv1", width, 1, 3, 3), batch_norm("bn1", width), block("block", width, width, 3, 3))
    parts += (batch_norm("bn2", width), affine("classifier", 10, width * 9))
    return {name: tensor for part in parts for name, tensor in part.items()}


def authors_mc(widths: tuple[int, int, int] = (2, 3, 4)) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    inputs = (1, *widths)
    for i, lift in enumerate(("conv1", "downsample1", "downsample2")):
        state |= affine(lift, widths[i], inputs[i], 3, 3)
        state |= batch_norm(f"bn{2 * i + 1}", widths[i])
        state |= block(f"block{i + 1}", widths[i], widths[i], 3, 3)
        state |= batch_norm(f"bn{2 * i + 2}", widths[i])
    return state | affine("classifier", 10, widths[2])


def normalised(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight, bias, mean, var = (state[f"{name}.{key}"] for key in BATCH_NORM[:4])
    return F.batch_norm(x, mean, var, weight, bias)


def weight_of(state: dict[str, Tensor], name: str) -> Tensor:
    v, g = state[f"{name}.deq.f.W.weight_v"], state[f"{name}.deq.f.W.weight_g"]
    return g * v / v.flatten(1).norm(dim=1).reshape(g.shape)


def test_l_computes_what_the_authors_weights_say():
    state = authors_l()
    images = torch.rand(4, 1, 28, 28)
    x = F.softplus(
        normalised(state, "bn1", F.linear(images.flatten(1), state["linear1.weight"], state["linear1.bias"])), 5
    )
    weight, z = weight_of(state, "block"), torch.zeros(4, 6)
    for _ in range(500):
        z = torch.tanh(z @ weight.T + x)
    expected = F.linear(normalised(state, "bn2", z), state["classifier.weight"], state["classifier.bias"])
    model = load_reference(L((6,), activation="tanh", solver=Picard(tol=1e-6)), state).eval()
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


def test_sc_computes_what_the_authors_weights_say():
    state = authors_sc()
    images = torch.rand(2, 1, 28, 28)
    lifted = F.conv2d(images, state["conv1.weight"], state["conv1.bias"], padding=1)
    x = F.softplus(normalised(state, "bn1", lifted), 5)
    weight, z = weight_of(state, "block"), torch.zeros_like(x)
    for _ in range(500):
        z = F.softsign(F.conv2d(z, weight, padding=1) + x)
    z = F.avg_pool2d(normalised(state, "bn2", F.max_pool2d(z, 3, 1, 1)), 8).flatten(1)
    expected = F.linear(z, state["classifier.weight"], state["classifier.bias"])
    model = load_reference(SC((3,), activation="softsign", solver=Picard(tol=1e-6)), state).eval()
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "state"),
    [(lambda: L((6,)), authors_l), (lambda: SC((3,)), authors_sc), (lambda: MC((2, 3, 4)), authors_mc)],
)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_every_entry_arrives(make, state, prefix):
    theirs = {prefix + name: tensor for name, tensor in state().items()}
    model = load_reference(make(), theirs)
    ours = [tensor for name, tensor in model.state_dict().items() if ".warm." not in name]
    assert len(ours) == len(theirs)
    assert sorted(t.double().sum().item() for t in ours) == sorted(t.double().sum().item() for t in theirs.values())


def test_mc_entries_arrive_where_they_belong():
    state = authors_mc()
    model = load_reference(MC((2, 3, 4)), state)
    pairs = {
        "downsample1.weight": model.lift2.weight,
        "bn4.running_mean": model.deq2_norm.running_mean,
        "bn5.bias": model.lift3_norm.bias,
        "block3.deq.f.W.weight_v": model.deq3.operator.weight_v,
    }
    for name, tensor in pairs.items():
        assert torch.equal(state[name], tensor), name


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: without(state, "bn2.running_var"), "no bn2.running_var"),
        (lambda state: {**state, "fc.weight": torch.zeros(1)}, "unknown name fc.weight"),
        (lambda state: {**state, "block.deq.f.W.weight_g": torch.ones(6)}, r"weight_g is \(6,\) and not \(6, 1\)"),
        (
            lambda state: {**state, "classifier.bias": torch.full((10,), torch.nan)},
            "classifier.bias has infinite or NaN",
        ),
        (lambda state: {**state, "classifier.bias": 3}, "classifier.bias is not a tensor"),
        (lambda state: authors_mc(), "unknown name conv1.weight"),
        (lambda state: {}, "no linear1.weight"),
    ],
)
def test_a_misfit_is_named_and_nothing_is_loaded(spoil, message):
    model = L((6,))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DataError, match=message):
        load_reference(model, spoil(authors_l()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_other_models_are_refused():
    with pytest.raises(UsageError, match="not Sequential"):
        load_reference(torch.nn.Sequential(), {})
