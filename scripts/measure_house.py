"""How large the package is and how deep: ``python scripts/measure_house.py`` prints what the design sets limits to.

Lines of code are those without blank lines, comments and docstrings. Depth is the number of frames of the package that
lie on the stack between `layer(x)` and the call of a C kernel, or the first product with W.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[1] / "src"
LONGEST_FILE = 400
# The limits of the design: frames of the package, from `layer(x)`.
DEEPEST_KERNEL, DEEPEST_PRODUCT = 8, 9
SILENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
KINDS, MODES = ("dense", "conv"), ("training", "evaluation", "frozen")


def python_lines(text: str) -> int:
    """Lines of Python with code on them."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - documented)


def c_lines(text: str) -> int:
    """Lines of C with code on them."""
    # Strings come first, so that what looks like a comment in one is none; a comment leaves its line breaks.
    pattern = r"\"(?:\\.|[^\"\\])*\"|/\*.*?\*/|//[^\n]*"

    def without(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith('"') else "\n" * found[0].count("\n")

    return sum(bool(line.strip()) for line in re.sub(pattern, without, text, flags=re.DOTALL).splitlines())


def sizes(source: Path = SOURCE) -> dict[str, Any]:
    """What can be counted in the text of the package."""
    python = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
    c = {path: path.read_text() for path in sorted([*source.rglob("*.c"), *source.rglob("*.h")])}
    lengths = {str(path.relative_to(source)): text.count("\n") for path, text in (python | c).items()}
    return {
        "lines of Python": sum(map(python_lines, python.values())),
        "lines of C": sum(map(c_lines, c.values())),
        f"files above {LONGEST_FILE} lines": {name: n for name, n in lengths.items() if n > LONGEST_FILE},
        "data_ptr": sum(text.count("data_ptr") for text in python.values()),
        "autograd functions": sum(len(autograd_functions(text)) for text in python.values()),
        "files that look at kernels": [
            str(path.relative_to(source)) for path, text in python.items() if looks_at_kernels(text)
        ],
    }


def autograd_functions(text: str) -> list[str]:
    """The classes that tell torch their own gradient."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and any(
            ast.unparse(base) in ("torch.autograd.Function", "autograd.Function", "Function") for base in node.bases
        )
    ]


def looks_at_kernels(text: str) -> bool:
    """Whether a file names the compiled module, or the constant that holds it."""
    for node in ast.walk(ast.parse(text)):
        names = {getattr(node, key, None) for key in ("id", "attr")}
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {part for alias in node.names for part in alias.name.split(".")}
            names |= set((getattr(node, "module", None) or "").split("."))
        if isinstance(node, ast.Constant) and node.value == "pcdeq._kernels":
            return True
        if names & {"KERNELS", "_kernels"}:
            return True
    return False


class Depth(NamedTuple):
    """How many frames of the package were on the stack when something was first called; 0 if it never was."""

    kernel: int
    product: int


def depths() -> dict[tuple[str, str], Depth]:
    """The depth of each kind of layer in each mode, in this process: with kernels if it has them."""
    import torch

    import pcdeq

    torch.manual_seed(0)
    layers = {"dense": pcdeq.PcDEQLinear(16), "conv": pcdeq.PcDEQConv2d(4)}
    inputs = {"dense": torch.randn(8, 16), "conv": torch.randn(8, 4, 10, 10)}
    found = {}
    for kind in KINDS:
        for mode in MODES:
            layer = layers[kind].train(mode == "training")
            if mode == "frozen":
                (layer,) = pcdeq.freeze(torch.nn.Sequential(layer))
            passes = []
            for _ in range(2):  # after the first backward pass the layer has something to start from
                with torch.set_grad_enabled(mode == "training"):
                    depth, z = depth_of(layer, inputs[kind])
                passes.append(depth)
                if z.requires_grad:
                    z.sum().backward()
            found[kind, mode] = Depth(*(max(frames) for frames in zip(*passes, strict=True)))
    return found


def depth_of(layer: Callable[[Any], Any], x: Any) -> tuple[Depth, Any]:
    """How deep in the package is the first call of a solving kernel, and of a product with W; and what comes out."""
    from pcdeq import operators

    kernel: list[int] = []
    product: list[int] = []
    with contextlib.ExitStack() as stack:
        for name, function in solving_kernels().items():
            stack.enter_context(noting(sys.modules["pcdeq._kernels"], name, function, kernel))
        for linear in (operators.DenseMap, operators.ConvMap):
            # The frame of a product itself is the package's, and deeper than its caller by one.
            stack.enter_context(noting(linear, "apply", linear.apply, product, beneath=1))
            stack.enter_context(noting(linear, "apply_plus", linear.apply_plus, product, beneath=1))
        z = layer(x)
    return Depth(next(iter(kernel), 0), next(iter(product), 0)), z


def solving_kernels() -> dict[str, Callable[..., object]]:
    """The functions of the compiled module that solve or take a step; none where it is not used."""
    module = sys.modules.get("pcdeq._kernels")
    names = ("solve", "dense_forward", "anderson_step")
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


@contextlib.contextmanager
def noting(owner: Any, name: str, function: Callable[..., Any], found: list[int], beneath: int = 0) -> Iterator[None]:
    """Note how deep in the package a function of a module or class is called."""

    @functools.wraps(function)
    def noted(*args: Any, **options: Any) -> Any:
        found.append(frames_of_package(sys._getframe(1)) + beneath)
        return function(*args, **options)

    setattr(owner, name, noted)
    try:
        yield
    finally:
        setattr(owner, name, function)


def frames_of_package(frame: FrameType | None) -> int:
    """How many frames from here outwards are of functions of the package."""
    count = 0
    while frame is not None:
        count += Path(frame.f_code.co_filename).is_relative_to(package())
        frame = frame.f_back
    return count


@functools.cache
def package() -> Path:
    import pcdeq

    return Path(pcdeq.__file__).parent


def depths_with(kernels: bool, source: Path | None = None) -> dict[str, Depth]:
    """The depths in a process of its own, with or without kernels; of another source than the installed if given."""
    environment = os.environ | {"PCDEQ_KERNELS": str(int(kernels))}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    command = [sys.executable, __file__, "--depths"]
    result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return {name: Depth(*numbers) for name, numbers in json.loads(result.stdout).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", action="store_true", help="only these, of this process, as JSON")
    if parser.parse_args().depths:
        print(json.dumps({" ".join(name): depth for name, depth in depths().items()}))
        return
    for what, number in sizes().items():
        print(f"{what}: {number:,}" if isinstance(number, int) else f"{what}: {len(number)} {number or ''}")
    for kernels in (True, False):
        print(f"depth with kernels {'on' if kernels else 'off'}: to a kernel, to the first product")
        for name, depth in depths_with(kernels, SOURCE).items():
            print(f"  {name:18}{depth.kernel or '-':>4}{depth.product or '-':>4}")


if __name__ == "__main__":
    main()
