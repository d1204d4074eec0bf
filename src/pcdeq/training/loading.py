"""From a configuration or a run folder to a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

from pcdeq.errors import DataError, UsageError
from pcdeq.models import Network, Preprocessing, build, equilibrium_layers
from pcdeq.recipes import ImageShape, ResolvedConfig
from pcdeq.solvers import Anderson, Picard
from pcdeq.training.facts import describe_training
from pcdeq.training.pretrained import network_parts, read_pretrained
from pcdeq.training.run import Run, Which

_SOLVERS = {"default": None, "paper": Picard(stop="batch"), "picard": Picard(), "anderson": Anderson()}


def make_network(config: ResolvedConfig, image_shape: ImageShape, preprocessing: Preprocessing) -> Network:
    """The untrained network that a configuration describes."""
    network = build(
        config.row,
        config.data,
        image_shape=image_shape,
        num_classes=len(preprocessing.classes),
        channels=config.channels,
        solver=_SOLVERS[config.solver],
    )
    network.preprocessing = preprocessing
    given = {"tol": config.tol, "max_steps": config.max_steps}
    changes = {name: value for name, value in given.items() if value is not None}
    layers = equilibrium_layers(network)
    if changes and not layers:
        raise UsageError(f"{config.row} has nothing to solve: {' and '.join(changes)} mean nothing to it")
    for layer in layers:
        layer.solver = layer.solver.with_options(**changes)
        layer.adjoint_solver = layer.adjoint_solver.with_options(**changes)
    return network


def load(run: str | os.PathLike[str] | Run, checkpoint: Which = "last") -> Network:
    """A trained network, in evaluation mode: that of a run folder, or one that ships with the package, by its name.

    Those of the package were trained on the whole of their training set. That of MNIST holds all digits of
    ``mnist-mini``, so accuracy on these says nothing.

    Its ``preprocessing`` turns uint8 images into its input and names its classes:

    >>> import torch
    >>> model = load("pcdeq-1-l-tanh-mnist")  # or load("runs/...")
    >>> images = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    >>> model(model.preprocessing(images)).shape, model.preprocessing.classes[:3]
    (torch.Size([2, 10]), ('0', '1', '2'))
    """
    if checkpoint not in get_args(Which):
        raise UsageError(f"checkpoint must be 'last' or 'best', got {checkpoint!r}")
    if not isinstance(run, Run):
        path = Path(run)
        if not (path / "config.json").is_file() and len(path.parts) == 1 and not path.exists():
            if checkpoint != "last":
                raise UsageError("of the package's networks there is only the last epoch")
            return _load_pretrained(str(path))
        run = Run.open(path)
    network = make_network(run.config, run.image_shape, run.preprocessing)
    try:
        network.load_state_dict(run.load_weights(checkpoint))
    except RuntimeError as error:
        raise DataError(f"the weights in {run.path} do not fit its configuration: {error}") from error
    network.training_facts = describe_training(run, checkpoint)
    return network.eval()


def _load_pretrained(name: str) -> Network:
    description, tensors = read_pretrained(name)
    config, image_shape, preprocessing = network_parts(description)
    network = make_network(config.resolve(image_shape), image_shape, preprocessing)
    network.load_state_dict(tensors)
    network.training_facts = description["facts"]
    return network.eval()
