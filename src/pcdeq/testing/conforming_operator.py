"""What an operator must do, as tests for whoever writes one."""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.equation import Equation
from pcdeq.layers import PcDEQ
from pcdeq.operators import LinearMap, Operator
from pcdeq.proofs.order import enclose_near
from pcdeq.solvers import Anderson
from pcdeq.testing.shared import Conformance, assert_near, uniform


class OperatorConformance(Conformance):
    """What every operator must do: derive from it, and say how to build yours.

    A subclass has the shape of one sample as ``state``, small (each number and each weight is tried alone), the method
    `build` and, if you can write it down, `matrix`.

    >>> import torch, pcdeq
    >>> from pcdeq.testing import OperatorConformance
    >>> class Neighbours(pcdeq.LinearMap):
    ...     def apply(self, z):
    ...         return self.weight[0, 0] * (z.roll(1, -1) + z.roll(-1, -1))
    >>> class Ring(pcdeq.Operator):
    ...     def __init__(self):
    ...         super().__init__((1, 1), state_ndim=1)
    ...     def bind(self, weight):
    ...         return Neighbours(weight)
    >>> class TestRing(OperatorConformance):
    ...     state = (5,)
    ...     def build(self):
    ...         return Ring()
    >>> TestRing.check()  # pytest does it by itself

    A mistake is found, and named:

    >>> class Backwards(Neighbours):
    ...     def adjoint(self, y):
    ...         return self.weight[0, 0] * y.roll(-1, -1)
    >>> TestRing.build = lambda self: setattr(ring := Ring(), "bind", Backwards) or ring
    >>> TestRing().test_adjoint_is_the_transpose()
    Traceback (most recent call last):
    ...
    AssertionError: adjoint(y) is not the transpose of apply: ...
    """

    state: tuple[int, ...]

    def build(self) -> Operator:
        """A new operator, in float32, on the CPU."""
        raise NotImplementedError("build() must return the operator that is to be tested")

    def matrix(self, weight: Tensor) -> Tensor | None:
        """The matrix that a weight stands for, on flattened states; None if you would rather not say."""
        return None

    # What the tests start from.

    def weight(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return 0.05 + uniform(*self.build().shape, seed=1, dtype=dtype)

    def bound(self, dtype: torch.dtype = torch.float64) -> LinearMap:
        """A weight at work. Proofs ask a float32 operator for a float64 map: buffers must follow the weight."""
        return self.build().bind(self.weight(dtype))

    def states(self, samples: int = 4, seed: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
        return uniform(samples, *self.state, seed=seed, dtype=dtype)

    def units(self) -> Tensor:
        n = torch.Size(self.state).numel()
        return torch.eye(n, dtype=torch.float64).reshape(n, *self.state)

    def images(self) -> Tensor:
        """The matrix, from what `apply` does to unit vectors."""
        return self.bound().apply(self.units()).flatten(1).T

    def layer(self, dtype: torch.dtype, solver: Anderson | None = None) -> PcDEQ:
        """A layer with this operator, scaled so that neither it nor its gradient is saturated."""
        operator = self.build().to(dtype)
        with torch.no_grad():
            for seed, parameter in enumerate(operator.parameters()):
                parameter.copy_(0.2 + uniform(*parameter.shape, seed=seed))
            weight = operator.effective_weight()
            row_sum = operator.bind(weight).apply(torch.ones(1, *self.state, dtype=dtype)).max()
            operator._stored()[-1].mul_(0.8 / row_sum)  # the weight is proportional to the last
        return PcDEQ(operator, "tanh", solver=solver, warm_start=False)

    # The map.

    def test_keeps_shape_and_dtype_and_leaves_its_argument_alone(self):
        for dtype in (torch.float32, torch.float64):
            linear = self.bound(dtype)
            for name, function in (("apply", linear.apply), ("adjoint", linear.adjoint)):
                z = self.states(dtype=dtype)
                before, result = z.clone(), function(z)
                assert result.shape == z.shape, f"{name} maps {tuple(z.shape)} to {tuple(result.shape)}"
                assert result.dtype == dtype, f"{name} maps {dtype} to {result.dtype}"
                assert torch.equal(z, before), f"{name} changes its argument in place"

    def test_is_linear(self):
        linear, a, b = self.bound(), self.states(seed=2) - 0.5, self.states(seed=3) - 0.5
        for name, function in (("apply", linear.apply), ("adjoint", linear.adjoint)):
            assert_near(function(2 * a + 3 * b), 2 * function(a) + 3 * function(b), 1e-12, f"{name} is not linear")

    def test_maps_nonnegative_to_nonnegative(self):
        lowest = self.images().min()
        assert lowest >= 0, f"apply maps a unit vector to {lowest:.3g}: the guarantee needs W >= 0"

    def test_adjoint_is_the_transpose(self):
        linear, matrix, y = self.bound(), self.images(), self.states() - 0.5
        what = "adjoint(y) is not the transpose of apply"
        assert_near(linear.adjoint(y).flatten(1), y.flatten(1) @ matrix, 1e-12, what)
        assert_near(linear.adjoint(self.units()).flatten(1), matrix, 1e-12, what)

    def test_matrix_is_the_matrix(self):
        found, written = self.bound().matrix(torch.Size(self.state)), self.matrix(self.weight())
        assert_near(found, self.images(), 1e-13, "the map's matrix() is not what apply does")
        if written is not None:
            assert_near(found, written, 1e-13, "apply is not the product with the matrix of the test")

    def test_samples_do_not_mix(self):
        linear, z = self.bound(), self.states() - 0.5
        for name, function in (("apply", linear.apply), ("adjoint", linear.adjoint)):
            alone = torch.cat([function(sample[None]) for sample in z])
            assert_near(function(z), alone, 1e-13, f"{name} mixes the samples of a batch")

    def test_weight_gradient_is_the_derivative(self):
        operator, weight, step = self.build(), self.weight(), 1e-4
        z, y = self.states(seed=2), self.states(seed=3) - 0.5
        expected = torch.empty_like(weight)
        for i in range(weight.numel()):
            change = torch.zeros_like(weight)
            change.view(-1)[i] = step
            above, below = operator.bind(weight + change).apply(z), operator.bind(weight - change).apply(z)
            expected.view(-1)[i] = (y * (above - below)).sum() / (2 * step)
        gradient = operator.bind(weight).weight_gradient(z, y)
        assert_near(gradient, expected, 1e-7, "weight_gradient(z, y) is not the derivative of <y, Wz>")

    def test_adjoint_and_weight_gradient_build_no_graph(self):
        linear = self.bound()
        with torch.no_grad():
            results = linear.adjoint(self.states()), linear.weight_gradient(self.states(), self.states())
        assert not any(result.requires_grad for result in results), "a graph is kept although grad mode is off"

    def test_terms_bound_the_rounding(self):
        # T9: a float32 product is off by at most half an eps, relative, for each rounding, because nothing cancels.
        linear, terms = self.bound(torch.float32), self.bound(torch.float32).terms(torch.Size(self.state))
        exact = self.build().bind(linear.weight.double())
        limit = terms * torch.finfo(torch.float32).eps / 2
        for power in (0, 1, 8):  # equal numbers round alike, so that errors add up; others lose what is small
            z = self.states(samples=100, dtype=torch.float32) ** power / 3
            expected = exact.apply(z.double())
            error = ((linear.apply(z) - expected).abs() / expected.clamp(min=1e-30)).max()
            assert error <= 1.001 * limit, f"terms() = {terms} allows an error of {limit:.2g}, but it is {error:.2g}"

    # The parameters, and a layer.

    def test_weight_is_nonnegative_whatever_the_parameters(self):
        operator = self.build()
        with torch.no_grad():
            for seed, parameter in enumerate(operator.parameters()):
                parameter.copy_(uniform(*parameter.shape, seed=seed) - 0.5)
        weight = operator.effective_weight()
        assert bool((weight >= 0).all()), f"effective_weight() has an entry of {weight.min():.3g}"

    def test_gradients_of_a_layer(self):
        layer = self.layer(torch.float64, Anderson(tol=1e-13, max_steps=1000))
        names, parameters = zip(*layer.named_parameters(), strict=True)
        probe = self.states(samples=2, seed=3) - 0.5

        def forward(x: Tensor, *values: Tensor) -> Tensor:
            return (probe * torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))).sum()

        given = (self.states(samples=2) - 0.5, *parameters)
        assert torch.autograd.gradcheck(forward, [t.detach().clone().requires_grad_() for t in given])

    def test_bounds_hold_the_answer(self):
        layer, x = self.layer(torch.float32, Anderson(tol=1e-6)), self.states(dtype=torch.float32) - 0.5
        with torch.no_grad():
            equation = layer.equation(x)
            exact = Equation(layer.operator.bind(equation.map.weight.double()), layer.activation, equation.x.double())
            z = exact.at_zero()
            for _ in range(500):
                z = exact(z)
        # The layer may go over to float64, where it is hard to be wrong; so in float32 as well.
        for box in (layer.enclose(x), enclose_near(equation, layer.solve(x).value)):
            assert bool(box.certified.all()), "no bounds were found: is terms() needlessly large?"
            outside = torch.maximum(box.lower - z, z - box.upper).max()
            assert outside <= 1e-14, f"the answer lies {outside:.2g} outside of its bounds: is terms() too small?"
