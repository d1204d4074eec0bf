"""Runs one check in an interpreter of its own: what reads or writes outside of its memory must not take pytest along.

A process takes two seconds, nearly all of them for importing torch: what can no longer crash is better called as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from pcdeq.errors import PcdeqError


def alone(check: Callable[..., None], *arguments: str, **environment: str) -> str:
    """Call a function of a test file in a new process, assert that it comes to its end, return what it prints."""
    file = sys.modules[check.__module__].__file__
    assert file is not None
    # What is on the path here is on the path there: the same package is tested, wherever it is installed.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, file, check.__name__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def main(functions: dict[str, Any]) -> None:
    """What a test file does that is run as a program: the check that its arguments name."""
    warnings.simplefilter("ignore")  # of torch about addresses, and of solves that do not converge: not the point here
    torch.set_num_threads(1)
    torch.manual_seed(0)
    functions[sys.argv[1]](*sys.argv[2:])


def refused(call: Callable[[], Any]) -> bool:
    """Whether a call says in words that it cannot be done: our errors, or torch's."""
    try:
        call()
    except (PcdeqError, RuntimeError):
        return True
    return False
