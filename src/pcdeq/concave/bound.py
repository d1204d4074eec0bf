"""A map of yours with its parameters, samples first: its value, its rounding, its derivative."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from pcdeq.concave import rounding
from pcdeq.errors import UsageError
from pcdeq.proofs.order import largest

Linear = Callable[[Tensor], Tensor]


class BoundMap:
    """z -> fn(z, *params) on (samples, *state), as solvers and the order test want it.

    Args:
        granted: the relative rounding error that the user grants to an evaluation; None to analyse each.
    """

    def __init__(self, fn: Callable[..., Tensor], params: tuple[Any, ...], like: Tensor, granted: float | None) -> None:
        if not isinstance(like, Tensor) or not like.is_floating_point():
            got = like.dtype if isinstance(like, Tensor) else type(like).__name__
            raise UsageError(f"the first argument is a point, a floating point tensor, got {got}")
        if bool((like < 0).any()):
            raise UsageError(f"a point must lie in the nonnegative cone, but has a component {float(like.min()):.3g}")
        self.fn, self.params, self.granted = fn, params, granted
        self.shape = like.shape
        self.start = like.detach().reshape(1, -1) if like.ndim < 2 else like.detach()
        self.analysed: tuple[Tensor, Tensor] | None = None  # the last point, and the error there

    def started_at(self, z: Tensor) -> BoundMap:
        """The same map, to be solved from another point."""
        other = copy(self)
        other.start = z
        return other

    def evaluate(self, z: Tensor) -> Tensor:
        """fn at a point, in the graph of autograd; refused if it changes the shape."""
        value = self.fn(z.reshape(self.shape), *self.params)
        if not isinstance(value, Tensor) or value.shape != self.shape or not value.is_floating_point():
            got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"fn maps a point of shape {tuple(self.shape)} to {got}; it must keep the shape")
        return value.reshape(z.shape).to(z.dtype)

    def __call__(self, z: Tensor) -> Tensor:
        return self.evaluate(z)

    def in_cone(self, z: Tensor) -> Tensor:
        """fn at max(z, 0), which has the same fixed points and is defined wherever a solver looks."""
        return self.evaluate(z.clamp(min=0))

    def off(self, z: Tensor) -> Tensor:
        """The absolute rounding error of an evaluation at z, by component."""
        if self.granted is not None:
            return self.granted * self.evaluate(z).abs()
        if self.analysed is None or self.analysed[0] is not z:
            self.analysed = z, rounding.evaluate(self.evaluate, z)[1]
        return self.analysed[1]

    def margin(self, z: Tensor) -> Tensor:
        """The same relative to the value."""
        if self.granted is not None:
            return torch.full_like(z, self.granted)
        return self.off(z) / self.evaluate(z).abs() * (1 + 4 * torch.finfo(z.dtype).eps)

    def pullback(self, z: Tensor) -> Linear:
        """y -> Jᵀy at z."""
        with torch.enable_grad():
            point = z.detach().requires_grad_()
            value = self.evaluate(point)

        def pull(y: Tensor) -> Tensor:
            if not value.requires_grad:
                return torch.zeros_like(y)
            (pulled,) = torch.autograd.grad(value, point, y, retain_graph=True, materialize_grads=True)
            return pulled

        return pull

    def pullback_with_error(self, z: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """y -> Jᵀy, and a bound on its rounding error: the backward pass analysed, or what was granted."""
        if self.granted is not None:
            pull, granted = self.pullback(z), self.granted
            return lambda y: (pull(y), granted * pull(y.abs()))
        with torch.enable_grad():
            point = rounding.Rounded(z, torch.zeros_like(z)).requires_grad_()
            value = self.evaluate(point)

        def pull_analysed(y: Tensor) -> tuple[Tensor, Tensor]:
            given = rounding.Rounded(y, torch.zeros_like(y))
            (pulled,) = torch.autograd.grad(value, point, given, retain_graph=True, materialize_grads=True)
            return rounding.parts(pulled)

        return pull_analysed

    def tangent(self, z: Tensor) -> Linear:
        """d -> Jd at z: the derivative of y -> Jᵀy, which is linear."""
        with torch.enable_grad():
            point, weights = z.detach().requires_grad_(), torch.zeros_like(z, requires_grad=True)
            value = self.evaluate(point)
            if not value.requires_grad:
                return torch.zeros_like
            (pulled,) = torch.autograd.grad(value, point, weights, create_graph=True, materialize_grads=True)

        def push(d: Tensor) -> Tensor:
            if not pulled.requires_grad:
                return torch.zeros_like(d)
            (pushed,) = torch.autograd.grad(pulled, weights, d, retain_graph=True, materialize_grads=True)
            return pushed

        return push

    def jacobian(self, z: Tensor) -> Tensor:
        """The matrices of the derivative, (samples, n, n): one backward pass for each row."""
        pull, n = self.pullback(z), z[0].numel()
        rows = torch.eye(n, dtype=z.dtype, device=z.device).reshape(n, 1, *z.shape[1:]).expand(n, *z.shape)
        return torch.stack([pull(row).reshape(len(z), n) for row in rows], 1)

    def samples(self, values: Tensor) -> Tensor:
        """A result, in the shape that the user's points have."""
        return values.reshape(self.shape)


@torch.no_grad()
def contradicted(bound: BoundMap, top: Tensor, trials: int = 4, concave: bool = False) -> Tensor:
    """For which samples the map was seen not to be positive, monotone and scalable (or concave) below 2 ``top``.

    A few random inequalities a sample: they find gross mistakes, a decreasing map or a convex one, before anything is
    claimed. `ConcaveMap.check` looks harder.
    """
    generator = torch.Generator().manual_seed(0)
    top = torch.where(top.isfinite() & (top > 0), top, 1.0)
    allowed = torch.finfo(top.dtype).eps ** 0.5 / 16
    broken = torch.zeros(len(top), dtype=torch.bool, device=top.device)

    def fails(holds: Tensor) -> Tensor:
        return ~holds.flatten(1).all(1)

    for trial in range(trials):
        x, step = (2 * top * torch.rand(top.shape, generator=generator).to(top) for _ in range(2))
        if trial % 2:  # few components, so that what one of them does is not hidden by the others
            x = x * (torch.rand(top.shape, generator=generator).to(top) < 0.5)
        y, factor = x + step, 4.0 ** (trial + 1)
        low, high, far = bound(x), bound(y), bound(factor * x)
        slack = allowed * largest(high)
        broken |= fails((low > 0) & high.isfinite()) | fails(low <= high + slack) | fails(far <= factor * (low + slack))
        if concave:
            broken |= fails((low + high) / 2 <= bound((x + y) / 2) + slack)
    return broken
