"""What a run folder tells of the network in it: how it was made, and what a model card says of its training."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pcdeq.errors import DataError
from pcdeq.files import parse_json, read_json, read_text
from pcdeq.models.networks import Preprocessing
from pcdeq.recipes import ImageShape, ResolvedConfig, TrainConfig, find_row
from pcdeq.recipes.config import check_type, check_types

Which = Literal["last", "best"]


@dataclass(frozen=True)
class TrainingFacts:
    """What a model card tells of a network's training; what is not known is None."""

    row: str | None = None
    data: str | None = None
    test_accuracy: float | None = None
    published_accuracy: float | None = None
    epochs: int | None = None
    seed: int | None = None
    certified: str | None = None
    command: str | None = None
    versions: str | None = None

    def __post_init__(self) -> None:
        check_types(self)


def told_by(run: Any) -> tuple[ResolvedConfig, ImageShape, Preprocessing]:
    """Configuration, image shape and preprocessing, from a run's ``config.json``."""
    try:
        data = run["data"]
        image_shape: Any = tuple(data["image_shape"])
        check_type(image_shape, ImageShape, "image_shape")
        check_type(run.get("versions", {}), dict[str, Any], "versions")
        check_type(tuple(run.get("command", ())), tuple[str, ...], "command")
        preprocessing = Preprocessing(tuple(data["mean"]), tuple(data["std"]), tuple(data["classes"]))
        config = TrainConfig.from_dict(run["config"]).resolve(image_shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"this is not the configuration of a run: {error!r}") from error
    return config, image_shape, preprocessing


def fingerprint(config: ResolvedConfig, image_shape: ImageShape, preprocessing: Preprocessing) -> str:
    """A few letters that tell a run from others, kept with its weights: those of another run are noticed.

    What may change while a run goes on, epochs, device and places, is not in it.
    """
    decisive = {name: getattr(config, name) for name in _DECISIVE}
    told = [decisive, Path(config.data).name, image_shape, asdict(preprocessing)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


# A list, so that a setting that is new, and at its default in older runs, does not make strangers of their weights.
_DECISIVE = (
    *("row", "recipe", "channels", "seed", "batch_size", "accumulate", "optimizer", "optimizer_options", "lr"),
    *("schedule", "lr_step", "lr_factor", "weight_decay", "augment", "flip", "robust_radius", "validation"),
    *("solver", "tol", "max_steps", "precision"),
)


def describe_training(folder: Path, told: Any, which: Which) -> TrainingFacts:
    """What a run folder, whose ``config.json`` is ``told``, records of the training of its network."""
    config, image_shape, _ = told_by(told)
    row = find_row(config.row, config.data, image_shape[0])
    last = _last_metrics(folder) if which == "last" else {}  # which are not those of the best epoch
    versions = ", ".join(f"{name} {version}" for name, version in told.get("versions", {}).items())
    return TrainingFacts(
        row=config.row,
        data=Path(config.data).name,  # of a user's own data, not where it lies
        test_accuracy=last.get("test_accuracy"),
        published_accuracy=row.accuracy if row.dataset == config.data else None,
        epochs=last.get("epoch"),
        seed=config.seed,
        certified=_certified(folder, last.get("epoch")),
        command=_command(told.get("command", [])),
        versions=versions or None,
    )


def _last_metrics(folder: Path) -> dict[str, Any]:
    try:
        *_, line, _ = read_text(folder / "metrics.jsonl").split("\n")
        return dict(parse_json(line))
    except (DataError, ValueError, TypeError):  # the network is there all the same
        return {}


def _certified(folder: Path, epoch: int | None) -> str | None:
    """How many predictions after this epoch were proved, if the run's summary says so."""
    try:
        summary = read_json(folder / "summary.json")
        if summary["epoch"] == epoch and summary["certified"] is not None:
            return f"{summary['certified']:,} of {summary['certified_of']:,} test images"
    except (DataError, ValueError, KeyError, TypeError):
        pass
    return None


def _command(arguments: Any) -> str | None:
    """The command line of a run as others would type it; None if the run was not started by one, or says none."""
    if not isinstance(arguments, list) or not all(isinstance(argument, str) for argument in arguments):
        return None
    if not arguments or Path(arguments[0]).stem not in ("pcdeq", "__main__"):
        return None
    kept, rest = ["pcdeq"], iter(arguments[1:])
    for argument in rest:
        if argument in ("--out", "--data-dir", "--device"):
            next(rest, None)  # places and devices are of one machine
        elif argument != "--json":
            kept.append(Path(argument).name if kept[-1] == "--data" else argument)
    return shlex.join(kept)
