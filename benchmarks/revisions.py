"""Revisions of this repository side by side: each in a folder of its own, its C kernels built by the same Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).parents[1]
KEPT = TREE / ".bench"  # revisions that were built, and images


@dataclass(frozen=True)
class Revision:
    """A state of the code: what git calls it, and where it lies."""

    name: str
    folder: Path

    @property
    def source(self) -> Path:
        return self.folder / "src"

    @property
    def is_fixed(self) -> bool:
        """Whether the name says all: not so where files were changed since the commit."""
        return not self.name.endswith("-dirty")


def this_tree() -> Revision:
    """The code as it lies here, built."""
    return build(Revision(_git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"), TREE))


def fetch(name: str) -> Revision:
    """A commit, tag or branch, unpacked and built in a folder that is kept."""
    commit = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not commit:
        raise SystemExit(f"git knows no revision {name!r} here")
    revision = Revision(commit[:12], KEPT / commit[:12])
    if not revision.folder.is_dir():
        partial = revision.folder.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "archive", commit, "src", "setup.py", "pyproject.toml", "README.md", "LICENSE"],
            cwd=TREE,
            check=True,
            stdout=subprocess.PIPE,
        )
        subprocess.run(["tar", "-x", "-C", partial], input=archive.stdout, check=True)
        build(Revision(revision.name, partial)).folder.rename(revision.folder)
    return revision


def build(revision: Revision) -> Revision:
    """Build the C kernels in place; without them the comparison would be of something else."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=revision.folder, capture_output=True, text=True)
    if result.returncode or not list((revision.source / "pcdeq").glob("_kernels*")):
        raise SystemExit(f"the C kernels of {revision.name} could not be built:\n{result.stderr[-2000:]}")
    return revision


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=TREE, capture_output=True, text=True).stdout.strip()
