"""The running error analysis, against float64 and against arithmetic that is off on purpose."""

from __future__ import annotations

import pytest
import torch

import pcdeq
from pcdeq.concave import rounding
from pcdeq.errors import UsageError

W = torch.rand(5, 5, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([0, 1, 1, 3, 4])
# Maps of (samples, 5), written for the dtype of z; between them they use every rule that is not a view.
MAPS = {
    "matrix": lambda z, w: z @ w.T + 0.1,
    "linear": lambda z, w: torch.nn.functional.linear(z, w, w[0]),
    "batched": lambda z, w: torch.einsum("bi,bij->bj", z, w.expand(len(z), 5, 5)),
    "vectors": lambda z, w: torch.stack([w @ row + torch.dot(w[0], row) for row in z]),
    "harmonic": lambda z, w: 1 / (w / (1 + (z @ w.T)[:, None, :])).sum(-1),
    "roots": lambda z, w: z.sqrt() + z.pow(0.3) + (1 + z).pow(-1.5) + (1 + z).rsqrt() + (2 + z).reciprocal(),
    "logs": lambda z, w: (0.3 * z).log1p() + (1 + z).log() + (1 + z).log2() + (1 + z).log10(),
    "exps": lambda z, w: torch.exp(-z) + torch.expm1(z) + torch.exp2(z) + 1 - torch.exp(-2 * z),
    "squashed": lambda z, w: torch.tanh(z) + torch.sigmoid(z) + torch.atan(z) + torch.nn.functional.softplus(z),
    "cancelling": lambda z, w: (z + 1000) - 999 + (z - 0.5).abs(),
    "kinks": lambda z, w: torch.minimum(z @ w, z + 0.2) + torch.maximum(z, 0.1 * w[0]) + z.clamp(max=0.5) + z.relu(),
    "largest": lambda z, w: z.amax(1, keepdim=True) + z.amin(1, keepdim=True) + z.mean(1, keepdim=True) + z.square(),
    "chosen": lambda z, w: torch.where(z > 0.5, z * 0.1, z * 0.3) + z[:, INDEX] + z.flip(1).roll(1, 1),
    "added": lambda z, w: torch.zeros_like(z).index_add(1, INDEX, z / 3) + torch.cat([z[:, :2], 1 - z[:, 2:]], 1),
    "scattered": lambda z, w: torch.zeros_like(z).scatter_add(1, INDEX.expand_as(z), z * 0.7) + torch.ones_like(z) / 7,
    "alpha": lambda z, w: torch.add(z, z.sqrt(), alpha=0.3) + torch.sub(z, 0.1, alpha=0.3),
}  # fmt: skip


def points(scale=1.0):
    return scale * torch.rand(6, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
@pytest.mark.parametrize("name", MAPS)
def test_the_error_is_bounded(name, scale):
    z = points(scale)
    value, error = rounding.evaluate(lambda z: MAPS[name](z, W), z)
    exact = MAPS[name](z.double(), W.double())
    assert torch.equal(value, MAPS[name](z, W))
    assert ((value - exact).abs() <= error).all()
    # Constants such as 0.1 are meant, not their float32 neighbours, and a cancellation is seen; yet it is of use.
    assert float((error / (1 + exact.abs())).max()) < 1e-3


@pytest.mark.parametrize(
    "name", sorted(set(MAPS) - {"kinks", "largest", "chosen", "added", "scattered", "logs", "exps"})
)
def test_so_is_that_of_a_backward_pass(name):
    z, y = points() + 0.01, torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    if name == "squashed":
        fn = lambda z: torch.tanh(z @ W) + torch.sigmoid(z)  # noqa: E731
        exact_fn = lambda z: torch.tanh(z @ W.double()) + torch.sigmoid(z)  # noqa: E731
    else:
        fn, exact_fn = (lambda z: MAPS[name](z, W)), (lambda z: MAPS[name](z, W.double()))
    found, error = pcdeq.ConcaveMap(fn).bind(z).pullback_with_error(z)(y)
    wide = z.double().requires_grad_()
    (exact,) = torch.autograd.grad(exact_fn(wide), wide, y.double())
    assert ((found - exact).abs() <= error).all()
    assert float(error.max()) < 1e-3


def test_float64_is_as_exact_as_it_is():
    _, error = rounding.evaluate(lambda z: z @ W.double().T + 0.1, points().double())
    assert float(error.max()) < 1e-14


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda z: torch.special.i0(z), "aten.i0"),
        (lambda z: torch.where(z @ W > (z @ W) * 1, z, 1 + z), "rounding may have turned round"),
        (lambda z: z.pow(z), "exponent is a tensor"),
        (lambda z: torch.addmm(z, z, W, beta=0.5), "beta or alpha"),
        (lambda z: z.index_add(1, INDEX, z, alpha=2), "with alpha"),
    ],
)
def test_what_is_not_known_is_refused_by_name(fn, message):
    with pytest.raises(UsageError, match=message):
        rounding.evaluate(fn, points())
    with pytest.raises(UsageError, match="rounding="):
        rounding.evaluate(fn, points())


def test_a_division_by_what_may_be_zero_proves_nothing():
    for fn in (lambda z: 1 / ((z + 1000) - 1000), lambda z: ((z + 1000) - 1000).reciprocal()):
        _, error = rounding.evaluate(fn, torch.full((1, 1), 1e-5))
        assert error.isinf().all()


def test_a_refused_map_can_be_granted_a_rounding():
    def fn(z):
        return 1 + torch.special.i0e(z) + z.sqrt()

    with pytest.raises(UsageError, match="i0e"):
        pcdeq.ConcaveMap(fn).enclose(torch.zeros(1, 1).double())
