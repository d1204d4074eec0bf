"""Gradients: against finite differences, against each other, against their definitions; and their cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import (
    ACTIVATIONS,
    FACTS,
    OPERATORS,
    PAPER_ACTIVATIONS,
    STATES,
    as_array,
    injected,
    layer_matrix,
    make_input,
    make_layer,
    matrix_of,
    reference_solution,
    scalar_layer,
)
from torch.func import functional_call

import pcdeq
from pcdeq.equation import LARGEST, SMALLEST, Adjoint
from pcdeq.errors import ConvergenceError, ConvergenceWarning, PcdeqError
from pcdeq.operators import DenseMap

HERE = Path(__file__).parent
BACKWARD_INSIDE_AUTOCAST = """
import torch, pcdeq
from problems import make_input, make_layer
from test_implicit import assert_relatively_close, gradients
for solver in (pcdeq.Picard(), pcdeq.Anderson()):
    for operator in ("dense", "conv2d", "graph", "circulant"):
        layer = make_layer(operator, "tanh", gain=0.9, dtype=torch.float32, solver=solver).eval()
        x = make_input(operator, dtype=torch.float32)
        expected = gradients(layer, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = gradients(layer, x)
        assert_relatively_close(actual, expected, 1e-6)
"""
EXACT = pcdeq.Anderson(tol=1e-14, max_steps=2000)
each_operator = pytest.mark.parametrize("operator", OPERATORS)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def smooth_case(operator, activation, samples=2, **options):
    """A layer and an input at which no component is within 0.01 of a kink of s or of the injection."""
    facts = FACTS[activation]
    gain = 0.6 if facts.kink is None else 0.3 * min(facts.kink, 3.0)
    for seed in range(200):
        layer = make_layer(operator, activation, gain=gain, seed=seed, solver=EXACT, **options)
        x = make_input(operator, samples, seed=seed)
        z = reference_solution(operator, activation, layer, x).reshape(samples, -1)
        p = z @ layer_matrix(operator, layer).T + injected(as_array(x), facts.kind).reshape(samples, -1)
        if x.abs().min() > 0.01 and (facts.kink is None or np.abs(p - facts.kink).min() > 0.01):
            return layer, x
    raise AssertionError("no smooth case found")


def as_function(layer):
    """The layer as a function of its input and parameters, and the parameters."""
    names, values = zip(*layer.named_parameters(), strict=True)

    def function(x, *parameters):
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    return function, [value.detach().clone().requires_grad_() for value in values]


def gradients(layer, x, upstream=None):
    """d<upstream, layer(x)>/d(x, parameters)."""
    x = x.detach().clone().requires_grad_()
    z = layer(x)
    upstream = (
        torch.linspace(-1, 2, z.numel(), dtype=torch.float64).to(z.dtype).reshape(z.shape)
        if upstream is None
        else upstream
    )
    return torch.autograd.grad(z, [x, *layer.parameters()], upstream)


def assert_relatively_close(actual, expected, tol):
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).norm() <= tol * e.norm(), f"{((a - e).norm() / e.norm()).item():.2e} > {tol}"


class TestExact:
    @pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
    @each_operator
    @each_activation
    def test_gradcheck(self, activation, operator, gradient):
        layer, x = smooth_case(operator, activation, samples=1, gradient=gradient)
        function, parameters = as_function(layer)
        # Differences of 1e-6 of values exact to 1e-14: off by 1e-8, and the step's curvature by less. Not bit for bit
        # reproducible, because a backward pass in training mode teaches the warm start of the next.
        assert torch.autograd.gradcheck(
            function, [x.requires_grad_(), *parameters], atol=1e-6, rtol=1e-5, nondet_tol=1e-12, fast_mode=True
        )

    @each_operator
    def test_gradcheck_entry_by_entry(self, operator):
        layer, x = smooth_case(operator, "tanh", samples=2)
        function, parameters = as_function(layer)
        assert torch.autograd.gradcheck(
            function, [x.requires_grad_(), *parameters], atol=1e-6, rtol=1e-5, nondet_tol=1e-12
        )

    @each_operator
    @each_activation
    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_implicit_equals_unrolled(self, activation, operator, weight_norm):
        implicit, x = smooth_case(operator, activation, weight_norm=weight_norm)
        unrolled, _ = smooth_case(operator, activation, weight_norm=weight_norm, gradient="unrolled")
        assert_relatively_close(gradients(implicit, x), gradients(unrolled, x), 1e-8)

    @each_operator
    @pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
    def test_implicit_equals_the_formula(self, activation, operator):
        # (I - J)ᵀ y = v by a dense solve; dx = D y inj'(x).
        layer, x = smooth_case(operator, activation)
        facts, matrix = FACTS[activation], layer_matrix(operator, layer)
        raw = as_array(x).reshape(2, -1)
        z = reference_solution(operator, activation, layer, x).reshape(2, -1)
        slope = facts.slope(z @ matrix.T + injected(raw, facts.kind))
        v = np.linspace(-1, 2, z.size).reshape(z.shape)
        y = np.stack(
            [np.linalg.solve(np.eye(len(matrix)) - (d[:, None] * matrix).T, r) for d, r in zip(slope, v, strict=True)]
        )
        inject_slope = 1 / (1 + np.exp(-5 * raw)) if facts.kind == 1 else raw > 0
        expected = torch.from_numpy(slope * y * inject_slope).reshape(x.shape)
        assert_relatively_close(gradients(layer, x)[:1], [expected], 1e-10)

    def test_closed_form(self):
        # ReLU6 below its kink: z = x / (1 - w), dz/dx = 1 / (1 - w), dz/dw = x / (1 - w)².
        layer = scalar_layer(0.75, "relu6", solver=EXACT)
        x = torch.full((1, 1), 0.5, dtype=torch.float64, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.item() == pytest.approx(4.0, rel=1e-12)
        assert layer.operator.weight.grad.item() == pytest.approx(8.0, rel=1e-12)

    def test_a_saturated_unit_passes_nothing(self):
        layer = scalar_layer(0.75, "relu6", solver=EXACT)
        x = torch.full((1, 1), 2.0, dtype=torch.float64, requires_grad=True)
        layer(x).sum().backward()
        assert (x.grad.item(), layer.operator.weight.grad.item()) == (0.0, 0.0)

    def test_an_activation_of_the_user_s_own(self):
        own = pcdeq.Activation("1-2^-y", lambda y: 1 - torch.exp2(-y), supremum=1.0)
        layer = make_layer("conv1d", own, solver=EXACT)
        function, parameters = as_function(layer)
        assert torch.autograd.gradcheck(
            function, [make_input("conv1d", 1).requires_grad_(), *parameters], nondet_tol=1e-12
        )

    @pytest.mark.parametrize("frozen", ["input", "weights"])
    def test_only_what_asks_for_it_gets_one(self, frozen):
        layer, x = smooth_case("conv2d", "tanh")
        expected = gradients(layer, x, torch.ones_like(x))
        if frozen == "input":
            layer(x).sum().backward()
            assert x.grad is None
            assert_relatively_close([p.grad for p in layer.parameters()], expected[1:], 1e-10)
        else:
            layer.requires_grad_(False)
            layer(x.requires_grad_()).sum().backward()
            assert all(p.grad is None for p in layer.parameters())
            assert_relatively_close([x.grad], expected[:1], 1e-10)

    @pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson, pcdeq.Newton])
    @pytest.mark.parametrize("stop", ["sample", "batch", "certified"])
    def test_whatever_the_forward_solver(self, solver, stop):
        layer, x = smooth_case("dense", "softsign")
        expected = gradients(layer, x)
        options = {"tol": 1e-10, "max_steps": 500}
        chosen = pcdeq.Certified(solver(**options)) if stop == "certified" else solver(stop=stop, **options)
        other = make_layer("dense", "softsign", gain=0.6, solver=chosen)
        other.load_state_dict(layer.state_dict())
        assert_relatively_close(gradients(other, x), expected, 1e-8)

    @pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
    @pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson])
    def test_is_linear_in_the_upstream_gradient(self, scale, solver):
        # In float32 (1e-30)² underflows: a norm computed naively is 0 and the solve would stop at its first step.
        layer = make_layer("dense", "tanh", gain=0.9, dtype=torch.float32, solver=solver(tol=1e-6))
        x = make_input("dense", dtype=torch.float32)
        upstream = make_input("dense", seed=5, dtype=torch.float32)
        expected = gradients(layer, x, upstream)
        actual = [g / scale for g in gradients(layer, x, upstream * scale)[:1]]
        assert_relatively_close(actual, expected[:1], 1e-4)


class TestApproximations:
    """phantom and jacobian-free are defined by plain autograd steps from the detached fixed point."""

    @each_operator
    @pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
    @pytest.mark.parametrize(
        ("gradient", "option", "steps"),
        [("jacobian-free", 5, 1), ("phantom", 1, 1), ("phantom", 3, 3), ("phantom", 5, 5)],
    )
    def test_equals_its_definition(self, activation, operator, gradient, option, steps):
        layer, x = smooth_case(operator, activation, gradient=gradient, gradient_steps=option)
        z = torch.from_numpy(reference_solution(operator, activation, layer, x))
        own = [p.detach().clone().requires_grad_() for p in layer.parameters()]
        variable = x.clone().requires_grad_()
        u = torch.nn.functional.softplus(variable, beta=5) if FACTS[activation].kind == 1 else variable.relu()
        weight = own[0] * own[1] / own[0].flatten(1).norm(dim=1).reshape(own[1].shape)
        names = [name for name, _ in layer.operator.named_parameters()]
        assert names == ["weight_v", "weight_g"]
        matrix = _torch_matrix(operator, weight)
        s = {"tanh": torch.tanh, "softsign": torch.nn.functional.softsign, "relu6": torch.nn.functional.relu6}
        for _ in range(steps):
            p = (z.flatten(1) @ matrix.T).reshape(x.shape) + u
            z = s.get(activation, torch.sigmoid)(p)
        upstream = torch.linspace(-1, 2, z.numel(), dtype=torch.float64).reshape(z.shape)
        expected = torch.autograd.grad(z, [variable, *own], upstream)
        assert_relatively_close(gradients(layer, x), expected, 1e-10)

    def test_phantom_approaches_the_exact_one(self):
        exact, x = smooth_case("dense", "tanh")
        expected = gradients(exact, x)[0]
        errors = []
        for steps in (1, 5, 40):
            layer, _ = smooth_case("dense", "tanh", gradient="phantom", gradient_steps=steps)
            errors.append((gradients(layer, x)[0] - expected).norm().item())
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 1e-6

    @pytest.mark.parametrize("gradient", ["implicit", "phantom", "jacobian-free", "unrolled"])
    def test_the_value_does_not_depend_on_the_gradient(self, gradient):
        layer, x = smooth_case("dense", "tanh", gradient=gradient)
        expected = torch.from_numpy(reference_solution("dense", "tanh", layer, x))
        for value in (layer(x), layer(x.requires_grad_()), layer.solve(x).value):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def _torch_matrix(operator, weight):
    """The operator's matrix as a differentiable function of its weight: linear, so from the images of unit weights."""
    units = np.eye(weight.numel()).reshape(weight.numel(), *weight.shape)
    images = np.stack([matrix_of(operator, unit, STATES[operator]) for unit in units])
    return torch.tensordot(weight.flatten(), torch.from_numpy(images), dims=1)


class TestPrecision:
    @each_operator
    @pytest.mark.parametrize("activation", PAPER_ACTIVATIONS)
    def test_float32_against_float64(self, activation, operator):
        double, x = smooth_case(operator, activation)
        single = make_layer(operator, activation, dtype=torch.float32, solver=pcdeq.Anderson(tol=1e-6))
        single.load_state_dict(double.state_dict())
        # tol 1e-6 on both residuals, times ‖(I - J)⁻¹‖ which is below 10 here, twice.
        actual = [g.double() for g in gradients(single, x.float())]
        assert_relatively_close(actual, gradients(double, x), 1e-4)

    @pytest.mark.parametrize("operator", ["dense", "conv2d"])
    def test_under_autocast_the_equation_is_solved_in_float32(self, operator):
        layer = make_layer(operator, "tanh", gain=0.9, dtype=torch.float32).eval()
        x = make_input(operator, dtype=torch.float32)
        expected, expected_gradients = layer(x), gradients(layer, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = layer(x.requires_grad_())
        assert z.dtype == torch.float32
        assert torch.equal(z, expected)
        upstream = torch.linspace(-1, 2, z.numel(), dtype=torch.float64).float().reshape(z.shape)
        actual = torch.autograd.grad(z, [x, *layer.parameters()], upstream)
        for a, e in zip(actual, expected_gradients, strict=True):
            assert torch.equal(a, e)

    def test_backward_called_inside_autocast(self):
        # In a process of its own: a kernel that is handed bfloat16 for float32 takes the interpreter with it.
        run = subprocess.run([sys.executable, "-c", BACKWARD_INSIDE_AUTOCAST], capture_output=True, text=True, cwd=HERE)
        assert run.returncode == 0, run.stderr[-2000:]

    def test_inside_a_network_under_autocast(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), pcdeq.PcDEQLinear(8), torch.nn.Linear(8, 2))
        x = torch.randn(16, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        rough = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().mean().backward()
        # bfloat16 has 8 bits: two explicit layers around ours, each off by 2^-8 a few times over.
        assert_relatively_close(rough, [p.grad for p in model.parameters()], 0.05)
        assert model[1].last_backward.unconverged == 0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("operator", ["dense", "conv1d", "conv2d"])
    def test_a_module_of_half_precision(self, operator, dtype):
        layer = make_layer(operator, "tanh", gain=0.9, dtype=dtype)
        x = make_input(operator, dtype=dtype)
        z = layer(x)
        assert z.dtype == dtype
        actual = gradients(layer, x)
        assert all(g.dtype == dtype for g in actual)
        exact = make_layer(operator, "tanh", gain=0.9, solver=EXACT)
        exact.load_state_dict(layer.state_dict())
        eps = torch.finfo(dtype).eps
        # The solve is float32; what is rounded is the normalised weight, the output and the gradients: a few eps.
        assert_relatively_close([z.double()], [exact(x.double())], 4 * eps)
        assert_relatively_close([g.double() for g in actual], gradients(exact, x.double()), 20 * eps)


class TestSecondDerivative:
    @pytest.mark.parametrize("activation", ["tanh", "sigmoid", "isru"])
    @pytest.mark.parametrize(("operator", "weight_norm"), [("dense", True), ("dense", False), ("conv2d", True)])
    def test_implicit_has_one(self, activation, operator, weight_norm):
        layer, x = smooth_case(operator, activation, samples=1, weight_norm=weight_norm)
        function, parameters = as_function(layer)
        assert torch.autograd.gradgradcheck(function, [x.requires_grad_(), *parameters], atol=1e-5, rtol=1e-4)

    def test_implicit_has_one_with_the_weights_frozen(self):
        layer, x = smooth_case("dense", "tanh", samples=1)
        layer.requires_grad_(False)
        assert torch.autograd.gradgradcheck(layer, (x.requires_grad_(),), atol=1e-5, rtol=1e-4)

    def test_a_third(self):
        layer, x = smooth_case("dense", "tanh", samples=1)
        unrolled, _ = smooth_case("dense", "tanh", samples=1, gradient="unrolled")
        found = []
        for each in (layer, unrolled):
            value, point = each(x.requires_grad_()).square().sum(), x
            for _ in range(3):
                (value,) = torch.autograd.grad(value.sum(), point, create_graph=True)
            found.append(value)
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("wrt", ["x", "weight"])
    @pytest.mark.parametrize("loss", [torch.sum, lambda z: z.square().sum()])
    def test_with_a_part_of_ones_own_it_is_refused_not_wrong(self, wrt, loss):
        layer = make_layer("dense", pcdeq.Activation("own", lambda y: y / (2 + y), supremum=1.0), solver=EXACT)
        x = make_input("dense")
        x.requires_grad_()
        target = x if wrt == "x" else layer.operator.weight_v
        (first,) = torch.autograd.grad(loss(layer(x)), target, create_graph=True)
        with pytest.raises(PcdeqError, match=r'gradient="unrolled"'):
            torch.autograd.grad(first.square().sum(), target)

    def test_create_graph_leaves_the_first_derivative_alone(self):
        layer, x = smooth_case("dense", "tanh")
        x.requires_grad_()
        (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        (plain,) = torch.autograd.grad(layer(x).sum(), x)
        torch.testing.assert_close(first, plain)

    @pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_unrolled_has_one(self, activation, weight_norm):
        layer, x = smooth_case("dense", activation, samples=1, gradient="unrolled", weight_norm=weight_norm)
        function, parameters = as_function(layer)
        assert torch.autograd.gradgradcheck(function, [x.requires_grad_(), *parameters], atol=1e-5, rtol=1e-4)


class TestUnrolled:
    def test_warns_of_nothing(self):
        # torch says some things only once a process; here they must not be said at all.
        layer, x = smooth_case("dense", "tanh", gradient="unrolled")
        torch.set_warn_always(True)
        try:
            layer(x.requires_grad_()).sum().backward()
        finally:
            torch.set_warn_always(False)
        assert x.grad.isfinite().all()


class TestMemory:
    """What forward keeps for backward."""

    def saved(self, tol, gradient, activation="tanh", solver=pcdeq.Picard):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        layer = make_layer("conv2d", activation, gain=0.5, solver=solver(tol=tol, max_steps=1000), gradient=gradient)
        x = make_input("conv2d").requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        return sum(sizes), layer.last_forward.steps

    @pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson])
    @pytest.mark.parametrize("activation", ["tanh", pcdeq.Activation("own", lambda y: y / (2 + y), supremum=1.0)])
    @pytest.mark.parametrize("gradient", ["implicit", "phantom", "jacobian-free"])
    def test_does_not_grow_with_the_steps(self, gradient, activation, solver):
        loose, few = self.saved(1e-2, gradient, activation, solver)
        tight, many = self.saved(1e-10, gradient, activation, solver)
        assert many > few + 3
        assert tight == loose

    def test_unrolled_grows(self):
        loose, few = self.saved(1e-2, "unrolled")
        tight, many = self.saved(1e-10, "unrolled")
        state = 2 * 12 * 8  # samples, components, bytes
        assert tight - loose >= (many - few) * state

    def test_implicit_keeps_no_more_than_a_few_states(self):
        bytes_, _ = self.saved(1e-10, "implicit")
        state, weight = 2 * 12 * 8, 2 * 2 * 9 * 8
        assert bytes_ <= 3 * state + 8 * weight


class TestNotConverging:
    def layer(self, **options):
        return make_layer("dense", "tanh", gain=0.9, adjoint_solver=pcdeq.Picard(tol=1e-12, max_steps=3, **options))

    def test_backward_warns(self):
        layer = self.layer()
        z = layer(make_input("dense").requires_grad_())
        with pytest.warns(
            ConvergenceWarning, match="backward solve: 2 of 2 samples not converged after 3 steps.*raise max_steps"
        ):
            z.sum().backward()
        assert layer.last_backward.unconverged == 2
        assert layer.last_backward.outcome is pcdeq.Outcome.MAX_STEPS
        assert layer.last_forward.unconverged == 0

    def test_backward_throws_if_told_to(self):
        layer = self.layer(throw=True)
        z = layer(make_input("dense").requires_grad_())
        with pytest.raises(ConvergenceError, match="backward solve"):
            z.sum().backward()

    @pytest.mark.parametrize("max_steps", [1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("solver", [pcdeq.Picard, pcdeq.Anderson])
    def test_backward_at_the_smallest_limits(self, solver, dtype, max_steps):
        layer = make_layer("dense", "tanh", gain=0.9, dtype=dtype, adjoint_solver=solver(tol=1e-6, max_steps=max_steps))
        x = make_input("dense", dtype=dtype)
        with pytest.warns(ConvergenceWarning, match="backward solve.*max_steps"):
            result = gradients(layer, x)
        assert layer.last_backward.steps == max_steps
        assert all(g.isfinite().all() for g in result)

    def test_an_upstream_gradient_that_is_no_number_is_named(self):
        layer = make_layer("dense")
        z = layer(make_input("dense").requires_grad_())
        with pytest.warns(ConvergenceWarning, match="backward.*NaN"):
            z.backward(torch.full_like(z, float("nan")))
        assert layer.last_backward.outcome is pcdeq.Outcome.NONFINITE

    @pytest.mark.parametrize("gradient", ["implicit", "phantom", "unrolled"])
    def test_forward_warns_whatever_the_gradient(self, gradient):
        layer = make_layer(
            "dense", gain=0.9, gradient=gradient, solver=pcdeq.Picard(tol=1e-12, max_steps=3), adjoint_solver=EXACT
        )
        with pytest.warns(ConvergenceWarning, match="forward solve"):
            layer(make_input("dense").requires_grad_())
        assert layer.last_forward.steps == 3


class TestScale:
    """The adjoint equation is scaled where a sample's largest component is near an end of the range, and only there."""

    @pytest.mark.parametrize("size", [1, 5_000])
    @pytest.mark.parametrize(("peak", "is_scaled"), [(0.5, True), (2.0, False)])
    def test_from_the_smallest(self, peak, is_scaled, size):
        assert self.is_scaled(peak * SMALLEST, size) is is_scaled

    @pytest.mark.parametrize("size", [1, 5_000])
    @pytest.mark.parametrize(("peak", "is_scaled"), [(0.5, False), (2.0, True), (float("nan"), True)])
    def test_from_the_largest(self, peak, is_scaled, size):
        assert self.is_scaled(peak * LARGEST, size) is is_scaled

    def is_scaled(self, peak: float, size: int) -> bool:
        """Of three samples one is like that, in all its components."""
        grad = torch.ones(3, size)
        grad[1] = -peak
        _, factor = Adjoint(DenseMap(torch.eye(1)), torch.ones(3, size), grad).scaled()
        return factor is not None
