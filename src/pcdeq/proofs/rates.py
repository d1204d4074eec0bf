"""Rates of convergence that are known before the first step (T4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pcdeq.activations import Activation
from pcdeq.errors import UsageError


@dataclass(frozen=True)
class Rate:
    """A guarantee about plain iteration from any start in the box, in Thompson's metric ``max |log(z / z*)|``.

    Attributes:
        factor: each step shrinks the distance to z* at least by this factor; 1 where nothing is guaranteed.
        steps: so many steps are enough for the tolerance; None where nothing is guaranteed.
    """

    factor: float
    steps: int | None

    def error_after(self, step: float) -> float:
        """A bound on the distance to z* after a plain step of this length, both in Thompson's metric (T4).

        >>> Rate(factor=0.5, steps=None).error_after(1e-3)
        0.001
        """
        return self.factor / (1 - self.factor) * step if self.factor < 1 else math.inf


def a_priori_rate(activation: Activation, floor: float, tol: float) -> Rate:
    """T4: N = 1 + ceil(log(tol / D) / log c), with D = log(sup s / s(floor)) the distance after the first step."""
    if not tol > 0:
        raise UsageError(f"tol must be above 0, got {tol}")
    factor = activation.rate(floor)
    lowest = float(activation.value(torch.tensor(floor, dtype=torch.float64)))
    if factor >= 1 or lowest <= 0 or activation.supremum == math.inf:
        return Rate(factor, None)
    distance = math.log(activation.supremum / lowest)
    if distance <= tol or factor == 0:
        return Rate(factor, 1)
    # A little more, lest rounding take a step away.
    return Rate(factor, 1 + math.ceil(math.log(tol / distance) / math.log(factor) * (1 + 1e-12)))
