"""Networks by the names of the paper's rows."""

from __future__ import annotations

from typing import Unpack

from pcdeq.errors import UsageError
from pcdeq.models.networks import MC, SC, L, LayerOptions, Network
from pcdeq.recipes import ImageShape, find_row

TOPOLOGIES: dict[str, type[Network]] = {"l": L, "sc": SC, "mc": MC}

_IMAGE_SHAPES: dict[str, ImageShape] = {"mnist": (1, 28, 28), "svhn": (3, 32, 32), "cifar10": (3, 32, 32)}


def build(
    name: str,
    data: str = "mnist",
    *,
    num_classes: int | None = None,
    image_shape: ImageShape | None = None,
    channels: tuple[int, ...] | None = None,
    **options: Unpack[LayerOptions],
) -> Network:
    """The untrained network of a row of the paper, for its data or for yours.

    ``options`` go to the equilibrium layers, such as ``solver=Picard(stop="batch")``.

    >>> model = build("pcdeq-1-mc-relu6", data="cifar10")
    >>> sum(parameter.numel() for parameter in model.parameters())
    130950
    >>> build("pcdeq-2-l-sigmoid", image_shape=(3, 8, 8), num_classes=4, channels=(16,)).num_classes
    4
    """
    row = find_row(name, data, None if image_shape is None else image_shape[0])
    if row.topology is None or row.activation is None:
        raise UsageError(f"{name} is a published baseline, not a network of pcdeq; see `pcdeq list`")
    options.setdefault("activation", row.activation)
    return TOPOLOGIES[row.topology](
        channels or row.channels,
        image_shape or _IMAGE_SHAPES[row.dataset],
        num_classes or 10,
        **options,
    )
