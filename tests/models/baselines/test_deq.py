"""DEQ and explicit layers: free weights, right gradients where they converge, and honest counts where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pcdeq.errors import ConvergenceWarning, UsageError
from pcdeq.models import build
from pcdeq.models.baselines.deq import ACTIVATIONS, DEQ, DEQConv2d
from pcdeq.models.baselines.explicit import Explicit, ExplicitConv2d
from pcdeq.solvers import Anderson, Picard

EXACT = Anderson(tol=1e-12, max_steps=2000)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


def make(kind, activation="tanh", **options):
    torch.manual_seed(3)
    layer = (
        DEQ(6, activation=activation, **options) if kind == "dense" else DEQConv2d(2, activation=activation, **options)
    )
    x = torch.randn(4, 6) if kind == "dense" else torch.randn(4, 2, 5, 5)
    return layer.double(), x.double()


@activations
class TestActivation:
    def test_slope_is_the_derivative(self, activation):
        s = ACTIVATIONS[activation]
        y = torch.linspace(-9, 9, 41, dtype=torch.float64).requires_grad_()
        z = s.value(y)
        (true,) = torch.autograd.grad(z.sum(), y)
        torch.testing.assert_close(s.slope(z.detach()), true)
        assert s.bounds[0] <= z.min() < s.bounds[0] + 0.2 * (s.bounds[1] - s.bounds[0])
        assert s.bounds[1] - 0.2 * (s.bounds[1] - s.bounds[0]) < z.max() <= s.bounds[1]


@activations
@pytest.mark.parametrize("kind", ["dense", "conv"])
class TestEquilibrium:
    def product(self, layer, z):
        weight = layer.weight()
        return z @ weight.T if weight.ndim == 2 else nn.functional.conv2d(z, weight, padding=1)

    def test_satisfies_the_equation(self, kind, activation):
        layer, x = make(kind, activation, solver=EXACT)
        z = layer(x)
        torch.testing.assert_close(z, layer.activation.value(self.product(layer, z) + x))
        assert (layer.weight() < 0).any() and layer.last_forward.unconverged == 0

    def test_gradients_against_unrolled(self, kind, activation):
        layer, x = make(kind, activation, solver=EXACT)
        x.requires_grad_()
        z = layer(x)
        cotangent = torch.randn_like(z)
        wanted = [x, *layer.parameters()]
        implicit = torch.autograd.grad(z, wanted, cotangent)
        state = torch.zeros_like(x)
        for _ in range(120):
            state = layer.activation.value(self.product(layer, state) + x)
        torch.testing.assert_close(implicit, torch.autograd.grad(state, wanted, cotangent), rtol=1e-6, atol=1e-9)
        assert layer.last_backward.unconverged == 0


class TestFailure:
    def expanding(self):
        """z = tanh(-20 P z + x), P a cyclic shift: plain iteration goes round and round."""
        layer = DEQ(3, solver=Picard(max_steps=50))  # an odd number: no pattern of signs is consistent
        with torch.no_grad():
            layer.weight.weight_v.copy_(-torch.eye(3).roll(1, 0))
            layer.weight.weight_g.fill_(20.0)
        return layer

    def test_is_counted_and_leaves_finite_gradients(self):
        layer = self.expanding()
        x = (0.1 * torch.randn(4, 3)).requires_grad_()
        with pytest.warns(ConvergenceWarning, match="forward"):
            z = layer(x)
        assert layer.last_forward.unconverged == 4
        z.sum().backward()
        assert z.isfinite().all() and x.grad.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())

    def test_gradient_of_a_failed_sample_is_that_of_one_step(self):
        layer = self.expanding()
        x = torch.zeros(1, 3, requires_grad=True)  # z = 0 is an equilibrium, from which the adjoint grows
        z = layer(x)
        assert layer.last_forward.unconverged == 0
        with pytest.warns(ConvergenceWarning, match="backward"):
            z.sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(1, 3))

    def test_a_nan_stays_in_its_sample(self):
        layer = DEQ(4)
        x = torch.randn(3, 4)
        x[1] = torch.nan
        with pytest.warns(ConvergenceWarning):
            z = layer(x)
        assert layer.last_forward.unconverged == 1
        assert z.isfinite().all()


@activations
def test_explicit_is_one_step_of_the_same_equation(activation):
    for deq, explicit, shape in ((DEQ, Explicit, (5, 6)), (DEQConv2d, ExplicitConv2d, (5, 6, 4, 4))):
        torch.manual_seed(0)
        first, x = explicit(6, activation=activation), torch.randn(shape)
        second = deq(6, activation=activation, solver=Picard(max_steps=1))
        second.load_state_dict(first.state_dict())
        with pytest.warns(ConvergenceWarning):
            one_step = second(x)
        torch.testing.assert_close(first(x), one_step)


def test_explicit_solves_nothing():
    with pytest.raises(UsageError, match="solves nothing"):
        Explicit(3, solver=Picard())


@pytest.mark.parametrize("name", ["deq-l-tanh", "explicit-l-tanh"])
def test_same_parameters_as_the_pcdeq(name):
    ours, theirs = build(name), build("pcdeq-1-l-tanh")
    shapes = [sorted(tuple(p.shape) for p in model.parameters()) for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_unknown_activation():
    with pytest.raises(UsageError, match="unknown activation 'gelu'"):
        DEQ(3, activation="gelu")
