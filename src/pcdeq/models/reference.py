"""Weights trained with the authors' published code, loaded into our networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from pcdeq.errors import DataError, UsageError
from pcdeq.models.networks import MC, SC, L, Network

AnyNetwork = TypeVar("AnyNetwork", bound=Network)

# The authors' modules that have weights, in the order of ours. Within a module the names agree, except for the weight
# of an equilibrium layer, which they keep in `deq.f.W` and we in `operator`.
REFERENCE_NAMES: dict[type[Network], str] = {
    L: "linear1 bn1 block bn2 classifier",
    SC: "conv1 bn1 block bn2 classifier",
    MC: "conv1 bn1 block1 bn2 downsample1 bn3 block2 bn4 downsample2 bn5 block3 bn6 classifier",
}


def load_reference(model: AnyNetwork, state_dict: Mapping[str, Tensor]) -> AnyNetwork:
    """Load an authors' ``state_dict`` into the network of the same row, and return the network.

    Names may carry the ``module.`` that `DataParallel` adds. Every name and shape is checked before
    anything is written, so a misfit leaves the model as it was. Read files you did not make with
    ``torch.load(path, weights_only=True)``.

    >>> load_reference(L((80,)), {"fc.weight": torch.zeros(2, 2)})
    Traceback (most recent call last):
    ...
    pcdeq.errors.DataError: not a checkpoint of this L: unknown name fc.weight, no linear1.weight and 15 more
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"give the checkpoint's state_dict, not a {type(state_dict).__name__}: load its file first")
    names = REFERENCE_NAMES.get(type(model))
    if names is None:
        raise UsageError(f"the authors' checkpoints fit the L, SC and MC networks, not {type(model).__name__}")
    theirs = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    ours = model.state_dict()
    expected = _expected_names(names.split(), ours)
    problems = [f"unknown name {name}" for name in theirs if name not in expected]
    for name, our_name in expected.items():
        if name not in theirs:
            problems.append(f"no {name}")
        elif not isinstance(theirs[name], Tensor):
            problems.append(f"{name} is not a tensor")
        elif theirs[name].shape != ours[our_name].shape:
            problems.append(f"{name} is {tuple(theirs[name].shape)} and not {tuple(ours[our_name].shape)}")
        elif not bool(torch.isfinite(theirs[name]).all()):
            problems.append(f"{name} has infinite or NaN entries")
    if problems:
        more = f" and {len(problems) - 2} more" if len(problems) > 2 else ""
        kind = type(model).__name__
        raise DataError(f"not a checkpoint of this {kind}: {', '.join(problems[:2])}{more}")
    with torch.no_grad():
        for name, our_name in expected.items():
            ours[our_name].copy_(theirs[name])
    return model


def _expected_names(their_modules: list[str], ours: Iterable[str]) -> dict[str, str]:
    """Their name of every entry of our ``state_dict`` that they have too, and ours."""
    known = [name.split(".", 1) for name in ours if ".warm." not in name]  # what we guess solutions from
    our_modules = dict.fromkeys(module for module, _ in known)
    theirs = dict(zip(our_modules, their_modules, strict=True))
    return {
        f"{theirs[module]}.{entry.replace('operator.', 'deq.f.W.')}": f"{module}.{entry}" for module, entry in known
    }
