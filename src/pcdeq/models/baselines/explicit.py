"""The explicit layers of the same shape as those of deq.py.

One step from where the solve would start, s(W s(x) + x), with the same parameters.
"""

from __future__ import annotations

from torch import Tensor, nn

from pcdeq.errors import UsageError
from pcdeq.models.baselines.deq import FreeWeight, bind, free_activation
from pcdeq.models.networks import MC, SC, L, both_solvers
from pcdeq.solvers import Solver


class Explicit(nn.Module):
    """One step of a `DEQ` instead of its equilibrium, s(W s(x) + x), on the last dimension.

    >>> import torch
    >>> Explicit(4, activation="relu6")(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """

    kernel: tuple[int, ...] = ()

    def __init__(self, width: int, *, activation: str = "tanh", **options: Solver | None) -> None:
        if any(both_solvers("an explicit layer", options, None)):
            raise UsageError("an explicit layer solves nothing: leave the solver at its default")
        super().__init__()
        self.weight = FreeWeight(width, self.kernel)
        self.name = activation
        self.activation = free_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        s = self.activation.value
        return s(bind(self.weight()).apply(s(x)) + x)

    def extra_repr(self) -> str:
        return f"activation={self.name}"


class ExplicitConv2d(Explicit):
    """An `Explicit` layer of 3x3 convolutions."""

    kernel = (3, 3)


class ExplicitL(L):
    """The L network with one step in place of its equilibrium."""

    dense = Explicit


class ExplicitSC(SC):
    """The SC network with one step in place of its equilibrium."""

    conv = ExplicitConv2d


class ExplicitMC(MC):
    """The MC network with one step in place of each equilibrium."""

    conv = ExplicitConv2d
