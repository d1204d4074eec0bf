"""Files that are there whole or not at all."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
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
    finally:
        temporary.unlink(missing_ok=True)  # where it did not come to that
    flush_folder(path.parent)


def replace_folder(path: Path, contents: Mapping[str, bytes]) -> None:
    """The same for a folder of files; a non-empty folder cannot be renamed over, so the old one steps aside."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for name, content in contents.items():
            with (temporary / name).open("wb") as file:
                write_through(file, content)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush_folder(temporary)
    if path.exists():
        shutil.rmtree(_aside(path), ignore_errors=True)
        path.replace(_aside(path))
    temporary.replace(path)
    flush_folder(path.parent)
    shutil.rmtree(_aside(path), ignore_errors=True)


def find_folder(path: Path) -> Path | None:
    """Where a folder of `replace_folder` is: a crash between its two renames leaves only the old one, aside."""
    return next((place for place in (path, _aside(path)) if place.is_dir()), None)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".old")


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
