"""Layers that are made of others, and those about which nothing can be said."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pcdeq import residual
from pcdeq.layers import PcDEQ
from pcdeq.proofs import trusted
from pcdeq.proofs.folding import fold
from pcdeq.proofs.intervals import Bounds, Box, eps, outward
from pcdeq.proofs.linear import Functional, dot
from pcdeq.proofs.order import SINGLE_PRECISION
from pcdeq.proofs.rules import Layer, Truncated, bound, boxes_along, enclose, enlarge, pull


class Residual(Layer):
    """x + f(x), of a box as if the two were independent."""

    def __init__(self, module: Any, path: str, layers: Sequence[Layer]) -> None:
        super().__init__(module, path, residual.Residual, residual.Residual)
        self.layers = layers
        self.solves = any(layer.solves for layer in layers)

    def enclose(self, box: Box, tol: float) -> Box:
        branch = enclose(self.layers, box, tol)
        lower, upper = residual.add(box.lower, branch.lower), residual.add(box.upper, branch.upper)
        return outward(lower, upper, eps(lower) * torch.maximum(lower.abs(), upper.abs()), branch.proved)

    def pull(self, functional: Functional, box: Box) -> Functional:
        branch = pull(self.layers, functional, boxes_along(self.layers, box, SINGLE_PRECISION)[:-1])
        both = residual.add(functional.coefficient, branch.coefficient)
        size = torch.maximum(box.lower.abs(), box.upper.abs())[functional.image]
        return branch.through(both, torch.zeros_like(branch.constant), dot(both.abs(), size) * eps(size))

    def bound(self, bounds: Bounds) -> Bounds:
        return Bounds(*map(residual.add, bounds, bound(self.layers, bounds)))

    def enlarge(self, error: Tensor, truncated: Truncated) -> Tensor:
        return residual.add(error, enlarge(self.layers, error, truncated))

    def freeze(self) -> nn.Module:
        return residual.Residual(*(layer.freeze() for layer in fold(self.layers)))

    def export(self, equilibrium: Callable[[PcDEQ], nn.Module]) -> nn.Module:
        return residual.Residual(*(layer.export(equilibrium) for layer in self.layers))


class Unknown(Layer):
    """A module about which nothing can be said, and why."""

    def __init__(self, module: Any, path: str, reason: str) -> None:
        super().__init__(module, path, type(module), type(module))
        self.reason = reason

    def enclose(self, box: Box, tol: float) -> Box:
        self.refuse(self.reason)

    def pull(self, functional: Functional, box: Box) -> Functional:
        self.refuse(self.reason)

    def bound(self, bounds: Bounds) -> Bounds:
        self.refuse(self.reason)

    def enlarge(self, error: Tensor, truncated: Truncated) -> Tensor:
        self.refuse(self.reason)

    def freeze(self) -> nn.Module:
        if any(map(trusted.is_miscompiled, self.module.modules())):  # which a copy would not be
            self.refuse(self.reason)
        try:
            return copy.deepcopy(self.module)
        except RuntimeError:  # torch's, of a tensor that was computed from others
            self.refuse(self.reason)

    def export(self, equilibrium: Callable[[PcDEQ], nn.Module]) -> nn.Module:
        return self.freeze()

    def rank(self, before: int | None) -> int | None:
        return None
