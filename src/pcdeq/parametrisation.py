"""The weight in use, made of what is learned: nonnegative, normalised by rows if asked for, differentiable."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode AD is at work."""
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def _passed(parameter: Tensor, grad: Tensor) -> Tensor:
    """What passes of the gradient of max(parameter, 0).

    At parameter >= 0 it always does, as through a clamp, so that with `project_` after each step the
    dynamics are the paper's. Below 0 a gradient whose descent step raises the parameter is let through,
    so that no weight stays dead.
    """
    return torch.where(parameter >= 0, grad, grad.clamp(max=0.0))


class NonnegativeWeight(torch.autograd.Function):
    """max(v, 0) or, with a g, g v / ‖v‖ by rows for v and g clamped at 0; gradients also bring back what is below 0.

    A row of zeros has no direction. Its weight is 0; v learns as if its norm were 1, and g along the
    diagonal, so that the row can come back even from g = 0.
    """

    @staticmethod
    def forward(ctx, v: Tensor, g: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if g is None:
            ctx.save_for_backward(v, g)
            return v.clamp(min=0.0)
        direction, *_ = found = _found(v, g)
        ctx.save_for_backward(v, g, *found)
        return direction * g.clamp(min=0.0)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        v, g, *found = ctx.saved_tensors
        if g is None:
            return _passed(v, grad), None
        # In a graph of second derivatives all these are functions of v and g.
        direction, learned, scale = _found(v, g) if torch.is_grad_enabled() or not found else found
        grad_g = (grad * learned).sum(tuple(range(1, v.ndim)), keepdim=True)
        grad_v = scale * (grad - direction * grad_g)
        return _passed(v, grad_v), _passed(g, grad_g)


class TransformedWeight(NonnegativeWeight):
    """The same for `torch.func` and forward-mode AD; apart, for the other is quicker, and one that compilers take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor, g: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nonnegative_weight(v, g)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, v_tangent: Tensor | None, g_tangent: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        v, g = ctx.saved_tensors
        v_tangent = torch.zeros_like(v) if v_tangent is None else v_tangent * (v >= 0)
        if g is None:
            return v_tangent
        direction, norm, _ = _directions(v)
        along = (v_tangent * direction).sum(tuple(range(1, v.ndim)), keepdim=True)
        turned = (g.clamp(min=0.0) / norm) * (v_tangent - direction * along)
        return turned if g_tangent is None else turned + direction * (g_tangent * (g >= 0))


def nonnegative_weight(v: Tensor, g: Tensor | None = None) -> Tensor:
    """The weight in use, from the parameters that are learned."""
    if g is None:
        return v.clamp(min=0.0)
    direction, _, _ = _directions(v)
    return direction * g.clamp(min=0.0)


def _found(v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What gradients need: the directions, those along which g learns, and max(g, 0) / ‖v‖."""
    direction, norm, empty = _directions(v)
    diagonal = math.sqrt(v.shape[0] / v.numel())  # one component of a vector along it of norm 1
    return direction, direction.masked_fill(empty, diagonal), g.clamp(min=0.0) / norm


def _directions(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """max(v, 0) by rows with norm 1, those norms, and which rows are 0, whose norm counts as 1."""
    positive = v.clamp(min=0.0)
    norm = row_norm(positive)
    empty = norm == 0
    norm = norm.masked_fill(empty, 1.0)
    return positive / norm, norm, empty


def row_norm(v: Tensor) -> Tensor:
    """‖v‖ by rows; in float64 where there is one, because the square of a small float32 is 0."""
    wide = None if v.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(v, dim=tuple(range(1, v.ndim)), keepdim=True, dtype=wide).to(v.dtype)
