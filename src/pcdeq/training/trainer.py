"""The training loop, on Accelerate.

``batch_size`` counts the images of one optimiser step, whatever they are split into: processes
(``torchrun --nproc-per-node=2 -m pcdeq train ...``) and parts (``accumulate``) only share the work. Each
part's loss is weighted by its images, so the gradient is that of the whole batch, also for the last,
smaller one. What does depend on the split is batch norm, whose statistics are of the part at hand.

Every epoch starts from its own seed, which together with `Checkpoint` makes a resumed run continue
bit for bit.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list
from torch import Tensor, nn

from pcdeq.data import Batches
from pcdeq.errors import ConvergenceWarning, PcdeqError, UsageError
from pcdeq.layers import PcDEQLinear
from pcdeq.models import equilibrium_layers
from pcdeq.recipes import ResolvedConfig, TrainConfig, find_row
from pcdeq.training.counting import count_papers_steps
from pcdeq.training.display import Display, Lines, ProgressKind, make_display
from pcdeq.training.evaluation import Device, measure
from pcdeq.training.memory import kept_memory
from pcdeq.training.objective import Objective, objective_after, plain_loss
from pcdeq.training.optim import learning_rate, set_rate
from pcdeq.training.run import EpochMetrics, Run
from pcdeq.training.session import Session, open_session, seed_everything
from pcdeq.training.tally import Tally


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training; the run keeps its last complete epoch."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"interrupted; continue with `{run.resume_command}`")
        self.run = run


def train(config: TrainConfig | None = None, *, progress: ProgressKind | Display = "auto") -> Run:
    """Train a network and return its run folder, which holds everything.

    >>> import tempfile
    >>> config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(16,), out=tempfile.mkdtemp())
    >>> run = train(config, progress="none")
    >>> run.accuracy > 50, len(run.metrics)
    (True, 1)
    """
    display = make_display(progress)
    session = open_session(config or TrainConfig(), quiet=not isinstance(display, Lines))
    path = [""]
    if session.accelerator.is_main_process:
        path = [str(Run.create(session.config, session.preprocessing, session.network.image_shape).path)]
    broadcast_object_list(path)
    return _fit(session, Run.open(path[0]), display)


def resume(
    run: str | os.PathLike[str] | Run,
    *,
    epochs: int | None = None,
    device: Device | None = None,
    data_dir: Path | None = None,
    progress: ProgressKind | Display = "auto",
) -> Run:
    """Go on with a run from its last complete epoch, as if it had never stopped.

    >>> import tempfile
    >>> config = TrainConfig("pcdeq-1-l-tanh", epochs=1, channels=(16,), out=tempfile.mkdtemp())
    >>> run = train(config, progress="none")
    >>> len(resume(run, epochs=2, progress="none").metrics)
    2

    Args:
        epochs: train up to this epoch instead of the planned one.
        device: move to another device; results then agree only up to rounding.
        data_dir: where the data are now.
    """
    run, display = Run.open(run), make_display(progress)
    config = run.config
    if epochs not in (None, config.epochs):
        _require_no_plan(config)
    changes = {"epochs": epochs, "device": device, "data_dir": data_dir}
    config = replace(config, **{name: value for name, value in changes.items() if value is not None})
    if run.has("last"):
        run.require_fit("last")
    session = open_session(config, run, quiet=not isinstance(display, Lines))
    return _fit(session, run, display)


def _fit(session: Session, run: Run, display: Display) -> Run:
    """Train the epochs that are left, saving each."""
    config, main = session.config, session.accelerator.is_main_process
    display = display if main else Display()
    last = run.load("last") if run.has("last") else None
    done, best = (0, None) if last is None else session.restore(last)
    if config.epochs < done:
        raise UsageError(f"{run.path} has {done} epochs already; epochs must be at least that, got {config.epochs}")
    try:
        on_cpu = session.accelerator.device.type == "cpu"
        with run.alone() if main else nullcontext(), _settings(config), kept_memory() if on_cpu else nullcontext():
            if main:
                run = run.rewind(config, last)
            lines = run.metrics if main else []
            display.start(_headline(session, run), config.epochs, session.epoch_images, done)
            _start_tracker(session, run)
            for epoch in range(done + 1, config.epochs + 1):
                start = time.perf_counter()
                tally = _train_epoch(session, epoch, display)
                with session.shown(at_the_end=epoch == config.epochs):
                    metrics = _measure(session, epoch, tally, start)
                    score = metrics.validation_accuracy
                    improved = score is not None and (best is None or score > best)
                    best = score if improved else best
                    lines.append(metrics)
                    if main:  # the checkpoint before the line: it has all lines, so that resuming can write them anew
                        checkpoint = replace(session.checkpoint(epoch, best), metrics=tuple(lines))
                        if improved:
                            run.save("best", checkpoint)
                        run.save("last", checkpoint)
                        run.append_metrics(metrics)
                session.accelerator.log(_for_tracker(metrics), step=epoch)
                display.epoch(metrics)
    except KeyboardInterrupt as stop:
        raise Interrupted(run) from stop
    finally:
        display.stop()
        session.accelerator.end_training()
    return run


def _require_no_plan(config: ResolvedConfig) -> None:
    """Refuse another number of epochs than the one by which training was laid out."""
    plans = {
        "the one-cycle rate was": config.schedule == "one-cycle",
        "the rise of the radius was": config.robust_radius is not None,
        "the tightening of the tolerance was": config.loosen != 1.0,
        "the new statistics of batch norm were": config.recalibrate,
    }
    for what, planned in plans.items():
        if planned:
            raise UsageError(f"{what} planned for {config.epochs} epochs; they cannot be changed")


def _measure(session: Session, epoch: int, tally: Tally, start: float) -> EpochMetrics:
    """What came of an epoch that began at ``start``."""
    loss, hits, images, solves, unconverged, *steps = session.total(tally.sums())
    forward, backward = steps[: len(tally.layers)], steps[len(tally.layers) :]
    _require_finite(loss, session, epoch)
    trained = time.perf_counter()
    broadcast(list(session.network.buffers()))  # the main process's batch statistics: all evaluate the same network
    test_loss, test_accuracy = _evaluate(session, session.test)
    _require_finite(test_loss, session, epoch)  # the last step may have been the one too far
    validation = None if session.validation is None else _evaluate(session, session.validation)[1]
    layers = [layer for layer in tally.layers if isinstance(layer, PcDEQLinear)]
    tested = time.perf_counter()
    papers_forward, papers_backward = count_papers_steps(session.network, session.counted)
    dense = [layer.operator.effective_weight().detach() for layer in layers]
    return EpochMetrics(
        epoch=epoch,
        loss=loss / images,
        train_accuracy=100 * hits / images,
        test_loss=test_loss,
        test_accuracy=test_accuracy,
        validation_accuracy=validation,
        learning_rate=session.optimizer.param_groups[0]["lr"],
        forward_steps=tuple(total / solves for total in forward),
        backward_steps=tuple(total / solves for total in backward),
        unconverged=int(unconverged),
        largest_singular_value=tuple(float(torch.linalg.matrix_norm(weight, ord=2)) for weight in dense),
        seconds=trained - start,
        test_seconds=tested - trained,
        paper_forward_steps=papers_forward,
        paper_backward_steps=papers_backward,
    )


def _require_finite(loss: float, session: Session, epoch: int) -> None:
    if not math.isfinite(loss):
        raise PcdeqError(
            f"the loss became {loss} in epoch {epoch}: lower lr, now {session.config.lr:g}; "
            "the epochs before it are kept in the run folder"
        )


def _train_epoch(session: Session, epoch: int, display: Display) -> Tally:
    """One pass over the training images, or as much of it as an epoch shall have."""
    config, accelerator = session.config, session.accelerator
    seed_everything(config.seed, epoch, accelerator.process_index)
    session.model.train()
    session.train.set_epoch(epoch)
    tally = Tally(equilibrium_layers(session.network))
    steps = min(len(session.train), config.steps_per_epoch or len(session.train))
    for step, (images, labels) in enumerate(islice(session.train, steps)):
        batch_images = min(config.batch_size, session.epoch_images - step * config.batch_size)
        if batch_images < 2 * accelerator.num_processes:
            break  # a last batch of a single image has no batch statistics
        epochs_done = epoch - 1 + step / steps
        session.set_tolerance(epochs_done)
        set_rate(session.optimizer, learning_rate(config, epochs_done))
        objective = objective_after(config, session.preprocessing, epochs_done)
        add_gradients(accelerator, session.model, images, labels, batch_images, config.accumulate, tally, objective)
        session.step((epoch - 1) * steps + step + 1)
        if display.due():
            done = (epoch - 1) * session.epoch_images + step * config.batch_size + batch_images
            display.step(done, *tally.recent())
    return tally


def add_gradients(
    accelerator: Accelerator,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    batch_images: int,
    parts: int,
    tally: Tally,
    objective: Objective = plain_loss,
) -> None:
    """Add the gradient of the mean loss over a batch of which this process has a share.

    ``batch_images`` counts the images of all processes. Their gradients are averaged, so a sum of
    losses times (processes / images) becomes the mean over the batch, however uneven the shares.
    """
    weight = accelerator.num_processes / batch_images
    share = batch_images // accelerator.num_processes
    parts = max(1, min(parts, share // 2))  # the last batch may be too small for so many
    pieces = zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True)
    for number, (some_images, some_labels) in enumerate(pieces, start=1):
        with nullcontext() if number == parts else accelerator.no_sync(model):
            logits, loss, descended = objective(model, some_images, some_labels)
            weighted = descended * weight
            # Accelerate's own `backward` would look for a package on the disk at every step.
            (weighted if accelerator.scaler is None else accelerator.scaler.scale(weighted)).backward()
        tally.add(loss.detach(), (logits.detach().argmax(1) == some_labels).sum(), len(some_labels))


def _evaluate(session: Session, batches: Batches) -> tuple[float, float]:
    """Loss and accuracy in percent, over all processes."""
    part = measure(session.network, batches)
    images = len(part.labels)
    loss, correct, images = session.total([part.loss * images, part.correct, images])
    return loss / images, 100 * correct / images


@contextmanager
def _settings(config: ResolvedConfig) -> Iterator[None]:
    """Process-wide settings for the time of training."""
    before = torch.are_deterministic_algorithms_enabled()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it
    torch.use_deterministic_algorithms(before or config.deterministic)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # counted in the metrics instead
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def _headline(session: Session, run: Run) -> list[str]:
    """What is trained on what, for people."""
    config, network = session.config, session.network
    row = find_row(config.row, config.data, network.image_shape[0])
    parameters = sum(parameter.numel() for parameter in network.parameters())
    lines = [
        f"{config.row}: {type(network).__name__} network, {row.activation}, {parameters:,} parameters, "
        f"on {session.accelerator.device.type}",
        session.data_line,
        f"run folder {run.path}",
    ]
    if row.dataset != config.data and config.row != "demo":
        lines.insert(1, f"the paper has no such row for {config.data}: hyperparameters of its {row.dataset} row")
    return lines


def _start_tracker(session: Session, run: Run) -> None:
    settings = {k: v if isinstance(v, int | float | str) else str(v) for k, v in session.config.to_dict().items()}
    session.accelerator.project_configuration.logging_dir = str(run.path)
    session.accelerator.init_trackers(str(session.config.tracker), config=settings)  # none, unless one was asked for


def _for_tracker(metrics: EpochMetrics) -> dict[str, float]:
    """Numbers by name; those per layer are numbered."""
    flat: dict[str, float] = {}
    for name, value in asdict(metrics).items():
        if isinstance(value, tuple):
            flat |= {f"{name}/{number}": item for number, item in enumerate(value, start=1)}
        elif value is not None and name != "epoch":
            flat[name] = value
    return flat
