"""Files that are there whole or not at all."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path

from pcdeq.errors import PcdeqError


def write_file(path: Path, content: bytes) -> Path:
    """Write a file, and its folder where that is missing; what goes wrong becomes one line.

    >>> import tempfile
    >>> write_file(Path(tempfile.mkdtemp()) / "new folder" / "answer.txt", b"42").read_bytes()
    b'42'
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        reason = error.strerror or error
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = f"{path.parent} is a file, not a folder"
        raise PcdeqError(f"could not write {path}: {reason}") from error
    return path


def replace_file(path: Path, content: bytes) -> None:
    """Write under another name, flush to the disk, rename: whatever happens, a reader sees the old file or the new."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write_through(file, content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def write_through(file: io.BufferedIOBase, content: bytes) -> None:
    """Write and wait until it is on the disk."""
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Make renames in a folder last through a power cut, where the system lets folders be opened."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
