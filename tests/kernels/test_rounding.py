"""Winograd's convolutions lose small numbers beside large ones: a solve that may have lost one goes the plain way."""

from __future__ import annotations

import pytest
import torch
import twins
from test_binding import solve
from twins import make_form

import pcdeq
from pcdeq.data import load_dataset
from pcdeq.kernels import binding
from pcdeq.kernels.binding import Form

NAMES = tuple(twins.ACTIVATIONS)
pytestmark = pytest.mark.skipif(binding._KERNELS is None, reason=binding.engine())


def without_kernels(monkeypatch, run):
    with monkeypatch.context() as patch:
        patch.setattr(binding, "_KERNELS", None)
        return run()


@pytest.mark.parametrize("gain", [3.0, 30.0, 100.0])
def test_small_numbers_beside_large_ones_grow_as_they_should(gain, monkeypatch):
    layer = pcdeq.PcDEQConv2d(1, "relu6", weight_norm=False)
    with torch.no_grad():
        layer.operator.weight.zero_()[0, 0, 1, 1] = gain
    x = torch.tensor([[[[3.0, -3.0, -3.0, -3.0]]]])
    found, plain = layer.solve(x), without_kernels(monkeypatch, lambda: layer.solve(x))
    assert found.converged.all()
    torch.testing.assert_close(found.value, plain.value, rtol=1e-3, atol=0.0)
    if gain == 100:
        assert (found.value == 6).all()


def hostile(seed):
    """Weights and inputs over many orders of magnitude, among them zeros."""
    generator = torch.Generator().manual_seed(seed)
    channels, size = 1 + seed % 6, 1 + seed % 8
    layer = pcdeq.PcDEQConv2d(channels, NAMES[seed % len(NAMES)], weight_norm=False)
    weight = torch.rand(layer.operator.weight.shape, generator=generator)
    weight = weight**8 if seed % 3 else weight * (torch.rand(weight.shape, generator=generator) < 0.15)
    with torch.no_grad():
        layer.operator.weight.copy_(weight * 10 ** (3 * torch.rand((), generator=generator) - 1.5))
    x = 3 * torch.randn(4, channels, size, 9 - size, generator=generator)
    if seed % 2:
        x = -x.abs()
        x[:, :, 0, 0] = 3.0
    return layer, x


def test_hostile_layers_converge_where_torch_does_and_to_the_same(monkeypatch):
    taken = []
    real = binding.solve

    def spy(*args, **options):
        taken.append(real(*args, **options))
        return taken[-1]

    monkeypatch.setattr(binding, "solve", spy)
    for seed in range(120):
        layer, x = hostile(seed)
        found, plain = layer.solve(x), without_kernels(monkeypatch, lambda: layer.solve(x))  # noqa: B023
        exact = layer.double().solve(x.double(), solver=pcdeq.Anderson(tol=1e-11, max_steps=5000)).value
        error, usual = (twins.norm(s.value.double() - exact) / twins.norm(exact) for s in (found, plain))
        assert (found.converged | ~plain.converged).all()
        assert ((error <= 1e-2) | (usual > 1e-3)).all()
    solved = [found for found in taken if found is not None]
    plain = sum(found.plain for found in solved)
    assert 0 < plain < sum(len(found.value) for found in solved)  # both ways were taken


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 4), (8, 9, 7), (17, 6, 13), (25, 4, 4), (32, 3, 9)], ids=str)
def test_plain_sums_are_exact_to_a_few_roundings_in_every_component(shape, transposed):
    """One step of u = Wu + 0, whose weights are so large that Winograd's products are no good for the tolerance."""
    torch.manual_seed(0)
    channels = shape[0]
    weight = 1e6 * torch.rand(channels, channels, 3, 3) ** 4
    z = torch.rand(3, *shape) ** 20
    zeros, ones = torch.zeros_like(z), torch.ones_like(z)
    found = solve(Form("conv", weight, transposed, "linear", zeros, ones), start=z, max_steps=1)
    assert found is not None and found.plain == 3
    wide = weight.double().flip(2, 3).transpose(0, 1) if transposed else weight.double()
    exact = torch.conv2d(z.double(), wide, padding=1)
    assert ((found.value - exact).abs() <= 9 * channels * 2.0**-23 * exact).all()


@pytest.mark.parametrize("activation", ["tanh", "relu6", "sigmoid"])
def test_fine_tolerances_begin_with_winograd_and_end_with_plain_sums(activation):
    """The first products are those of a coarse solve, to the bit; the last residual is what plain sums make of it."""
    form = make_form((24, 12, 11), activation=activation)
    fine, coarse = (solve(form, tol=tol, max_steps=200) for tol in (1e-6, 1e-2))
    assert fine.plain == len(fine.value) and coarse.plain == 0 and fine.converged.all()
    one = solve(form, tol=1e-6, max_steps=2)
    assert one.plain == 0 and torch.equal(one.value, solve(form, tol=1e-2, max_steps=2).value)
    exact = twins.solution(form)
    assert (twins.norm(fine.value.double() - exact) <= 1e-5 * twins.norm(exact)).all()


def test_networks_as_they_are_trained_do_not_need_it(monkeypatch):
    counts = []
    real = binding.solve

    def spy(*args, **options):
        found = real(*args, **options)
        counts.append((0, 0) if found is None else (found.plain, len(found.value)))
        return found

    monkeypatch.setattr(binding, "solve", spy)
    network, digits = pcdeq.load("pcdeq-1-mc-relu6-mnist"), load_dataset("mnist-mini").test.images[:64]
    with torch.no_grad():
        network(network.preprocessing(digits))
    assert sum(samples for _, samples in counts) == 3 * 64
    assert sum(plain for plain, _ in counts) == 0


def test_forms_of_the_twins_do_not_need_it_either():
    assert solve(make_form((16, 9, 9))).plain == 0
