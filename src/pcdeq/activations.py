"""Concave activations, the s of z = s(Wz + x).

An activation qualifies when, on [0, inf), it is nonnegative, nondecreasing and concave and
s(y)/y -> 0. Then z -> s(Wz + x) has exactly one fixed point for every W >= 0 and every
admissible x, whatever the size of W (Gabor, Piotrowski & Cavalcante 2024, Proposition 4.6).

The kind follows from s(0). Kind 1 (s(0) = 0) needs a positive input x, kind 2 (s(0) > 0) a
nonnegative one. Every derivative here is a function of the value as well: s is strictly
increasing wherever its slope is not 0, so s'(y) can be read off s(y), and the backward pass
needs nothing but z.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pcdeq.errors import UsageError

TensorMap = Callable[[Tensor], Tensor]
# What a rate found on a grid may be below the true one, of its size: the grid's last step squared, and rounding.
ROUNDED_UP = 1e-13
# Devices on which four simple passes are quicker than one of torch's tanh, and on which torch takes longer to make a
# tensor of a number than to add it to a small batch: there the constants of a solve are tensors.
SLOW_NUMBERS = frozenset(("cpu",))
_ONE, _MINUS_TWO = (torch.tensor(number, dtype=torch.float32, device="cpu") for number in (1.0, -2.0))
ROUNDINGS = 16  # of its result, by which an evaluation of s may be off where something is proved


@dataclass(frozen=True, eq=False)
class Activation:
    """A concave activation: value, slope, supremum, and what follows from them.

    Args:
        name: what it is called in messages and checkpoints.
        value: s, elementwise, for arguments >= 0.
        slope: s', elementwise. Where s has a kink any number between the two one-sided slopes.
            Left out, it is found by autograd.
        slope_of_value: s' as a function of z = s(y), which spares the backward pass a product.
        supremum: the limit of s at infinity; ``math.inf`` if there is none.
        kinks: where s has no derivative.

    A custom activation is checked when it is made: one that is convex, decreasing, negative or
    grows linearly is refused, because the layer's guarantee would be void.

    Bounds are proved on the assumption that ``value`` is accurate to 16 roundings of its result, also near 0. One
    that loses digits there, such as ``1 - torch.exp2(-y)``, can be trained, but `PcDEQ.enclose` refuses it. The same
    holds for the slope and `PcDEQ.enclose_gradient`.

    >>> import math, torch, pcdeq
    >>> gompertz = pcdeq.Activation("1-2^-y", lambda y: -torch.expm1(-math.log(2) * y), supremum=1.0)
    >>> gompertz.kind
    1
    >>> pcdeq.PcDEQLinear(3, activation=gompertz)(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    >>> pcdeq.Activation("softplus", torch.nn.functional.softplus, supremum=float("inf"))
    Traceback (most recent call last):
    ...
    pcdeq.errors.UsageError: activation 'softplus' is not concave on [0, inf): ...
    """

    name: str
    value: TensorMap
    slope: TensorMap | None = None
    slope_of_value: TensorMap | None = None
    supremum: float = math.inf
    kinks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_concave(self)

    def __call__(self, y: Tensor) -> Tensor:
        return self.value(y)

    @property
    def builtin(self) -> bool:
        """Whether this is the activation that pcdeq knows under its name."""
        return ACTIVATIONS.get(self.name) is self

    def __reduce__(self) -> str | tuple[object, ...]:
        if self.builtin:  # travels through pickle as its name
            return (as_activation, (self.name,))
        return super().__reduce__()

    def __deepcopy__(self, memo: object) -> Activation:
        return self  # immutable

    @cached_property
    def at_zero(self) -> float:
        """s(0)."""
        return float(self.value(torch.zeros((), dtype=torch.float64, device="cpu")))

    @cached_property
    def loses_digits_at(self) -> float | None:
        """An argument at which ``value`` is off by more than 16 roundings in float32, if there is one."""
        return _loses_digits_at(self.value)

    @cached_property
    def slope_loses_digits_at(self) -> float | None:
        """The same for the slope."""
        return _loses_digits_at(self.derivative)

    @property
    def kind(self) -> int:
        """1 where s(0) = 0 (the input must be positive), 2 where s(0) > 0 (nonnegative will do)."""
        return 2 if self.at_zero > 0 else 1

    def derivative(self, y: Tensor) -> Tensor:
        """s'(y), elementwise."""
        if self.slope is not None:
            return self.slope(y)
        with torch.inference_mode(False), torch.enable_grad():
            y = y.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.value(y).sum(), y)
        return slope

    def rate(self, floor: float = 0.0) -> float:
        """The contraction factor of the layer in Thompson's metric when its input is >= floor (T4).

        c = sup over y >= floor of (y - floor) s'(y) / s(y). Below 1 it holds for every W >= 0,
        so the number of steps is known before the first one.

        >>> round(as_activation("sigmoid").rate(), 4)
        0.2785
        >>> round(as_activation("relu6").rate(0.6), 12)
        0.9
        """
        if floor < 0 or not math.isfinite(floor):
            raise UsageError(f"floor must be a number >= 0, got {floor}")
        if floor == 0 and self.kind == 1:
            return 1.0  # (y s'(y) / s(y)) -> 1 at 0+ for any concave s with s(0) = 0 and a slope there
        return _largest_elasticity(self, floor)

    def floor_for(self, rate: float) -> float:
        """The smallest floor under the input that guarantees this rate, for every W >= 0 (T4).

        >>> tanh = as_activation("tanh")
        >>> floor = tanh.floor_for(0.5)
        >>> tanh.rate(floor) <= 0.5 < tanh.rate(0.99 * floor)
        True
        """
        if not 0 < rate < 1:
            raise UsageError(f"rate must be between 0 and 1, got {rate}")
        if self.rate(0.0) <= rate:
            return 0.0
        low, high = 0.0, 1.0
        while self.rate(high) > rate:
            low, high = high, 2 * high
            if high > 1e6:
                raise UsageError(f"no floor gives activation '{self.name}' a rate of {rate}")
        for _ in range(60):  # the rate falls as the floor rises
            middle = (low + high) / 2
            low, high = (low, middle) if self.rate(middle) <= rate else (middle, high)
        return high


def _loses_digits_at(function: TensorMap) -> float | None:
    y = _logspace(-12, 12, 4801).float()
    exact, limits = function(y.double()), torch.finfo(torch.float32)
    # What float32 is too small for is no lost digit.
    wrong = (function(y).double() - exact).abs() > ROUNDINGS * limits.eps * exact + limits.tiny
    return float(y[int(wrong.int().argmax())]) if bool(wrong.any()) else None


def _largest_elasticity(activation: Activation, floor: float) -> float:
    """Maximise (y - floor) s'(y) / s(y) over y > floor on a grid that is refined twice; rounded up."""
    # The elasticity of log1p is largest beyond its floor times the floor's logarithm.
    distance, best, centre = _logspace(-12, 12, 24001) * max(1.0, floor), 0.0, 1.0
    for factor in (1.01, 1.0001, 1.0):
        y = floor + distance
        found, index = torch.nan_to_num(distance * activation.derivative(y) / activation.value(y)).max(0)
        if float(found) > best:
            best, centre = float(found), float(distance[index])
        distance = _logspace(math.log10(centre / factor), math.log10(centre * factor), 4001)
    for kink in activation.kinks:
        below = torch.tensor(math.nextafter(kink, 0.0), dtype=torch.float64, device="cpu")
        best = max(best, (kink - floor) * float(activation.derivative(below) / activation.value(below)))
    # What is too small for a number is not 0: sigmoid's from a floor of 750 on.
    return min(max(best, torch.finfo(torch.float64).tiny) * (1 + ROUNDED_UP), 1.0)


def _logspace(low: float, high: float, points: int) -> Tensor:
    """So many numbers from 10^low to 10^high; on the CPU, also where layers are made without memory."""
    return torch.logspace(low, high, points, dtype=torch.float64, device="cpu")


def require_concave(activation: Activation) -> None:
    """Refuse an activation that breaks the guarantee, by sampling [0, inf) in float64."""
    y = torch.cat([torch.zeros(1, device="cpu"), torch.logspace(-6, 6, 1201, device="cpu")]).double()
    s = activation.value(y)

    def refuse(property_: str, index: Tensor, why: str) -> None:
        at = float(y[int(index)])
        raise UsageError(f"activation '{activation.name}' is not {property_}: near y = {at:.3g} {why}")

    if s.shape != y.shape or not s.isfinite().all():
        raise UsageError(f"activation '{activation.name}' must map finite numbers to finite numbers, elementwise")
    slack = 1e-12 * (1 + s.abs())
    if (s < 0).any():
        refuse("nonnegative on [0, inf)", (s < 0).int().argmax(), "its value is below 0")
    if (s.diff() < -slack[1:]).any():
        refuse("nondecreasing on [0, inf)", s.diff().argmin(), "it falls")
    chord = s.diff() / y.diff()
    noise = 1e-9 * chord[:-1].abs() + (slack[1:-1] + slack[2:]) / y.diff()[1:]
    if (chord.diff() > noise).any():
        refuse("concave on [0, inf)", (chord.diff() - noise).argmax() + 1, "its slope grows")
    # s(y)/y falls for every concave s; where it has stopped falling far out, s has a line in it.
    far = torch.tensor([1e15, 1e30], dtype=torch.float64, device="cpu")
    ratio = activation.value(far) / far
    if float(ratio[1]) > 0.8 * float(ratio[0]):
        raise UsageError(
            f"activation '{activation.name}' grows linearly (s(y)/y -> {float(ratio[1]):.3g}, not 0): a fixed "
            "point then exists only for small weights; bound it, as ReLU6 bounds ReLU"
        )
    if float(s.max()) > activation.supremum * (1 + 1e-6):
        raise UsageError(f"activation '{activation.name}' exceeds its supremum {activation.supremum}")
    if float(s.max()) == 0:
        raise UsageError(f"activation '{activation.name}' is 0 everywhere")


def _bent(name: str, line: TensorMap, *, kink: float, supremum: float, slope: float = 1.0) -> Activation:
    """A line, constant from the kink on, at which it has reached its supremum."""

    def slope_below(end: float) -> TensorMap:
        return lambda y: (y < end).to(y.dtype) * slope

    return Activation(
        name, lambda y: line(y).clamp(max=supremum), slope_below(kink), slope_below(supremum), supremum, (kink,)
    )


# (value, slope, slope as a function of the value, supremum, kinks); the first four are the paper's.
ACTIVATIONS: dict[str, Activation] = {}
for _activation in (
    Activation("tanh", torch.tanh, lambda y: torch.cosh(y).reciprocal_().square(), lambda z: 1 - z * z, 1.0),
    Activation("softsign", lambda y: y / (1 + y), lambda y: (1 + y) ** -2, lambda z: (1 - z) ** 2, 1.0),
    _bent("relu6", lambda y: y, kink=6.0, supremum=6.0),
    Activation("sigmoid", torch.sigmoid, lambda y: torch.sigmoid(y) * torch.sigmoid(-y), lambda z: z * (1 - z), 1.0),
    Activation("log1p", torch.log1p, lambda y: 1 / (1 + y), lambda z: torch.exp(-z)),
    Activation("arctan", torch.atan, lambda y: 1 / (1 + y * y), lambda z: torch.cos(z) ** 2, math.pi / 2),
    Activation("1-exp", lambda y: -torch.expm1(-y), lambda y: torch.exp(-y), lambda z: 1 - z, 1.0),
    Activation(
        "isru",
        lambda y: y / torch.hypot(y, torch.ones_like(y)),
        lambda y: (1 + y * y) ** -1.5,
        lambda z: (1 - z * z).clamp(min=0.0) ** 1.5,
        1.0,
    ),
    _bent("hard-tanh", lambda y: y, kink=1.0, supremum=1.0),
    _bent("hard-sigmoid", lambda y: y / 6 + 0.5, kink=3.0, supremum=1.0, slope=1 / 6),
):
    ACTIVATIONS[_activation.name] = _activation


def _overwrite_with_tanh(y: Tensor) -> Tensor:
    """-e / (2 + e) for e = exp(-2y) - 1, y >= 0: half the time of torch's tanh on a CPU, as exact near 0."""
    if y.device.type not in SLOW_NUMBERS:
        return y.tanh_()
    e = y.mul_(_MINUS_TWO).expm1_()
    return e.div_(torch.sub(_MINUS_TWO, e))


def _overwrite_with_softsign(y: Tensor) -> Tensor:
    return y.div_(torch.add(y, _ONE) if y.device.type in SLOW_NUMBERS else 1 + y)


# The same in the memory of the argument, which a solve need not keep.
_OVERWRITING: dict[str, TensorMap] = {
    "tanh": _overwrite_with_tanh,
    "softsign": _overwrite_with_softsign,
    "relu6": lambda y: y.clamp_(max=6.0),
    "sigmoid": torch.sigmoid_,
    "log1p": Tensor.log1p_,
    "arctan": torch.atan_,
    "1-exp": lambda y: y.neg_().expm1_().neg_(),
    "hard-tanh": lambda y: y.clamp_(max=1.0),
    "hard-sigmoid": lambda y: y.div_(6).add_(0.5).clamp_(max=1.0),
}


def overwrite(activation: Activation, y: Tensor) -> Tensor:
    """s(y), in the memory of y where that is possible."""
    return (_OVERWRITING.get(activation.name, activation.value) if activation.builtin else activation.value)(y)


def as_activation(activation: str | Activation) -> Activation:
    """The activation of that name, or the one given."""
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str):
        if activation in ACTIVATIONS:
            return ACTIVATIONS[activation]
        plain = activation.lower().replace("_", "-")
        reason = " (ReLU grows linearly; relu6 is its concave, bounded form)" if plain == "relu" else ""
        hint = f"did you mean {plain}? Known" if plain in ACTIVATIONS else "known"
        raise UsageError(f"unknown activation '{activation}'{reason}; {hint}: {', '.join(ACTIVATIONS)}")
    if isinstance(activation, int):
        raise UsageError(
            f"the second argument is the activation, got {activation}: a layer keeps its width, one number is enough"
        )
    raise UsageError(
        f"activation must be a name or a pcdeq.Activation, got {type(activation).__name__}; "
        "wrap a function as pcdeq.Activation(name, function, supremum=...)"
    )
