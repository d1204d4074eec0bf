"""Files that are there whole or not at all, and of which no more is read than they may hold.

A file may come from anyone, and one of a kilobyte can unpack to gigabytes. So whoever reads says how much there can be,
and nothing beyond that is read, unpacked or given memory.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pcdeq.errors import DataError, PcdeqError

LARGEST_TEXT = 1 << 26  # bytes of JSON; a run of a hundred thousand epochs has fewer
DEEPEST = 32  # objects and lists within each other; ours have four


class Readable(Protocol):
    """What has bytes to give, a file or something that unpacks one."""

    def read(self, size: int, /) -> bytes: ...


class Limited:
    """A stream that ends in an error where it has more bytes than it may have.

    >>> Limited(io.BytesIO(b"1234"), 3).read(10)
    Traceback (most recent call last):
    ...
    ValueError: it has more than the 3 bytes that it may have
    """

    def __init__(self, stream: Readable, most: int) -> None:
        self.stream, self.most, self.left = stream, most, most

    def read(self, size: int = -1) -> bytes:
        """So many bytes, or all."""
        content = self.stream.read(self.left + 1 if size < 0 else min(size, self.left + 1))
        self.left -= len(content)
        if self.left < 0:
            raise ValueError(f"it has more than the {self.most:,} bytes that it may have")
        return content


def read_text(path: Path) -> str:
    """The content of a text file, which is no larger than ours can be; else a `DataError`."""
    try:
        if not path.is_file():
            raise OSError("there is no such file")
        with path.open("rb") as file:
            return Limited(file, LARGEST_TEXT).read().decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> Any:
    """What a file says; a `DataError` if it cannot be read."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def parse_json(text: str) -> Any:
    """JSON whose numbers a machine has, and through which a program can walk; else a `ValueError`.

    >>> parse_json('{"steps": 200}')
    {'steps': 200}
    >>> parse_json("[" * 40 + "]" * 40)
    Traceback (most recent call last):
    ...
    ValueError: it is nested more than 32 deep
    """
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from error
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _within(outer)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
    return value


def _within(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _whole(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"{text:.20}... has too many digits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text:.20} is not a finite number")
    return float(text)


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
