"""What a layer is, but for its tensors: that which the solves and the gradients of `implicit` go by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from pcdeq.activations import Activation
from pcdeq.equation import Equation
from pcdeq.operators import LinearMap
from pcdeq.solvers import Solution, Solver
from pcdeq.warmstart import WarmStart

Gradient = Literal["implicit", "phantom", "jacobian-free", "unrolled"]
GRADIENTS = get_args(Gradient)


class Rule(NamedTuple):  # a dataclass would take longer to make, and one is made for each pass
    """Everything about a layer but its tensors: the form of its equation, how to solve it, whom to tell."""

    bind: Callable[[Tensor], LinearMap]
    dense: bool  # whether the operator is `Dense` itself
    weight_form: type[Any]  # its value and its gradients as functions of the parameters: see operators.py
    injection_form: type[Any]  # the same of the input: see injection.py
    floor: float
    activation: Activation
    solver: Solver
    adjoint_solver: Solver
    gradient: Gradient
    gradient_steps: int
    warm: WarmStart | None
    record_forward: Callable[[Solution], None]
    record_backward: Callable[[Solution], None]
    observe: Callable[[Tensor, Callable[[Tensor], Tensor], LinearMap], None]

    def equation(self, x: Tensor, weight: Tensor) -> Equation:
        """The layer's equation for these inputs and this weight."""
        return Equation(self.bind(weight), self.activation, x)
