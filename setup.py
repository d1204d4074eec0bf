"""Builds the optional C kernels; everything else is in pyproject.toml.

Without a compiler the build goes on without them, and pcdeq falls back to plain torch.
"""

import sys

from setuptools import Extension, setup

# OpenMP is compiled in but not linked: torch has its runtime loaded by the time the module is imported.
openmp = ["-fopenmp"] if sys.platform == "linux" else []

setup(
    ext_modules=[
        Extension(
            "pcdeq._kernels",
            [f"src/pcdeq/kernels/{name}.c" for name in ("anderson", "elementwise", "explicit", "module", "product", "solve")],
            depends=[f"src/pcdeq/kernels/{name}.h" for name in ("anderson", "kernels", "product")],
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", *openmp],
            optional=True,
        )
    ]
)
