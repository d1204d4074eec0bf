"""Layers: what goes in, what comes out, what they refuse, and a weight that stays nonnegative in every loop."""

from __future__ import annotations

import copy
import gc
import math
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from problems import (
    ACTIVATIONS,
    FACTS,
    KIND_1,
    OPERATORS,
    STATES,
    Circulant,
    Graph,
    injected,
    make_input,
    make_layer,
    reference_solution,
    scalar_layer,
)
from torch import nn

import pcdeq
from pcdeq.errors import ConvergenceWarning, UsageError

each_operator = pytest.mark.parametrize("operator", OPERATORS)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


class TestTheEquation:
    @each_operator
    @each_activation
    def test_forward_solves_it(self, activation, operator):
        layer = make_layer(operator, activation, gain=0.9, solver=pcdeq.Anderson(tol=1e-12))
        x = make_input(operator)
        expected = torch.from_numpy(reference_solution(operator, activation, layer, x))
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=0)

    @pytest.mark.parametrize(
        ("layer", "shape"),
        [
            (pcdeq.PcDEQLinear, (2, 4)),
            (pcdeq.PcDEQConv1d, (2, 4, 5)),
            (pcdeq.PcDEQConv2d, (2, 4, 3, 5)),
            (pcdeq.PcDEQConv3d, (2, 4, 2, 3, 2)),
        ],
    )
    def test_the_paper_s_layers_with_defaults(self, layer, shape):
        layer, x = layer(4), torch.randn(shape)
        z = layer(x)
        assert z.shape == shape
        assert z.dtype == torch.float32
        assert layer.activation.name == "tanh"
        assert isinstance(layer.solver, pcdeq.Anderson)
        assert {name for name, _ in layer.named_parameters()} == {"operator.weight_v", "operator.weight_g"}
        assert (z > 0).all()

    def test_parameter_count_of_the_paper(self):
        # 80 units: 6400 + 80; 82 channels of 3 x 3: 82 * 82 * 9 + 82.
        assert sum(p.numel() for p in pcdeq.PcDEQLinear(80).parameters()) == 6480
        assert sum(p.numel() for p in pcdeq.PcDEQConv2d(82).parameters()) == 60598

    def test_an_operator_and_an_activation_of_the_user_s_own(self):
        own = pcdeq.Activation("y/(2+y)", lambda y: y / (2 + y), supremum=1.0)
        for operator in (Graph(), Circulant()):
            layer = pcdeq.PcDEQ(operator, own, solver=pcdeq.Anderson(tol=1e-12)).double()
            x = torch.randn(2, 3, 2).double() if isinstance(operator, Graph) else torch.randn(2, 4).double()
            z = layer(x)
            torch.testing.assert_close(z, layer.equation(x)(z), rtol=1e-10, atol=0)

    def test_an_operator_whose_product_is_of_another_dtype(self):
        # A buffer kept in float64 promotes the product of a float32 layer; the answer must not suffer.
        class Scaled(Circulant):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.linspace(0.5, 1, 4, dtype=torch.float64))

            def bind(self, weight):
                linear = super().bind(weight)
                plain = linear.apply
                linear.apply = lambda z: plain(z) * self.scale
                return linear

        layer = pcdeq.PcDEQ(Scaled(), "tanh", solver=pcdeq.Anderson(tol=1e-6))
        with torch.no_grad():
            layer.operator.weight_v.fill_(1.0)
            layer.operator.weight_g.fill_(0.8)
        x = torch.randn(2, 4)
        z = layer(x)
        torch.testing.assert_close(z.double(), layer.equation(x)(z).double(), rtol=1e-5, atol=0)

    def test_forward_and_backward_leave_their_statistics(self):
        layer = make_layer("dense", solver=pcdeq.Picard())
        assert layer.last_forward is None
        assert layer.last_backward is None
        layer(make_input("dense", samples=3).requires_grad_()).sum().backward()
        for stats in (layer.last_forward, layer.last_backward):
            assert (stats.samples, stats.unconverged, stats.outcome) == (3, 0, pcdeq.Outcome.CONVERGED)
            assert 1 < stats.steps < 100
            assert stats.residual < 1e-4

    def test_repr_names_what_matters(self):
        text = repr(pcdeq.PcDEQLinear(4, "sigmoid", solver=pcdeq.Picard(tol=1e-7)))
        for part in ("sigmoid", "kind=2", "Picard", "1e-07", "(4, 4)"):
            assert part in text


class TestShapes:
    @each_operator
    def test_extra_leading_dimensions_are_batch(self, operator):
        layer = make_layer(operator, solver=pcdeq.Anderson(tol=1e-12))
        x = make_input(operator, samples=6)
        expected = layer(x)
        torch.testing.assert_close(layer(x.reshape(2, 3, *STATES[operator])), expected.reshape(2, 3, *STATES[operator]))
        torch.testing.assert_close(layer(x.reshape(1, 6, 1, *STATES[operator])).reshape(x.shape), expected)

    @each_operator
    def test_one_sample_without_a_batch_dimension(self, operator):
        layer = make_layer(operator, solver=pcdeq.Anderson(tol=1e-12))
        x = make_input(operator, samples=1)
        z = layer(x[0])
        assert z.shape == STATES[operator]
        torch.testing.assert_close(z, layer(x)[0])
        assert layer.solve(x[0]).value.shape == STATES[operator]
        assert layer.enclose(x[0]).lower.shape == STATES[operator]

    @each_operator
    def test_a_batch_of_one(self, operator):
        layer = make_layer(operator)
        z = layer(make_input(operator, samples=1).requires_grad_())
        z.sum().backward()
        assert layer.last_backward.samples == 1

    @each_operator
    def test_an_empty_batch(self, operator):
        self.empty(operator, "tanh", pcdeq.Anderson())

    @pytest.mark.parametrize("activation", ["tanh", "sigmoid", "log1p"])
    @pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson, pcdeq.Newton])
    @pytest.mark.parametrize("stop", ["sample", "batch", "certified"])
    def test_an_empty_batch_with_every_solver(self, activation, solver, stop):
        proved = stop == "certified"
        self.empty("conv2d", activation, pcdeq.Certified(solver()) if proved else solver(stop=stop))

    def empty(self, operator, activation, solver):
        layer = make_layer(operator, activation, solver=solver)
        x = make_input(operator, samples=0).requires_grad_()
        z = layer(x)
        z.sum().backward()
        assert z.shape == x.grad.shape == (0, *STATES[operator])
        assert all((p.grad == 0).all() for p in layer.parameters())
        solution = layer.solve(x)
        assert solution.outcome is pcdeq.Outcome.CONVERGED
        assert solution.steps.shape == (0,)
        assert layer.enclose(x).certified.shape == (0,)

    @pytest.mark.parametrize("gradient", ["phantom", "jacobian-free", "unrolled"])
    def test_an_empty_batch_with_every_gradient(self, gradient):
        x = torch.zeros(0, 4, requires_grad=True)
        pcdeq.PcDEQLinear(4, gradient=gradient)(x).sum().backward()
        assert x.grad.shape == (0, 4)

    @each_operator
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_memory_layout_does_not_matter(self, operator, dtype):
        layer = make_layer(operator, solver=pcdeq.Anderson(tol=1e-6), dtype=dtype).eval()
        x = make_input(operator, samples=4, dtype=dtype)
        expected = layer(x)
        strided = torch.empty(4, *STATES[operator][::-1], dtype=dtype).permute(0, *range(x.ndim - 1, 0, -1)).copy_(x)
        expanded = x[:1].expand_as(x)
        torch.testing.assert_close(layer(strided), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(layer(expanded), expected[:1].expand_as(expected), rtol=1e-5, atol=0)

        def gradient(x, upstream):
            x = x.detach().requires_grad_()
            layer(x).backward(upstream)
            return x.grad

        upstream = torch.ones(()).to(dtype).expand_as(x)
        torch.testing.assert_close(
            gradient(strided, upstream), gradient(x, upstream.contiguous()), rtol=1e-4, atol=1e-6
        )

    def test_the_input_is_left_alone(self):
        layer = make_layer("conv2d", dtype=torch.float32)
        x = make_input("conv2d", dtype=torch.float32)
        before = x.clone()
        layer(x)
        layer.solve(x)
        layer.enclose(x)
        assert torch.equal(x, before)

    @each_operator
    def test_the_result_is_a_tensor_of_its_own(self, operator):
        layer = make_layer(operator, dtype=torch.float32).eval()
        x = make_input(operator, dtype=torch.float32)
        first = layer(x)
        kept = first.clone()
        layer(x + 1)
        layer.solve(-x)
        assert torch.equal(first, kept)


class TestDtypes:
    @pytest.mark.parametrize("parameters", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("inputs", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_the_output_has_the_dtype_of_the_input(self, inputs, parameters):
        layer = make_layer("dense", dtype=parameters)
        x = make_input("dense", dtype=inputs)
        z = layer(x)
        assert z.dtype == inputs
        exact = make_layer("dense", dtype=torch.float64, solver=pcdeq.Anderson(tol=1e-10))
        exact.load_state_dict(layer.state_dict())
        tol = 8 * max(torch.finfo(inputs).eps, torch.finfo(parameters).eps) + 1e-3  # the default tol, amplified
        torch.testing.assert_close(z.double(), exact(x.double()), rtol=tol, atol=0)

    def test_the_solve_is_never_below_float32(self):
        layer = make_layer("dense", dtype=torch.bfloat16)
        equation = layer.equation(make_input("dense", dtype=torch.bfloat16))
        assert equation.x.dtype == equation.map.weight.dtype == torch.float32


class TestNoGraph:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("gradient", ["implicit", "phantom", "jacobian-free", "unrolled"])
    def test_evaluation_builds_none(self, mode, gradient):
        layer = make_layer("dense", gradient=gradient)
        saved = []
        with mode(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            z = layer(make_input("dense"))
        assert not z.requires_grad
        assert z.grad_fn is None
        assert not saved

    def test_evaluation_keeps_nothing_alive(self):
        layer = make_layer("dense")
        with torch.no_grad():
            alive = weakref.ref(layer(make_input("dense")))
        assert alive() is None
        layer = weakref.ref(layer)
        gc.collect()
        assert layer() is None

    def test_nothing_that_asks_for_a_gradient_builds_none(self):
        layer = make_layer("dense").requires_grad_(False)
        assert layer(make_input("dense")).grad_fn is None

    @pytest.mark.parametrize("solver", [pcdeq.Picard(), pcdeq.Anderson(), pcdeq.Newton(), pcdeq.Certified()])
    @pytest.mark.parametrize("operator", ["dense", "circulant"])
    @pytest.mark.parametrize("activation", ["tanh", pcdeq.Activation("own", lambda y: y / (2 + y), supremum=1.0)])
    def test_inference_mode_does_not_hinder_anything(self, solver, operator, activation):
        layer = make_layer(operator, activation, solver=solver)
        with torch.inference_mode():
            x = make_input(operator)
            layer(x)
            assert layer.solve(x).outcome is pcdeq.Outcome.CONVERGED
            assert layer.enclose(x).certified.all()
        layer(make_input(operator)).sum().backward()
        assert layer.last_backward.unconverged == 0


class TestInjection:
    @each_activation
    def test_the_paper_s_by_kind(self, activation):
        layer = make_layer("dense", activation)
        x = torch.tensor([[-30.0, -0.3, 0.0], [0.2, 3.0, 50.0]]).double()
        expected = torch.from_numpy(injected(x.numpy(), FACTS[activation].kind))
        # softplus switches to the identity above 4, where it differs from it by 4e-10.
        # Kind 1 has a floor of 1e-16 under it, which only an input of -30 can see.
        torch.testing.assert_close(layer.inject(x), expected, rtol=1e-9, atol=1.1e-16)

    @each_activation
    def test_a_floor_is_added(self, activation):
        x = make_input("dense")
        without, with_floor = make_layer("dense", activation), make_layer("dense", activation, floor=0.25)
        torch.testing.assert_close(with_floor.inject(x), without.inject(x) + 0.25)
        assert with_floor.equation(x - 1000).x.min() == 0.25

    @pytest.mark.parametrize("activation", KIND_1)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32, torch.float64])
    def test_an_exact_0_never_reaches_kind_1(self, activation, dtype, parameters):
        layer = make_layer("dense", activation, dtype=parameters)
        for value in (-1000.0, -30.0, -4.0, torch.finfo(dtype).min):
            x = torch.full((1, 3), value, dtype=dtype)
            assert (layer.equation(x).x > 0).all()
            assert (layer.equation(x).at_zero() > 0).all()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert (layer.equation(x).x > 0).all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_inject_itself_keeps_its_promise(self, dtype):
        result = pcdeq.PcDEQLinear(3).inject(torch.full((1, 3), -1000.0, dtype=dtype))
        assert torch.finfo(result.dtype).bits >= 32
        assert (result > 0).all()

    def test_an_exact_0_from_an_injection_of_the_user_s_own(self):
        layer = make_layer("dense", "tanh", injection=torch.relu)
        assert (layer.equation(torch.full((1, 3), -1.0).double()).x > 0).all()

    def test_the_answer_to_an_input_that_softplus_makes_0_is_the_positive_one(self):
        # tanh, W = 2: an exact 0 would have the fixed point 0; any positive input has one near 0.9575.
        layer = scalar_layer(2.0, "tanh", injection=None, solver=pcdeq.Picard(max_steps=500))
        for dtype in (torch.float16, torch.float64):
            z = layer(torch.full((1, 1), -1000.0, dtype=dtype))
            assert z.item() == pytest.approx(0.9575, abs=1e-3)

    def test_kind_2_takes_a_0(self):
        x = torch.full((1, 3), -5.0).double()
        assert (make_layer("dense", "sigmoid").equation(x).x == 0).all()

    def test_one_of_the_user_s_own(self):
        layer = make_layer("dense", "tanh", injection=torch.exp, solver=pcdeq.Anderson(tol=1e-12))
        x = make_input("dense")
        z = layer(x)
        weight = layer.operator.effective_weight()
        torch.testing.assert_close(z, torch.tanh(z @ weight.T + x.exp()), rtol=1e-10, atol=0)

    def test_a_module_as_injection_learns_and_is_saved(self):
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.log = nn.Parameter(torch.zeros(3))

            def forward(self, x):
                return self.log.exp() * nn.functional.softplus(x)

        layer = pcdeq.PcDEQLinear(3, injection=Scale())
        layer(torch.randn(2, 3)).sum().backward()
        assert layer.injection.log.grad.abs().sum() > 0
        assert "injection.log" in layer.state_dict()

    def test_a_negative_one_is_refused(self):
        layer = make_layer("dense", injection=lambda x: x)
        with pytest.raises(UsageError, match=r"gave -0\.5, below 0.*\[0, inf\)"):
            layer(torch.tensor([[1.0, -0.5, 2.0]]))

    def test_one_that_changes_the_shape_is_refused(self):
        layer = make_layer("dense", injection=lambda x: x.exp().sum(-1, keepdim=True))
        with pytest.raises(UsageError, match=r"\(2, 3\) to \(2, 1\)"):
            layer(make_input("dense"))

    @pytest.mark.parametrize(
        ("activation", "floor"), [("tanh", -0.1), ("sigmoid", -0.1), ("tanh", math.nan), ("tanh", math.inf)]
    )
    def test_a_floor_that_is_none_is_refused(self, activation, floor):
        with pytest.raises(UsageError, match=f"floor.*{floor}"):
            pcdeq.PcDEQLinear(3, activation, floor=floor)

    def test_a_floor_of_0_is_refused_for_kind_1_only(self):
        with pytest.raises(UsageError, match="must be positive"):
            pcdeq.PcDEQLinear(3, "tanh", floor=0.0)
        assert pcdeq.PcDEQLinear(3, "sigmoid", floor=0.0).floor == 0


class TestWrongInput:
    @pytest.mark.parametrize(
        ("operator", "shape", "message"),
        [
            ("dense", (2, 4), r"3 features but the input's last dimension is 4 \(shape \(2, 4\)\)"),
            ("conv1d", (2, 3, 4), r"2 channels but the input has 3 \(shape \(2, 3, 4\)"),
            ("conv2d", (2, 5, 3, 3), "2 channels but the input has 5"),
            ("conv3d", (2, 4, 3, 3, 3), "1 channels but the input has 4"),
            ("dense", (), r"1 dimensions but the input has shape \(\)"),
            ("conv1d", (4,), r"2 dimensions but the input has shape \(4,\)"),
            ("conv2d", (3, 3), r"3 dimensions but the input has shape \(3, 3\)"),
            ("conv3d", (2, 2, 2), r"4 dimensions but the input has shape \(2, 2, 2\)"),
        ],
    )
    def test_shape(self, operator, shape, message):
        layer = make_layer(operator)
        for call in (layer, layer.solve, layer.enclose):
            with pytest.raises(UsageError, match=message):
                call(torch.zeros(shape, dtype=torch.float64))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
    def test_dtype(self, dtype):
        with pytest.raises(UsageError, match=rf"floating point.*{dtype}"):
            make_layer("dense")(torch.zeros(2, 3, dtype=dtype))

    def test_gradient_name(self):
        with pytest.raises(
            UsageError, match="unknown gradient 'exact'; known: implicit, phantom, jacobian-free, unrolled"
        ):
            pcdeq.PcDEQLinear(3, gradient="exact")

    def test_gradient_steps(self):
        with pytest.raises(UsageError, match="gradient_steps must be at least 1, got 0"):
            pcdeq.PcDEQLinear(3, gradient="phantom", gradient_steps=0)

    def test_activation_name(self):
        with pytest.raises(UsageError, match=r"unknown activation 'gelu'.*tanh"):
            pcdeq.PcDEQConv2d(3, activation="gelu")

    def test_solver_that_is_none(self):
        with pytest.raises(UsageError, match="solver"):
            pcdeq.PcDEQLinear(3, solver="anderson")

    def test_unknown_keyword(self):
        with pytest.raises(TypeError, match="tolerance"):
            pcdeq.PcDEQLinear(3, tolerance=1e-3)


class TestNonnegativeForGood:
    """The weight in use is >= 0 whatever happens to the parameters."""

    def check(self, layer, x):
        assert (layer.operator.effective_weight() >= 0).all()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (layer(x) >= 0).all()

    @each_operator
    @pytest.mark.parametrize("weight_norm", [True, False])
    @pytest.mark.parametrize("lr", [0.1, 10.0, 1000.0])
    def test_in_a_loop_that_never_heard_of_it(self, operator, weight_norm, lr):
        layer = make_layer(operator, "tanh", weight_norm=weight_norm, dtype=torch.float32)
        x = make_input(operator, samples=3, dtype=torch.float32)
        optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
        crossed = False
        for _ in range(8):
            optimizer.zero_grad()
            layer(x).sum().backward()  # pushes every weight down
            optimizer.step()
            crossed |= any(bool((p < 0).any()) for p in layer.parameters())
            self.check(layer, x)
        assert crossed or lr < 10  # else nothing was shown

    @each_operator
    def test_after_a_load_of_negative_values(self, operator):
        layer = make_layer(operator, "tanh", dtype=torch.float64)
        layer.load_state_dict({name: -torch.ones_like(value) for name, value in layer.state_dict().items()})
        x = make_input(operator)
        self.check(layer, x)
        if operator != "graph":  # there the adjacency was loaded too
            torch.testing.assert_close(layer(x), torch.tanh(torch.nn.functional.softplus(x, beta=5)))

    @pytest.mark.parametrize("operator", ["dense", "conv2d", "graph"])
    @pytest.mark.parametrize("value", [-1.0, 1e6, math.nan, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_loaded_start_cannot_change_the_equilibrium(self, operator, value, dtype):
        # tanh, large W, x = 0.01 has a second solution near -1, outside the domain: a start must not lead there.
        layer = make_layer(operator, "tanh", gain=10.0, dtype=dtype, injection=lambda x: x)
        x = torch.full_like(make_input(operator, dtype=dtype), 0.01)
        layer(x + 0.1).sum().backward()  # so that there is something to overwrite
        expected = layer.solve(x, solver=pcdeq.Newton(tol=1e-6)).value
        state = layer.state_dict()
        learned = [name for name in state if not name.startswith("operator") and state[name].is_floating_point()]
        assert learned
        layer.load_state_dict({n: torch.full_like(v, value) if n in learned else v for n, v in state.items()})
        z = layer(x)
        torch.testing.assert_close(z, expected, rtol=1e-3, atol=0)
        z.sum().backward()
        assert layer.last_backward.unconverged == 0

    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_after_deepcopy_and_changes_of_dtype(self, weight_norm):
        layer = make_layer("dense", "tanh", weight_norm=weight_norm)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_()
        for other in (
            copy.deepcopy(layer),
            copy.deepcopy(layer).float(),
            copy.deepcopy(layer).half(),
            copy.deepcopy(layer).bfloat16().double(),
        ):
            dtype = next(other.parameters()).dtype
            self.check(other, make_input("dense", dtype=dtype))

    def test_after_data_was_written_to(self):
        layer = make_layer("dense", "tanh", weight_norm=False)
        layer.operator.weight.data.fill_(-3.0)
        self.check(layer, make_input("dense"))

    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_a_weight_that_crossed_0_comes_back_when_the_loss_asks_for_it(self, weight_norm):
        layer = make_layer("dense", "tanh", weight_norm=weight_norm, solver=pcdeq.Anderson(tol=1e-8))
        with torch.no_grad():
            (layer.operator.weight_v if weight_norm else layer.operator.weight)[0, 1] = -0.3
        x = make_input("dense", samples=4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
        for _ in range(100):
            optimizer.zero_grad()
            (-layer(x)[:, 0].sum()).backward()
            optimizer.step()
        assert layer.operator.effective_weight()[0, 1] > 0.05

    def test_a_weight_that_crossed_0_stays_when_the_loss_does_not(self):
        layer = make_layer("dense", "tanh", weight_norm=False)
        with torch.no_grad():
            layer.operator.weight[0, 1] = -0.3
        layer(make_input("dense")).sum().backward()
        assert layer.operator.weight.grad[0, 1] == 0  # and does not drift away either

    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_a_weight_of_exactly_0_has_the_gradient_of_the_unconstrained_one(self, weight_norm):
        layer = make_layer("dense", "tanh", weight_norm=weight_norm, solver=pcdeq.Anderson(tol=1e-13))
        parameter = layer.operator.weight_v if weight_norm else layer.operator.weight
        x = make_input("dense")

        def loss():
            return (layer(x) * torch.tensor([1.0, -2.0, 0.5]).double()).sum()

        with torch.no_grad():
            parameter[0, 1] = 0.0
        loss().backward()
        gradient = parameter.grad[0, 1].item()
        with torch.no_grad():
            base = loss().item()
            parameter[0, 1] = 1e-6
            difference = (loss().item() - base) / 1e-6
        assert gradient == pytest.approx(difference, rel=1e-4)
        assert gradient != 0

    def test_a_layer_whose_row_is_all_zero(self):
        for g in (0.5, 0.0):
            layer = make_layer("dense", "tanh", solver=pcdeq.Anderson(tol=1e-10))
            with torch.no_grad():
                layer.operator.weight_v[1] = 0
                layer.operator.weight_g[1] = g
            x = make_input("dense")
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
            assert (layer.operator.effective_weight()[1] == 0).all()
            for _ in range(20):
                optimizer.zero_grad()
                (-layer(x)[:, 1].sum()).backward()
                assert all(p.grad.isfinite().all() for p in layer.parameters())
                optimizer.step()
                pcdeq.project_(layer)
            assert layer.operator.effective_weight()[1].sum() > 0.05


class TestThePaperSDynamics:
    """With the projection after each step: the parameters of a plain weight-normalised, clamped, unrolled training."""

    def reference(self, v, g, x, target, make_optimizer, steps, activation):
        v, g = (p.clone().requires_grad_() for p in (v, g))
        optimizer = make_optimizer([v, g])
        zeros = 0
        for _ in range(steps):
            optimizer.zero_grad()
            weight = g * v / v.norm(dim=1, keepdim=True)
            u = nn.functional.softplus(x, beta=5) if activation is torch.tanh else x.relu()
            z = torch.zeros_like(x)
            for _ in range(150):
                z = activation(z @ weight.T + u)
            (z - target).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                v.clamp_(min=0)
                g.clamp_(min=0)
            zeros = max(zeros, int((v == 0).sum()))
        return v.detach(), g.detach(), zeros

    @pytest.mark.parametrize("hook", [True, False])
    @pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
    @pytest.mark.parametrize(
        "make_optimizer",
        [
            lambda parameters: torch.optim.SGD(parameters, lr=0.6, momentum=0.5),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.15, weight_decay=0.1),
        ],
        ids=["sgd", "adamw"],
    )
    def test_the_parameters_are_the_same(self, make_optimizer, activation, hook):
        layer = make_layer("dense", activation, gain=0.8, solver=pcdeq.Anderson(tol=1e-14, max_steps=500))
        x, target = make_input("dense", samples=4), 3 * make_input("dense", samples=4, seed=9)
        v, g = layer.operator.weight_v.detach().clone(), layer.operator.weight_g.detach().clone()
        optimizer = make_optimizer(layer.parameters())
        if hook:
            optimizer.register_step_post_hook(lambda *_: pcdeq.project_(layer))
        for _ in range(12):
            optimizer.zero_grad()
            (layer(x) - target).square().sum().backward()
            optimizer.step()
            if not hook:
                pcdeq.project_(layer)
        function = torch.tanh if activation == "tanh" else torch.sigmoid
        v, g, zeros = self.reference(v, g, x, target, make_optimizer, 12, function)
        assert zeros > 0  # some weights did reach 0, where a clamp and a ReLU differ
        assert v.isfinite().all()
        torch.testing.assert_close(layer.operator.weight_v.detach(), v, rtol=0, atol=1e-8)
        torch.testing.assert_close(layer.operator.weight_g.detach(), g, rtol=0, atol=1e-8)


class TestHistory:
    """A layer may learn where to start; that must never change what it finds, nor break it."""

    def train(self, layer, x, steps=3):
        layer.train()
        for _ in range(steps):
            layer(x).sum().backward()

    @each_operator
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_equilibrium_is_the_same_before_and_after(self, operator, dtype):
        layer = make_layer(operator, "tanh", gain=1.2, dtype=dtype, solver=pcdeq.Anderson(tol=1e-6))
        x = make_input(operator, dtype=dtype)
        before = layer.solve(x).value
        self.train(layer, 3 * make_input(operator, samples=8, seed=7, dtype=dtype) + 1)
        torch.testing.assert_close(layer.solve(x).value, before, rtol=1e-4, atol=0)

    @each_operator
    def test_evaluation_does_not_move_it(self, operator):
        layer = make_layer(operator, "tanh", dtype=torch.float32)
        self.train(layer, make_input(operator, dtype=torch.float32))
        layer.eval()
        state = copy.deepcopy(layer.state_dict())
        x = make_input(operator, dtype=torch.float32).requires_grad_()
        first = layer(x)
        first.sum().backward()
        assert torch.equal(layer(x), first)
        assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())

    @each_operator
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_an_empty_batch_in_training_does_no_harm(self, operator, dtype):
        layer = make_layer(operator, "tanh", dtype=dtype)
        self.train(layer, make_input(operator, samples=0, dtype=dtype))
        layer(make_input(operator, dtype=dtype)).sum().backward()
        assert layer.last_forward.unconverged == layer.last_backward.unconverged == 0

    @each_operator
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_one_bad_batch_in_training_does_no_lasting_harm(self, operator, bad, dtype):
        layer = make_layer(operator, "softsign", dtype=dtype)
        x = make_input(operator, dtype=dtype)
        x[0] = bad
        with pytest.warns(ConvergenceWarning):
            layer(x).sum().backward()
        layer(make_input(operator, dtype=dtype)).sum().backward()
        assert layer.last_forward.unconverged == layer.last_backward.unconverged == 0

    @each_operator
    def test_the_weights_may_change_at_once(self, operator):
        layer = make_layer(operator, "tanh", gain=0.05, dtype=torch.float32, solver=pcdeq.Anderson(tol=1e-5))
        self.train(layer, make_input(operator, samples=8, dtype=torch.float32), steps=20)
        big = make_layer(operator, "tanh", gain=8.0, dtype=torch.float32, solver=pcdeq.Anderson(tol=1e-5), seed=3)
        with torch.no_grad():
            for mine, new in zip(layer.parameters(), big.parameters(), strict=True):
                mine.copy_(new)
        x = make_input(operator, dtype=torch.float32)
        z = layer(x)
        torch.testing.assert_close(z, big(x), rtol=1e-4, atol=0)
        z.sum().backward()
        assert layer.last_backward.unconverged == 0

    @pytest.mark.parametrize("operator", ["dense", "conv2d"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_sample_unlike_all_earlier_ones_is_still_solved(self, operator, dtype):
        # z* is 1e-16 or so: a long way down from the mean of what was seen, none at all from g(0).
        layer = make_layer(operator, "tanh", gain=0.4, dtype=dtype)
        x = torch.full_like(make_input(operator, dtype=dtype), -1000.0)
        assert layer.solve(x).outcome is pcdeq.Outcome.CONVERGED
        self.train(layer, make_input(operator, samples=8, dtype=dtype) + 3, steps=40)
        assert layer.solve(x).outcome is pcdeq.Outcome.CONVERGED

    @pytest.mark.parametrize("operator", ["dense", "conv2d"])
    def test_it_saves_steps(self, operator):
        layer = make_layer(operator, "tanh", gain=0.9, dtype=torch.float32)
        x = make_input(operator, samples=32, dtype=torch.float32)
        cold = layer.solve(x).steps.double().mean()
        self.train(layer, x, steps=40)
        assert layer.solve(x).steps.double().mean() < cold

    def test_it_can_be_switched_off(self):
        layer = make_layer("dense", "tanh", dtype=torch.float32, warm_start=False)
        x = make_input("dense", dtype=torch.float32)
        first = layer(x)
        self.train(layer, x)
        assert torch.equal(layer(x), first)
        assert set(layer.state_dict()) == {"operator.weight_v", "operator.weight_g"}


def test_reference_of_these_tests_solves_its_equation():
    # The referee itself: its residual in float64.
    for activation in ACTIVATIONS:
        layer = make_layer("conv1d", activation, gain=2.0)
        x = make_input("conv1d")
        z = reference_solution("conv1d", activation, layer, x)
        residual = layer.equation(x)(torch.from_numpy(z)).detach().numpy() - z
        assert np.abs(residual).max() < 1e-13 * z.max()


def test_threads_that_train_one_layer_with_images_of_different_sizes():
    """The warm start keeps one buffer, which each of them sizes anew."""
    layer, failures = pcdeq.PcDEQConv2d(2), []

    def train(size):
        try:
            for _ in range(60):
                layer(torch.randn(3, 2, size, size)).sum().backward()
        except RuntimeError as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=train, args=(size,)) for size in range(4, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
