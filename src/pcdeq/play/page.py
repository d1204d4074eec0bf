"""One HTML file with trained networks and all that runs them: no server, no network, nothing to install.

The page computes everything itself, in double precision, from the stored parameters: numerics.js has the network and
its bounds, picture.js what happens to a drawing before, view.js what is seen. Here the parameters are put in.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from pcdeq.activations import ACTIVATIONS
from pcdeq.errors import UsageError
from pcdeq.files import write_file
from pcdeq.models import Network
from pcdeq.operators import Dense
from pcdeq.proofs import trusted
from pcdeq.proofs.kinds import Dropout, Equilibrium, Flatten, Identity, Linear
from pcdeq.proofs.network import split_classifier
from pcdeq.proofs.rules import Layer

SHIPPED = tuple(f"pcdeq-{kind}-mnist" for kind in ("1-l-tanh", "1-l-softsign", "1-l-relu6", "2-l-sigmoid"))
LARGEST = 2_000_000  # bytes of a page
SCRIPTS = ("numerics.js", "picture.js", "view.js")

Numbers = dict[str, str]  # base64 of float32, under "f4", or of float64, under "f8"


def write_page(networks: Mapping[str, Network], out: Path, *, certify: str | None = None) -> Path:
    """Write the page of some networks, by name, each with an activation of its own.

    Args:
        networks: those of the package and of runs (`pcdeq.load`) whose layers are dense, one of them an equilibrium.
        certify: where there is more about `pcdeq certify`, for a link.

    >>> import pcdeq, tempfile
    >>> name = "pcdeq-1-l-tanh-mnist"
    >>> page = write_page({name: pcdeq.load(name)}, Path(tempfile.mkdtemp()) / "play.html")
    >>> page.stat().st_size < 500_000
    True
    """
    described = [describe(name, network) for name, network in networks.items()]
    for key, what in (("image", "images of other sizes"), ("classes", "other classes")):
        if any(one[key] != described[0][key] for one in described):
            raise UsageError(f"{', '.join(networks)} have {what}: write a page for each")
    if len({one["activation"] for one in described}) < len(described):
        names = (f"{one['name']} ({one['activation']})" for one in described)
        raise UsageError(f"a page switches between activations, so give one network for each, not {', '.join(names)}")
    own = files("pcdeq.play")
    link = f' <a href="{html.escape(certify)}" target="_top">More about it.</a>' if certify else ""
    content = Template(own.joinpath("page.html").read_text("utf-8")).substitute(
        style=own.joinpath("page.css").read_text("utf-8"),
        script="\n".join(own.joinpath(name).read_text("utf-8") for name in SCRIPTS),
        networks=json.dumps(described).replace("<", r"\u003c"),
        more=link,
    )
    if len(content) > LARGEST:
        size, most = len(content) / 1e6, LARGEST / 1e6
        raise UsageError(f"the page would have {size:.1f} MB, above {most:.0f}: give fewer or narrower networks")
    return write_file(out, content.encode())


def describe(name: str, network: Network) -> dict[str, Any]:
    """A network for the page: affine layers, one equilibrium, affine layers, the last of them the classifier."""
    channels, *image = network.image_shape
    if channels != 1:
        raise UsageError(f"{name} takes pictures of {channels} channels: what is drawn on the page has one")
    if network.preprocessing is None:
        raise UsageError(f"{name} does not say how pixels become its input: set its preprocessing")
    (mean,), (std,) = network.preprocessing.mean, network.preprocessing.std
    scale = 1 / torch.tensor([std], dtype=torch.float32).double()
    pixels = {"scale": _numbers(scale), "shift": _numbers(-torch.tensor([mean], dtype=torch.float32) * scale)}
    layers, classifier = split_classifier("a page to play with", network)
    places = [place for place, layer in enumerate(layers) if isinstance(layer, Equilibrium)]
    described = list(map(_parts, layers))  # which refuses what is not dense
    if len(places) != 1:
        raise UsageError(f"{name} has {len(places)} equilibrium layers: the page shows exactly one")
    (place,) = places
    before, after = (list(chain(*part)) for part in (described[:place], described[place + 1 :]))
    return {
        "name": name,
        "image": image,
        "classes": network.preprocessing.classes,
        **described[place][0],
        "before": [pixels, *before],
        "after": [*after, *_parts(classifier)],
    }


def _parts(layer: Layer) -> list[dict[str, Any]]:
    """What the page is to know of a layer; nothing, if it changes no number."""
    if isinstance(layer, Flatten | Identity | Dropout):
        return []
    if isinstance(layer, Equilibrium):
        return [_equilibrium(layer)]
    per_channel = layer.per_channel()
    if per_channel is not None:
        return [{"scale": _numbers(per_channel.scale), "shift": _numbers(per_channel.shift)}]
    if not isinstance(layer, Linear):
        layer.refuse("a page to play with takes dense layers only, around one dense equilibrium")
    weight, bias = layer.module.weight, layer.module.bias
    return [{"weight": _numbers(weight), "bias": _numbers(weight.new_zeros(len(weight)) if bias is None else bias)}]


def _equilibrium(layer: Equilibrium) -> dict[str, Any]:
    module = layer.module
    activation, operator = module.activation, module.operator
    if module.injection is not None:
        layer.refuse(trusted.OWN_INJECTION)
    if type(operator) is not Dense:
        layer.refuse(f"its operator is {type(operator).__name__}: a page to play with takes a dense one")
    if ACTIVATIONS.get(activation.name) is not activation:
        layer.refuse(f"its activation '{activation.name}' is your own: a page knows {', '.join(ACTIVATIONS)}")
    weight = operator.effective_weight_in(torch.float64)
    return {"activation": activation.name, "floor": module.floor, "weight": _numbers(weight)}


def _numbers(tensor: Tensor) -> Numbers:
    kind = "f4" if tensor.dtype == torch.float32 else "f8"
    numbers = (tensor if kind == "f4" else tensor.double()).detach().cpu().numpy().astype(f"<{kind}")
    return {kind: base64.b64encode(numbers.tobytes()).decode()}
