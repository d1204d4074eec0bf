"""The commands of the command line: a dataclass each, whose fields are the options.

To add one, write a dataclass with a ``run`` method and put it into `COMMANDS`. What needs torch is
imported where it is used.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_type_hints

from tyro.conf import FlagCreatePairsOff, Positional, arg

from pcdeq.errors import PcdeqError, UsageError
from pcdeq.recipes import TrainConfig, find_row, rows

if TYPE_CHECKING:
    from pcdeq.data import Dataset
    from pcdeq.guarantees.certify import Certificate
    from pcdeq.guarantees.check import LayerReport
    from pcdeq.training import Evaluation, Run

Device = Literal["auto", "cpu", "cuda", "mps"]
Which = Literal["last", "best"]
RunFolder = Annotated[Path, Positional, arg(metavar="RUN")]
Flag = Annotated[bool, FlagCreatePairsOff]

CERTIFIED_AFTER_TRAINING = 1_000  # test images; `pcdeq certify` takes them all


class Command(Protocol):
    """What the command line runs."""

    def run(self) -> None:
        """Do it, printing results; raise `PcdeqError` if it cannot be done."""


@dataclass(frozen=True)
class Train(TrainConfig):
    """Train a network; without arguments, a small one on handwritten digits."""

    row: Annotated[str, Positional, arg(metavar="[ROW]")] = TrainConfig.row
    """Row of the paper (`pcdeq list` shows them), or `demo`, a network that learns in about a minute."""
    resume: Path | None = None
    """Go on with this run folder; of the other options only --epochs, --device and --data-dir may change."""
    json: Flag = False
    """Print a JSON object per epoch and one at the end, for programs."""

    def run(self) -> None:
        """Train, draw the figures and say how it went."""
        from pcdeq.report import figures
        from pcdeq.training import evaluate, resume, train

        progress = "json" if self.json else "auto"
        if self.resume is None:
            run = train(self._config(), progress=progress)
        else:
            changes = self._changes_on_resume()
            run = resume(self.resume, progress=progress, **changes)
        if os.environ.get("RANK", "0") != "0":
            return  # one process speaks for all
        evaluation, dataset = evaluate(run, quiet=True)
        certificate = certify_run(run, dataset, CERTIFIED_AFTER_TRAINING)
        pictures = [*figures.draw_run(run), figures.draw_evaluation(run, evaluation, dataset)]
        summary = summarise(run, evaluation, certificate, pictures)
        print(json.dumps(summary) if self.json else _as_text(summary))

    def _config(self) -> TrainConfig:
        return TrainConfig(**{item.name: getattr(self, item.name) for item in fields(TrainConfig)})

    def _changes_on_resume(self) -> dict[str, Any]:
        given = {
            item.name: getattr(self, item.name)
            for item in fields(TrainConfig)
            if getattr(self, item.name) != getattr(TrainConfig(), item.name)
        }
        for name in given.keys() - {"epochs", "device", "data_dir"}:
            raise UsageError(f"{name} cannot change when a run is resumed; only epochs, device and data_dir can")
        return given


def certify_run(run: Run, dataset: Dataset, images: int | None, radius: float = 0.0) -> Certificate:
    """Certify the predictions for so many test images, spread over the test set, or for all."""
    import torch

    from pcdeq.guarantees.certify import certify
    from pcdeq.training import load

    network = load(run)
    total = len(dataset.test.labels)
    chosen = torch.linspace(0, total - 1, min(images or total, total)).long()
    return certify(network, run.preprocessing(dataset.test.images[chosen]), radius=radius)


def summarise(run: Run, evaluation: Evaluation, certificate: Certificate, pictures: list[Path]) -> dict[str, Any]:
    """How a run ended, in the order in which people ask."""
    last, config = run.metrics[-1], run.config
    row = find_row(config.row, config.data, run.image_shape[0])
    summary = {
        "accuracy": last.test_accuracy,
        "test_images": len(evaluation.labels),
        "forward_steps": list(last.forward_steps),
        "backward_steps": list(last.backward_steps),
        "unconverged": last.unconverged,
        "certified": int(certificate.proved.sum()),
        "certified_of": len(certificate.proved),
        "seconds": sum(line.seconds for line in run.metrics),
        "run": str(run.path),
        "figures": [str(picture) for picture in pictures],
    }
    if row.dataset == config.data and row.accuracy is not None:
        summary["published"] = row.accuracy
    return summary


def _as_text(summary: dict[str, Any]) -> str:
    lines = [f"test accuracy   {summary['accuracy']:.2f} % of {summary['test_images']:,} images, after the last epoch"]
    if "published" in summary:
        lines.append(f"published       {summary['published']} %, the mean of five runs")
    steps = [sum(summary[name]) / len(summary[name]) for name in ("forward_steps", "backward_steps")]
    lines += [
        f"steps           {steps[0]:.1f} forward, {steps[1]:.1f} backward per solve",
        f"unconverged     {summary['unconverged']:,} of the last epoch's solves",
        f"certified       {summary['certified']:,} of {summary['certified_of']:,} predictions: proved to be those of "
        "the exact equilibrium network",
        f"training time   {summary['seconds']:.0f} s",
        f"saved in        {summary['run']} ({', '.join(Path(name).name for name in summary['figures'])})",
        f"next            pcdeq predict {summary['run']} PICTURE",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Evaluate:
    """Test the network of a run, and draw its confusion matrix and worst errors."""

    folder: RunFolder
    """Run folder, as `pcdeq list runs` shows it."""
    data: str | None = None
    """Another data set with images of the same size. (default: the one it was trained on)"""
    checkpoint: Which = "last"
    """last, or best, which exists if there was a validation split."""
    device: Device = "auto"
    """Where to compute."""
    batch_size: int = 256
    """Images at a time."""
    data_dir: Path | None = None
    """Where data sets are kept. (default: as in training)"""
    json: Flag = False
    """Print a JSON object, for programs."""

    def run(self) -> None:
        """Evaluate and print."""
        from pcdeq.report.figures import draw_evaluation
        from pcdeq.training import Run, evaluate

        if self.batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, got {self.batch_size}")
        run = Run.open(self.folder)
        evaluation, dataset = evaluate(
            run,
            self.data,
            checkpoint=self.checkpoint,
            device=self.device,
            batch_size=self.batch_size,
            data_dir=self.data_dir,
            quiet=self.json,
        )
        picture = draw_evaluation(run, evaluation, dataset)
        result = {
            "data": dataset.name,
            "accuracy": evaluation.accuracy,
            "loss": evaluation.loss,
            "images": len(evaluation.labels),
            "forward_steps": list(evaluation.forward_steps),
            "unconverged": evaluation.unconverged,
            "seconds": evaluation.seconds,
            "figure": str(picture),
        }
        if self.json:
            print(json.dumps(result))
            return
        steps = sum(evaluation.forward_steps) / max(1, len(evaluation.forward_steps))
        print(f"{evaluation.accuracy:.2f} % of {len(evaluation.labels):,} test images of {dataset.name}")
        print(f"{steps:.1f} steps per solve, {evaluation.unconverged:,} samples did not converge")
        print(f"confusion matrix and worst errors in {picture}")


@dataclass(frozen=True)
class Certify:
    """Prove, test image by test image, which class the exact equilibrium network gives."""

    folder: RunFolder
    """Run folder, as `pcdeq list runs` shows it."""
    images: int | None = None
    """So many test images, spread over the test set. (default: all)"""
    radius: float = 0.0
    """Prove the class for every input within this distance in each normalised pixel: robustness."""
    data_dir: Path | None = None
    """Where data sets are kept. (default: as in training)"""
    json: Flag = False
    """Print a JSON object, for programs."""

    def run(self) -> None:
        """Certify and print."""
        from pcdeq.data import load_dataset
        from pcdeq.training import Run

        if self.images is not None and self.images < 1:
            raise UsageError(f"images must be at least 1, got {self.images}")
        run = Run.open(self.folder)
        dataset = load_dataset(run.config.data, data_dir=self.data_dir or run.config.data_dir, quiet=self.json)
        certificate = certify_run(run, dataset, self.images, self.radius)
        proved, total = int(certificate.proved.sum()), len(certificate.proved)
        if self.json:
            print(json.dumps({"images": total, "certified": proved, "share": certificate.share, "radius": self.radius}))
            return
        what = f"for every input within {self.radius:g}" if self.radius else "for the exact equilibrium network"
        print(f"{proved:,} of {total:,} test images ({100 * certificate.share:.2f} %): class proved {what}")
        if proved:
            lead = float(certificate.margin[certificate.proved].min())
            print(f"smallest lead of a proved class over the next: {lead:.3g}")


@dataclass(frozen=True)
class Check:
    """Audit a trained network: which guarantee holds for each equilibrium layer, and why."""

    folder: RunFolder
    """Run folder, as `pcdeq list runs` shows it."""
    data_dir: Path | None = None
    """Where data sets are kept. (default: as in training)"""
    json: Flag = False
    """Print a JSON object, for programs."""

    def run(self) -> None:
        """Audit and print; fails where a guarantee does not hold."""
        from pcdeq.data import load_dataset
        from pcdeq.guarantees.check import check
        from pcdeq.training import Run, load

        run = Run.open(self.folder)
        dataset = load_dataset(run.config.data, data_dir=self.data_dir or run.config.data_dir, quiet=self.json)
        report = check(load(run), run.preprocessing(dataset.test.images[:64]))
        if self.json:
            print(json.dumps(report.to_dict()))
        else:
            _print_table([_check_entry(layer) for layer in report.layers])
        for layer in report.layers:
            if not layer.holds:
                raise PcdeqError(f"{layer.name}: no guarantee: {layer.reason}")
        if not self.json:
            print("every equilibrium exists, is unique, and plain iteration reaches it, for every input")


def _check_entry(layer: LayerReport) -> dict[str, Any]:
    return {
        "layer": layer.name,
        "activation": layer.activation,
        "guarantee": f"pcDEQ-{layer.kind}" if layer.holds else "none",
        "rate, a priori": f"{layer.rate:.4f}",
        "measured": "-" if layer.measured_rate is None else f"{layer.measured_rate:.3f}",
        "norm of W": f"{layer.norm:.3f}",
        "radius": f"{layer.radius:.3f}",
        "Banach enough": "yes" if layer.contraction else "no",
        "dead rows": layer.dead_rows,
        "saturated": "-" if layer.saturated is None else f"{100 * layer.saturated:.1f} %",
    }


@dataclass(frozen=True)
class Predict:
    """Say what a trained network sees in pictures of your own."""

    folder: RunFolder
    """Run folder, as `pcdeq list runs` shows it."""
    pictures: Annotated[tuple[Path, ...], Positional, arg(metavar="PICTURE ...")]
    """Picture files of any common format and size."""
    checkpoint: Which = "last"
    """last, or best, which exists if there was a validation split."""
    device: Device = "auto"
    """Where to compute."""
    json: Flag = False
    """Print a JSON object per picture, for programs."""

    def run(self) -> None:
        """Classify and print."""
        from pcdeq.training.prediction import predict

        if not self.pictures:
            raise UsageError("which picture? pcdeq predict RUN PICTURE ...")
        for result in predict(self.folder, self.pictures, checkpoint=self.checkpoint, device=self.device):
            if self.json:
                print(json.dumps({"picture": str(result.path), "ranking": result.ranking}))
            else:
                guesses = ", ".join(f"{name} {100 * probability:.1f} %" for name, probability in result.ranking)
                print(f"{result.path}: {guesses} ({result.preparation})")


@dataclass(frozen=True)
class List:
    """List the rows of the paper, or your runs."""

    what: Annotated[Literal["rows", "runs"], Positional] = "rows"
    """rows: of the paper, with parameters, published accuracy and command; runs: yours."""
    runs_dir: Path = Path("runs")
    """Where to look for runs."""
    json: Flag = False
    """Print a JSON object per row or run, for programs."""

    def run(self) -> None:
        """Print the list."""
        entries = _row_entries() if self.what == "rows" else _run_entries(self.runs_dir)
        if self.json:
            for entry in entries:
                print(json.dumps(entry))
        elif entries:
            _print_table(entries)
        else:
            print(f"no runs in {self.runs_dir}; `pcdeq train` makes one")


def _row_entries() -> list[dict[str, Any]]:
    return [
        {
            "data": row.dataset,
            "row": row.title,
            "parameters": row.params if row.parameters is None else f"{row.parameters:,}",
            "accuracy %": row.accuracy,
            "command": f"pcdeq train {row.name} --data {row.dataset}" if row.topology else "published by others",
        }
        for row in rows()
    ]


def _run_entries(folder: Path) -> list[dict[str, Any]]:
    from pcdeq.training import find_runs

    entries = []
    for run in find_runs(folder):
        metrics = run.metrics
        entries.append(
            {
                "run": str(run.path),
                "row": run.config.row,
                "data": run.config.data,
                "epochs": f"{len(metrics)}/{run.config.epochs}",
                "accuracy %": run.accuracy,
                "started": run.description.get("started", ""),
            }
        )
    return entries


def _print_table(entries: list[dict[str, Any]]) -> None:
    """Columns as wide as their contents; nothing is ever cut off."""
    cells = [["" if value is None else str(value) for value in entry.values()] for entry in entries]
    lines = [list(entries[0]), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@dataclass(frozen=True)
class Data:
    """List the data sets that have names, or fetch one."""

    name: Annotated[str | None, Positional, arg(metavar="[NAME]")] = None
    """Data set to fetch and check, or a folder or .npz file of your own to check. (default: list them)"""
    data_dir: Path | None = None
    """Where data sets are kept. (default: the user's cache)"""

    def run(self) -> None:
        """List or fetch."""
        from pcdeq.data import dataset_names, load_dataset

        if self.name is None:
            print("\n".join(dataset_names()))
            print("\n`pcdeq data NAME` fetches one; `pcdeq train ROW --data NAME` does so by itself.")
            print("Your own: a folder with one folder of images per class, or an .npz file.")
        else:
            print(load_dataset(self.name, data_dir=self.data_dir).describe())


COMMANDS: tuple[type[Command], ...] = (Train, Evaluate, Certify, Check, Predict, List, Data)

# Where None means "as the text says", tyro would add "(default: None)".
for _command in COMMANDS:
    for _name, _kind in get_type_hints(_command, include_extras=True).items():
        if getattr(_command, _name, "") is None:
            _command.__annotations__[_name] = Annotated[_kind, arg(help_behavior_hint="")]
