"""Builds the optional C kernels; everything else is in pyproject.toml.

Without a compiler the build goes on without them, and pcdeq falls back to plain torch.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

# OpenMP is compiled in but not linked: torch has its runtime loaded by the time the module is imported.
openmp = ["-fopenmp"] if sys.platform == "linux" else []

kernels = Path("src/pcdeq/kernels")

setup(
    ext_modules=[
        Extension(
            "pcdeq._kernels",
            sorted(str(path) for path in kernels.glob("*.c")),
            depends=sorted(str(path) for path in kernels.glob("*.h")),
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", *openmp],
            optional=True,
        )
    ]
)
