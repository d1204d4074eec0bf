"""A sparse nonnegative operator: who acts on whom, as a list of entries.

A product gathers the components that the entries read and adds what they send to the components that they write, so
that it costs as much as there are entries. Both are plain operations of torch, on any device and in any dtype. A row of
k entries is a sum of k terms, in whatever order, which is what bounds on its rounding rest on (T9).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pcdeq.errors import UsageError
from pcdeq.operators import LinearMap, Operator


class SparseMap(LinearMap):
    """z -> Wz for a W given by rows, columns and a weight of shape (1, entries)."""

    def __init__(self, weight: Tensor, indices: Tensor) -> None:
        super().__init__(weight)
        self.rows, self.columns = indices

    def apply(self, z: Tensor) -> Tensor:  # (samples, nodes)
        return torch.zeros_like(z).index_add(1, self.rows, z[:, self.columns] * self.weight)

    def adjoint(self, y: Tensor) -> Tensor:
        return torch.zeros_like(y).index_add(1, self.columns, y[:, self.rows] * self.weight)

    def weight_gradient(self, z: Tensor, y: Tensor) -> Tensor:
        return (y[:, self.rows] * z[:, self.columns]).sum(0, keepdim=True)

    def terms(self, state: torch.Size) -> int:
        """The most entries in a row or, for the adjoint, in a column."""
        return int(max(torch.bincount(axis).max() for axis in (self.rows, self.columns)))


class Sparse(Operator):
    """A sparse nonnegative matrix on the last dimension: node i hears ``values[k]`` times node j for each entry k.

    Args:
        indices: the rows i and columns j of the entries, (2, entries). Entries that occur twice add up.
        values: the entries, >= 0.
        nodes: how many rows and columns there are.
        learnable: whether the values are learned; else they are fixed. Either way they are kept >= 0 in use.

    >>> import torch, pcdeq
    >>> ring = torch.stack([torch.arange(5), torch.arange(5).roll(1)])
    >>> layer = pcdeq.PcDEQ(pcdeq.Sparse(ring, torch.full((5,), 0.5), nodes=5), activation="softsign")
    >>> z = layer(torch.randn(3, 5))
    >>> z.sum().backward()
    >>> layer.operator.weight.grad.shape, bool(layer.enclose(torch.randn(3, 5)).certified.all())
    (torch.Size([1, 5]), True)
    """

    indices: Tensor

    def __init__(self, indices: Tensor, values: Tensor, nodes: int, *, learnable: bool = True) -> None:
        _require_entries(indices, values, nodes)
        super().__init__((1, len(values)), state_ndim=1, weight_norm=False)
        self.nodes = nodes
        self.register_buffer("indices", indices.detach().clone())
        with torch.no_grad():
            self.weight = torch.nn.Parameter(values.detach().clone()[None], requires_grad=learnable)

    def bind(self, weight: Tensor) -> LinearMap:
        return SparseMap(weight, self.indices)

    def check_input(self, x: Tensor) -> None:
        if x.shape[-1] != self.nodes:
            raise UsageError(
                f"the operator has {self.nodes} nodes but the input's last dimension is {x.shape[-1]} "
                f"(shape {tuple(x.shape)})"
            )

    def extra_repr(self) -> str:
        return f"nodes={self.nodes}, entries={self.shape[1]}"


def _require_entries(indices: Tensor, values: Tensor, nodes: int) -> None:
    if indices.ndim != 2 or len(indices) != 2 or indices.dtype != torch.int64:
        raise UsageError(f"indices must be int64 of shape (2, entries), got {indices.dtype} {tuple(indices.shape)}")
    if values.shape != indices.shape[1:] or not values.is_floating_point():
        raise UsageError(
            f"values must be floating point, one for each of the {indices.shape[1]} entries, got {values.dtype} of "
            f"shape {tuple(values.shape)}"
        )
    if not len(values):
        raise UsageError("a sparse operator needs at least one entry; give one of value 0")
    if bool((indices < 0).any() | (indices >= nodes).any()):
        raise UsageError(f"indices must be from 0 to {nodes - 1}, got {int(indices.min())} to {int(indices.max())}")
    if not bool((values >= 0).all() & values.isfinite().all()):
        raise UsageError(f"values must be finite and >= 0, got {float(values.min())} to {float(values.max())}")
