"""Activations beside ReLU: boxes and lines hold for the exact function, on hostile ranges, by 50 digits."""

from __future__ import annotations

import mpmath
import pytest
import torch
from torch import nn

import pcdeq
from pcdeq.errors import UsageError
from pcdeq.proofs.intervals import Box
from pcdeq.proofs.linear import Functional
from pcdeq.proofs.network import recognise
from pcdeq.proofs.rules import enclose, pull

mpmath.mp.dps = 50
EXACT = {
    nn.LeakyReLU(0.3): lambda x: x if x > 0 else mpmath.mpf(0.3) * x,
    nn.LeakyReLU(1.0): lambda x: x,
    nn.Hardtanh(-0.7, 0.1): lambda x: min(max(x, mpmath.mpf(-0.7)), mpmath.mpf(0.1)),
    nn.ReLU6(): lambda x: min(max(x, 0), 6),
    nn.Tanh(): mpmath.tanh,
    nn.Sigmoid(): lambda x: 1 / (1 + mpmath.exp(-x)),
}
CURVES = pytest.mark.parametrize(("module", "exact"), EXACT.items(), ids=map(str, EXACT))
# Middles, and how far a range goes from them: within rounding, near corners, far out, past where exp overflows.
MIDDLES = (0.0, 1e-300, 1e-9, 0.1, 0.7, 1.0, 6.0, 20.0, 90.0, 400.0, 1e30, 1e200)
REACHES = (0.0, 1e-300, 1e-16, 1e-8, 0.01, 1.0, 7.0, 500.0, 1e25)


def ranges():
    """(n, 1) each: all pairs, both signs of the middle, and one-sided ones."""
    pairs = [
        (sign * middle - left * reach, sign * middle + right * reach)
        for middle in MIDDLES
        for reach in REACHES
        for sign in (1, -1)
        for left, right in ((1, 1), (0, 1), (1, 0), (0.01, 1))
    ]
    low, high = torch.tensor(pairs, dtype=torch.float64).T[:, :, None]
    return low, torch.maximum(low, high)


def inside(low, high):
    """Numbers of each range, ends and what is near 0 and other corners among them."""
    parts = torch.linspace(0, 1, 9, dtype=torch.float64)
    corners = torch.tensor([0.0, -0.7, 0.1, 6.0, 1e-12, -1e-12, 1.3, -1.3], dtype=torch.float64)
    return torch.cat([low + parts * (high - low), corners.expand(len(low), -1)], 1).clamp(low, high)


@CURVES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_box_holds_the_exact_value(module, exact, dtype):
    x = torch.cat([inside(*ranges()).flatten(), torch.linspace(-110, 110, 4001, dtype=torch.float64)])
    x = x[x.abs() < 1e30].to(dtype)[:, None]
    box = enclose(recognise(module), Box.of(x), 1e-6)
    for given, low, high in zip(x.flatten(), box.lower.flatten(), box.upper.flatten(), strict=True):
        assert float(low) <= exact(mpmath.mpf(float(given))) <= float(high)
    assert ((box.upper - box.lower) <= 64 * torch.finfo(dtype).eps * x.abs().clamp(min=1)).all()


@CURVES
@pytest.mark.parametrize("weight", [1.0, -1.0, 3e-7, -1e12])
def test_a_line_is_on_its_side_over_the_whole_range(module, exact, weight):
    low, high = ranges()
    image = torch.arange(len(low))
    wanted = Functional(torch.full_like(low, weight), torch.zeros(len(low), dtype=low.dtype), image)
    found = pull(recognise(module), wanted, [Box(low, high, torch.ones(len(low), dtype=torch.bool))])
    for row, slope, constant in zip(inside(low, high), found.coefficient.flatten(), found.constant, strict=True):
        for x in map(mpmath.mpf, map(float, row)):
            assert float(slope) * x + float(constant) <= weight * exact(x)


@CURVES
def test_lines_are_tighter_than_boxes_and_near_for_small_ranges(module, exact):
    for reach, allowed in ((1e-3, 1e-3), (1.0, 1.0)):
        middle = torch.linspace(-7, 7, 57, dtype=torch.float64)[:, None]
        low, high = middle - reach, middle + reach
        for weight in (1.0, -1.0):
            wanted = Functional(torch.full_like(low, weight), low.new_zeros(len(low)), torch.arange(len(low)))
            found = pull(recognise(module), wanted, [Box(low, high, torch.ones(len(low), dtype=torch.bool))])
            at_middle = (found.coefficient * middle).flatten() + found.constant
            gap = (weight * module(middle)).flatten() - at_middle
            box = (module(high) - module(low)).flatten()
            assert (gap <= 0.6 * box + 1e-12).all() and gap.max() <= allowed


@CURVES
def test_infinite_ranges_prove_nothing_false(module, exact):
    infinite = torch.tensor([[-torch.inf], [-1.0], [-torch.inf]], dtype=torch.float64)
    high = torch.tensor([[1.0], [torch.inf], [torch.inf]], dtype=torch.float64)
    for weight in (1.0, -1.0):
        wanted = Functional(torch.full_like(high, weight), high.new_zeros(3), torch.arange(3))
        found = pull(recognise(module), wanted, [Box(infinite, high, torch.ones(3, dtype=torch.bool))])
        at_ends = found.coefficient * torch.tensor([[1.0], [-1.0], [0.0]]).double() + found.constant[:, None]
        allowed = weight * module(torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64))
        assert (at_ends.isnan() | (at_ends <= allowed)).all()


@pytest.mark.parametrize("slope", [-0.1, 1.5, float("nan")])
def test_a_leaky_relu_that_falls_or_is_concave_is_refused(slope):
    model = nn.Sequential(nn.LeakyReLU(slope), nn.Linear(4, 2)).eval()
    with pytest.raises(UsageError, match=r"0 \(LeakyReLU\): its negative_slope is .*: it must be from 0 to 1"):
        pcdeq.certify(model, torch.randn(2, 4))
