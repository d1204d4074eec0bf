"""The paper's tables as data, and the one configuration that a training run needs.

A :class:`Row` is one line of the paper's accuracy tables: what was published and, for the pcDEQ
rows, the hyperparameters that made it. A :class:`TrainConfig` names a row and overrides whatever
the user wants different; :meth:`TrainConfig.resolve` fills in the rest from the row. Neither needs
torch, so that the command line can explain itself at once.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from pcdeq.errors import UsageError

Topology = Literal["l", "sc", "mc"]
Schedule = Literal["step", "one-cycle", "constant"]
ImageShape = tuple[int, int, int]  # (channels, height, width)


@dataclass(frozen=True)
class Row:
    """One row of the paper's tables: published numbers and, for a pcDEQ, how to get them.

    The paper took its baseline rows from elsewhere, so they carry no hyperparameters
    (``topology is None``). Accuracies are percentages of the test set.

    >>> row = find_row("pcdeq-1-sc-tanh", "cifar10")
    >>> row.title, row.accuracy, row.parameters, row.channels
    ('pcDEQ-1-SC-Tanh', 76.6, 164760, (125,))
    """

    dataset: str
    name: str
    title: str
    accuracy: float | None
    params: str
    parameters: int | None = None
    topology: Topology | None = None
    activation: str | None = None
    channels: tuple[int, ...] = ()
    epochs: int | None = None
    lr: float | None = None
    schedule: Schedule | None = None
    lr_step: int | None = None
    lr_factor: float | None = None
    weight_decay: float | None = None
    augment: bool = False


# dataset  title  params  accuracy  [channels  epochs  lr  lr_step  lr_factor  weight_decay]
_TABLES = """
mnist   NODE                 84K  96.4
mnist   ANODE                84K  98.2
mnist   monDEQ-L             84K  98.1
mnist   monDEQ-SC            84K  99.1
mnist   monDEQ-MT            81K  99.0
mnist   pcDEQ-1-L-ReLU6      70K  98.1  80           40  0.001   30  0.1  0.02
mnist   pcDEQ-1-L-Tanh       70K  98.2  80           40  0.001   30  0.1  0.02
mnist   pcDEQ-1-L-Softsign   70K  98.1  80           40  0.001   30  0.1  0.02
mnist   pcDEQ-2-L-Sigmoid    70K  98.1  80           40  0.001   30  0.1  0.02
mnist   pcDEQ-1-SC-ReLU6     69K  99.2  82           40  0.0007  30  0.1  0.02
mnist   pcDEQ-1-SC-Tanh      69K  99.2  82           40  0.0007  30  0.1  0.02
mnist   pcDEQ-1-SC-Softsign  69K  99.1  82           40  0.0007  30  0.1  0.02
mnist   pcDEQ-2-SC-Sigmoid   69K  98.9  82           40  0.0002  30  0.1  0.02
mnist   pcDEQ-1-MC-ReLU6     41K  99.3  12,24,48     40  0.0005  30  0.1  0.015
mnist   pcDEQ-1-MC-Tanh      41K  99.2  12,24,48     40  0.0005  30  0.1  0.015
mnist   pcDEQ-1-MC-Softsign  41K  99.2  12,24,48     40  0.0005  30  0.1  0.015
mnist   pcDEQ-2-MC-Sigmoid   41K  98.7  12,24,48     40  0.0002  30  0.1  0.015
svhn    NODE                 172K 81.0
svhn    ANODE                172K 83.5
svhn    monDEQ-SC            172K 88.7
svhn    monDEQ-MT            170K 92.4
svhn    pcDEQ-1-SC-ReLU6     165K 88.0  125          80  0.0007  70  0.1  0.02
svhn    pcDEQ-1-SC-Tanh      165K 88.1  125          80  0.0007  70  0.1  0.02
svhn    pcDEQ-1-SC-Softsign  165K 88.4  125          80  0.0007  70  0.1  0.02
svhn    pcDEQ-2-SC-Sigmoid   165K 87.3  125          80  0.0005  70  0.1  0.02
svhn    pcDEQ-1-MC-ReLU6     131K 93.0  20,50,80     50  0.0005  40  0.1  0.015
svhn    pcDEQ-1-MC-Tanh      131K 92.3  20,50,80     50  0.0005  40  0.1  0.015
svhn    pcDEQ-1-MC-Softsign  131K 92.3  20,50,80     50  0.0005  40  0.1  0.015
svhn    pcDEQ-2-MC-Sigmoid   131K 91.5  20,50,80     50  0.0002  40  0.1  0.015
cifar10 NODE                 172K 53.7
cifar10 NODE*                1M   59.9
cifar10 ANODE                172K 60.6
cifar10 ANODE*               1M   73.4
cifar10 monDEQ-SC            172K 74.0
cifar10 monDEQ-SC*           854K 82.0
cifar10 monDEQ-MT            170K 72.0
cifar10 monDEQ-MT*           1M   89.0
cifar10 pcDEQ-1-SC-ReLU6     165K 76.3  125          80  0.0005  70  0.1  0.02
cifar10 pcDEQ-1-SC-Tanh      165K 76.6  125          80  0.0005  70  0.1  0.02
cifar10 pcDEQ-1-SC-Softsign  165K 76.4  125          80  0.0005  70  0.1  0.02
cifar10 pcDEQ-2-SC-Sigmoid   165K 75.5  125          80  0.0002  70  0.1  0.02
cifar10 pcDEQ-1-MC-ReLU6     131K 78.2  20,50,80     50  0.0007  40  0.1  0.015
cifar10 pcDEQ-1-MC-ReLU6*    661K 89.2  100,120,140  120 0.0007  100 0.1  0.02
cifar10 pcDEQ-1-MC-Tanh      131K 76.5  20,50,80     50  0.0007  40  0.1  0.015
cifar10 pcDEQ-1-MC-Tanh*     661K 88.5  100,120,140  120 0.0007  100 0.1  0.02
cifar10 pcDEQ-1-MC-Softsign  131K 77.1  20,50,80     50  0.0007  40  0.1  0.015
cifar10 pcDEQ-1-MC-Softsign* 661K 89.0  100,120,140  120 0.0007  100 0.1  0.02
cifar10 pcDEQ-2-MC-Sigmoid   131K 71.0  20,50,80     50  0.0002  40  0.1  0.015
cifar10 pcDEQ-2-MC-Sigmoid*  661K 85.6  100,120,140  120 0.0002  100 0.1  0.02
"""

# The published counts are rounded; these follow from the networks, which depend only on the
# colours, the channels and the image size (SVHN and CIFAR-10 share theirs).
_PARAMETERS = {"70K": 70410, "69K": 69136, "41K": 41278, "165K": 164760, "131K": 130950, "661K": 661470}


def _parse_row(line: str) -> Row:
    dataset, title, params, accuracy, *recipe = line.split()
    name = title.lower().replace("*", "-aug")
    row = Row(dataset, name, title, float(accuracy), params, augment=name.endswith("-aug"))
    if not recipe:
        return row
    _, _, topology, activation = title.rstrip("*").lower().split("-")
    channels, epochs, lr, lr_step, lr_factor, weight_decay = recipe
    return replace(
        row,
        parameters=_PARAMETERS[params],
        topology=cast(Topology, topology),
        activation=activation,
        channels=tuple(map(int, channels.split(","))),
        epochs=int(epochs),
        lr=float(lr),
        schedule="step",
        lr_step=int(lr_step),
        lr_factor=float(lr_factor),
        weight_decay=float(weight_decay),
    )


_ROWS = tuple(map(_parse_row, _TABLES.strip().splitlines()))
_NAMES = sorted({row.name for row in _ROWS})
_PAPER_DATASETS = ("mnist", "svhn", "cifar10")
_LIKE_MNIST = ("mnist-mini", "fashion-mnist", "kmnist")


def rows(dataset: str | None = None) -> tuple[Row, ...]:
    """All rows of the paper, or those of one of its data sets, in the paper's order.

    >>> len(rows()), [row.name for row in rows("svhn")][:2]
    (49, ['node', 'anode'])
    """
    if dataset is not None and dataset not in _PAPER_DATASETS:
        raise UsageError(f"the paper has no rows for {dataset!r}, only for {', '.join(_PAPER_DATASETS)}")
    return tuple(row for row in _ROWS if dataset in (None, row.dataset))


def paper_dataset(data: str, image_channels: int | None = None) -> str:
    """The data set of the paper whose hyperparameters suit ``data``.

    Grey pictures follow MNIST and other colour pictures CIFAR-10.

    >>> paper_dataset("fashion-mnist"), paper_dataset("my/pictures", image_channels=3)
    ('mnist', 'cifar10')
    """
    if data in _PAPER_DATASETS:
        return data
    return "mnist" if data in _LIKE_MNIST or image_channels == 1 else "cifar10"


def find_row(name: str, data: str = "mnist", image_channels: int | None = None) -> Row:
    """The row called ``name`` for ``data``, or the paper's nearest where it has none for that data.

    Compare the result's ``dataset`` with ``data`` to see whose hyperparameters it holds. The row
    ``demo`` is ours: the MC ReLU6 network with a schedule that fits in about a minute.

    >>> find_row("pcdeq-1-l-tanh", "kmnist").dataset
    'mnist'
    >>> find_row("pcdeq-1-l-than")
    Traceback (most recent call last):
    ...
    pcdeq.errors.UsageError: unknown row 'pcdeq-1-l-than'; did you mean pcdeq-1-l-tanh? See `pcdeq list`
    """
    if name == "demo":
        network = find_row("pcdeq-1-mc-relu6", data, image_channels)
        return replace(network, name="demo", title="demo", accuracy=None, epochs=5, lr=1e-2, schedule="one-cycle")
    named = {row.dataset: row for row in _ROWS if row.name == name}
    if not named:
        near = difflib.get_close_matches(name, [*_NAMES, "demo"], n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UsageError(f"unknown row {name!r}{hint} See `pcdeq list`")
    return named.get(paper_dataset(data, image_channels)) or next(iter(named.values()))


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
    channels: tuple[int, ...] | None = None
    """Width of each equilibrium layer. (default: the row's)"""
    epochs: int | None = None
    """Passes over the training images. (default: the row's)"""
    batch_size: int = 64
    """Images per optimiser step, over all processes and accumulated parts."""
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
    augment: bool | None = None
    """Random crops with padding 4, and flips where they make sense. (default: the row's)"""
    flip: bool | None = None
    """Whether augmentation also mirrors images. (default: if they are colour pictures, not digits)"""
    robust_radius: float | None = None
    """Train against every input within this distance in each pixel (0 to 1 scale): the certified loss. (default: no)"""
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
    """Run folder; must be new or empty. (default: runs/ROW-DATA-seedK)"""

    def __post_init__(self) -> None:
        for name, (given, wanted) in _FROM_JSON.items():
            if isinstance(value := getattr(self, name), given):
                object.__setattr__(self, name, wanted(value))
        _check_types(self)
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")
        for name in ("lr", "lr_factor", "tol", "max_steps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} must be positive and finite, got {value}")
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation must be a fraction, at least 0 and below 1, got {self.validation}")
        if self.robust_radius is not None and not 0 < self.robust_radius < 1:
            raise UsageError(f"robust_radius must be above 0 and below 1, got {self.robust_radius}")
        if self.accumulate > self.batch_size:
            raise UsageError(f"accumulate {self.accumulate} is more than batch_size {self.batch_size}")
        if self.channels is not None and (not self.channels or min(self.channels) < 1):
            raise UsageError(f"channels must be positive, got {self.channels}")

    def resolve(self, image_shape: ImageShape | None = None) -> ResolvedConfig:
        """Fill in from the row whatever was left open; ``image_shape`` helps with data of your own."""
        image_channels = None if image_shape is None else image_shape[0]
        row = find_row(self.row, self.data, image_channels)
        if row.topology is None:
            raise UsageError(f"{row.name} is a published baseline without hyperparameters; train a pcdeq row")
        schedule = self.schedule or row.schedule
        if schedule != "step" and (self.lr_step or self.lr_factor):
            raise UsageError(f"lr_step and lr_factor belong to the schedule step, not to {schedule}")
        augment = row.augment if self.augment is None else self.augment
        if self.flip and not augment:
            raise UsageError("flip is a part of the augmentation: set augment too")
        defaults = {
            "channels": row.channels,
            "epochs": row.epochs,
            "lr": row.lr,
            "schedule": row.schedule,
            "lr_step": row.lr_step if schedule == "step" else None,
            "lr_factor": row.lr_factor if schedule == "step" else None,
            "weight_decay": row.weight_decay,
            "augment": augment,
            "flip": augment and paper_dataset(self.data, image_channels) == "cifar10",
        }
        given = {name: value for name, value in self._values().items() if value is not None}
        return ResolvedConfig(**{**defaults, **given})

    def _values(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

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
    augment: bool = field()
    flip: bool = field()


# Types that JSON does not have, made from those it has.
_FROM_JSON: dict[str, tuple[type, type[Any]]] = {
    "channels": (list, tuple),
    "data_dir": (str, Path),
    "out": (str, Path),
}
_AT_LEAST = {"epochs": 1, "batch_size": 1, "accumulate": 1, "lr_step": 1, "weight_decay": 0, "seed": 0}


def _check_types(config: TrainConfig) -> None:
    for name, hint in get_type_hints(type(config)).items():
        if name != "_" and not _fits(getattr(config, name), hint):
            raise UsageError(f"{name} must be {_describe(hint)}, got {getattr(config, name)!r}")


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
    """Whether ``value`` is of the annotated type, for the few kinds of annotation used above."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
