"""Several tensors as one point of a solver: tuples, lists and dicts of tensors, nested as you like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pcdeq.errors import UsageError


class Packing:
    """How the tensors of one tree lie side by side in a tensor (samples, numbers of one sample).

    Dimension 0 counts samples if all tensors share it and they are not just vectors; else the whole is one sample.
    Tensors of several dtypes are packed in the widest.
    """

    def __init__(self, tree: Any, name: str) -> None:
        self.tree, self.name = tree, name
        leaves = dict(_leaves(tree, name))
        if not leaves:
            raise UsageError(f"{name} has no tensor in it: {tree!r}")
        for place, leaf in leaves.items():
            if not leaf.is_floating_point():
                raise UsageError(f"{place} must be a floating point tensor, got {leaf.dtype}")
        self.leaves = list(leaves.values())
        if len(devices := {str(leaf.device) for leaf in self.leaves}) > 1:
            raise UsageError(f"the tensors of {name} are on {' and '.join(sorted(devices))}; move them to one device")
        self.dtype = reduce(torch.promote_types, (leaf.dtype for leaf in self.leaves))
        first = self.leaves[0]
        shared = all(leaf.ndim and leaf.shape[0] == first.shape[0] for leaf in self.leaves)
        batched = shared and any(leaf.ndim > 1 for leaf in self.leaves)
        self.samples = first.shape[0] if batched else 1
        self.sizes = [leaf.shape[1:].numel() if batched else leaf.numel() for leaf in self.leaves]

    @property
    def device(self) -> str:
        """The kind of device that the tensors are on."""
        return self.leaves[0].device.type

    def pack(self, tree: Any, source: str) -> Tensor:
        """The tensors of a tree like the first, as one; ``source`` says in messages where it comes from."""
        found = list(_aligned(self.tree, tree, self.name, source))
        sized = zip(found, self.sizes, strict=True)
        columns = [leaf.reshape(self.samples, size).to(self.dtype) for leaf, size in sized]
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def unpack(self, flat: Tensor) -> Any:
        """The tree whose tensors lie in this one, with their own shapes and dtypes."""
        parts = iter(flat.split(self.sizes, 1))
        return _map(self.tree, lambda leaf: next(parts).reshape(leaf.shape).to(leaf.dtype))


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """What a tuple, list or dict holds, by place; None for anything else."""
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", tree[key]) for key in tree]
    return [(f"[{i}]", child) for i, child in enumerate(tree)] if isinstance(tree, tuple | list) else None


def _leaves(tree: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield place, tree
    elif (children := _children(tree)) is not None:
        for step, child in children:
            yield from _leaves(child, place + step)
    else:
        raise UsageError(f"{place} must be a tensor, or a tuple, list or dict of them, got {type(tree).__name__}")


def _map(tree: Any, fn: Any) -> Any:
    """The same tree with other tensors."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        return type(tree)((key, _map(tree[key], fn)) for key in tree)  # pyright: ignore[reportCallIssue]
    children = [_map(child, fn) for child in tree]
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def _aligned(expected: Any, found: Any, place: str, source: str) -> Iterator[Tensor]:
    """The tensors of ``found``, in the order of ``expected``, refused unless they have its structure and shapes."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            raise UsageError(f"{source} has a {type(found).__name__} where {place} is a tensor")
        if found.shape != expected.shape:
            raise UsageError(
                f"{source} maps shape {tuple(expected.shape)} to {tuple(found.shape)}; it must keep the shape"
                + (f" of {place}" if "[" in place else "")
            )
        yield found
        return
    known = dict(_children(expected) or ())
    given = dict(_children(found) or ())
    same_kind = isinstance(found, Mapping) == isinstance(expected, Mapping)
    if not same_kind or known.keys() != given.keys():
        raise UsageError(
            f"{source} gives {_shape_of(found)} where {place} is {_shape_of(expected)}; keep the structure"
        )
    for step, child in known.items():
        yield from _aligned(child, given[step], place + step, source)


def _shape_of(tree: Any) -> str:
    if isinstance(tree, Mapping):
        return f"a dict of {', '.join(map(repr, tree)) or 'nothing'}"
    return f"a {type(tree).__name__}" + (f" of {len(tree)}" if isinstance(tree, tuple | list) else "")
