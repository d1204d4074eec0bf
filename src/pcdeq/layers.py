"""The layers: injection, operator, activation and solver put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from pcdeq import injection as injections
from pcdeq.activations import Activation, as_activation
from pcdeq.equation import Equation
from pcdeq.errors import UsageError
from pcdeq.implicit import GRADIENTS, Gradient, Plan, equilibrium, is_known_solver
from pcdeq.injection import TINY_FLOOR
from pcdeq.operations import AnySolver, autocasts, no_autocast, require_tensor, solve_and_confirm, solve_equation
from pcdeq.operators import Conv, Dense, Device, LinearMap, Operator
from pcdeq.parametrisation import is_transformed
from pcdeq.proofs.certified import Certified, Question, solve_until
from pcdeq.proofs.gradient import GradientEnclosure, enclose_gradient, through_slope
from pcdeq.proofs.order import Enclosure, enclose_near, enclose_tightly, enclose_within
from pcdeq.proofs.precision import full_precision
from pcdeq.proofs.rates import Rate, a_priori_rate
from pcdeq.proofs.trusted import require_known_layer
from pcdeq.solvers import Anderson, Newton, Solution, SolveStats, SolvingLayer, report
from pcdeq.solvers.solver import require_solver
from pcdeq.solvers.start import WarmStart

Injection = Callable[[Tensor], Tensor]


class PcDEQ(SolvingLayer):
    """An equilibrium layer: the z that solves z = s(Wz + inject(x)), with W >= 0 and s concave.

    There is exactly one such z for every weight and input, and plain iteration reaches it. The layer
    takes any real input; its shape is kept.

    Args:
        operator: W, any `Operator`.
        activation: s, by name or as an `Activation`. The kind of the layer follows from it.
        injection: maps the input to [0, inf). By default the paper's: softplus with beta 5 where s(0) = 0
            (pcDEQ-1), ReLU where s(0) > 0 (pcDEQ-2). A function of yours is checked on each call.
        floor: added to the injected input. With a floor the rate of convergence is known in advance,
            whatever the weights (T4): see `rate`.
        rate: choose the floor that guarantees this rate, such as 0.5, instead of giving it.
        solver: forward; by default `Anderson`, which cannot fail (T6). With `Certified` around it, its tolerance is a
            proved error.
        adjoint_solver: backward; by default like ``solver``.
        gradient: ``"implicit"`` is exact up to the solvers' tolerance; ``"phantom"`` differentiates the
            last ``gradient_steps`` steps, ``"jacobian-free"`` one step, ``"unrolled"`` all of a plain
            iteration from the start (memory grows with them).
        warm_start: start each solve from what earlier equilibria taught (see `pcdeq.solvers.start`), kept like
            the statistics of batch norm. It saves about half of the steps; the equilibrium is the same from
            every start. Not used with ``stop="batch"``, the paper's rule.

    After a pass ``last_forward`` and ``last_backward`` hold its `SolveStats`.

    Under autocast, and with parameters below float32, the equation is solved in float32: its tolerance
    is finer than bfloat16 can resolve.

    >>> import torch, pcdeq
    >>> from pcdeq.operators import Dense
    >>> layer = pcdeq.PcDEQ(Dense(4, weight_norm=False), "softsign", floor=0.1, solver=pcdeq.Picard(tol=1e-6))
    >>> x = torch.randn(2, 4)
    >>> z = layer(x)
    >>> weight = layer.operator.effective_weight()
    >>> torch.allclose(z, layer.activation(z @ weight.T + layer.inject(x)), atol=1e-5)
    True
    """

    def __init__(
        self,
        operator: Operator,
        activation: str | Activation = "tanh",
        *,
        injection: Injection | None = None,
        floor: float | None = None,
        rate: float | None = None,
        solver: AnySolver | None = None,
        adjoint_solver: AnySolver | None = None,
        gradient: Gradient = "implicit",
        gradient_steps: int = 5,
        warm_start: bool = True,
    ) -> None:
        if not isinstance(operator, Operator):
            raise UsageError(f"operator must be a pcdeq.Operator, got {type(operator).__name__}")
        if gradient not in GRADIENTS:
            raise UsageError(f"unknown gradient {gradient!r}; known: {', '.join(GRADIENTS)}")
        if gradient_steps < 1:
            raise UsageError(f"gradient_steps must be at least 1, got {gradient_steps}")
        for name, given in (("solver", solver), ("adjoint_solver", adjoint_solver)):
            if given is not None and not isinstance(given, Certified):
                require_solver(given, name)
        solver = Anderson() if solver is None else solver
        super().__init__(solver, _adjoint_of(solver) if adjoint_solver is None else adjoint_solver)
        self.operator = operator
        self.activation = as_activation(activation)
        self.injection = injection
        if rate is not None:
            if floor is not None:
                raise UsageError("give either floor or rate: the rate decides the floor")
            floor = max(self.activation.floor_for(rate), TINY_FLOOR)
        self.floor = self._checked_floor(floor)
        self.gradient: Gradient = gradient
        self.gradient_steps = gradient_steps
        self.warm = WarmStart().to(operator.device, operator.dtype) if warm_start else None

    def _checked_floor(self, floor: float | None) -> float:
        if floor is None:
            return TINY_FLOOR if self.activation.kind == 1 else 0.0
        if not 0 <= floor < float("inf"):
            raise UsageError(f"floor must be a number >= 0, got {floor}")
        if self.activation.kind == 1 and floor < TINY_FLOOR:
            raise UsageError(
                f"activation '{self.activation.name}' is 0 at 0, so the input must be positive: "
                f"floor must be at least {TINY_FLOOR:.2g}, got {floor}"
            )
        return float(floor)

    def inject(self, x: Tensor) -> Tensor:
        """The input of the equation: in [floor, inf), in at least float32."""
        if x.dtype != torch.float32:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.injection is None:
            return injections.inject(x, self.activation.kind, self.floor)
        injected = self.injection(x)
        if injected.shape != x.shape:
            raise UsageError(f"the injection maps shape {tuple(x.shape)} to {tuple(injected.shape)}; it must keep it")
        if bool((injected < 0).any()):
            raise UsageError(f"the injection gave {float(injected.min()):.3g}, below 0: it must map into [0, inf)")
        return injected + self.floor

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        if self.warm is None:  # the weights are the same with and without
            for name in [name for name in state_dict if name.startswith(f"{prefix}warm.")]:
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            require_tensor(x, "the input")
        if torch.compiler.is_compiling() and (not self._is_known() or maybe_current_level() is not None):
            if torch.compiler.is_exporting():
                raise UsageError("torch.export takes no part of your own, Certified or unrolled: use pcdeq.unroll")
            # The solve decides by its residuals when to stop: outside the graph, as one opaque call.
            return torch.compiler.disable(self.forward)(x)  # pyright: ignore[reportReturnType, reportArgumentType]
        if is_tracing():
            raise UsageError("torch.jit.trace would record the steps of one input: use torch.export or pcdeq.unroll")
        plan = Plan(self.solver, self.adjoint_solver, self.gradient, self.gradient_steps, self._told)
        with no_autocast(x.device.type):
            equation = self.equation(x)
            z, stats = equilibrium(equation, plan, self._guess(equation))
        if not torch.compiler.is_exporting():
            self.record_forward(stats)
        z = z if z.shape == x.shape else z.reshape(x.shape)
        return z if z.dtype == x.dtype or autocasts(x.device.type) else z.to(x.dtype)

    def _is_known(self) -> bool:
        """Whether a compiler can be told of the whole solve as one operator."""
        parts = type(self.operator) in (Dense, Conv) and self.activation.builtin and self.injection is None
        solvers = is_known_solver(self.solver) and is_known_solver(self.adjoint_solver)
        return parts and solvers and self.gradient != "unrolled"

    def _guess(self, equation: Equation) -> Tensor | None:
        return None if self.warm is None else self.warm.guess(equation.x)

    def _told(self, stats: SolveStats, z: Tensor, linear: LinearMap) -> None:
        """Hear of an adjoint solve, and learn from the equilibria that it was about."""
        self.record_backward(stats)
        if self.training and self.warm is not None and not is_transformed():  # whose tensors no buffer can hold
            self.warm.observe(z, linear.apply)

    @torch.no_grad()
    def solve(self, x: Tensor, *, solver: AnySolver | None = None, until: Question | None = None) -> Solution:
        """Solve for x without a gradient and tell how it went.

        A sample is called converged where the residual of its value, by a plain product of its own, is below ``tol``.

        Args:
            solver: instead of the layer's own.
            until: a question that bounds on z* may settle: given an `Enclosure`, it says for which samples they do.
                Each sample is then solved only as far as that takes.

        >>> import torch, pcdeq
        >>> layer = pcdeq.PcDEQConv2d(2, activation="relu6")
        >>> solution = layer.solve(torch.randn(3, 2, 8, 8), solver=pcdeq.Picard(tol=1e-6))
        >>> solution.value.shape, solution.converged.tolist()
        (torch.Size([3, 2, 8, 8]), [True, True, True])

        Is any unit above one half? A rough solve often knows:

        >>> question = lambda box: ((box.lower > 0.5) | (box.upper <= 0.5)).flatten(1).all(1)
        >>> layer.solve(torch.ones(1, 2, 8, 8), until=question).converged.tolist()
        [True]
        """
        require_tensor(x, "the input")
        chosen: AnySolver = self.solver if solver is None else solver
        with no_autocast(x.device.type):
            equation = self.equation(x)
            guess = self._guess(equation)
            if until is None:
                solution = solve_and_confirm(equation, chosen, guess)
            elif isinstance(chosen, Certified) or chosen.stop != "sample":
                raise UsageError("until= asks its question sample by sample: give it a solver with stop='sample'")
            else:
                solution = solve_until(until, chosen, equation, guess)
        report(solution.stats, chosen, "forward")
        return solution.with_value(solution.value.reshape(x.shape))

    @torch.no_grad()
    def enclose(self, x: Tensor, *, width: float | None = None, solver: AnySolver | None = None) -> Enclosure:
        """Bounds lower <= z* <= upper, proved per sample by the order test (T1, T3, T9).

        The claim is about the layer whose weight and injected input are the numbers in memory.

        Args:
            width: no component's bounds may be further apart than this; what cannot be had so is not certified. A
                width that the solve allows costs little more than the solve, less than none given, which means bounds
                as tight as the solve; for smaller ones the solve goes on, and the result is float64 where it must be.
            solver: for the first solve, instead of the layer's own.

        >>> import torch, pcdeq
        >>> box = pcdeq.PcDEQLinear(4).enclose(torch.randn(2, 4), width=1e-9)
        >>> bool(box.certified.all()), bool((box.width <= 1e-9).all())
        (True, True)
        """
        if width is not None and not width > 0:
            raise UsageError(f"width must be above 0, got {width}")
        with full_precision():
            equation = self.equation(x)
            solution = solve_equation(equation, self.solver if solver is None else solver, self._guess(equation))
            given = equation, solution.value, self._equation_in_float64
            box = enclose_tightly(*given) if width is None else enclose_within(width, *given)
        return Enclosure(box.lower.reshape(x.shape), box.upper.reshape(x.shape), box.certified)

    @torch.no_grad()
    def enclose_gradient(self, x: Tensor, grad: Tensor, *, tol: float = 1e-6) -> GradientEnclosure:
        """Bounds on the exact gradient of <grad, z*(x)> with respect to x, proved per sample (T5), in float64.

        They contain what `backward` would give if the equilibrium and its gradient were exact. Near a kink of the
        activation no computation can tell on which side z* lies; such components are reported.

        >>> import torch, pcdeq
        >>> layer, x = pcdeq.PcDEQLinear(4), torch.randn(2, 4, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> bounds = layer.enclose_gradient(x, torch.ones(2, 4))
        >>> bool(bounds.certified.all()), bool((bounds.width < 1e-4).all())
        (True, True)
        """
        require_known_layer(self, PcDEQ)
        if grad.shape != x.shape:
            raise UsageError(f"grad must have the input's shape {tuple(x.shape)}, got {tuple(grad.shape)}")
        with full_precision():
            equation = self._equation_in_float64(self.equation(x))
            solver = Anderson(tol=tol / 10, max_steps=2000)
            box = enclose_near(equation, solve_equation(equation, solver, self._guess(equation)).value)
            bounds = enclose_gradient(equation, box, grad.double().reshape(equation.x.shape), tol)
            bounds = through_slope(bounds, injections.slope(self._as_samples(x).double(), self.activation.kind))
        lower, upper, kinks = (item.reshape(x.shape) for item in (bounds.lower, bounds.upper, bounds.kinks))
        return GradientEnclosure(lower, upper, bounds.certified, kinks)

    def _equation_in_float64(self, equation: Equation) -> Equation:
        """The same numbers, as float64."""
        return Equation(self.operator.bind(equation.map.weight.double()), self.activation, equation.x.double())

    def rate(self, tol: float = 1e-4) -> Rate:
        """How fast plain iteration converges, known before the first step and for every weight (T4).

        >>> import pcdeq
        >>> pcdeq.PcDEQLinear(4, activation="sigmoid").rate()
        Rate(factor=0.278..., steps=8)
        >>> pcdeq.PcDEQLinear(4, activation="tanh", rate=0.5).rate(tol=1e-6).steps
        22
        """
        return a_priori_rate(self.activation, self.floor, tol)

    def equation(self, x: Tensor) -> Equation:
        """The equation that the layer solves for this input, samples along dimension 0.

        In the widest of the dtypes of input and weight, and at least float32.
        """
        x, weight = self._as_samples(x), self.operator.effective_weight()
        if type(weight) is not Tensor:
            require_tensor(weight, "the weight")
        dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        return Equation(self.operator.bind(weight.to(dtype)), self.activation, self.inject(x.to(dtype)))

    def _as_samples(self, x: Tensor) -> Tensor:
        """The input, checked, as (samples, *state)."""
        operator = self.operator
        if type(x) is not Tensor:
            require_tensor(x, "the input")
        if (least := operator.state_ndim) > x.ndim:
            raise UsageError(f"one sample has {least} dimensions but the input has shape {tuple(x.shape)}")
        if not x.is_floating_point() or x.dtype.itemsize < 2:  # torch has no sums of numbers of 8 bits
            raise UsageError(f"the input must be a floating point tensor, got {x.dtype}; use x.float()")
        if x.layout is not torch.strided:
            raise UsageError(f"the input must be a dense tensor, got {x.layout}; use x.to_dense()")
        if x.device != operator.device:
            raise UsageError(f"the layer is on {operator.device} but its input is on {x.device}; move one")
        operator.check_input(x)
        if x.ndim == operator.state_ndim + 1:
            return x
        return x.reshape(-1, *x.shape[x.ndim - operator.state_ndim :])

    def extra_repr(self) -> str:
        return f"activation={self.activation.name}, kind={self.activation.kind}, solver={self.solver}"


def _adjoint_of(solver: AnySolver) -> AnySolver:
    """The solver for the backward pass: the same where it applies to a linear equation."""
    if isinstance(solver, Certified):
        return Certified(_adjoint_of(solver.solver))  # pyright: ignore[reportArgumentType]
    return Anderson(tol=solver.tol, stop=solver.stop, throw=solver.throw) if isinstance(solver, Newton) else solver


class PcDEQLinear(PcDEQ):
    """A fully connected equilibrium layer on the last dimension.

    Takes the keywords of `PcDEQ`, and ``weight_norm``, ``device``, ``dtype``.

    >>> import torch, pcdeq
    >>> layer = pcdeq.PcDEQLinear(8, activation="sigmoid")
    >>> z = layer(torch.randn(5, 8))
    >>> z.sum().backward()
    >>> layer.last_forward.unconverged, layer.last_backward.unconverged
    (0, 0)
    """

    def __init__(
        self,
        features: int,
        activation: str | Activation = "tanh",
        *,
        weight_norm: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options,
    ) -> None:
        operator = Dense(features, weight_norm=weight_norm, device=device, dtype=dtype)
        super().__init__(operator, activation, **options)


class _PcDEQConv(PcDEQ):
    dims: int

    def __init__(
        self,
        channels: int,
        activation: str | Activation = "tanh",
        *,
        kernel_size: int = 3,
        weight_norm: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options,
    ) -> None:
        operator = Conv(self.dims, channels, kernel_size, weight_norm=weight_norm, device=device, dtype=dtype)
        super().__init__(operator, activation, **options)


class PcDEQConv1d(_PcDEQConv):
    """A convolutional equilibrium layer on ``(*batch, channels, length)``; see `PcDEQConv2d`.

    >>> import torch, pcdeq
    >>> pcdeq.PcDEQConv1d(3)(torch.randn(2, 3, 20)).shape
    torch.Size([2, 3, 20])
    """

    dims = 1


class PcDEQConv2d(_PcDEQConv):
    """A convolutional equilibrium layer on ``(*batch, channels, height, width)``.

    Takes the keywords of `PcDEQ`, ``kernel_size`` (odd), ``weight_norm``, ``device`` and ``dtype``.

    >>> import torch, pcdeq
    >>> pcdeq.PcDEQConv2d(3, activation="relu6")(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """

    dims = 2


class PcDEQConv3d(_PcDEQConv):
    """A convolutional equilibrium layer on ``(*batch, channels, depth, height, width)``; see `PcDEQConv2d`.

    >>> import torch, pcdeq
    >>> pcdeq.PcDEQConv3d(2)(torch.randn(1, 2, 4, 4, 4)).shape
    torch.Size([1, 2, 4, 4, 4])
    """

    dims = 3
