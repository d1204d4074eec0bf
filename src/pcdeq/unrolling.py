"""Equilibrium layers as so many plain steps of ordinary torch operations, which every exporter understands.

Plain iteration always converges; it begins where training has learned to. For a network of the package
`pcdeq.export` chooses the number of steps and says what error they leave; `unroll` takes any module.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pcdeq.equation import Equation
from pcdeq.errors import UsageError
from pcdeq.injection import inject
from pcdeq.layers import PcDEQ
from pcdeq.proofs.trusted import why_hooked, why_unknown_layer

DEEPEST = 400  # steps of a layer that anybody wants in a graph


class Equilibrium(nn.Module):
    """A layer's equation with its weight as a constant, and where its iteration starts."""

    weight: Tensor
    guess: Tensor  # of Wz*; empty where there is none

    def __init__(self, layer: PcDEQ) -> None:
        super().__init__()
        self.activation = layer.activation
        self.injection = layer.injection
        self.floor = layer.floor
        self.register_buffer("weight", layer.operator.effective_weight().detach().contiguous())
        self.operator = copy.deepcopy(layer.operator)  # for `bind`, and what else that needs; not what makes the weight
        self.operator._modules.pop("parametrizations", None)
        for name in ("weight", "weight_v", "weight_g"):
            self.operator._parameters.pop(name, None)
        product = torch.empty(0) if layer.warm is None else layer.warm.product
        self.register_buffer("guess", product.nan_to_num(nan=0.0).clamp(min=0.0).contiguous())

    def equation(self, x: Tensor) -> Equation:
        """The equation for this input, (samples, *state)."""
        kind = self.activation.kind
        if self.injection is not None:  # a graph cannot refuse a negative number
            x, kind = self.injection(x), 2
        weight = self.weight if self.weight.dtype == x.dtype else self.weight.to(x.dtype)
        return Equation(self.operator.bind(weight), self.activation, inject(x, kind, self.floor))

    def start(self, equation: Equation) -> Tensor:
        """s(x + a guess of Wz* that is >= 0): the first step, from wherever, so that T4 holds for it."""
        return equation.start(self.guess if self.guess.shape == equation.x.shape[1:] else None)


class FixedSteps(Equilibrium):
    """So many plain steps, of which the start is the first."""

    def __init__(self, layer: PcDEQ, steps: int) -> None:
        super().__init__(layer)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        state = x.shape[x.ndim - self.operator.state_ndim :]
        samples = x if x.ndim == len(state) + 1 else x.reshape(-1, *state)
        wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        equation = self.equation(samples if x.dtype == wide else samples.to(wide))
        z = self.start(equation)
        for _ in range(self.steps - 1):  # nothing in place, which an equation does without a gradient
            z = self.activation.value(equation.product(z) + equation.x)
        z = z if x.dtype == wide else z.to(x.dtype)
        return z if x.ndim == len(state) + 1 else z.reshape(x.shape)

    def extra_repr(self) -> str:
        return f"activation={self.activation.name}, steps={self.steps}"


def unroll(module: nn.Module, steps: int | None = None, *, tol: float = 1e-4) -> nn.Module:
    """A copy of any module in which each PcDEQ layer is so many plain steps, for inference anywhere.

    The steps are ordinary torch operations with constant weights, so that `torch.onnx.export`, `torch.export` for
    runtimes without Python, `torch.jit.trace` and the like take them.

    Args:
        steps: of each layer. Left out, they follow from the proved rate (T4): so many that z is within ``tol`` of z*,
            as a ratio. That takes an activation such as sigmoid, or a floor under the layer's input.
        tol: for that.

    >>> import torch, pcdeq
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(3, 8), pcdeq.PcDEQLinear(8, "sigmoid"), nn.Linear(8, 2)).eval()
    >>> unrolled, x = pcdeq.unroll(model), torch.randn(5, 3)
    >>> unrolled[1]
    FixedSteps(
      activation=sigmoid, steps=8
      (operator): Dense((8, 8), weight_norm=True)
    )
    >>> bool((unrolled(x) - model(x)).abs().max() < 1e-3)
    True
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"unroll takes a module, got {type(module).__name__}")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise UsageError(f"steps must be a number of at least 1, got {steps!r}")
    whole = nn.ModuleList([copy.deepcopy(module)])
    layers = {name: layer for name, layer in whole.named_modules() if isinstance(layer, PcDEQ)}
    replaced = {id(layer): FixedSteps(layer, _steps_of(layer, name, steps, tol)) for name, layer in layers.items()}
    for parent in list(whole.modules()):
        for name, child in parent._modules.items():
            if id(child) in replaced:
                parent._modules[name] = replaced[id(child)].train(child.training)  # pyright: ignore[reportOptionalMemberAccess]
    return whole[0]


def _steps_of(layer: PcDEQ, name: str, steps: int | None, tol: float) -> int:
    """How many steps a layer takes; refused where it may compute something else than its equation says."""
    place = f"layer '{name.partition('.')[2]}'" if "." in name else "the layer"
    reason = why_unknown_layer(layer, PcDEQ) or why_hooked(layer)
    if reason is not None:
        raise UsageError(f"{place} cannot be unrolled: {reason}")
    if steps is not None:
        return steps
    proved = layer.rate(tol).steps
    if proved is None or proved > DEEPEST:
        wanted = "gives no number of steps" if proved is None else f"asks for {proved:.3g} steps"
        raise UsageError(
            f"the proved rate {wanted} for {place} ({layer.activation.name}, floor {layer.floor:.2g}): give steps=, "
            "or build it with a larger floor, or rate="
        )
    return proved
