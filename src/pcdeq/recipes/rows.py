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

import difflib
from dataclasses import dataclass, replace
from typing import Literal, cast

from pcdeq.errors import UsageError

Family = Literal["pcdeq", "mondeq", "node", "anode", "deq", "explicit"]
Topology = Literal["l", "sc", "mc", "mt", "ode"]
Schedule = Literal["step", "one-cycle", "constant"]


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


# The published counts, params, are rounded; parameters follow from the networks, which depend only on the colours, the
# channels and the image size (SVHN and CIFAR-10 share theirs).
# dataset  title  params  parameters  accuracy  channels  epochs  lr  lr_step  lr_factor  weight_decay (one-cycle: - -)
_TABLES = """
mnist   NODE                 84K  85316    96.4  92           40  0.001   30  0.1  0
mnist   ANODE                84K  85462    98.2  64,5         40  0.001   30  0.1  0
mnist   monDEQ-L             84K  84313    98.1  87           40  0.001   30  0.1  0
mnist   monDEQ-SC            84K  84460    99.1  56           40  0.001   30  0.1  0
mnist   monDEQ-MT            81K  81458    99.0  16,32,32     40  0.001   30  0.1  0
mnist   pcDEQ-1-L-ReLU6      70K  70410    98.1  80           40  0.001   30  0.1  0.02
mnist   pcDEQ-1-L-Tanh       70K  70410    98.2  80           40  0.001   30  0.1  0.02
mnist   pcDEQ-1-L-Softsign   70K  70410    98.1  80           40  0.001   30  0.1  0.02
mnist   pcDEQ-2-L-Sigmoid    70K  70410    98.1  80           40  0.001   30  0.1  0.02
mnist   pcDEQ-1-SC-ReLU6     69K  69136    99.2  82           40  0.0007  30  0.1  0.02
mnist   pcDEQ-1-SC-Tanh      69K  69136    99.2  82           40  0.0007  30  0.1  0.02
mnist   pcDEQ-1-SC-Softsign  69K  69136    99.1  82           40  0.0007  30  0.1  0.02
mnist   pcDEQ-2-SC-Sigmoid   69K  69136    98.9  82           40  0.0002  30  0.1  0.02
mnist   pcDEQ-1-MC-ReLU6     41K  41278    99.3  12,24,48     40  0.0005  30  0.1  0.015
mnist   pcDEQ-1-MC-Tanh      41K  41278    99.2  12,24,48     40  0.0005  30  0.1  0.015
mnist   pcDEQ-1-MC-Softsign  41K  41278    99.2  12,24,48     40  0.0005  30  0.1  0.015
mnist   pcDEQ-2-MC-Sigmoid   41K  41278    98.7  12,24,48     40  0.0002  30  0.1  0.015
svhn    NODE                 172K 173611   81.0  125          50  0.001   40  0.1  0
svhn    ANODE                172K 172452   83.5  64,10        50  0.001   40  0.1  0
svhn    monDEQ-SC            172K 172218   88.7  81           80  0.001   70  0.1  0
svhn    monDEQ-MT            170K 170286   92.4  16,32,60     50  0.001   40  0.1  0
svhn    pcDEQ-1-SC-ReLU6     165K 164760   88.0  125          80  0.0007  70  0.1  0.02
svhn    pcDEQ-1-SC-Tanh      165K 164760   88.1  125          80  0.0007  70  0.1  0.02
svhn    pcDEQ-1-SC-Softsign  165K 164760   88.4  125          80  0.0007  70  0.1  0.02
svhn    pcDEQ-2-SC-Sigmoid   165K 164760   87.3  125          80  0.0005  70  0.1  0.02
svhn    pcDEQ-1-MC-ReLU6     131K 130950   93.0  20,50,80     50  0.0005  40  0.1  0.015
svhn    pcDEQ-1-MC-Tanh      131K 130950   92.3  20,50,80     50  0.0005  40  0.1  0.015
svhn    pcDEQ-1-MC-Softsign  131K 130950   92.3  20,50,80     50  0.0005  40  0.1  0.015
svhn    pcDEQ-2-MC-Sigmoid   131K 130950   91.5  20,50,80     50  0.0002  40  0.1  0.015
cifar10 NODE                 172K 173611   53.7  125          50  0.001   40  0.1  0
cifar10 NODE*                1M   998983   59.9  327          120 0.001   100 0.1  0
cifar10 ANODE                172K 172452   60.6  64,10        50  0.001   40  0.1  0
cifar10 ANODE*               1M   998636   73.4  308,10       120 0.001   100 0.1  0
cifar10 monDEQ-SC            172K 172218   74.0  81           80  0.001   70  0.1  0
cifar10 monDEQ-SC*           854K 853612   82.0  200          65  0.01    -   -    0
cifar10 monDEQ-MT            170K 170286   72.0  16,32,60     50  0.01    40  0.1  0
cifar10 monDEQ-MT*           1M   1014802  89.0  64,128,128   65  0.05    -   -    0
cifar10 pcDEQ-1-SC-ReLU6     165K 164760   76.3  125          80  0.0005  70  0.1  0.02
cifar10 pcDEQ-1-SC-Tanh      165K 164760   76.6  125          80  0.0005  70  0.1  0.02
cifar10 pcDEQ-1-SC-Softsign  165K 164760   76.4  125          80  0.0005  70  0.1  0.02
cifar10 pcDEQ-2-SC-Sigmoid   165K 164760   75.5  125          80  0.0002  70  0.1  0.02
cifar10 pcDEQ-1-MC-ReLU6     131K 130950   78.2  20,50,80     50  0.0007  40  0.1  0.015
cifar10 pcDEQ-1-MC-ReLU6*    661K 661470   89.2  100,120,140  120 0.0007  100 0.1  0.02
cifar10 pcDEQ-1-MC-Tanh      131K 130950   76.5  20,50,80     50  0.0007  40  0.1  0.015
cifar10 pcDEQ-1-MC-Tanh*     661K 661470   88.5  100,120,140  120 0.0007  100 0.1  0.02
cifar10 pcDEQ-1-MC-Softsign  131K 130950   77.1  20,50,80     50  0.0007  40  0.1  0.015
cifar10 pcDEQ-1-MC-Softsign* 661K 661470   89.0  100,120,140  120 0.0007  100 0.1  0.02
cifar10 pcDEQ-2-MC-Sigmoid   131K 130950   71.0  20,50,80     50  0.0002  40  0.1  0.015
cifar10 pcDEQ-2-MC-Sigmoid*  661K 661470   85.6  100,120,140  120 0.0002  100 0.1  0.02
"""


def _parse_row(line: str) -> Row:
    dataset, title, params, parameters, accuracy, channels, *training = line.split()
    epochs, lr, lr_step, lr_factor, weight_decay = training
    name = title.lower().replace("*", "-aug")
    family, *rest = title.rstrip("*").lower().split("-")
    if family == "pcdeq":
        _, topology, activation = rest
    else:
        topology, activation = rest[0] if rest else "ode", "relu"
    stepwise = lr_step != "-"
    return Row(
        dataset=dataset,
        name=name,
        title=title,
        family=cast(Family, family),
        topology=cast(Topology, topology),
        activation=activation,
        accuracy=float(accuracy),
        params=params,
        parameters=int(parameters),
        channels=tuple(map(int, channels.split(","))),
        epochs=int(epochs),
        lr=float(lr),
        schedule="step" if stepwise else "one-cycle",
        lr_step=int(lr_step) if stepwise else None,
        lr_factor=float(lr_factor) if stepwise else None,
        weight_decay=float(weight_decay),
        augment=name.endswith("-aug"),
    )


def _like(row: Row, family: Family, title: str) -> Row:
    """The row of the same shape and training in another family, which the paper does not have."""
    _, _, topology, activation = row.title.split("-")
    title = f"{title}-{topology}-{activation}"
    name = title.lower().replace("*", "-aug")
    return replace(row, name=name, title=title, family=family, accuracy=None)


_ROWS = tuple(map(_parse_row, _TABLES.strip().splitlines()))
_OUR_FAMILIES: dict[Family, str] = {"deq": "DEQ", "explicit": "Explicit"}
_OURS = tuple(
    _like(row, family, title) for family, title in _OUR_FAMILIES.items() for row in _ROWS if row.family == "pcdeq"
)
_NAMES = sorted({row.name for row in (*_ROWS, *_OURS)})
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
    """Rows that the paper does not have: every pcDEQ with free weights (DEQ) and with one step (explicit).

    They are of the same shape and trained in the same way.

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


def find_row(name: str, data: str = "mnist", image_channels: int | None = None) -> Row:
    """The row called ``name`` for ``data``, or the paper's nearest where it has none for that data.

    Compare the result's ``dataset`` with ``data`` to see whose hyperparameters it holds. The row
    ``demo`` is ours: the MC ReLU6 network with a schedule that fits in about a minute.

    >>> find_row("pcdeq-1-l-tanh", "kmnist").dataset, find_row("monDEQ-MT*").name
    ('mnist', 'mondeq-mt-aug')
    >>> find_row("pcdeq-1-l-than")
    Traceback (most recent call last):
    ...
    pcdeq.errors.UsageError: unknown row 'pcdeq-1-l-than'; did you mean pcdeq-1-l-tanh? See `pcdeq list`
    """
    name = name.lower().replace("*", "-aug")  # as the tables print it
    if name == "demo":
        network = find_row("pcdeq-1-mc-relu6", data, image_channels)
        return replace(network, name="demo", title="demo", accuracy=None, epochs=5, lr=1e-2, schedule="one-cycle")
    named = {row.dataset: row for row in (*_ROWS, *_OURS) if row.name == name}
    if not named:
        near = difflib.get_close_matches(name, [*_NAMES, "demo"], n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UsageError(f"unknown row {name!r}{hint} See `pcdeq list`")
    return named.get(paper_dataset(data, image_channels)) or next(iter(named.values()))
