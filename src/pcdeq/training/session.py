"""Everything in memory that training needs, set up once from a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from pcdeq.data import Batches, dataset_names, load_dataset, split_validation
from pcdeq.errors import DataError, UsageError
from pcdeq.models import Network, Preprocessing, equilibrium_layers
from pcdeq.models.description import Description
from pcdeq.models.registry import make_network
from pcdeq.operators import project_
from pcdeq.recalibration import recalibrate
from pcdeq.recipes import ResolvedConfig, TrainConfig, find_row
from pcdeq.solvers import SolvingLayer
from pcdeq.training.averaging import Average
from pcdeq.training.counting import BATCH_SIZE, batches_to_count
from pcdeq.training.evaluation import EVALUATION_BATCH, pick_device
from pcdeq.training.objective import WorstCase
from pcdeq.training.optim import looseness, make_optimizer, restore_optimizer
from pcdeq.training.run import Checkpoint, Run


@dataclass(frozen=True)
class Session:
    """A network, its optimiser and its data, placed on their device."""

    config: ResolvedConfig
    accelerator: Accelerator
    network: Network  # the plain module
    model: nn.Module  # the same, or its worst case, as Accelerate wraps it for processes and precision
    optimizer: Optimizer
    scaler: GradScaler  # of fp16 gradients; with other numbers it does nothing
    train: Batches
    test: Batches
    validation: Batches | None
    counted: list[tuple[Tensor, Tensor]]  # images and labels on which the steps that the paper counts are counted
    calibration: Batches | None  # all training images, if the statistics of batch norm are to be measured at the end
    average: Average | None
    solvers: list[tuple[SolvingLayer, Any, Any]]  # of each equilibrium layer, forward and backward, at full tolerance
    epoch_images: int  # of training, in an epoch
    data_line: str  # what the data are, for people

    def step(self, number: int) -> None:
        """Move the weights along the gradients, project them, and forget the gradients."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        project_(self.network)
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(number)

    def set_tolerance(self, epochs_done: float) -> None:
        """Solve as finely as is due after so many epochs."""
        if self.config.loosen == 1.0:
            return
        factor = looseness(self.config, epochs_done)
        for layer, forward, backward in self.solvers:
            layer.solver = forward.with_options(tol=factor * forward.tol)
            layer.adjoint_solver = backward.with_options(tol=factor * backward.tol)

    @contextmanager
    def shown(self, *, at_the_end: bool) -> Iterator[None]:
        """The network is meanwhile what is tested and saved: averaged, with exact statistics, if so configured."""
        self.set_tolerance(self.config.epochs)
        with nullcontext() if self.average is None else self.average.applied():
            if at_the_end and self.calibration is not None:
                # A last batch of a single image has no statistics.
                recalibrate(self.network, (images for images, labels in self.calibration if len(labels) > 1))
            yield

    def checkpoint(self, epoch: int, best_accuracy: float | None) -> Checkpoint:
        """The state of training, to be saved while it is `shown`."""
        return Checkpoint(
            epoch=epoch,
            model=self.network.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict() or None,
            best_accuracy=best_accuracy,
            trained=None if self.average is None else self.average.trained,
            network=Description.of(self.network),
        )

    def restore(self, checkpoint: Checkpoint) -> tuple[int, float | None]:
        """Go back to a saved state; return its epoch and the best accuracy until then."""
        try:
            self.network.load_state_dict(checkpoint.model)
            restore_optimizer(self.optimizer, checkpoint.optimizer)
            if self.average is not None:
                self.average.restart()
                self.average.load(checkpoint.trained or {})
        except (RuntimeError, ValueError, KeyError) as error:
            raise DataError(f"the checkpoint does not fit the run's configuration: {error}") from error
        if checkpoint.scaler is not None:
            self.scaler.load_state_dict(checkpoint.scaler)
        return checkpoint.epoch, checkpoint.best_accuracy

    @property
    def preprocessing(self) -> Preprocessing:
        """How the images are normalised, and the names of the classes."""
        assert self.network.preprocessing is not None  # make_network sets it
        return self.network.preprocessing

    def total(self, values: list[float]) -> list[float]:
        """Sums over all processes."""
        if self.accelerator.num_processes == 1:
            return values
        summed = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        torch.distributed.all_reduce(summed)
        return summed.tolist()


def open_session(config: TrainConfig, run: Run | None = None, *, quiet: bool = False) -> Session:
    """Load the data and build the network, anew or as ``run`` describes it."""
    find_row(config.row)  # a typo is told before any data are read
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():  # one process downloads, the others find the files
        silent = quiet or not accelerator.is_main_process
        dataset = load_dataset(config.data, data_dir=config.data_dir, size=config.size, quiet=silent)
    resolved = _anchored(config).resolve(dataset.image_shape)
    preprocessing = Preprocessing(dataset.mean, dataset.std, dataset.classes)
    if run is not None:
        if (run.image_shape, run.preprocessing.classes) != (dataset.image_shape, dataset.classes):
            raise DataError(f"{config.data} has changed since {run.path} was started: other sizes or classes")
        preprocessing = run.preprocessing
    train, held_out = dataset.train, None
    if config.validation:
        train, held_out = split_validation(train, config.validation, seed=config.seed)
    _check_batch_size(resolved, accelerator.num_processes, len(train))
    seed_everything(config.seed, epoch=0)
    network = make_network(resolved, dataset.image_shape, preprocessing)
    batches = partial(  # this process's part of them
        Batches,
        mean=preprocessing.mean,
        std=preprocessing.std,
        device=accelerator.device,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        channels_last=True,
    )
    layers = equilibrium_layers(network)
    training = {"shuffle": True, "augment": resolved.augment, "flip": resolved.flip, "seed": resolved.seed}
    at_once = max(EVALUATION_BATCH, accelerator.num_processes)
    model = accelerator.prepare(network if resolved.robust_radius is None else WorstCase(network))
    return Session(
        config=resolved,
        accelerator=accelerator,
        network=network,
        model=model,
        optimizer=make_optimizer(resolved, network, accelerator.device),
        scaler=accelerator.scaler or GradScaler(enabled=False),
        train=batches(train, resolved.batch_size, **training),
        test=batches(dataset.test, at_once),
        validation=None if held_out is None else batches(held_out, at_once),
        counted=_draw_to_count(
            batches(train, min(BATCH_SIZE, len(train)), rank=0, world_size=1, shuffle=True), resolved
        ),
        # Of the whole in each process, so that the statistics do not depend on how many there are.
        calibration=batches(train, resolved.batch_size, rank=0, world_size=1, **training)
        if resolved.recalibrate
        else None,
        average=Average(network, resolved.average) if resolved.average else None,
        solvers=[(layer, layer.solver, layer.adjoint_solver) for layer in layers],
        epoch_images=min(len(train), (resolved.steps_per_epoch or len(train)) * resolved.batch_size),
        data_line=dataset.describe(),
    )


def _draw_to_count(batches: Batches, config: ResolvedConfig) -> list[tuple[Tensor, Tensor]]:
    """The same few batches for every run on these data."""
    steps = min(len(batches), config.steps_per_epoch or len(batches))
    return list(islice(batches, batches_to_count(steps)))


def seed_everything(seed: int, epoch: int, rank: int = 0) -> None:
    """Start all random numbers anew, so that none of them has a past that a checkpoint would have to keep."""
    set_seed(int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1)[0]))


def _anchored(config: TrainConfig) -> TrainConfig:
    """With absolute paths, so that the run can be evaluated and resumed from anywhere."""
    own = config.data not in dataset_names()
    return replace(
        config,
        data=str(Path(config.data).expanduser().resolve()) if own else config.data,
        data_dir=config.data_dir and config.data_dir.expanduser().resolve(),
    )


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Accelerate's view of the devices, processes, precision and trackers asked for."""
    device = pick_device(config.device)
    trackers = [str(tracker) for tracker in get_available_trackers()]
    if config.tracker is not None and config.tracker not in trackers:
        known = "is not installed" if config.tracker in LOGGER_TYPE_TO_CLASS else "is unknown"
        raise UsageError(f"tracker {config.tracker!r} {known}; installed: {', '.join(trackers) or 'none'}")
    # Accelerate keeps its settings for the life of the process; a second run may want others.
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        return Accelerator(
            cpu=device.type == "cpu",
            mixed_precision={"fp32": "no"}.get(config.precision, config.precision),
            log_with=config.tracker,
            project_dir="." if config.tracker else None,  # the run folder, once there is one
        )
    except (ValueError, ImportError) as error:
        raise UsageError(f"precision {config.precision} or tracker {config.tracker}: {error}") from error


def _check_batch_size(config: ResolvedConfig, processes: int, images: int) -> None:
    least = 2 * config.accumulate * processes
    if min(config.batch_size, images) < least:
        raise UsageError(
            f"{processes} process(es) x {config.accumulate} part(s) of a batch need 2 images each for batch norm, "
            f"so at least {least}; batch_size is {config.batch_size}, training images {images}"
        )
