"""Train, evaluate, predict."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from pcdeq.commands.shared import Checkpoint, Device, Flag, Json, RunDataDir, RunFolder, draw, show
from pcdeq.errors import DataError, UsageError
from pcdeq.recipes import TrainConfig, find_row

if TYPE_CHECKING:
    from pcdeq.training import Run, Summary


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
        from pcdeq.training import evaluate, resume, summarise, train

        progress = "json" if self.json else "auto"
        if self.resume is None:
            run = train(self._config(), progress=progress)
        else:
            run = resume(self.resume, progress=progress, **self._changes_on_resume())
        if os.environ.get("RANK", "0") != "0":
            return  # one process speaks for all
        evaluation, dataset = evaluate(run, quiet=True)
        result = describe(run, summarise(run, dataset))
        show([result], _as_text(result), self.json)
        draw(
            "figures        ",
            lambda: [*figures.draw_run(run), figures.draw_evaluation(run, evaluation, dataset)],
            self.json,
        )

    def _config(self) -> TrainConfig:
        return TrainConfig(**{item.name: getattr(self, item.name) for item in fields(TrainConfig)})

    def _changes_on_resume(self) -> dict[str, Any]:
        usual = vars(TrainConfig())
        given = {name: value for name, value in vars(self._config()).items() if value != usual[name]}
        for name in given.keys() - {"epochs", "device", "data_dir"}:
            raise UsageError(f"{name} cannot change when a run is resumed; only epochs, device and data_dir can")
        return given


def describe(run: Run, summary: Summary) -> dict[str, Any]:
    """How a run ended, in the order in which people ask."""
    last, config = run.metrics[-1], run.config
    row = find_row(config.row, config.data, run.image_shape[0])
    result = {
        "accuracy": last.test_accuracy,
        "test_images": summary.test_images,
        "forward_steps": list(last.forward_steps),
        "backward_steps": list(last.backward_steps),
        "unconverged": last.unconverged,
        "certified": summary.certified,
        "certified_of": summary.certified_of,
        "seconds": sum(line.seconds + line.test_seconds for line in run.metrics),
        "test_seconds": sum(line.test_seconds for line in run.metrics),
        "run": str(run.path),
    }
    if row.dataset == config.data and row.accuracy is not None:
        result["published"] = row.accuracy
    return result


def _as_text(result: dict[str, Any]) -> list[str]:
    lines = [f"test accuracy   {result['accuracy']:.2f} % of {result['test_images']:,} images, after the last epoch"]
    if "published" in result:
        lines.append(f"published       {result['published']} %, the mean of five runs")
    if result["forward_steps"]:
        steps = [sum(result[name]) / len(result[name]) for name in ("forward_steps", "backward_steps")]
        lines.append(f"steps           {steps[0]:.1f} forward, {steps[1]:.1f} backward per solve")
        lines.append(f"unconverged     {result['unconverged']:,} of the last epoch's solves")
    if result["certified"] is not None:
        lines.append(
            f"certified       {result['certified']:,} of {result['certified_of']:,} predictions: proved to be those of "
            "the exact equilibrium network"
        )
    lines += [
        f"training time   {result['seconds']:.0f} s, of which {result['test_seconds']:.0f} s for tests",
        f"saved in        {result['run']}",
        f"next            pcdeq predict {result['run']} PICTURE",
    ]
    return lines


@dataclass(frozen=True)
class Evaluate:
    """Test the network of a run, and draw its confusion matrix and worst errors."""

    folder: RunFolder
    data: str | None = None
    """Another data set with images of the same size. (default: the one it was trained on)"""
    checkpoint: Checkpoint = "last"
    device: Device = "auto"
    batch_size: int = 256
    """Images at a time."""
    data_dir: RunDataDir = None
    json: Json = False

    def run(self) -> None:
        """Evaluate and print."""
        from pcdeq.report.figures import draw_evaluation
        from pcdeq.training import Run, evaluate
        from pcdeq.training.display import mean

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
        result = {
            "data": dataset.name,
            "accuracy": evaluation.accuracy,
            "loss": evaluation.loss,
            "images": len(evaluation.labels),
            "forward_steps": list(evaluation.forward_steps),
            "unconverged": evaluation.unconverged,
            "seconds": evaluation.seconds,
        }
        steps = mean(evaluation.forward_steps)
        text = (
            f"{evaluation.accuracy:.2f} % of {len(evaluation.labels):,} test images of {dataset.name}",
            f"{steps:.1f} steps per solve, {evaluation.unconverged:,} samples did not converge",
        )
        show([result], text, self.json)
        draw("confusion matrix and worst errors in", lambda: [draw_evaluation(run, evaluation, dataset)], self.json)


@dataclass(frozen=True)
class Predict:
    """Say what a trained network sees in pictures of your own."""

    folder: RunFolder
    pictures: Annotated[tuple[Path, ...], Positional, arg(metavar="PICTURE ...")]
    """Picture files of any common format and size."""
    checkpoint: Checkpoint = "last"
    device: Device = "auto"
    json: Flag = False
    """Print a JSON object per picture, for programs."""

    def run(self) -> None:
        """Classify and print."""
        from pcdeq.data.userdata import open_picture
        from pcdeq.training import Run
        from pcdeq.training.prediction import predict

        if not self.pictures:
            raise UsageError("which picture? pcdeq predict RUN PICTURE ...")
        run = Run.open(self.folder)
        readable, complaints = [], []
        for path in self.pictures:
            try:
                open_picture(path)
                readable.append(path)
            except DataError as error:  # told at the end: the others are classified all the same
                complaints.append(str(error))
        results = predict(run, readable, checkpoint=self.checkpoint, device=self.device) if readable else []
        guesses = [", ".join(f"{name} {100 * share:.1f} %" for name, share in result.ranking) for result in results]
        show(
            ({"picture": str(result.path), "ranking": result.ranking} for result in results),
            (f"{result.path}: {guess} ({result.preparation})" for result, guess in zip(results, guesses, strict=True)),
            self.json,
        )
        if complaints:
            raise DataError("; ".join(complaints))
