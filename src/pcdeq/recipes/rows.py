"""The rows of the paper's accuracy tables, and ours beside them.

The paper took its figures of NODE, ANODE and monDEQ from the papers that introduced them; here those rows
can be trained like any other. All widths meet the published parameter counts within 3 %. Those of monDEQ, and of
NODE and ANODE on MNIST, are their authors' (`experiments.ipynb` of locuslab/monotone_op_net, `config_img.json` of
EmilienDupont/augmented-neural-odes), but for monDEQ-SC on MNIST: 56 channels, where the authors' 54 give 80K here.
The other ODEs have widths that we chose to meet the count. Learning rates, and for the ODEs no weight decay, come
from the same two files (of the ODEs only MNIST's is there; the others follow it), weight decay 0 of monDEQ from its
plain Adam. The batch size is ours. Epochs and the one drop of the rate are those of the pcDEQ of the same class (of
MC for the ODEs), so that all learn for the same time; the large monDEQs have their authors' 65 epochs and peak rate,
with our one-cycle schedule (cosines, peak after a fifth), where the authors' is linear with its peak in the middle.
"""

from __future__ import annotations

import csv
import difflib
import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pcdeq.errors import UsageError

Family = Literal["pcdeq", "mondeq", "node", "anode", "deq", "explicit"]
Topology = Literal["l", "sc", "mc", "tc", "mt", "ode"]
Schedule = Literal["step", "one-cycle", "constant"]
Recipe = Literal["paper", "fast"]


@dataclass(frozen=True)
class Row:
    """One network on one data set: what the paper published about it, and how to train it.

    Accuracies are percentages of the test set; rows that the paper does not have, have none.

    >>> row = find_row("pcdeq-1-sc-tanh", "cifar10")
    >>> row.title, row.accuracy, row.parameters, row.channels
    ('pcDEQ-1-SC-Tanh', 76.6, 164760, (125,))

    Attributes:
        family: what computes the layers.
        params: the published number of parameters, which is rounded; ``parameters`` is exact, of the network here.
        channels: widths; of an ANODE its filters and its extra channels.
    """

    dataset: str
    name: str
    title: str
    family: Family
    topology: Topology
    activation: str
    accuracy: float | None
    params: str
    parameters: int
    channels: tuple[int, ...]
    epochs: int
    lr: float
    schedule: Schedule
    lr_step: int | None
    lr_factor: float | None
    weight_decay: float
    augment: bool
    recipe: Recipe = "paper"
    batch_size: int = 64
    scale_rate: float = 1.0
    smoothing: float = 0.0
    average: float = 0.0
    loosen: float = 1.0
    recalibrate: bool = False
    robust_reach: float | None = None

    @property
    def kind(self) -> str:
        """The class of networks to which it belongs, as recipes go: its topology, and whether it is augmented."""
        return f"{self.topology}-aug" if self.augment else self.topology

    def has_recipe(self, recipe: Recipe) -> bool:
        """Whether it can be trained by this recipe."""
        return recipe == "paper" or self.kind in _FAST

    def with_recipe(self, recipe: Recipe) -> Row:
        """The same network on the same data, trained by a recipe: the paper's own, or ours of its class.

        >>> row = find_row("pcdeq-1-mc-relu6", "cifar10")
        >>> row.epochs, row.with_recipe("fast").epochs
        (50, 10)
        >>> find_row("node").with_recipe("fast")
        Traceback (most recent call last):
        ...
        pcdeq.errors.UsageError: there is no recipe fast for node; it is for l, sc, mc and mc-aug
        """
        if recipe == self.recipe:
            return self
        if recipe == "paper":
            return find_row(self.name, self.dataset)
        if not self.has_recipe(recipe):
            *most, last = _FAST
            raise UsageError(f"there is no recipe {recipe} for {self.name}; it is for {', '.join(most)} and {last}")
        return replace(self, **self._settings(_FAST), recipe=recipe)

    def against_noise(self) -> Row:
        """The same network on the same data with the rates and epochs that suit the certified loss, where we know them.

        >>> find_row("pcdeq-1-l-relu6").against_noise().schedule
        'one-cycle'
        """
        if self.kind not in _ROBUST:
            return self
        return replace(self, **self._settings(_ROBUST))

    def _settings(self, recipes: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What recipes say for this row; a setting that they have only for other data or activations stays its own."""
        keys = (f"{self.dataset} {self.activation}", self.dataset, self.activation, "other")
        settings: dict[str, Any] = {"lr_step": None, "lr_factor": None}
        for name, value in recipes[self.kind].items():
            said = [value[key] for key in keys if key in value] if isinstance(value, dict) else [value]
            settings |= {name: said[0]} if said else {}
        return settings


def _name(title: str) -> str:
    """The name of a row, from how the tables print it."""
    return title.lower().replace("*", "-aug")


def _read_row(line: dict[str, str]) -> Row:
    """A line of ``paper.csv``, whose columns are called as the fields; without an ``lr_step`` it is a one-cycle row.

    The published counts, ``params``, are rounded; ``parameters`` follow from the networks, which depend only on the
    colours, the channels and the image size (SVHN and CIFAR-10 share theirs).
    """
    family, *rest = line["title"].rstrip("*").lower().split("-")
    if family == "pcdeq":
        _, topology, activation = rest
    else:
        topology, activation = rest[0] if rest else "ode", "relu"
    words = {name: line.pop(name) for name in ("dataset", "title", "params")}
    channels = tuple(map(int, line.pop("channels").split()))
    return Row(
        **words,
        name=_name(words["title"]),
        family=cast(Family, family),
        topology=cast(Topology, topology),
        activation=activation,
        channels=channels,
        schedule="step" if line["lr_step"] else "one-cycle",
        augment=words["title"].endswith("*"),
        **{name: json.loads(number or "null") for name, number in line.items()},
    )


def _like(row: Row, family: Family, title: str) -> Row:
    """The row of the same shape and training in another family, which the paper does not have."""
    _, _, topology, activation = row.title.split("-")
    title = f"{title}-{topology}-{activation}"
    return replace(row, name=_name(title), title=title, family=family, accuracy=None)


def _with_two_convolutions(row: Row) -> Row:
    """The row of our topology TC that is trained like one of MC."""
    title = row.title.replace("-MC-", "-TC-")
    return replace(row, name=_name(title), title=title, topology="tc", accuracy=None, **_TWO_CONVOLUTIONS[row.dataset])


with Path(__file__).with_name("paper.csv").open(encoding="utf-8", newline="") as _file:
    _ROWS = tuple(map(_read_row, csv.DictReader(_file)))
with Path(__file__).with_name("fast.toml").open("rb") as _file:
    _FAST: dict[str, dict[str, Any]] = tomllib.load(_file)  # by class of networks, settings by name
with Path(__file__).with_name("robust.toml").open("rb") as _file:
    _ROBUST: dict[str, dict[str, Any]] = tomllib.load(_file)  # likewise
_TWO_CONVOLUTIONS: dict[str, dict[str, Any]] = {  # sizes of TC by data
    "mnist": {"channels": (16, 32), "params": "33K", "parameters": 32506},
    "cifar10": {"channels": (32, 64), "params": "108K", "parameters": 108458},
}
_OUR_FAMILIES: dict[Family, str] = {"deq": "DEQ", "explicit": "Explicit"}
_OURS = (
    *(_like(row, family, title) for family, title in _OUR_FAMILIES.items() for row in _ROWS if row.family == "pcdeq"),
    *(_with_two_convolutions(row) for row in _ROWS if row.kind == "mc" and row.dataset in _TWO_CONVOLUTIONS),
)
PAPER_DATASETS = ("mnist", "svhn", "cifar10")
_LIKE_MNIST = ("mnist-mini", "fashion-mnist", "kmnist")
KNOWN_DATASETS = (*PAPER_DATASETS, *_LIKE_MNIST)


def rows(dataset: str | None = None) -> tuple[Row, ...]:
    """All rows of the paper, or those of one of its data sets, in the paper's order.

    >>> len(rows()), [row.name for row in rows("svhn")][:2]
    (49, ['node', 'anode'])
    """
    return _of(_ROWS, dataset)


def own_rows(dataset: str | None = None) -> tuple[Row, ...]:
    """Rows that the paper does not have: every pcDEQ with free weights (DEQ) and with one step (explicit), and our TC.

    They are trained in the same way, and all but TC are of the same shape.

    >>> [row.name for row in own_rows("mnist")][:2]
    ['deq-l-relu6', 'deq-l-tanh']
    """
    return _of(_OURS, dataset)


def _of(table: tuple[Row, ...], dataset: str | None) -> tuple[Row, ...]:
    if dataset is not None and dataset not in PAPER_DATASETS:
        raise UsageError(f"the paper has no rows for {dataset!r}, only for {', '.join(PAPER_DATASETS)}")
    return tuple(row for row in table if dataset in (None, row.dataset))


def paper_dataset(data: str, image_channels: int | None = None) -> str:
    """The data set of the paper whose hyperparameters suit ``data``.

    Grey pictures follow MNIST and other colour pictures CIFAR-10.

    >>> paper_dataset("fashion-mnist"), paper_dataset("my/pictures", image_channels=3)
    ('mnist', 'cifar10')
    """
    if data in PAPER_DATASETS:
        return data
    return "mnist" if data in _LIKE_MNIST or image_channels == 1 else "cifar10"


def find_row(name: str, data: str = "mnist", image_channels: int | None = None, *, recipe: Recipe = "paper") -> Row:
    """The row called ``name`` for ``data``, or the paper's nearest where it has none for that data.

    Compare the result's ``dataset`` with ``data`` to see whose hyperparameters it holds; ``recipe`` says whether they
    are the paper's or ours. The row ``demo`` is the MC ReLU6 network by our recipe, which on the digits of the package
    takes less than a minute.

    >>> find_row("pcdeq-1-l-tanh", "kmnist").dataset, find_row("monDEQ-MT*").name
    ('mnist', 'mondeq-mt-aug')
    >>> find_row("pcdeq-1-l-than")
    Traceback (most recent call last):
    ...
    pcdeq.errors.UsageError: unknown row 'pcdeq-1-l-than'; did you mean pcdeq-1-l-tanh? See `pcdeq list`
    """
    name = _name(name)
    if name == "demo":
        network = find_row("pcdeq-1-mc-relu6", data, image_channels, recipe="fast")
        return replace(network, name="demo", title="demo", accuracy=None, recipe=recipe)
    named = {row.dataset: row for row in (*_ROWS, *_OURS) if row.name == name}
    if not named:
        names = {"demo", *(row.name for row in (*_ROWS, *_OURS))}
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UsageError(f"unknown row {name!r}{hint} See `pcdeq list`")
    row = named.get(paper_dataset(data, image_channels)) or next(iter(named.values()))
    return row.with_recipe(recipe)
