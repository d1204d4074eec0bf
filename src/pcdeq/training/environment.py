"""What a run records of the world around it."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pcdeq._version import __version__


def describe_environment() -> dict[str, Any]:
    """Versions, machine, git commit, command and time, as plain values for ``config.json``.

    >>> sorted(describe_environment())
    ['command', 'git', 'machine', 'started', 'versions']
    """
    return {
        "versions": {
            "pcdeq": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "accelerate": version("accelerate"),
        },
        "machine": {
            "system": platform.platform(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "git": _git_commit(Path(__file__).parents[3]),
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git_commit(checkout: Path) -> dict[str, Any] | None:
    """The commit of the checkout this package is used from, or None if it was installed from a wheel."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "status", "--porcelain=v2", "--branch"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    # The first line is "# branch.oid COMMIT", and every line without # a change.
    return {"commit": told[0].split()[-1], "dirty": any(not line.startswith("#") for line in told)}
