"""Runs as processes of this machine, some at a time, with its cores divided among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import torch

from pcdeq.errors import UsageError
from pcdeq.reproduce.board import Board
from pcdeq.reproduce.plan import Job

POLL_SECONDS = 0.1
TRIES = 3  # of a run whose worker dies
PATIENCE_SECONDS = 10  # for workers to save what they can after Ctrl-C


def run_locally(jobs: Sequence[Job], board: Board, *, parallel: int = 1, cpus: int | None = None) -> None:
    """Do all jobs that are not done, ``parallel`` at a time; one that fails does not stop the others.

    Args:
        cpus: threads of each run; by default torch's (OMP_NUM_THREADS, or the cores) divided by ``parallel``.
    """
    if parallel < 1 or (cpus is not None and cpus < 1):
        raise UsageError(f"parallel and cpus must be at least 1, got {parallel} and {cpus}")
    threads = cpus or max(1, torch.get_num_threads() // parallel)
    waiting = deque(job for job in jobs if not _is_done(job, board))
    tries = dict.fromkeys((job.name for job in waiting), 0)
    active: list[_Worker] = []
    try:
        while waiting or active:
            while waiting and len(active) < parallel:
                job = waiting.popleft()
                tries[job.name] += 1
                active.append(_Worker.start(job, threads))
                board.set(job, "running")
            time.sleep(POLL_SECONDS)
            board.update()
            for worker in [worker for worker in active if worker.process.poll() is not None]:
                active.remove(worker)
                job, (code, message) = worker.job, worker.end()
                if code == 0:
                    board.set(job, "done")
                elif code < 0 and tries[job.name] < TRIES:  # killed, not refused
                    board.set(job, "waiting", f"its process died ({message}); once more from its last epoch")
                    waiting.append(job)
                else:
                    board.set(job, "failed", message)
    finally:
        _stop(active)


def _is_done(job: Job, board: Board) -> bool:
    if job.stage == "done":
        board.set(job, "done")
        return True
    return False


@dataclass(frozen=True)
class _Worker:
    job: Job
    process: subprocess.Popen[str]
    errors: IO[str]

    @classmethod
    def start(cls, job: Job, threads: int) -> _Worker:
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in `end`)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            [sys.executable, "-m", "pcdeq.reproduce.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
            env=environment,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(job.to_json() + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; its exit code tells
        return cls(job, process, errors)

    def end(self) -> tuple[int, str]:
        """Exit code, and the last thing it said."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        self.errors.close()
        code = self.process.returncode
        if code < 0:
            return code, signal.Signals(-code).name
        return code, lines[-1] if lines else f"exit code {code}"


def _stop(workers: list[_Worker]) -> None:
    """Ask them to end, as Ctrl-C in a terminal already has, and wait; what they leave can be resumed."""
    for worker in workers:
        worker.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + PATIENCE_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        worker.end()
