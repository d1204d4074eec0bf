"""Maps of single channels, such as batch norm by running statistics, taken over by the affine layers next to them."""

from __future__ import annotations

from collections.abc import Sequence

from pcdeq.proofs.rules import Layer


def fold(layers: Sequence[Layer]) -> list[Layer]:
    """The same network with as few maps of single channels as possible; no layer that was given is altered.

    Only what is provably the same is done: into the affine layer right before, whose outputs are the channels, or into
    the next one, whose inputs they are, past layers that such a map commutes with. How many dimensions a tensor has is
    known behind a flattening and around images; where it is not, a map stays where it is.
    """
    layers, ranks = _fold_back(layers)
    for index in reversed(range(len(layers))):
        per_channel = layers[index].per_channel()
        if per_channel is None:
            continue
        after = index + 1
        while after < len(layers) and layers[after].commutes(ranks[after]):
            after += 1
        taken = layers[after].preceded_by(per_channel, ranks[after]) if after < len(layers) else None
        if taken is not None:
            layers[after] = taken
            del layers[index], ranks[index]
    return layers


def _fold_back(layers: Sequence[Layer]) -> tuple[list[Layer], list[int | None]]:
    """The layers after folding back, and how many dimensions the input of each has, where that is known."""
    result: list[Layer] = []
    ranks: list[int | None] = []
    rank: int | None = None
    for layer in layers:
        after, per_channel = layer.rank(rank), layer.per_channel()
        taken = result[-1].followed_by(per_channel, after) if result and per_channel is not None else None
        if taken is not None:
            result[-1] = taken
        else:
            result.append(layer)
            ranks.append(rank)
        rank = after
    return result, ranks
