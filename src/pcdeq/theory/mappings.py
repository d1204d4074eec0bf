"""What the toolbox takes: a map of the nonnegative cone into itself, and a template of its points."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pcdeq.errors import UsageError

Map = Callable[[Tensor], Tensor]
# The number of components, or a tensor of the shape, dtype and device of a point.
Like = int | Tensor


def origin(like: Like) -> Tensor:
    """The point 0: a float64 vector of so many components, or zeros like the tensor given."""
    if isinstance(like, Tensor):
        if not like.is_floating_point() or like.numel() == 0:
            raise UsageError(
                f"a point needs at least one floating point component, got {like.dtype} of shape {tuple(like.shape)}"
            )
        return torch.zeros_like(like, requires_grad=False)
    if isinstance(like, bool) or not isinstance(like, int) or like < 1:
        raise UsageError(f"give the number of components (at least 1) or a tensor like a point, got {like!r}")
    return torch.zeros(like, dtype=torch.float64)


def value_of(fn: Map, z: Tensor) -> Tensor:
    """fn(z), refused unless it is a floating point tensor of the shape of z."""
    value = fn(z)
    if not isinstance(value, Tensor) or value.shape != z.shape or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"fn maps a point of shape {tuple(z.shape)} to {got}; it must keep the shape")
    return value.detach()


def rounding(z: Tensor) -> float:
    """The relative rounding error granted to one evaluation of a map (T9).

    A component that is a sum of nonnegative terms, one for each component of z, has a relative error of
    at most their number times eps; 16 eps more are for what is done with the sum.
    """
    return (z.numel() + 16) * torch.finfo(z.dtype).eps


def require_cone(**points: Tensor) -> None:
    """Refuse points with a component below 0."""
    for name, point in points.items():
        if bool((point < 0).any()):
            raise UsageError(f"{name} must lie in the nonnegative cone, but has a component {float(point.min()):.3g}")
