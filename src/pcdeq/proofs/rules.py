"""What every kind of layer must say for proofs to know it, and the two families that most kinds belong to.

A kind says how exact boxes, differentiable bounds and errors go through its layers, and what becomes of them in frozen
and exported networks. Most of that follows from one mathematical fact: that the layer is affine, or that each of its
outputs is the largest of some of its inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from pcdeq.errors import UsageError
from pcdeq.layers import PcDEQ
from pcdeq.proofs import trusted
from pcdeq.proofs.balls import Ball
from pcdeq.proofs.intervals import Bounds, Box, eps, outward
from pcdeq.proofs.linear import Functional, dot
from pcdeq.proofs.precision import full_precision

# What each equilibrium of a truncated network makes of the error of its input, in the order of the forward pass.
Truncated = Iterator[Callable[[Tensor], Tensor]]
# Errors are summed in float64, without cancellation, over fewer than 1e6 terms.
ROUNDING = 1 + 1e-9


class PerChannel(NamedTuple):
    """x * scale + shift for each channel, which is dimension 1; in float64, (channels,) each."""

    scale: Tensor
    shift: Tensor
    size: Tensor  # of the numbers that the shift is a sum of


class Layer(ABC):
    """One layer of a recognised network."""

    solves = False  # whether there is an equilibrium in it
    varies = False  # whether it computes something else in training mode
    tensors: tuple[str, ...] = ()  # the names of what its module has learned

    def __init__(self, module: Any, path: str, plain: type[nn.Module], known: type[nn.Module]) -> None:
        self.module = module
        self.path = path  # its name in the network
        self.plain = plain  # torch's class, which exporters can look into
        self.known = known  # the class by which it was recognised: the same, or a faster one of ours

    @classmethod
    def why_not(cls, module: Any, training: bool) -> str | None:
        """What in the options of a module is not known, if it may be in training mode or not; None if they all are."""
        return None

    def refuse(self, reason: str) -> NoReturn:
        """Say which layer it is, and why."""
        raise UsageError(f"{self.path} ({type(self.module).__name__}): {reason}")

    @abstractmethod
    def enclose(self, box: Box, tol: float) -> Box:
        """The box of the exact outputs for the inputs in a box; ``tol`` is for equilibrium layers."""

    def surround(self, ball: Ball, tol: float) -> Ball:
        """The same for a ball: less tight, and less work where a kind has a rule of its own.

        What a rule needs of the weights is made once: the layer is taken for what it is at the first call.
        """
        box = self.enclose(ball.box(), tol)
        return replace(ball.around(box), proved=box.proved)

    @abstractmethod
    def bound(self, bounds: Bounds) -> Bounds:
        """The clean outputs and bounds of the outputs over a box, differentiable, in the mode the module is in."""

    @abstractmethod
    def pull(self, functional: Functional, box: Box) -> Functional:
        """A lower bound of a functional of the output, over a box in float64, as a functional of the input (T10)."""

    @abstractmethod
    def enlarge(self, error: Tensor, truncated: Truncated) -> Tensor:
        """A bound on the error of the output, in float64, from one on the input's, component by component."""

    def freeze(self) -> nn.Module:
        """A copy whose parameters are constants."""
        return constant(self.module, self.known, self.tensors)

    def export(self, equilibrium: Callable[[PcDEQ], nn.Module]) -> nn.Module:
        """A copy made of torch's own modules; ``equilibrium`` makes those in place of equilibrium layers."""
        return constant(self.module, self.plain, self.tensors)

    def commutes(self, rank: int | None) -> bool:
        """Whether a map of single channels can as well be applied after it, for inputs of so many dimensions."""
        return False

    def rank(self, before: int | None) -> int | None:
        """How many dimensions its output has, given those of the input; None where that is not known."""
        return before

    def per_channel(self) -> PerChannel | None:
        """The map, if the layer is only one of single channels."""
        return None

    def followed_by(self, other: PerChannel, rank: int | None) -> Layer | None:
        """A layer that does this and then the map, for outputs of so many dimensions; None if there is none."""
        return None

    def preceded_by(self, other: PerChannel, rank: int | None) -> Layer | None:
        """A layer that does the map and then this, for inputs of so many dimensions; None if there is none."""
        return None


class Entry(NamedTuple):
    """How a class of modules is known."""

    kind: type[Layer]
    plain: type[nn.Module]


KINDS: dict[type[nn.Module], Entry] = {}


Kind = TypeVar("Kind", bound=Layer)


def kind(*classes: type[nn.Module]) -> Callable[[type[Kind]], type[Kind]]:
    """Register a kind for these classes of modules; one that lacks a rule is an error."""

    def register(found: type[Kind]) -> type[Kind]:
        missing = getattr(found, "__abstractmethods__", None)
        if missing:
            raise TypeError(f"{found.__name__} has no rule for {', '.join(sorted(missing))}")
        for known in classes:
            trusted.know(known)
            KINDS[known] = Entry(found, known)
        return found

    return register


def constant(module: nn.Module, cls: type[nn.Module], tensors: Sequence[str]) -> nn.Module:
    """A module of the class with the options of another one, and its tensors, as they evaluate now, as constants."""
    clone: nn.Module = cls.__new__(cls)
    nn.Module.__init__(clone)
    options = {name: value for name, value in vars(module).items() if name not in (*vars(clone), *tensors)}
    vars(clone).update(options)
    for name in tensors:
        value: Tensor | None = getattr(module, name)
        fixed = None if value is None else value.detach().clone()
        if name in module._buffers:
            clone.register_buffer(name, fixed)
        else:
            clone.register_parameter(name, None if fixed is None else nn.Parameter(fixed, requires_grad=False))
    return clone.train(module.training)


@full_precision()
def boxes_along(layers: Sequence[Layer], box: Box, tol: float) -> list[Box]:
    """The boxes of what goes into each of the layers in line, and of what comes out of the last."""
    boxes = [box]
    for layer in layers:
        boxes.append(layer.enclose(boxes[-1], tol))
    return boxes


def enclose(layers: Sequence[Layer], box: Box, tol: float) -> Box:
    """The box of the exact outputs of layers in line."""
    return boxes_along(layers, box, tol)[-1]


@full_precision()
def surround(layers: Sequence[Layer], ball: Ball, tol: float, before: float | None = None) -> Ball:
    """The ball of the exact outputs of layers in line.

    Each equilibrium enlarges what those before it leave open: ``before`` is for all but the last, if it differs.
    """
    last = max((place for place, layer in enumerate(layers) if layer.solves), default=0)
    for place, layer in enumerate(layers):
        ball = layer.surround(ball, tol if before is None or place >= last else before)
    return ball


def bound(layers: Sequence[Layer], bounds: Bounds) -> Bounds:
    """The clean outputs of layers in line, and their bounds."""
    for layer in layers:
        bounds = layer.bound(bounds)
    return bounds


@full_precision()
def pull(layers: Sequence[Layer], functional: Functional, boxes: Sequence[Box]) -> Functional:
    """A functional of the outputs of layers in line as one of their inputs; each layer's input has a box."""
    for layer, box in zip(reversed(layers), reversed(boxes), strict=True):
        functional = layer.pull(functional, box)
    return functional


@full_precision()
def enlarge(layers: Sequence[Layer], error: Tensor, truncated: Truncated) -> Tensor:
    """A bound on the error of the outputs of layers in line."""
    for layer in layers:
        error = layer.enlarge(error, truncated) * ROUNDING
    return error


class Largest(Layer):
    """Each output is the largest of some of the inputs, perhaps with 0: monotone, without rounding, and no error grows.

    |max a - max b| <= max |a - b|, so the rule for values is that for errors, too.
    """

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """The outputs."""

    def enclose(self, box: Box, tol: float) -> Box:
        return box.map(self.value)

    def keeps_channels(self, rank: int) -> bool:
        """Whether, for inputs of so many dimensions, each output is one of the numbers of its own channel."""
        return False

    def surround(self, ball: Ball, tol: float) -> Ball:
        """A largest number moves at most as far as any of those that it is the largest of."""
        value, radius = self.value(ball.centre), ball.radius
        numbers = radius[0].numel() if len(radius) else 1
        if numbers == 1:
            radius = radius.reshape(len(radius), *[1] * (value.ndim - 1))
        elif numbers != radius.shape[1] or not self.keeps_channels(value.ndim):
            radius = self.value(radius.expand_as(ball.centre))
        return ball.moved(value, radius)

    def pull(self, functional: Functional, box: Box) -> Functional:
        """By the two ends of the output, which are numbers: nothing is left of the input."""
        c, low, high = functional.coefficient, self.value(box.lower), self.value(box.upper)
        return functional.through(c.new_zeros(len(c), *box.lower.shape[1:]), *functional.of_box(low, high))

    def bound(self, bounds: Bounds) -> Bounds:
        return bounds.map(self.value)

    def enlarge(self, error: Tensor, truncated: Truncated) -> Tensor:
        return self.value(error)


class Affine(Layer):
    """x -> Ax + b. A box goes by centre and radius, and errors by |A|."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """Ax + b, in the dtype of x."""

    @abstractmethod
    def magnify(self, x: Tensor, bias: float = 0.0) -> Tensor:
        """|A|x for x >= 0, and as much of |b|, or of the numbers that b was made from."""

    @abstractmethod
    def terms(self, shape: torch.Size) -> int:
        """At most so many numbers are summed up in one output, for inputs of a shape."""

    def enclose(self, box: Box, tol: float) -> Box:
        """The rounding of both products is at most (terms + 4) eps |A| |centre|, and a little."""
        centre, radius = box.ball()
        rounding = (self.terms(centre.shape) + 4) * eps(centre)
        reach = self.magnify(radius * (1 + rounding) + rounding * centre.abs(), rounding) * (1 + rounding)
        middle = self.value(centre)
        return outward(middle, middle, reach, box.proved)

    def bound(self, bounds: Bounds) -> Bounds:
        clean, centre = self.module(torch.cat((bounds.clean, bounds.centre))).chunk(2)
        return Bounds.around(clean, centre, self.magnify(bounds.reach))

    def pull(self, functional: Functional, box: Box) -> Functional:
        """Aᵀc by autograd; its rounding, as that of <c, b>, is met by |c| (|A| |x| + |b|)."""
        c, image = functional.coefficient, functional.image
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros(len(c), *box.lower.shape[1:], dtype=c.dtype, device=c.device, requires_grad=True)
            at_zero = self.value(x)
            (pulled,) = torch.autograd.grad(at_zero, x, c.clone())
        size = dot(c.abs(), self.magnify(torch.maximum(box.lower.abs(), box.upper.abs()), 1.0)[image])
        terms = max(self.terms(x.shape), self.terms_back(x.shape)) + c[:1].numel() + 16
        rounding = 4 * terms * eps(c) * size
        return functional.through(pulled, dot(c, at_zero.detach()), rounding)

    def terms_back(self, shape: torch.Size) -> int:
        """At most so many outputs are summed up for one input by the transposed map."""
        return self.terms(shape)

    def enlarge(self, error: Tensor, truncated: Truncated) -> Tensor:
        return self.magnify(error)
