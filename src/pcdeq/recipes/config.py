"""The one configuration that a training run needs.

A :class:`TrainConfig` names a row and overrides whatever the user wants different;
:meth:`TrainConfig.resolve` fills in the rest from the row.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pcdeq.errors import UsageError
from pcdeq.recipes.rows import Recipe, Schedule, find_row, paper_dataset

ImageShape = tuple[int, int, int]  # (channels, height, width)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a training run; what is left ``None`` follows the row.

    >>> config = TrainConfig("pcdeq-1-l-tanh", data="mnist", epochs=3).resolve()
    >>> config.epochs, config.lr, config.channels
    (3, 0.001, (80,))
    >>> TrainConfig(batch_size=0)
    Traceback (most recent call last):
    ...
    pcdeq.errors.UsageError: batch_size must be at least 1, got 0
    """

    row: str = "demo"
    """Row of the paper (`pcdeq list` shows them), or `demo`, a network that learns in about a minute."""
    _: KW_ONLY
    data: str = "mnist-mini"
    """Data set by name (`pcdeq data` shows them), or the path of your own."""
    recipe: Recipe = "paper"
    """paper: the row's own epochs and rates; fast: ours, of few epochs, for the same network and data."""
    size: str | None = None
    """Cut and scale pictures of your own to so many pixels: 32, or width and height, 32x24. (default: as they are)"""
    channels: tuple[int, ...] | None = None
    """Width of each equilibrium layer. (default: the row's)"""
    epochs: int | None = None
    """Passes over the training images. (default: the row's)"""
    steps_per_epoch: int | None = None
    """End each epoch after so many optimiser steps, for a model too slow for whole passes. (default: no)"""
    batch_size: int | None = None
    """Images per optimiser step, over all processes and accumulated parts. (default: the recipe's; the paper's 64)"""
    accumulate: int = 1
    """Split each step's images into so many parts, to save memory; batch norm sees one part at a time."""
    optimizer: str = "AdamW"
    """Any optimiser of torch.optim by its name."""
    optimizer_options: dict[str, float] = field(default_factory=dict)
    """Further numbers for the optimiser, such as `momentum 0.9`."""
    lr: float | None = None
    """Learning rate; for one-cycle its peak. (default: the row's)"""
    schedule: Schedule | None = None
    """step: times lr_factor once, after epoch lr_step; one-cycle: up to lr and down; constant. (default: the row's)"""
    lr_step: int | None = None
    """The last epoch before the rate drops (schedule step). (default: the row's)"""
    lr_factor: float | None = None
    """What the rate is multiplied with then (schedule step). (default: the row's)"""
    weight_decay: float | None = None
    """Weight decay of all parameters. (default: the row's)"""
    scale_rate: float | None = None
    """Learn the scales of an equilibrium's weights, one a row, at this part of the rate. (default: the recipe's; 1)"""
    smoothing: float | None = None
    """Part of each label that is spread evenly over all classes. (default: the recipe's; the paper's is 0)"""
    average: float | None = None
    """Test and save a moving average of the weights, of which each step keeps this part. (default: the recipe's; 0)"""
    loosen: float | None = None
    """Begin with a tolerance so many times tol, which is tol again after 4/5 of training. (default: the recipe's; 1)"""
    recalibrate: bool | None = None
    """Measure the statistics of batch norm anew, over all training images, at the end. (default: the recipe's; no)"""
    augment: bool | None = None
    """Random crops with padding 4, and flips where they make sense. (default: the row's)"""
    flip: bool | None = None
    """Whether augmentation also mirrors images. (default: if they are colour pictures, not digits)"""
    robust_radius: float | None = None
    """Train for proofs against all noise up to this in each pixel, which goes from 0 to 1. (default: no)"""
    robust_reach: float | None = None
    """Train with noise so many times robust_radius. (default: the recipe's; 1.5, but at most 0.05 beyond the radius)"""
    validation: float = 0.0
    """Fraction of the training images to hold out; keeps the best epoch beside the last."""
    seed: int = 0
    """Decides initial weights, order and augmentation."""
    solver: Literal["default", "paper", "picard", "anderson"] = "default"
    """default: the layers' own; paper: Picard, stopped by the whole batch; picard; anderson."""
    tol: float | None = None
    """Relative residual at which a solve stops, both ways. (default: the solver's)"""
    max_steps: int | None = None
    """Most steps of a solve, both ways. (default: the solver's)"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto takes the best there is."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the explicit layers (mixed precision)."""
    deterministic: bool = False
    """Only deterministic algorithms, for bit-equal runs on a GPU too."""
    tracker: str | None = None
    """Also log to tensorboard, or to another tracker that Accelerate knows and you have installed."""
    data_dir: Path | None = None
    """Where data sets are kept. (default: the user's cache)"""
    out: Path | None = None
    """Run folder; must be new or empty. (default: runs/ROW-DATA-seedK, and what is not usual before seed)"""

    def __post_init__(self) -> None:
        for name, (given, wanted) in _FROM_JSON.items():
            if isinstance(value := getattr(self, name), given):
                object.__setattr__(self, name, wanted(value))
        check_types(self)
        for names, words, holds in _RULES:
            for name in names.split():
                if (value := getattr(self, name)) is not None and not holds(value):
                    raise UsageError(f"{name} must be {words}, got {value}")
        if self.batch_size is not None and self.accumulate > self.batch_size:
            raise UsageError(f"accumulate {self.accumulate} is more than batch_size {self.batch_size}")

    def resolve(self, image_shape: ImageShape | None = None) -> ResolvedConfig:
        """Fill in from the row whatever was left open; ``image_shape`` helps with data of your own."""
        image_channels = None if image_shape is None else image_shape[0]
        row = find_row(self.row, self.data, image_channels, recipe=self.recipe)
        if self.robust_radius is not None and self.recipe == "paper":
            row = row.against_noise()
        if self.robust_radius is None and self.robust_reach is not None:
            raise UsageError("robust_reach is in units of robust_radius: set that too")
        filled = {name: vars(row).get(name) if value is None else value for name, value in vars(self).items()}
        if filled["schedule"] != "step":
            if self.lr_step or self.lr_factor:
                raise UsageError(f"lr_step and lr_factor belong to the schedule step, not to {filled['schedule']}")
            filled |= {"lr_step": None, "lr_factor": None}
        if self.flip and not filled["augment"]:
            raise UsageError("flip is a part of the augmentation: set augment too")
        if self.flip is None:
            filled["flip"] = filled["augment"] and paper_dataset(self.data, image_channels) == "cifar10"
        return ResolvedConfig(**{**filled, "row": row.name})

    @property
    def training_radius(self) -> float | None:
        """How far noise reaches in training: further than ``robust_radius``, which unseen images are to withstand.

        By ``robust_reach`` times it, if that is given. Else by half of it or by 0.05 further, whichever is less: on
        digits, further still costs accuracy and proves no more.

        >>> [round(TrainConfig(robust_radius=radius).training_radius, 3) for radius in (0.02, 0.1, 0.3)]
        [0.03, 0.15, 0.35]
        """
        if self.robust_radius is None:
            return None
        if self.robust_reach is not None:
            return self.robust_reach * self.robust_radius
        return min(1.5 * self.robust_radius, self.robust_radius + 0.05)

    @property
    def run_name(self) -> str:
        """What its run folder is called, unless it is told.

        >>> TrainConfig("pcdeq-1-l-tanh", data="mnist", recipe="fast", seed=2).run_name
        'pcdeq-1-l-tanh-mnist-fast-seed2'
        """
        recipe = [] if self.recipe == "paper" else [self.recipe]
        solver = [] if self.solver == "default" else [self.solver]
        return "-".join([self.row, Path(self.data).stem, *recipe, *solver, f"seed{self.seed}"])

    def changes_from(self, other: TrainConfig) -> dict[str, Any]:
        """The settings in which this differs from another configuration, but for where a run is made.

        >>> TrainConfig(lr=0.1, device="cpu").changes_from(TrainConfig())
        {'lr': 0.1}
        """
        return {k: v for k, v in vars(self).items() if k not in _INCIDENTAL and v != getattr(other, k)}

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary that survives JSON; :meth:`from_dict` is its inverse."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> typing.Self:
        """The configuration with these values; an unknown key is an error.

        >>> TrainConfig.from_dict({"epoch": 3})
        Traceback (most recent call last):
        ...
        pcdeq.errors.UsageError: unknown setting 'epoch'; did you mean epochs?
        """
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise UsageError(f"unknown setting {name!r}; {hint}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """A configuration without open ends: what a run folder records and the trainer reads."""

    channels: tuple[int, ...] = field()
    epochs: int = field()
    lr: float = field()
    schedule: Schedule = field()
    weight_decay: float = field()
    batch_size: int = field()
    scale_rate: float = field()
    smoothing: float = field()
    average: float = field()
    loosen: float = field()
    recalibrate: bool = field()
    augment: bool = field()
    flip: bool = field()


# Where a run is made and watched, which does not decide it.
_INCIDENTAL = {"device", "data_dir", "out", "tracker"}
# Types that JSON does not have, made from those it has.
_FROM_JSON: dict[str, tuple[type, type[Any]]] = {
    "channels": (list, tuple),
    "data_dir": (str, Path),
    "out": (str, Path),
}
# Of which settings what must hold, in words and as a test.
_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("epochs steps_per_epoch batch_size accumulate lr_step max_steps", "at least 1", lambda value: value >= 1),
    ("epochs steps_per_epoch batch_size accumulate lr_step max_steps", "below 2^31", lambda value: value < 2**31),
    ("weight_decay seed", "at least 0", lambda value: value >= 0),
    ("seed", "below 2^63", lambda value: value < 2**63),
    ("weight_decay", "finite", lambda value: value < float("inf")),
    ("lr lr_factor scale_rate tol robust_reach", "positive and finite", lambda value: 0 < value < float("inf")),
    ("loosen", "at least 1 and finite", lambda value: 1 <= value < float("inf")),
    ("validation smoothing average", "a fraction, at least 0 and below 1", lambda value: 0 <= value < 1),
    ("robust_radius", "above 0 and below 1", lambda value: 0 < value < 1),
    ("channels", "positive", lambda value: min(value, default=0) >= 1),
)


def check_types(instance: Any) -> None:
    """Raise `UsageError` unless every field of a dataclass is of the annotated type."""
    hints = get_type_hints(type(instance))
    for item in fields(instance):
        check_type(getattr(instance, item.name), hints[item.name], item.name)


def check_type(value: object, hint: Any, name: str) -> None:
    """Raise `UsageError` unless a value is of the annotated type."""
    if not _fits(value, hint):
        raise UsageError(f"{name} must be {_describe(hint)}, got {value!r:.80}")


def _describe(hint: Any) -> str:
    """The annotation in a reader's words.

    >>> _describe(Literal["step", "constant"] | None)
    "'step' or 'constant' or None"
    """
    if get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is type(None):
        return "None"
    return str(hint) if get_args(hint) else hint.__name__


def _fits(value: object, hint: Any) -> bool:
    """Whether ``value`` is of the annotated type, for the few kinds of annotation in use."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        if not isinstance(value, tuple) or (inner[-1] is not ... and len(value) != len(inner)):
            return False
        return all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if isinstance(value, bool):  # which Python takes for a whole number
        return hint in (bool, Any)
    return hint is Any or isinstance(value, int | float if hint is float else hint)
