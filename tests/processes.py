"""Programs as processes of their own, which signals reach as in a terminal, and which are gone when a test is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def program(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """``python -m pcdeq`` with these arguments; whatever happens, it and its children are killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pcdeq", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""},
        start_new_session=True,
        preexec_fn=_as_in_a_terminal,
        **options,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _as_in_a_terminal() -> None:
    """Of a suite that runs in the background, or under nohup, the children are told to ignore signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
