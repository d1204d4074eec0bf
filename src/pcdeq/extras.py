"""Packages that only some parts of pcdeq need, and what to type where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pcdeq.errors import MissingExtra

# What is imported of each extra of pyproject.toml.
EXTRAS = {
    "train": ("accelerate", "matplotlib", "PIL", "pooch", "requests", "rich", "scipy", "tyro"),
    "hub": ("huggingface_hub",),
    "baselines": ("torchdiffeq",),
    "onnx": ("onnx", "onnx_ir", "onnxruntime", "onnxscript"),
    "ray": ("ray",),
}
CHECKOUT = Path(__file__).parents[2]


@contextmanager
def needing(name: str, what: str) -> Iterator[None]:
    """Around imports of the extra's packages: where one is missing, one line says for what, and how to install it.

    >>> with needing("ray", "--on ray"):
    ...     raise ModuleNotFoundError("No module named 'ray.util'", name="ray.util")
    Traceback (most recent call last):
    ...
    pcdeq.errors.MissingExtra: --on ray needs ray, which is not installed: ...pip install ...
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS[name]:
            raise  # a mistake of ours, or a broken installation: its own words are the best
        raise MissingExtra(f"{what} needs {package}, which is not installed: {command(name)}") from error


def command(name: str) -> str:
    """What installs an extra: from the checkout that this package is used from, or from one that we do not know."""
    if (CHECKOUT / "constraints.txt").is_file():
        return f"pip install -c {CHECKOUT / 'constraints.txt'} -e '{CHECKOUT}[{name}]'"
    return f"in the checkout, pip install -c constraints.txt '.[{name}]'"
