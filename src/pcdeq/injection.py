"""How an input becomes nonnegative: the paper's two injections."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BETA = 5.0  # the paper's

# Under softplus, so that an input to kind 1 is never exactly 0 (T4 and uniqueness need x > 0); far below
# the last digit of any softplus that matters, yet not so small that growing out of it takes many steps.
TINY_FLOOR = 1e-16


def inject(x: Tensor, kind: int, floor: float) -> Tensor:
    """log(1 + exp(5x)) / 5 + floor, positive, for pcDEQ-1; max(x, 0) + floor, nonnegative, for pcDEQ-2."""
    if kind == 1:
        return softplus(x) + floor
    return F.relu(x) + floor if floor else F.relu(x)


def slope(x: Tensor, kind: int) -> Tensor:
    """Its derivative."""
    return torch.sigmoid(BETA * x) if kind == 1 else (x > 0).to(x.dtype)


def largest_curvature(low: Tensor, high: Tensor) -> Tensor:
    """The largest second derivative of softplus between two ends: it falls from 5/4 at 0 to both sides."""
    nearest = torch.where((low < 0) & (high > 0), 0.0, torch.minimum(low.abs(), high.abs()))
    e = torch.exp(-BETA * nearest)
    return BETA * e / (1 + e) ** 2


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(5x)) / 5, to the last digits of a small result too."""
    if not torch.compiler.is_exporting():
        # Beyond its threshold torch's softplus is x: off by exp(-threshold) / 5, which float64 would see at 20.
        return F.softplus(x, beta=BETA, threshold=40.0 if x.dtype == torch.float64 else 20.0)
    # A runtime's own softplus may give exactly 0 below -3, and pcDEQ-1 lives on the relative size of its input. The
    # quotient is the classical way to have log1p from log: the rounding of 1 + e cancels.
    e = torch.exp(-BETA * x.abs())
    sum_ = 1 + e
    return x.relu() + torch.where(sum_ == 1, e, torch.log(sum_) * e / (sum_ - 1)) / BETA
