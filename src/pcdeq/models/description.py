"""What a network is, as plain values: enough to build it, to feed it, and to write its card.

The one form in which run folders, the package and the Hub keep a network beside its weights. It may come from anyone,
so every key and every type is checked, and nothing in it can name code that is not listed here.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, Self, TypeVar, get_type_hints

import torch

from pcdeq._version import __version__
from pcdeq.errors import UsageError
from pcdeq.layers import PcDEQ
from pcdeq.models.baselines.node import Dopri5
from pcdeq.models.clip import Clip
from pcdeq.models.facts import TrainingFacts, told_by
from pcdeq.models.networks import LayerOptions, Network, Preprocessing, equilibrium_layers
from pcdeq.models.registry import NETWORKS, make_network
from pcdeq.proofs.certified import Certified
from pcdeq.recipes import Family, Topology
from pcdeq.recipes.config import check_type, check_types
from pcdeq.solvers import Anderson, Newton, Picard, SolvingLayer

T = TypeVar("T")
# By the name in a description. A solver that wraps another one needs no more than to stand here.
SOLVERS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Anderson, Picard, Newton, Dopri5, Certified)}
SOLVER_KEYS = ("solver", "adjoint_solver")
OPTION_TYPES = get_type_hints(LayerOptions)
PCDEQ_KEYS = OPTION_TYPES.keys() - {"injection", "rate"}  # code, and another word for the floor


@dataclass(frozen=True, kw_only=True)
class Description:
    """A network without its weights.

    >>> from pcdeq.models import L
    >>> description = Description.of(L((8,), activation="relu6"))
    >>> description.family, description.topology, description.channels
    ('pcdeq', 'l', (8,))
    >>> Description.read(json.loads(description.to_json())) == description
    True
    >>> type(description.make()).__name__
    'L'
    """

    model_type: Literal["pcdeq"] = "pcdeq"
    pcdeq_version: str = __version__
    family: Family = "pcdeq"  # all that there was to describe at first
    topology: Topology
    channels: tuple[int, ...]
    image_shape: tuple[int, int, int]
    num_classes: int
    clip: bool = False  # whether it begins with one
    layers: dict[str, Any]  # options of the equilibrium layers, the same for all
    preprocessing: Preprocessing | None
    training: TrainingFacts | None

    def __post_init__(self) -> None:
        check_types(self)
        try:
            self.to_json()
        except ValueError as error:
            raise UsageError(f"a description has finite numbers only: {error}") from error
        if min(*self.image_shape, self.num_classes) < 1:
            raise UsageError(f"image_shape {self.image_shape} and num_classes {self.num_classes} must be above 0")
        _check_keys(self.layers, PCDEQ_KEYS if self.family == "pcdeq" else set(), PCDEQ_KEYS)
        for name in self.layers.keys() - set(SOLVER_KEYS):
            check_type(self.layers[name], OPTION_TYPES[name], name)
        if (given := self.preprocessing) is not None:
            sizes, channels = {len(given.mean), len(given.std)}, self.image_shape[0]
            if not sizes <= {1, channels} or len(given.classes) != self.num_classes:
                raise UsageError(f"the preprocessing is not of {channels} channels and {self.num_classes} classes")

    @classmethod
    def of(cls, model: Network) -> Self:
        """The description of a network of ours."""
        names = {kind: name for name, kind in NETWORKS.items()}
        if type(model) not in names:
            raise UsageError(f"only the networks of pcdeq can be saved like this, not {type(model).__name__}")
        family, topology = names[type(model)]
        layers = [_options_of(layer) for layer in equilibrium_layers(model)] or [{}]
        if any(other != layers[0] for other in layers):
            raise UsageError("the equilibrium layers have different settings, which a description cannot tell")
        given = {name: value for name, value in model.options.items() if value is not None}
        return cls(
            family=family,
            topology=topology,
            channels=model.channels,
            image_shape=model.image_shape,
            num_classes=model.num_classes,
            clip=isinstance(model[0], Clip),
            layers=layers[0] if family == "pcdeq" else given | layers[0],
            preprocessing=model.preprocessing,
            training=model.training_facts,
        )

    @classmethod
    def read(cls, given: Any) -> Self:
        """The description that JSON has brought, in today's form or an older one."""
        if isinstance(given, dict) and "config" in given:
            return cls._of_run(given)
        if not isinstance(given, dict) or given.get("model_type") != "pcdeq":
            raise UsageError("it is not the configuration of a pcdeq network")
        inner = {"preprocessing": Preprocessing, "training": TrainingFacts}
        made = {name: _from_plain(kind, given[name]) for name, kind in inner.items() if given.get(name) is not None}
        return _from_plain(cls, given | made)

    @classmethod
    def _of_run(cls, given: dict[str, Any]) -> Self:
        """From what a run was told to do: all that run folders and files of the package had before there was this."""
        with torch.device("meta"):
            network = make_network(*told_by(given))
        facts = given.get("facts")
        network.training_facts = None if facts is None else _from_plain(TrainingFacts, facts)
        return cls.of(network)

    def to_json(self) -> str:
        """As text; `read` is the inverse."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    def make(self) -> Network:
        """The untrained network."""
        options = self.layers | {name: solver_from_dict(self.layers[name]) for name in SOLVER_KEYS & self.layers.keys()}
        if (self.family, self.topology) not in NETWORKS:
            raise UsageError(f"there is no network {self.topology} of the family {self.family}")
        kind = NETWORKS[self.family, self.topology]
        network = kind(self.channels, self.image_shape, self.num_classes, clip=self.clip, **options)
        network.preprocessing, network.training_facts = self.preprocessing, self.training
        return network


def _options_of(layer: SolvingLayer) -> dict[str, Any]:
    options = {name: solver_to_dict(getattr(layer, name)) for name in SOLVER_KEYS}
    if not isinstance(layer, PcDEQ):
        return options
    if layer.injection is not None or not layer.activation.builtin:
        raise UsageError("an injection or activation of your own is code, and cannot be saved: save the state_dict")
    return options | {
        "activation": layer.activation.name,
        "floor": layer.floor,
        "weight_norm": layer.operator.weight_norm,
        "gradient": layer.gradient,
        "gradient_steps": layer.gradient_steps,
        "warm_start": layer.warm is not None,
    }


def solver_to_dict(solver: Any) -> dict[str, Any]:
    """A solver as plain values; one that wraps another nests.

    >>> solver_to_dict(Picard(tol=1e-6))
    {'name': 'Picard', 'tol': 1e-06, 'max_steps': 200, 'stop': 'sample', 'throw': False}
    """
    kind = type(solver)
    if SOLVERS.get(kind.__name__) is not kind:
        raise UsageError(f"a solver of your own is code, and cannot be saved: {kind.__name__}")
    values = {item.name: getattr(solver, item.name) for item in fields(solver)}
    nested = {name: solver_to_dict(value) for name, value in values.items() if type(value) in SOLVERS.values()}
    return {"name": kind.__name__, **values, **nested}


def solver_from_dict(given: Any) -> Any:
    """The inverse of `solver_to_dict`."""
    if not isinstance(given, dict) or str(given.get("name")) not in SOLVERS:
        raise UsageError(f"a solver is one of {', '.join(SOLVERS)} with its options, not {given!r:.80}")
    if given.get("stop") == "certified":  # from before there was the wrapper
        given = {"name": "Certified", "solver": {**given, "stop": "sample"}}
    values = {name: solver_from_dict(value) if isinstance(value, dict) else value for name, value in given.items()}
    solver = _from_plain(SOLVERS[values.pop("name")], values)
    check_types(solver)
    return solver


def _from_plain(kind: type[T], given: Any) -> T:
    """A dataclass from values by name, none of which is missing or unknown; lists become tuples."""
    known = fields(kind)  # pyright: ignore[reportArgumentType]
    required = {item.name for item in known if item.default is MISSING and item.default_factory is MISSING}
    _check_keys(given, required, {item.name for item in known})
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _check_keys(given: Any, required: set[str], known: set[str]) -> None:
    if not isinstance(given, dict):
        raise UsageError(f"there should be an object with {', '.join(sorted(known))}, not {given!r:.80}")
    if wrong := sorted((given.keys() - known) | (required - given.keys())):
        raise UsageError(f"unknown or missing: {', '.join(wrong)}")
