"""The fixed point of any map: its value, its gradient, what it costs and what it refuses."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_implicit import EXACT, assert_relatively_close

import pcdeq
from pcdeq.errors import ConvergenceError, ConvergenceWarning, PcdeqError, UsageError


class TestFixedPoint:
    """pcdeq.fixed_point, for any map."""

    def parameters(self):
        generator = torch.Generator().manual_seed(4)
        matrix = 0.4 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
        bias = torch.randn(3, generator=generator, dtype=torch.float64)
        return matrix.requires_grad_(), bias.requires_grad_()

    def unrolled(self, fn, z, *params):
        for _ in range(300):
            z = fn(z, *params)
        return z

    @staticmethod
    def fn(z, matrix, bias):
        return torch.tanh(z @ matrix.T + bias)

    @pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)])
    @pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson])
    @pytest.mark.parametrize("stop", ["sample", "batch"])
    def test_value_and_gradient_equal_the_unrolled_ones(self, shape, solver, stop):
        matrix, bias = self.parameters()
        z0 = torch.zeros(shape, dtype=torch.float64)
        z = pcdeq.fixed_point(self.fn, z0, matrix, bias, solver=solver(tol=1e-12, stop=stop))
        expected = self.unrolled(self.fn, z0, matrix, bias)
        assert z.shape == shape
        torch.testing.assert_close(z, expected, rtol=1e-9, atol=1e-11)
        actual = torch.autograd.grad(z.square().sum(), [matrix, bias])
        assert_relatively_close(actual, torch.autograd.grad(expected.square().sum(), [matrix, bias]), 1e-8)

    def test_gradients_reach_tensors_that_the_map_closes_over(self):
        matrix, bias = self.parameters()
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

        def fn(z):
            return scale * torch.tanh(z @ matrix.T + x * bias)

        z0 = torch.zeros(4, 3).double()
        wanted = [matrix, bias, x, scale]
        actual = torch.autograd.grad(pcdeq.fixed_point(fn, z0, solver=EXACT).sum(), wanted)
        assert_relatively_close(actual, torch.autograd.grad(self.unrolled(fn, z0).sum(), wanted), 1e-8)

    def test_gradcheck(self):
        matrix, bias = self.parameters()
        z0 = torch.zeros(2, 3).double()
        assert torch.autograd.gradcheck(lambda m, b: pcdeq.fixed_point(self.fn, z0, m, b, solver=EXACT), (matrix, bias))

    def test_a_module_s_parameters_learn(self):
        cell = torch.nn.Linear(3, 3)
        with torch.no_grad():
            cell.weight.mul_(0.5)
        z = pcdeq.fixed_point(lambda z: torch.tanh(cell(z)), torch.zeros(5, 3))
        z.sum().backward()
        assert cell.weight.grad.abs().sum() > 0
        assert cell.bias.grad.abs().sum() > 0

    def test_scalar_and_empty_starts(self):
        cosine = pcdeq.fixed_point(torch.cos, torch.zeros((), dtype=torch.float64), solver=EXACT)
        assert cosine.shape == ()
        assert cosine.item() == pytest.approx(0.7390851332151607, rel=1e-12)
        assert pcdeq.fixed_point(torch.cos, torch.zeros(0, 3)).shape == (0, 3)

    def test_without_grad_no_graph(self):
        matrix, bias = self.parameters()
        with torch.no_grad():
            z = pcdeq.fixed_point(self.fn, torch.zeros(3).double(), matrix, bias)
        assert not z.requires_grad
        assert not pcdeq.fixed_point(torch.cos, torch.zeros(3)).requires_grad

    def test_a_start_that_asks_for_a_gradient_gets_none(self):
        matrix, bias = self.parameters()
        z0 = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        pcdeq.fixed_point(self.fn, z0, matrix, bias, solver=EXACT).sum().backward()
        assert z0.grad is None or (z0.grad == 0).all()

    def test_a_map_that_changes_the_shape_is_refused(self):
        with pytest.raises(UsageError, match=r"\(2, 3\) to \(2, 4\)"):
            pcdeq.fixed_point(lambda z: torch.zeros(2, 4), torch.zeros(2, 3))

    def test_an_integer_start_is_refused(self):
        with pytest.raises(UsageError, match="int64"):
            pcdeq.fixed_point(torch.cos, torch.zeros(2, dtype=torch.int64))

    def test_the_certified_rule_is_refused(self):
        with pytest.raises(UsageError, match="Certified"):
            pcdeq.fixed_point(torch.cos, torch.zeros(2), solver=pcdeq.Certified(pcdeq.Picard()))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("solver", [pcdeq.Picard(max_steps=2000), pcdeq.Anderson(memory=2)])
    @pytest.mark.parametrize("fn", [lambda z: 2 * z + 1, lambda z: z * z + 1, lambda z: z + 1])
    def test_divergence_warns(self, fn, solver, dtype):
        # Also where the square of z overflows before z does: ‖step‖ / inf is no small residual.
        with pytest.warns(ConvergenceWarning, match="forward"):
            pcdeq.fixed_point(fn, torch.zeros(2, dtype=dtype), solver=solver.with_options(tol=1e-7))

    def test_a_cycle_raises_if_told_to(self):
        with pytest.raises(ConvergenceError, match="forward solve"):
            pcdeq.fixed_point(lambda z: 1 - z, torch.zeros(2), solver=pcdeq.Picard(throw=True))

    def test_a_backward_solve_that_stops_short_warns(self):
        matrix, bias = self.parameters()
        short = pcdeq.Picard(tol=1e-12, max_steps=2)
        z = pcdeq.fixed_point(self.fn, torch.zeros(4, 3).double(), matrix, bias, solver=EXACT, adjoint_solver=short)
        with pytest.warns(ConvergenceWarning, match="backward solve"):
            z.sum().backward()

    def test_samples_do_not_influence_each_other(self):
        a = torch.tensor([[0.1], [0.5], [0.97]], dtype=torch.float64)
        solver = pcdeq.Picard(tol=1e-3)
        together = pcdeq.fixed_point(lambda z: a * z + 1, torch.zeros(3, 1).double(), solver=solver)
        for i in range(3):
            alone = pcdeq.fixed_point(lambda z, i=i: a[i : i + 1] * z + 1, torch.zeros(1, 1).double(), solver=solver)
            assert torch.equal(alone[0], together[i])

    @pytest.mark.parametrize("loss", [torch.sum, lambda z: z.square().sum()])
    def test_a_second_derivative_is_refused_not_wrong(self, loss):
        a = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
        z = pcdeq.fixed_point(lambda z: torch.cos(a * z), torch.zeros(1).double(), solver=EXACT)
        (first,) = torch.autograd.grad(loss(z), a, create_graph=True)
        with pytest.raises(PcdeqError, match="second derivative"):
            torch.autograd.grad(first.sum(), a)

    def test_memory_does_not_grow_with_the_steps(self):
        def saved(tol):
            sizes = []
            matrix, bias = self.parameters()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
                pcdeq.fixed_point(self.fn, torch.zeros(4, 3).double(), matrix, bias, solver=pcdeq.Picard(tol=tol))
            return sum(sizes)

        assert saved(1e-2) == saved(1e-12)

    @pytest.mark.parametrize("inside", [True, False])
    def test_autocast_is_the_map_s_own(self, inside):
        # The map runs under the caller's autocast, in both directions.
        torch.manual_seed(0)
        cell = torch.nn.Linear(3, 3)
        with torch.no_grad():
            cell.weight.mul_(0.3)

        def fn(z):
            return torch.tanh(cell(z)).float()

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            z = pcdeq.fixed_point(fn, torch.zeros(5, 3), solver=pcdeq.Picard(tol=2e-2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            z.sum().backward()
        assert cell.weight.grad.isfinite().all()
