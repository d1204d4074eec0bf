"""Networks by the names of the rows: the paper's, and those that it is compared with."""

from __future__ import annotations

import difflib
from typing import Unpack

from pcdeq.errors import UsageError
from pcdeq.models.baselines.deq import DEQL, DEQMC, DEQSC
from pcdeq.models.baselines.explicit import ExplicitL, ExplicitMC, ExplicitSC
from pcdeq.models.baselines.mondeq import MonDEQL, MonDEQMT, MonDEQSC
from pcdeq.models.baselines.node import ANODE, NODE
from pcdeq.models.networks import MC, SC, TC, L, LayerOptions, Network, Preprocessing, equilibrium_layers
from pcdeq.recipes import KNOWN_DATASETS, Family, ImageShape, ResolvedConfig, Topology, find_row
from pcdeq.solvers import Anderson, Picard

NETWORKS: dict[tuple[Family, Topology], type[Network]] = {
    ("pcdeq", "l"): L,
    ("pcdeq", "sc"): SC,
    ("pcdeq", "mc"): MC,
    ("pcdeq", "tc"): TC,
    ("mondeq", "l"): MonDEQL,
    ("mondeq", "sc"): MonDEQSC,
    ("mondeq", "mt"): MonDEQMT,
    ("node", "ode"): NODE,
    ("anode", "ode"): ANODE,
    ("deq", "l"): DEQL,
    ("deq", "sc"): DEQSC,
    ("deq", "mc"): DEQMC,
    ("explicit", "l"): ExplicitL,
    ("explicit", "sc"): ExplicitSC,
    ("explicit", "mc"): ExplicitMC,
}

WIDEST_CLIP = 0.45  # of pixels from 0 to 1, at either end: what is between must be left
PAPERS_SOLVER = Picard(stop="batch")
_SOLVERS = {"default": None, "paper": PAPERS_SOLVER, "picard": Picard(), "anderson": Anderson()}
_IMAGE_SHAPES: dict[str, ImageShape] = {"mnist": (1, 28, 28), "svhn": (3, 32, 32), "cifar10": (3, 32, 32)}


def build(
    name: str,
    data: str = "mnist",
    *,
    num_classes: int | None = None,
    image_shape: ImageShape | None = None,
    channels: tuple[int, ...] | None = None,
    clip: bool = False,
    **options: Unpack[LayerOptions],
) -> Network:
    """The untrained network of a row, for its data or for yours.

    With ``clip`` it begins with a `pcdeq.models.Clip`, as networks do that are trained against noise. ``options`` go
    to the equilibrium layers, such as ``solver=Picard(stop="batch")``.

    >>> model = build("pcdeq-1-mc-relu6", data="cifar10")
    >>> sum(parameter.numel() for parameter in model.parameters())
    130950
    >>> build("pcdeq-2-l-sigmoid", image_shape=(3, 8, 8), num_classes=4, channels=(16,)).num_classes
    4
    >>> type(build("mondeq-sc")).__name__
    'MonDEQSC'
    """
    if image_shape is None and data not in KNOWN_DATASETS:
        near = difflib.get_close_matches(data, KNOWN_DATASETS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? F" if near else "f"
        raise UsageError(f"unknown data set {data!r}; {hint}or images of your own give image_shape")
    row = find_row(name, data, None if image_shape is None else image_shape[0])
    if row.family in ("pcdeq", "deq", "explicit"):  # the others know only ReLU
        options.setdefault("activation", row.activation)
    return NETWORKS[row.family, row.topology](
        channels or row.channels,
        image_shape or _IMAGE_SHAPES[row.dataset],
        num_classes or 10,
        clip=clip,
        **options,
    )


def make_network(config: ResolvedConfig, image_shape: ImageShape, preprocessing: Preprocessing) -> Network:
    """The untrained network that a configuration describes."""
    network = build(
        config.row,
        config.data,
        image_shape=image_shape,
        num_classes=len(preprocessing.classes),
        channels=config.channels,
        clip=config.robust_radius is not None,
        solver=_SOLVERS[config.solver],
    )
    network.preprocessing = preprocessing
    if config.training_radius is not None:
        network.clip_pixels(min(config.training_radius, WIDEST_CLIP))
        network.start_for_bounds()
    given = {"tol": config.tol, "max_steps": config.max_steps}
    changes = {name: value for name, value in given.items() if value is not None}
    layers = equilibrium_layers(network)
    if changes and not layers:
        raise UsageError(f"{config.row} has nothing to solve: {' and '.join(changes)} mean nothing to it")
    for layer in layers:
        layer.solver = layer.solver.with_options(**changes)
        layer.adjoint_solver = layer.adjoint_solver.with_options(**changes)
    return network
