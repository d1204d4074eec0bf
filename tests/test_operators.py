"""Operators: each passes `OperatorConformance`; and the weight that cannot become negative."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from problems import STATES, Circulant, Graph, as_array, matrix_of, normalised
from torch import Tensor, nn

import pcdeq
from pcdeq.errors import UsageError
from pcdeq.operators import Conv, Dense
from pcdeq.testing import OperatorConformance


class OurOperator(OperatorConformance):
    """What every operator must do, and what those that leave the parameters to `Operator` do beyond."""

    name: str

    def build(self, weight_norm: bool = True) -> pcdeq.Operator:
        raise NotImplementedError

    def matrix(self, weight: Tensor) -> Tensor:
        return torch.from_numpy(matrix_of(self.name, as_array(weight), self.state))

    def test_terms_count_every_entry_of_a_row(self):
        entries = int((self.images() != 0).sum(1).max())
        assert self.bound().terms(torch.Size(self.state)) >= entries

    def test_start_is_the_paper_s(self):
        operator = self.build()
        v, g = operator.weight_v.detach(), operator.weight_g.detach()
        top = math.sqrt(1e-4 / (v.shape[0] + v.shape[1]))
        assert (v >= 0).all()
        assert (v < top).all()
        if v.numel() > 8:
            assert 0.3 * top < v.mean() < 0.7 * top
        assert g.shape == (v.shape[0], *[1] * (v.ndim - 1))
        torch.testing.assert_close(g.flatten(), v.flatten(1).norm(dim=1))
        torch.testing.assert_close(operator.effective_weight(), v)  # g = ‖v‖
        plain = self.build(weight_norm=False).weight.detach()
        assert ((plain >= 0) & (plain < top)).all()

    def test_effective_weight_is_the_paper_s_normalisation(self):
        operator = self.build().double()
        with torch.no_grad():
            operator.weight_v.copy_(self.weight())
            operator.weight_g.uniform_(0.1, 3)
        expected = normalised(as_array(operator.weight_v), as_array(operator.weight_g))
        torch.testing.assert_close(operator.effective_weight(), torch.from_numpy(expected), rtol=1e-14, atol=0)

    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_effective_weight_is_differentiable_and_nonnegative(self, weight_norm):
        operator = self.build(weight_norm).double()
        names, parameters = zip(*operator.named_parameters(), strict=True)

        def weight(*values):
            return torch.func.functional_call(
                _Effective(operator), {f"operator.{n}": p for n, p in zip(names, values, strict=True)}, ()
            )

        inside = [torch.empty_like(p).uniform_(0.2, 1.0).requires_grad_() for p in parameters]
        assert torch.autograd.gradcheck(weight, inside)
        found = weight(*map(torch.randn_like, parameters))
        assert (found >= 0).all()
        assert found.isfinite().all()


class _Effective(nn.Module):
    def __init__(self, operator: pcdeq.Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self) -> Tensor:
        return self.operator.effective_weight()


class TestDense(OurOperator):
    name = "dense"
    state = (5,)

    def build(self, weight_norm=True):
        return Dense(5, weight_norm=weight_norm)


class TestConv1d(OurOperator):
    name = "conv1d"
    state = (2, 6)

    def build(self, weight_norm=True):
        return Conv(1, 2, weight_norm=weight_norm)


class TestConv2d(OurOperator):
    name = "conv2d"
    state = (2, 4, 3)

    def build(self, weight_norm=True):
        return Conv(2, 2, weight_norm=weight_norm)


class TestConv2dWideKernelOnSmallImage(TestConv2d):
    state = (2, 2, 3)  # smaller than the kernel

    def build(self, weight_norm=True):
        return Conv(2, 2, kernel_size=5, weight_norm=weight_norm)


class TestConv2dPointwise(TestConv2d):
    def build(self, weight_norm=True):
        return Conv(2, 2, kernel_size=1, weight_norm=weight_norm)


class TestConv3d(OurOperator):
    name = "conv3d"
    state = (2, 2, 3, 2)

    def build(self, weight_norm=True):
        return Conv(3, 2, weight_norm=weight_norm)


class TestGraph(OurOperator):
    """A user's operator with apply and adjoint."""

    name = "graph"
    state = STATES["graph"]

    def build(self, weight_norm=True):
        return Graph(weight_norm=weight_norm)


class TestCirculant(OurOperator):
    """A user's operator with apply alone."""

    name = "circulant"
    state = STATES["circulant"]

    def build(self, weight_norm=True):
        return Circulant(weight_norm=weight_norm)


class TestTheClamp:
    def operator(self, weight: float) -> Dense:
        operator = Dense(1, weight_norm=False)
        with torch.no_grad():
            operator.weight.fill_(weight)
        return operator

    @pytest.mark.parametrize(("weight", "used"), [(-2.0, 0.0), (-0.0, 0.0), (0.0, 0.0), (3.0, 3.0)])
    def test_value(self, weight, used):
        assert self.operator(weight).effective_weight().item() == used

    @pytest.mark.parametrize(
        ("weight", "upstream", "passed"),
        [
            (1.0, 2.0, 2.0),
            (1.0, -2.0, -2.0),
            (0.0, 2.0, 2.0),  # at exactly 0 the paper's parameter has its full gradient ...
            (0.0, -2.0, -2.0),  # ... in both directions
            (-1.0, -2.0, -2.0),  # descent raises the weight: let it come back
            (-1.0, 2.0, 0.0),  # descent would lower it further
        ],
    )
    def test_gradient(self, weight, upstream, passed):
        operator = self.operator(weight)
        (operator.effective_weight() * upstream).sum().backward()
        assert operator.weight.grad.item() == passed

    def test_gradient_through_the_normalisation_at_a_weight_of_0(self):
        # dw/dv at v = (1, 0): row norm 1, so the second entry moves w by g, whatever its sign.
        operator = Dense(2).double()
        with torch.no_grad():
            operator.weight_v.copy_(torch.eye(2))
            operator.weight_g.fill_(0.5)
        upstream = torch.tensor([[0.0, -3.0], [4.0, 0.0]]).double()
        (operator.effective_weight() * upstream).sum().backward()
        assert torch.equal(operator.weight_v.grad, 0.5 * upstream)


class TestRowsOfZeros:
    """0/0 in the paper's formula: a zero row with finite gradients that can come back."""

    def operator(self, g: float) -> Dense:
        operator = Dense(3).double()
        with torch.no_grad():
            operator.weight_v.fill_(0.5)[1].zero_()
            operator.weight_g.fill_(1.0)[1].fill_(g)
        return operator

    @pytest.mark.parametrize("g", [0.0, 0.7])
    def test_weight_is_0_there_and_unchanged_elsewhere(self, g):
        weight = self.operator(g).effective_weight()
        expected = torch.full((3, 3), 1 / math.sqrt(3)).double()
        expected[1] = 0
        torch.testing.assert_close(weight, expected)

    @pytest.mark.parametrize("g", [0.0, 0.7])
    def test_gradients_are_finite(self, g):
        operator = self.operator(g)
        (operator.effective_weight() * torch.randn(3, 3)).sum().backward()
        assert all(p.grad.isfinite().all() for p in operator.parameters())

    @pytest.mark.parametrize("projected", [True, False])
    @pytest.mark.parametrize("g", [0.0, 0.7, -0.2])
    @pytest.mark.parametrize("v", [0.0, -0.1])
    def test_the_row_comes_back_when_the_loss_asks_for_it(self, v, g, projected):
        operator = self.operator(g)
        with torch.no_grad():
            operator.weight_v[1] = v
        optimizer = torch.optim.SGD(operator.parameters(), lr=0.1)
        target = torch.tensor([0.3, 0.2, 0.1]).double()
        for _ in range(400):
            optimizer.zero_grad()
            (operator.effective_weight()[1] - target).square().sum().backward()
            optimizer.step()
            if projected:
                pcdeq.project_(operator)
        # Weight normalisation slows down as ‖v‖ grows, so not to the last digit; a dead row would be 0.3 off.
        torch.testing.assert_close(operator.effective_weight()[1], target, rtol=0, atol=1e-2)

    def test_a_row_of_tiny_numbers_is_no_row_of_zeros(self):
        # g v / ‖v‖ does not depend on the size of v, also where v² underflows in float32.
        operator = Dense(3)
        with torch.no_grad():
            operator.weight_v.fill_(1e-25)
            operator.weight_g.fill_(1.0)
        torch.testing.assert_close(operator.effective_weight(), torch.full((3, 3), 1 / math.sqrt(3)))


class TestProjection:
    def model(self) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), pcdeq.PcDEQLinear(3), nn.Sequential(pcdeq.PcDEQ(Graph())))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        return model

    def test_clamps_the_parameters_of_operators_in_place(self):
        model = self.model()
        wanted = [p.detach().clamp(min=0) for p in model[1].parameters()] + [
            p.detach().clamp(min=0) for p in model[2].parameters()
        ]
        held = [*model[1].parameters(), *model[2].parameters()]
        assert pcdeq.project_(model) is model
        for parameter, expected in zip(held, wanted, strict=True):
            assert torch.equal(parameter, expected)
            assert parameter.requires_grad

    def test_leaves_other_modules_and_buffers_alone(self):
        model = self.model()
        model[2][0].operator.adjacency.fill_(-1.0)
        before = copy.deepcopy(model)
        pcdeq.project_(model)
        assert torch.equal(model[0].weight, before[0].weight)
        assert torch.equal(model[0].bias, before[0].bias)
        assert (model[2][0].operator.adjacency == -1).all()

    def test_does_not_change_what_is_computed(self):
        operator = Dense(4, weight_norm=True).double()
        with torch.no_grad():
            for parameter in operator.parameters():
                parameter.normal_()
        before = operator.effective_weight().detach()
        assert torch.equal(pcdeq.project_(operator).effective_weight(), before)


class TestWrongArguments:
    @pytest.mark.parametrize("kernel_size", [0, 2, 4, -1])
    def test_even_or_empty_kernel(self, kernel_size):
        with pytest.raises(UsageError, match=f"odd.*{kernel_size}"):
            pcdeq.PcDEQConv2d(3, kernel_size=kernel_size)

    @pytest.mark.parametrize("features", [0, -2])
    def test_no_features(self, features):
        with pytest.raises(UsageError, match="at least 1"):
            pcdeq.PcDEQLinear(features)

    def test_operator_that_is_none(self):
        with pytest.raises(UsageError, match=r"pcdeq\.Operator.*Linear"):
            pcdeq.PcDEQ(nn.Linear(3, 3))
