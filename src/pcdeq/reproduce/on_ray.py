"""Runs as tasks of a Ray cluster: the one at RAY_ADDRESS, or one started on this machine for the time.

A run whose worker or machine dies is retried by Ray, on whatever machine, and goes on from its run folder, which
must therefore lie on storage that all machines share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pcdeq.errors import DataError, PcdeqError, UsageError
from pcdeq.extras import needing
from pcdeq.files import read_json
from pcdeq.reproduce.board import Board
from pcdeq.reproduce.plan import Job
from pcdeq.reproduce.worker import Pulse, work

RETRIES = 3  # of a run whose worker dies
POLL_SECONDS = 0.5
PROGRESS = "progress.tmp"  # .tmp: nothing in it is needed again


def run_on_ray(jobs: Sequence[Job], board: Board, *, cpus: int = 1, gpus: float = 0.0) -> None:
    """Do all jobs that are not done, as many at a time as the cluster has room for.

    Args:
        cpus: that each run asks for, and its number of threads.
        gpus: that each run asks for; may be a fraction.
    """
    if cpus < 1 or gpus < 0:
        raise UsageError(f"cpus must be at least 1 and gpus at least 0, got {cpus} and {gpus}")
    with needing("ray", "--on ray"):
        import ray

    with contextlib.redirect_stdout(sys.stderr), _connect():  # where Ray tells of workers that died
        _require_room(ray.cluster_resources(), cpus, gpus)
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, retry_exceptions=False)(_work)
        pending = {}
        for job in jobs:
            if job.stage == "done":
                board.set(job, "done")
            else:
                pending[task.remote(job, cpus)] = job
        _watch(pending, board)


def _work(job: Job, threads: int) -> None:
    """What a task does, on whichever machine; it tells how far it is in a small file of the run folder."""
    import torch

    torch.set_num_threads(threads)
    file = job.folder / PROGRESS

    def tell(pulse: Pulse) -> None:
        file.write_text(json.dumps({"process": os.getpid(), **asdict(pulse)}), encoding="utf-8")

    try:
        work(job, tell)
    finally:
        file.unlink(missing_ok=True)


def read_progress(folder: Path) -> dict[str, Any] | None:
    """What a task last told of itself, if anything: its process, and the fields of a `Pulse`."""
    try:
        return read_json(folder / PROGRESS)
    except DataError:  # not there, or just being written
        return None


def _connect() -> contextlib.AbstractContextManager[Any]:
    """The cluster, until the end of the context."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    try:
        return ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"the Ray cluster at RAY_ADDRESS={address} cannot be reached" if address else "Ray does not start"
        raise PcdeqError(f"{where}: {error}") from error


def _require_room(resources: Mapping[str, float], cpus: int, gpus: float) -> None:
    """A task that asks for more than there is would wait for ever."""
    for name, wanted in (("CPU", cpus), ("GPU", gpus)):
        if wanted > resources.get(name, 0):
            raise UsageError(f"a run asks for {wanted:g} {name}, the cluster has {resources.get(name, 0):g}")


def _watch(pending: dict, board: Board) -> None:
    import ray
    from ray.exceptions import RayError

    while pending:
        finished, _ = ray.wait(list(pending), timeout=POLL_SECONDS)
        for reference in finished:
            job = pending.pop(reference)
            try:
                ray.get(reference)
                board.set(job, "done")
            except RayError as error:
                cause = getattr(error, "cause", None) or error
                board.set(job, "failed", " ".join(str(cause).split()))
        for job in pending.values():
            if (told := read_progress(job.folder)) is not None:
                if board.entries[job.name].state == "waiting":
                    board.set(job, "running")
                board.tell(job, Pulse(told["epochs_done"], told["loss"]))
