"""Builds the optional C kernels; everything else is in pyproject.toml.

Without a compiler the build goes on without them, and pcdeq falls back to plain torch.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("src/pcdeq/kernels")
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math"]


class BuildKernels(build_ext):
    """Chooses how loops become threads and vectors, by the compiler that is there."""

    def build_extension(self, ext):
        # gcc's OpenMP is compiled in but not linked: torch has its runtime loaded by the time the module is imported.
        # clang's is another, which torch for Linux does not bring; without it there are vectors, but no threads.
        ext.extra_compile_args = [*FLAGS, "-fopenmp-simd" if self.is_clang() else "-fopenmp"]
        super().build_extension(ext)

    def copy_extensions_to_source(self):
        for stale in KERNELS.parent.glob("_kernels.*.so"):
            stale.unlink()  # one that is not for all Pythons would be found first
        super().copy_extensions_to_source()

    def is_clang(self):
        command = [*self.compiler.compiler_so[:1], "--version"]
        told = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        return sys.platform == "darwin" or "clang" in told.stdout


def kernels():
    """The extension module; nothing, and a line that says so, where no compiler can build it."""
    if sys.platform == "win32":
        print("pcdeq: the C kernels are for gcc and clang, not for MSVC; this build is plain torch")
        return []
    sources, headers = (sorted(str(path) for path in KERNELS.glob(f"*.{end}")) for end in "ch")
    return [Extension("pcdeq._kernels", sources, depends=headers, py_limited_api=True, optional=True)]


modules = kernels()
setup(
    ext_modules=modules,
    cmdclass={"build_ext": BuildKernels},
    # One wheel for all Pythons of a platform, from the one whose limited API kernels.h asks for.
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if modules else {},
)
