"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pcdeq.errors import PcdeqError


def write_file(path: Path, content: bytes) -> Path:
    """Write under another name, flush to the disk, rename: whatever happens, a reader sees the old file or the new.

    >>> import tempfile
    >>> write_file(Path(tempfile.mkdtemp()) / "new folder" / "answer.txt", b"42").read_bytes()
    b'42'
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise PcdeqError(f"could not write {path}: {error.strerror or error}") from error
    return path
