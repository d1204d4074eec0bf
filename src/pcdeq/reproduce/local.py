"""Runs in this process, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pcdeq.errors import PcdeqError
from pcdeq.reproduce.board import Board
from pcdeq.reproduce.plan import Job
from pcdeq.reproduce.worker import work


def run_locally(jobs: Sequence[Job], board: Board) -> None:
    """Do all jobs that are not done; one that fails does not stop the others, Ctrl-C does."""
    for job in jobs:
        if job.stage != "done":
            board.set(job, "running")
            try:
                work(job, partial(board.tell, job))
            except Exception as error:  # whatever it is, the next run may not have it
                kind = "" if isinstance(error, PcdeqError) else f"{type(error).__name__}: "
                board.set(job, "failed", kind + " ".join(str(error).split()))
                continue
        board.set(job, "done")
