"""The fixed point of any map: its value, its gradient, what it costs and what it refuses."""

from __future__ import annotations

import warnings
from typing import NamedTuple

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


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class TestTrees:
    """fixed_point on tuples, lists and dicts of tensors."""

    def problem(self):
        """x and y that drive each other, of other shapes, for three samples; a parameter for each."""
        generator = torch.Generator().manual_seed(5)
        a = 0.3 * torch.randn(2, 4, generator=generator, dtype=torch.float64)
        b = 0.3 * torch.randn(4, 2, generator=generator, dtype=torch.float64)
        x0, y0 = torch.zeros(3, 2).double(), torch.zeros(3, 2, 2).double()

        def fn(x, y, a, b):
            return torch.tanh(y.flatten(1) @ a.T + 1), torch.sin(x @ b.T).reshape(3, 2, 2)

        return fn, x0, y0, a.requires_grad_(), b.requires_grad_()

    @pytest.mark.parametrize("kind", ["tuple", "list", "dict", "namedtuple", "nested"])
    @pytest.mark.parametrize("solver", [pcdeq.Picard(tol=1e-13), EXACT])
    def test_value_and_gradient_equal_the_unrolled_ones(self, kind, solver):
        fn, x0, y0, a, b = self.problem()
        make, take = {
            "tuple": (lambda x, y: (x, y), lambda z: z),
            "list": (lambda x, y: [x, y], lambda z: z),
            "dict": (lambda x, y: {"y": y, "x": x}, lambda z: (z["x"], z["y"])),
            "namedtuple": (Pair, lambda z: z),
            "nested": (lambda x, y: {"a": (x,), "b": [{"c": y}]}, lambda z: (z["a"][0], z["b"][0]["c"])),
        }[kind]
        z = pcdeq.fixed_point(lambda z, a, b: make(*fn(*take(z), a, b)), make(x0, y0), a, b, solver=solver)
        assert type(z) is type(make(x0, y0))
        x, y = take(z)
        for _ in range(200):
            x0, y0 = fn(x0, y0, a, b)
        torch.testing.assert_close((x, y), (x0, y0), rtol=1e-10, atol=1e-12)
        actual = torch.autograd.grad(x.square().sum() + y.sum(), [a, b])
        assert_relatively_close(actual, torch.autograd.grad(x0.square().sum() + y0.sum(), [a, b]), 1e-8)

    def test_gradcheck_with_one_output_unused(self):
        fn, x0, y0, a, b = self.problem()
        solve = lambda a, b: pcdeq.fixed_point(lambda z: fn(*z, a, b), (x0, y0), solver=EXACT)  # noqa: E731
        assert torch.autograd.gradcheck(lambda a, b: solve(a, b)[1], (a, b))
        assert torch.autograd.gradcheck(solve, (a, b))

    def test_each_sample_stops_on_its_own_residual(self):
        rate = torch.tensor([0.1, 0.5, 0.97]).double()
        calls = []

        def fn(z, rate):
            calls.append(1)
            x, t = z
            return rate[:, None] * x + 1, rate * t + 1  # (samples, 2) and one number a sample

        solver = pcdeq.Picard(tol=1e-3, max_steps=1000)
        x, t = pcdeq.fixed_point(fn, (torch.zeros(3, 2).double(), torch.zeros(3).double()), rate, solver=solver)
        for i in range(3):
            start = torch.zeros(1, 2).double(), torch.zeros(1).double()
            alone = pcdeq.fixed_point(fn, start, rate[i : i + 1], solver=solver)
            assert torch.equal(alone[0][0], x[i])
            assert torch.equal(alone[1][0], t[i])
        early = abs(float(x[0, 0]) - 1 / 0.9)
        assert early > 1e-6  # so it did stop early, while the others went on

    def test_without_a_shared_dimension_it_is_one_sample(self):
        """A vector of 2 and a matrix of 3 rows: coupled, so that to stop a row by itself would be wrong."""
        matrix = torch.tensor([[0.2, 0.1], [0.0, 0.3], [0.4, 0.0]]).double()

        def fn(z):
            v, m = z
            return 0.3 * m.sum(0) + 1, 0.2 * m + matrix * v

        v, m = pcdeq.fixed_point(fn, (torch.zeros(2).double(), torch.zeros(3, 2).double()), solver=EXACT)
        torch.testing.assert_close(fn((v, m)), (v, m), rtol=1e-12, atol=1e-13)

    def test_dtypes_are_kept(self):
        scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        z0 = {"half": torch.zeros(2, 3), "double": torch.zeros(2, dtype=torch.float64)}
        seen = []

        def fn(z):
            seen.append((z["half"].dtype, z["double"].dtype))
            return {"half": torch.cos(scale * z["half"]), "double": torch.cos(scale * z["double"])}

        z = pcdeq.fixed_point(fn, z0, solver=pcdeq.Picard(tol=1e-6))
        assert set(seen) == {(torch.float32, torch.float64)}
        assert z["half"].dtype is torch.float32 and z["double"].dtype is torch.float64
        assert float(z["half"][0, 0].detach()) == pytest.approx(float(z["double"][0].detach()), rel=1e-6)
        (z["half"].sum() + z["double"].sum()).backward()
        value = 0.9003672  # v = cos(v / 2), dv/ds = -v sin / (1 + s sin), eight of them
        sine = (1 - value**2) ** 0.5
        assert float(scale.grad) == pytest.approx(8 * -value * sine / (1 + 0.5 * sine), rel=1e-4)

    def test_memory_does_not_grow_with_the_steps(self):
        fn, x0, y0, a, b = self.problem()

        def saved(tol):
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
                pcdeq.fixed_point(lambda z: fn(*z, a, b), (x0, y0), solver=pcdeq.Picard(tol=tol))
            return sum(sizes)

        assert saved(1e-2) == saved(1e-12)

    def test_one_sample_that_is_lost_leaves_the_others_alone(self):
        rate = torch.tensor([0.5, torch.nan, 0.2]).double()
        with pytest.warns(ConvergenceWarning, match="1 of 3 samples"):
            x, _ = pcdeq.fixed_point(
                lambda z: (rate[:, None] * z[0] + 1, rate * z[1]),
                (torch.zeros(3, 2).double(), torch.ones(3).double()),
                solver=pcdeq.Picard(tol=1e-10),
            )
        torch.testing.assert_close(x[[0, 2], 0], torch.tensor([2.0, 1.25]).double(), rtol=1e-8, atol=0)
        assert x[1].isnan().all()

    def test_empty(self):
        z = pcdeq.fixed_point(lambda z: z, (torch.zeros(0, 3), torch.zeros(0)))
        assert z[0].shape == (0, 3) and z[1].shape == (0,)
        x, none = pcdeq.fixed_point(lambda z: (0.5 * z[0] + 1, z[1]), (torch.zeros(2, 3), torch.zeros(2, 0)))
        assert none.shape == (2, 0)
        torch.testing.assert_close(x, torch.full((2, 3), 2.0), rtol=1e-3, atol=0)

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (lambda x, y: (x,), r"fn gives a tuple of 1 where z0 is a tuple of 2; keep the structure"),
            (lambda x, y: {"x": x, "y": y}, r"fn gives a dict of 'x', 'y' where z0 is a tuple of 2"),
            (lambda x, y: x, r"fn gives a Tensor where z0 is a tuple of 2"),
            (lambda x, y: (x, None), r"fn has a NoneType where z0\[1\] is a tensor"),
            (lambda x, y: (x, y[:1]), r"fn maps shape \(3,\) to \(1,\); it must keep the shape of z0\[1\]"),
        ],
    )
    def test_another_structure_is_refused(self, result, message):
        with pytest.raises(UsageError, match=message):
            pcdeq.fixed_point(lambda z: result(*z), (torch.zeros(3, 2), torch.zeros(3)))

    @pytest.mark.parametrize(
        ("start", "message"),
        [
            (
                (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
                r"z0\[1\] must be a floating point tensor, got .*int64",
            ),
            (
                {"x": torch.zeros(2), "y": 3.0},
                r"z0\['y'\] must be a tensor, or a tuple, list or dict of them, got float",
            ),
            ((), r"z0 has no tensor in it"),
            ((torch.zeros(2), torch.zeros(2, device="meta")), r"z0 are on cpu and meta"),
        ],
    )
    def test_what_is_no_tree_of_tensors_is_refused(self, start, message):
        with pytest.raises(UsageError, match=message):
            pcdeq.fixed_point(lambda z: z, start)
