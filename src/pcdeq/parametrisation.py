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


def _passes(parameter: Tensor, grad: Tensor) -> Tensor:
    """Where the gradient of max(parameter, 0) passes.

    At parameter >= 0 it always does, as through a clamp, so that with `project_` after each step the
    dynamics are the paper's. Below 0 a gradient whose descent step raises the parameter is let through,
    so that no weight stays dead.
    """
    return (parameter >= 0) | (grad < 0)


class NonnegativeWeight(torch.autograd.Function):
    """max(v, 0) or, with a g, g v / ‖v‖ by rows for v and g clamped at 0; gradients also bring back what is below 0.

    A row of zeros has no direction. Its weight is 0; v learns as if its norm were 1, and g along the
    diagonal, so that the row can come back even from g = 0.
    """

    @staticmethod
    def forward(ctx, v: Tensor, g: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(v, g)
        return nonnegative_weight(v, g)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        v, g = ctx.saved_tensors
        if g is None:
            return grad * _passes(v, grad), None
        direction, norm, empty = _directions(v)
        rows = tuple(range(1, v.ndim))
        along = (grad * direction).sum(rows, keepdim=True)
        grad_v = (g.clamp(min=0.0) / norm) * (grad - direction * along)
        grad_g = along + empty * (grad.sum(rows, keepdim=True) * math.sqrt(v.shape[0] / v.numel()))
        return grad_v * _passes(v, grad_v), grad_g * _passes(g, grad_g)


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


def _directions(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """max(v, 0) by rows with norm 1, those norms, and which rows are 0, whose norm counts as 1."""
    positive = v.clamp(min=0.0)
    norm = row_norm(positive)
    empty = norm == 0
    norm = norm + empty
    return positive / norm, norm, empty


def row_norm(v: Tensor) -> Tensor:
    """‖v‖ by rows; in float64 where there is one, because the square of a small float32 is 0."""
    wide = None if v.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(v, dim=tuple(range(1, v.ndim)), keepdim=True, dtype=wide).to(v.dtype)
