"""One run, from wherever it stands to its end; also ``python -m pcdeq.reproduce.worker``.

The process reads its job from the first line of standard input and ends when that input does, because then
the process that wanted the result is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pcdeq.errors import PcdeqError
from pcdeq.reproduce.plan import Job
from pcdeq.training import resume, summarise, train
from pcdeq.training.display import Silence

HEARTBEAT_SECONDS = 1.0
INTERRUPTED = 130


def work(job: Job) -> None:
    """Train what is missing of a run, and measure what it became."""
    if job.stage != "done":
        # Also where only the summary is missing: of an epoch whose checkpoint was not written, the line is dropped.
        job.folder.mkdir(parents=True, exist_ok=True)
        config, heartbeat = job.config, Heartbeat(job.folder, job.epochs)
        if job.run is None:
            train(config, progress=heartbeat)
        else:
            job.require_same()
            epochs, device, data_dir = job.epochs, config.device, config.data_dir
            resume(job.folder, epochs=epochs, device=device, data_dir=data_dir, progress=heartbeat)
    if job.stage == "trained":
        assert job.run is not None
        summarise(job.run)


@dataclass(frozen=True)
class Pulse:
    """Where a run is within an epoch, and which process trains it."""

    epochs_done: float
    loss: float
    process: int

    @classmethod
    def read(cls, folder: Path) -> Pulse | None:
        """What the worker last told of itself, if anything."""
        try:
            return cls(**json.loads((folder / "progress.tmp").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # not there, or just being written
            return None


class Heartbeat(Silence):
    """Tells in a small file of the run folder, once a second, how far training is."""

    def __init__(self, folder: Path, epochs: int) -> None:
        self.file = folder / "progress.tmp"  # .tmp: nothing in it is needed again
        self.epochs = epochs
        self.last = 0.0

    def start(self, text: list[str], total_images: int, images_done: int) -> None:
        self.per_epoch = total_images / self.epochs

    def due(self) -> bool:
        return time.monotonic() - self.last > HEARTBEAT_SECONDS

    def step(self, images_done: int, loss: float, accuracy: float, steps: float) -> None:
        self.last = time.monotonic()
        pulse = Pulse(images_done / self.per_epoch, loss, os.getpid())
        self.file.write_text(json.dumps(asdict(pulse)), encoding="utf-8")

    def stop(self) -> None:
        self.file.unlink(missing_ok=True)


def _end_with_the_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> int:
    """Do the job on standard input."""
    job = Job.from_json(sys.stdin.readline())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        work(job)
    except PcdeqError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
