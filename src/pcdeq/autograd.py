"""Gradients that are not autograd's: what is shared by all who attach one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pcdeq.errors import PcdeqError


def attach_gradient(source: Tensor, value: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """``value``, whose gradient, after ``transform``, goes where that of ``source`` would."""
    return ReplacedGradient.apply(value.detach(), lambda grad: (transform(grad),), source)  # pyright: ignore[reportReturnType]


def once(grads: tuple[Tensor | None, ...], *sources: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients, which say, if anybody differentiates them in turn, that there is no second derivative."""
    if not torch.is_grad_enabled():
        return grads
    return tuple(
        grad if grad is None else ReplacedGradient.apply(grad, _no_second_derivative, *sources)  # pyright: ignore[reportReturnType]
        for grad in grads
    )


def _no_second_derivative(grad: Tensor) -> tuple[Tensor]:
    raise PcdeqError('no second derivative with gradient="implicit"; build the layer with gradient="unrolled"')


class ReplacedGradient(torch.autograd.Function):
    """Its first argument, with gradients for the sources that a given function makes of the one that comes in."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: Callable[..., tuple[Tensor | None, ...]], *sources: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.gradients = gradients
        ctx.save_for_backward(*sources)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            found = ctx.gradients(grad)
        return None, None, *once(found, *ctx.saved_tensors)
