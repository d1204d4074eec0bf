"""Refuse a wheel that is not what users should get: `python scripts/check_wheel.py dist/*.whl`."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

LARGEST = 8_000_000  # bytes
WANTED = (
    "pcdeq/py.typed",
    "pcdeq/data/mnist_mini.npz",
    "pcdeq/weights/pcdeq-1-l-tanh-mnist.safetensors",
    "pcdeq/report/page.css",
    "pcdeq/report/page.js",
    "pcdeq/play/page.html",
    "pcdeq/play/numerics.js",
    "pcdeq/_kernels",
    "pcdeq/cli.py",
    ".dist-info/licenses/LICENSE",
    ".dist-info/entry_points.txt",
)


def problems(wheel: Path) -> list[str]:
    """What is wrong with it."""
    found = []
    if (size := wheel.stat().st_size) >= LARGEST:
        found.append(f"{size / 1e6:.1f} MB, the limit is {LARGEST / 1e6:.0f}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = "".join(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        source = archive.read("pcdeq/_version.py").decode() if "pcdeq/_version.py" in names else ""
    found += [f"no {wanted}" for wanted in WANTED if not any(wanted in name for name in names)]
    found += [f"{name} has no place in it" for name in names if not name.startswith("pcdeq")]
    version = re.search(r'"(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)"', source)
    if version is None:
        found.append(f"no semantic version in {source.strip()!r}")
    elif f"\nVersion: {version[1]}\n" not in metadata:
        found.append(f"its metadata are not those of version {version[1]}")
    return found


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if wrong := problems(Path(argument)):
            sys.exit(f"{argument}: {'; '.join(wrong)}")
        print(f"{argument}: {Path(argument).stat().st_size / 1e6:.2f} MB, complete")
