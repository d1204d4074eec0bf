"""An audit of a model: which guarantee holds for each equilibrium layer, why, and with what numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pcdeq.activations import require_concave
from pcdeq.errors import UsageError
from pcdeq.layers import PcDEQ
from pcdeq.operators import Conv, Dense
from pcdeq.proofs.trusted import RANDOM_VECTORS, is_known_map, tried_units, why_negative, why_unknown_layer
from pcdeq.solvers import Picard

POWER_STEPS = 200


@dataclass(frozen=True)
class LayerReport:
    """What is known about one layer.

    Attributes:
        holds: whether the equilibrium exists, is unique and is reached by plain iteration, for every input.
        reason: the theorem by which, or what breaks it. Of an operator of your own also whether all of it was tried, or
            some; without inputs, which show their shape, none of it is, and nothing holds.
        rate: the factor by which each step provably shrinks the distance (T4); 1 where that says nothing.
        steps: so many steps provably reach 1e-4 in Thompson's metric, if any number does.
        measured_rate: the factor seen on the given inputs, of the last plain steps.
        norm: the largest singular value of W. Below 1, over the largest slope of s, Banach's theorem in the
            Euclidean norm would have sufficed.
        radius: the spectral radius of W; both are NaN for an operator of your own if no inputs were given.
        contraction: whether it would have.
        dead_rows: output units whose weights are all 0.
        negative: stored parameters below 0; they count as 0.
        saturated: the share of components whose slope is below 1e-3, on the given inputs.
    """

    name: str
    layer: str
    activation: str
    kind: int
    holds: bool
    reason: str
    rate: float
    steps: int | None
    norm: float
    radius: float
    contraction: bool
    dead_rows: int
    negative: int
    measured_rate: float | None = None
    saturated: float | None = None


@dataclass(frozen=True)
class Report:
    """The audit of a model: one report a layer."""

    layers: tuple[LayerReport, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every layer's guarantee holds."""
        return all(layer.holds for layer in self.layers)

    def __str__(self) -> str:
        verdict = {True: "holds", False: "FAILS"}
        return "\n".join(f"{layer.name}: {verdict[layer.holds]}: {layer.reason}" for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"holds": self.holds, "layers": [asdict(layer) for layer in self.layers]}


@torch.no_grad()
def check(model: nn.Module, images: Tensor | None = None) -> Report:
    """Audit every equilibrium layer of a model; with some of its inputs, also measure.

    >>> import torch, pcdeq
    >>> report = pcdeq.check(pcdeq.PcDEQLinear(4, activation="sigmoid"), torch.randn(8, 4))
    >>> report.holds, report.layers[0].steps, report.layers[0].measured_rate < report.layers[0].rate
    (True, 8, True)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"check takes a network, an nn.Module, not {type(model).__name__}")
    layers = {name or "model": module for name, module in model.named_modules() if isinstance(module, PcDEQ)}
    if not layers:
        raise UsageError("the model has no pcDEQ layer, whose guarantee could be checked")
    seen = {} if images is None else _inputs_of(model, layers, images)
    return Report(tuple(_check_layer(name, layer, seen.get(name)) for name, layer in layers.items()))


def _inputs_of(model: nn.Module, layers: dict[str, PcDEQ], images: Tensor) -> dict[str, Tensor]:
    """What each layer is given when the model runs on the images."""
    names = {layer: name for name, layer in layers.items()}
    seen: dict[str, Tensor] = {}

    def remember(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        seen[names[layer]] = inputs[0]

    handles = [layer.register_forward_pre_hook(remember) for layer in names]
    training = model.training
    try:
        model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return seen


def _check_layer(name: str, layer: PcDEQ, x: Tensor | None) -> LayerReport:
    reason = _violation(layer, x)
    theorem = f"pcDEQ-{layer.activation.kind}: positive concave mapping with asymptotic mapping 0 (paper, Prop. 4.6)"
    theorem += _what_was_tried(layer, x)
    rate = layer.rate() if reason is None else None
    norm, radius = _norm_and_radius(layer, x)
    slope = float(layer.activation.derivative(torch.tensor([layer.floor], dtype=torch.float64)))
    weight = layer.operator.effective_weight()
    measured, saturated = (None, None) if x is None or reason else _measure(layer, x)
    return LayerReport(
        name=name,
        layer=type(layer).__name__,
        activation=layer.activation.name,
        kind=layer.activation.kind,
        holds=reason is None,
        reason=reason or theorem,
        rate=1.0 if rate is None else rate.factor,
        steps=None if rate is None else rate.steps,
        norm=norm,
        radius=radius,
        contraction=norm * slope < 1,
        dead_rows=int((weight.flatten(1) == 0).all(1).sum()),
        negative=sum(int((parameter < 0).sum()) for parameter in layer.operator.parameters(recurse=False)),
        measured_rate=measured,
        saturated=saturated,
    )


def _violation(layer: PcDEQ, x: Tensor | None) -> str | None:
    """What breaks the guarantee, if anything does."""
    weight = layer.operator.effective_weight()
    if not bool(weight.isfinite().all()):
        return "a weight is infinite or NaN"
    if bool((weight < 0).any()):
        return (
            f"the weight in use has {int((weight < 0).sum())} negative entries, the smallest {float(weight.min()):.3g}"
        )
    try:
        require_concave(layer.activation)
    except UsageError as error:
        return str(error)
    if layer.activation.kind == 1 and layer.floor <= 0:
        return f"activation '{layer.activation.name}' is 0 at 0 and the floor under its input is {layer.floor}"
    if x is not None:
        equation = layer.equation(x)
        if not bool((equation.x >= layer.floor).all()):
            return f"the injected input goes down to {float(equation.x.min()):.3g}, below the floor {layer.floor:.3g}"
        for adjoint in (False, True):
            if (reason := why_negative(equation.map, equation.x, adjoint=adjoint)) is not None:
                return f"of the operator {type(layer.operator).__name__} {reason}"
    elif not is_known_map(layer.operator.bind(weight)):
        return (
            f"nothing is known about the operator {type(layer.operator).__name__} before it is tried: give check some "
            "inputs"
        )
    return why_unknown_layer(layer, PcDEQ)


def _what_was_tried(layer: PcDEQ, x: Tensor | None) -> str:
    """Of an operator of the user's, by which trial it is known to be nonnegative."""
    if x is None or is_known_map(layer.operator.bind(layer.operator.effective_weight())):
        return ""
    state = x.shape[-layer.operator.state_ndim :]
    units, total = tried_units(state), state.numel()
    if units == total:
        return f"; W >= 0, as the images of all {total} unit vectors show"
    return f"; that W >= 0 was only sampled, on {units} of {total} unit vectors and {RANDOM_VECTORS} random ones"


def _norm_and_radius(layer: PcDEQ, x: Tensor | None) -> tuple[float, float]:
    """Largest singular value and spectral radius of W, by power iteration; of its matrix where it has one.

    A convolution needs the size of its images: without inputs it is taken on 16 places a side. Of what an operator of
    the user's wants nothing is known: without inputs both are NaN.
    """
    operator, weight = layer.operator, layer.operator.effective_weight().double()
    if x is not None:
        state = x.shape[-operator.state_ndim :]
    elif isinstance(operator, Dense | Conv):
        state = (weight.shape[1], *[16] * (operator.state_ndim - 1))
    else:
        return math.nan, math.nan
    linear, ones = operator.bind(weight), weight.new_ones(1, *state)
    norm = math.sqrt(_power(lambda z: linear.adjoint(linear.apply(z)), ones))
    return norm, _power(linear.apply, ones)


def _power(apply: Callable[[Tensor], Tensor], z: Tensor) -> float:
    """The Perron root of a nonnegative operator, from a positive start."""
    value = 0.0
    for _ in range(POWER_STEPS):
        # A shift of one tenth: cyclic operators would go round and round.
        image = apply(z) + 0.1 * value * z
        before, value = value, float(image.norm() / z.norm()) - 0.1 * value
        if value <= 0 or abs(value - before) < 1e-10 * value:
            break
        z = image / image.norm()
    return max(value, 0.0)


def _measure(layer: PcDEQ, x: Tensor) -> tuple[float | None, float]:
    """The rate of the plain iteration before it converges, and the share of saturated components."""
    equation = layer.equation(x)
    z = equation.at_zero()
    before, rate = math.inf, None
    for _ in range(Picard().max_steps):
        new = equation(z)
        size = float((new - z).norm())
        rate = size / before if 0 < before < math.inf else rate
        z, before = new, size
        if size < 1e-4 * float(new.norm()):
            break
    return rate, float((equation.slope(z) < 1e-3).double().mean())
