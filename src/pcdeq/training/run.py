"""The run folder: it describes itself, and no crash leaves it half-written.

    config.json     the resolved configuration, the data's normalisation, versions, git commit
    metrics.jsonl   a line per epoch
    summary.json    what was measured of the network when training had ended
    last/           model.safetensors and training.pt, both of the last complete epoch
    best/           the same for the epoch with the best validation accuracy, if there is a validation split

A file is written under another name, flushed to the disk and renamed. A checkpoint is two files that
belong together, so a whole folder is made under another name and then takes the old one's place.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pcdeq import files
from pcdeq.data import Dataset, load_dataset
from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.models import Preprocessing, pretrained_names
from pcdeq.models.description import Description
from pcdeq.models.facts import Which, fingerprint, told_by
from pcdeq.models.registry import make_network
from pcdeq.models.store import WEIGHTS, find_checkpoint, read_weights, require_fit, require_run, to_bytes
from pcdeq.recipes import ImageShape, ResolvedConfig
from pcdeq.recipes.config import check_types
from pcdeq.training.environment import describe_environment

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RUNS = Path("runs")
# What torch names in a file of tensors.
_OF_TENSORS = re.compile(r"torch\._utils _rebuild_tensor_v2|torch \w+Storage|collections OrderedDict")


@dataclass(frozen=True)
class EpochMetrics:
    """One line of ``metrics.jsonl``; accuracies in percent, steps as the mean over all solves of the epoch."""

    epoch: int
    loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    validation_accuracy: float | None
    learning_rate: float
    forward_steps: tuple[float, ...]  # a number per equilibrium layer
    backward_steps: tuple[float, ...]
    unconverged: int  # samples, over all layers and both directions
    largest_singular_value: tuple[float, ...]  # of W, for the dense layers
    seconds: float
    test_seconds: float
    # What the paper counts, per pcDEQ layer, on a few batches at the end of the epoch; of older runs not known.
    paper_forward_steps: tuple[float, ...] = ()
    paper_backward_steps: tuple[float, ...] = ()

    def to_json(self) -> str:
        """One line, of finite numbers."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> EpochMetrics:
        """The inverse of writing it."""
        values: dict[str, Any] = files.parse_json(line)
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        metrics = cls(**values)
        check_types(metrics)
        return metrics


@dataclass(frozen=True)
class Checkpoint:
    """The state of training after ``epoch`` epochs.

    Order, augmentation and random numbers are functions of the seed and the epoch, and the learning
    rate is a function of progress, so none of them is state.
    """

    epoch: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any] | None = None
    best_accuracy: float | None = None
    trained: dict[str, Tensor] | None = None  # the values to go on from, where the model is an average of such
    network: Description | None = None  # what the weights are of, to be saved with them
    metrics: tuple[EpochMetrics, ...] | None = None  # of all epochs until this; None in files of older versions


@dataclass(frozen=True)
class Run(os.PathLike[str]):
    """A training run on disk; where a path is wanted, that of its folder.

    >>> from pcdeq.training.run import Run
    >>> Run.open("no/such/folder")
    Traceback (most recent call last):
    ...
    pcdeq.errors.UsageError: no/such/folder is not a run folder (it has no config.json); see `pcdeq list runs`
    """

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @classmethod
    def create(cls, config: ResolvedConfig, preprocessing: Preprocessing, image_shape: ImageShape) -> Run:
        """Make a new folder and describe the run in it; never touches the folder of another run."""
        description = {
            "config": config.to_dict(),
            "data": {"image_shape": image_shape, **asdict(preprocessing)},
            **describe_environment(),
        }
        try:
            run = cls(_new_folder(config))
            files.replace_file(run.path / "metrics.jsonl", b"")
            files.replace_file(run.path / "config.json", _to_json(description))  # last: with it there is a run
        except OSError as error:
            raise PcdeqError(f"could not create the run folder: {error}") from error
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """An existing run folder."""
        run = cls(Path(path))
        if (run.path / "config.json").is_file():
            return run
        if str(run.path) in pretrained_names():
            raise UsageError(
                f"{run.path} is a network of the package, for pcdeq.load in Python; this command needs a run folder"
            )
        raise UsageError(f"{run.path} is not a run folder (it has no config.json); see `pcdeq list runs`")

    @cached_property
    def description(self) -> dict[str, Any]:
        """The whole of ``config.json``."""
        return files.read_json(self.path / "config.json")

    @cached_property
    def _told(self) -> tuple[ResolvedConfig, ImageShape, Preprocessing]:
        return told_by(self.description)

    @property
    def config(self) -> ResolvedConfig:
        """The resolved configuration."""
        return self._told[0]

    @property
    def image_shape(self) -> ImageShape:
        """Channels, height and width of the images it was trained on."""
        return self._told[1]

    @property
    def preprocessing(self) -> Preprocessing:
        """How the images were normalised, and the names of the classes."""
        return self._told[2]

    def dataset(self, data_dir: Path | None = None, *, quiet: bool = True) -> Dataset:
        """What it was trained on; ``data_dir`` says where that is now."""
        config = self.config
        return load_dataset(config.data, data_dir=data_dir or config.data_dir, size=config.size, quiet=quiet)

    @property
    def metrics(self) -> list[EpochMetrics]:
        """The complete lines of ``metrics.jsonl``: one torn by a crash does not count, no file is an empty one."""
        lines = self._read_metrics()
        if missing := next((at for at, line in enumerate(lines, start=1) if line.epoch != at), None):
            raise DataError(f"{self.path / 'metrics.jsonl'} lacks epoch {missing}; `{self.resume_command}` may mend it")
        return lines

    def _read_metrics(self) -> list[EpochMetrics]:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        try:
            lines = files.read_text(path).split("\n")[:-1]  # what follows the last newline is torn
            return [EpochMetrics.from_json(line) for line in lines]
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    @property
    def accuracy(self) -> float | None:
        """Test accuracy after the last epoch, in percent; what we report."""
        metrics = self.metrics
        return metrics[-1].test_accuracy if metrics else None

    @property
    def resume_command(self) -> str:
        """What to type to go on with this run."""
        return f"pcdeq train --resume {self.path}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from training this run at the same time; the system forgets it with the process."""
        if fcntl is None:
            yield
            return
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise UsageError(f"{self.path} is being trained by another process") from error
        finally:
            os.close(folder)

    def rewind(self, config: ResolvedConfig, checkpoint: Checkpoint | None) -> Run:
        """Go back to a checkpoint, the last there is, with what changed in the configuration.

        The metrics become those that belong to it, whatever happened to the file; the environment of the start stays on
        record.
        """
        lines = self._metrics_until(checkpoint)
        with self._saving():
            description = {**self.description, "config": config.to_dict()}
            files.replace_file(self.path / "config.json", _to_json(description))
            metrics = "".join(f"{line.to_json()}\n" for line in lines)
            files.replace_file(self.path / "metrics.jsonl", metrics.encode())
        return Run(self.path)

    def _metrics_until(self, checkpoint: Checkpoint | None) -> list[EpochMetrics]:
        """The line of every epoch up to a checkpoint; where one cannot be had, this run cannot go on."""
        if checkpoint is not None and checkpoint.metrics is not None:
            return list(checkpoint.metrics)
        lines = self._read_metrics()
        if checkpoint is None and lines:
            what = f"{self.path} has metrics of {len(lines)} epoch(s), but no checkpoint last/ to go on from"
            raise DataError(f"{what}: put it back, or train anew into another --out")
        epoch = 0 if checkpoint is None else checkpoint.epoch
        if [line.epoch for line in lines[:epoch]] != list(range(1, epoch + 1)):
            what = f"{self.path / 'metrics.jsonl'} has not every epoch up to {epoch}, of which the checkpoint last/ is"
            raise DataError(f"{what}: put the lines back, or train anew into another --out")
        return lines[:epoch]

    def write(self, name: str, content: bytes) -> Path:
        """Put a file into the folder, whole or not at all; return its path."""
        return files.write_file(self.path / name, content)

    def append_metrics(self, metrics: EpochMetrics) -> None:
        """Add a line, on the disk when this returns."""
        with self._saving(), (self.path / "metrics.jsonl").open("ab") as file:
            files.write_through(file, f"{metrics.to_json()}\n".encode())

    def save(self, which: Which, checkpoint: Checkpoint) -> None:
        """Replace a checkpoint; until the new one is complete on the disk, the old one stands."""
        state = dict(vars(checkpoint))
        model, network, lines = state.pop("model"), state.pop("network"), state.pop("metrics")
        state["run"] = mark = fingerprint(*self._told)
        state["metrics"] = None if lines is None else [line.to_json() for line in lines]
        training = io.BytesIO()
        torch.save(state, training)
        contents = {WEIGHTS: to_bytes(model, network, mark), "training.pt": training.getvalue()}
        with self._saving():
            files.replace_folder(self.path / which, contents)

    def require_fit(self, which: Which) -> None:
        """Refuse a checkpoint that is not of the network in the configuration, before memory is taken for either."""
        with torch.device("meta"):
            sketch = make_network(*self._told)
        require_fit(find_checkpoint(self.path, which) / WEIGHTS, sketch)

    def load(self, which: Which = "last") -> Checkpoint:
        """A whole checkpoint; nothing in the file can run code."""
        path = find_checkpoint(self.path, which) / "training.pt"
        model = read_weights(path.with_name(WEIGHTS))
        mark = fingerprint(*self._told)
        require_run(path.with_name(WEIGHTS), mark, self.path / "config.json")
        try:
            _require_plain(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state.pop("run", mark) != mark:
                raise ValueError(f"it is of another run than {self.path / 'config.json'} describes")
            if (lines := state.pop("metrics", None)) is not None:
                state["metrics"] = tuple(map(EpochMetrics.from_json, lines))
            return Checkpoint(model=model, **state)
        except Exception as error:  # torch and zipfile have another type for each way in which a file can be broken
            raise DataError(
                f"{path} cannot be read: {error}; this run cannot go on: train anew into another --out "
                "(model.safetensors beside it, if whole, can still be evaluated)"
            ) from error

    def has(self, which: Which) -> bool:
        """Whether there is such a checkpoint."""
        return files.find_folder(self.path / which) is not None

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see that it can be written"
            kept = "the last complete state is intact" if self.has("last") else "nothing was kept yet"
            raise PcdeqError(
                f"could not write to {self.path}: {error.strerror or error}; {kept}: "
                f"{remedy}, then `{self.resume_command}`"
            ) from error


def _require_plain(path: Path) -> None:
    """Refuse a file of torch in which there is more than tensors: even its safe reader makes arrays of any length."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(name) as stream:
            pickled = files.Limited(stream, files.LARGEST_TEXT).read()
    for opcode, argument, _ in pickletools.genops(pickled):
        named = opcode.name == "GLOBAL" and not _OF_TENSORS.fullmatch(str(argument))
        if named or opcode.name in ("STACK_GLOBAL", "INST"):
            raise ValueError(f"it holds something that is no tensor ({argument})")


def find_runs(folder: Path = RUNS) -> list[Run]:
    """The runs in a folder, by name."""
    return [Run(path.parent) for path in sorted(folder.glob("*/config.json"))]


def _new_folder(config: ResolvedConfig) -> Path:
    if config.out is not None:
        if config.out.exists() and not _is_free(config.out):
            raise UsageError(
                f"{config.out} exists and is not empty; choose another --out, or continue the run in it "
                f"with `pcdeq train --resume {config.out}`"
            )
        config.out.mkdir(parents=True, exist_ok=True)
        return config.out
    number = 1
    while True:
        path = RUNS / (config.run_name if number == 1 else f"{config.run_name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)  # of two processes that try at once, one succeeds
            return path
        number += 1


def _is_free(path: Path) -> bool:
    """Whether it is a folder with nothing in it but what a run leaves that was killed as it began."""
    return path.is_dir() and all(
        file.suffix == ".tmp" or (file.name == "metrics.jsonl" and file.stat().st_size == 0) for file in path.iterdir()
    )


def _to_json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
