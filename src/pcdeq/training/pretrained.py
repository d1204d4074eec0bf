"""Trained networks that ship with the package: the first seed of each row that was reproduced.

One file each, ``weights/ROW-DATA.safetensors``: the tensors after the last epoch, and in the header the
configuration that built the network, its normalisation and its measured accuracy.
"""

from __future__ import annotations

import difflib
import json
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from pcdeq.errors import UsageError
from pcdeq.models import Preprocessing
from pcdeq.recipes import TrainConfig
from pcdeq.training.run import Run

_SUFFIX = ".safetensors"
_KEY = "pcdeq"


def pretrained_names() -> list[str]:
    """The names that `pcdeq.load` knows.

    >>> "pcdeq-1-l-tanh-mnist" in pretrained_names()
    True
    """
    return sorted(file.name.removesuffix(_SUFFIX) for file in _folder().iterdir() if file.name.endswith(_SUFFIX))


def is_pretrained(name: str) -> bool:
    """Whether there is such a network."""
    return name in pretrained_names()


def read_pretrained(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Description and tensors of a network; an unknown name is a `UsageError` that lists the known ones."""
    names = pretrained_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise UsageError(f"no run folder and no trained network is called {name!r}; {hint}")
    content = _folder().joinpath(name + _SUFFIX).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])["__metadata__"]
    return json.loads(header[_KEY]), load_safetensors(content)


def pack(run: Run) -> bytes:
    """A finished run's network as such a file."""
    config = run.config.to_dict() | {"out": None, "data_dir": None, "device": "auto"}
    description = {
        "config": config,
        "data": run.description["data"],
        "epoch": len(run.metrics),
        "accuracy": run.accuracy,
    }
    tensors = {name: tensor.contiguous() for name, tensor in run.load_weights().items()}
    return save_safetensors(tensors, {"format": "pt", _KEY: json.dumps(description)})


def network_parts(description: dict[str, Any]) -> tuple[TrainConfig, tuple[int, int, int], Preprocessing]:
    """Configuration, image shape and preprocessing of a description."""
    data = description["data"]
    channels, height, width = data["image_shape"]
    preprocessing = Preprocessing(tuple(data["mean"]), tuple(data["std"]), tuple(data["classes"]))
    return TrainConfig.from_dict(description["config"]), (channels, height, width), preprocessing


def _folder() -> Traversable:
    return files("pcdeq").joinpath("weights")
