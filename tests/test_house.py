"""The package keeps to its plan: short ways from a layer to the work, addresses and kernels in one place."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "measure_house.py"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_house", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def with_kernels(house):
    if importlib.util.find_spec("pcdeq._kernels") is None:
        pytest.skip("the kernels were not built")
    return house.depths_with(kernels=True)


@pytest.fixture(scope="module")
def without(house):
    return house.depths_with(kernels=False)


@pytest.fixture(scope="module")
def sizes(house):
    return house.sizes()


class TestDepth:
    """From `layer(x)`, in frames of the package."""

    def test_a_kernel_solves_if_there_are_kernels(self, with_kernels, without):
        assert all(depth.kernel for depth in with_kernels.values())
        assert all(depth.product and not depth.kernel for depth in without.values())

    def test_to_a_kernel(self, house, with_kernels):
        assert max(depth.kernel for depth in with_kernels.values()) <= house.DEEPEST_KERNEL

    def test_to_the_first_product(self, house, without):
        assert max(depth.product for depth in without.values()) <= house.DEEPEST_PRODUCT

    def test_every_kind_and_mode_goes_the_same_way(self, with_kernels, without):
        assert len({depth.kernel for depth in with_kernels.values()}) == 1
        assert len({depth.product for depth in without.values()}) == 1

    def test_frames_are_counted(self, house, tmp_path, monkeypatch):
        """A function of the package that calls another, which calls back: two frames, wherever it was called from."""
        path = tmp_path / "inner.py"
        path.write_text("def outer(f): return inner(f)\ndef inner(f): return f()\n")
        scope: dict = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        monkeypatch.setattr(house, "package", lambda: tmp_path)
        assert scope["outer"](lambda: house.frames_of_package(sys._getframe())) == 2


class TestPlaces:
    def test_no_addresses_leave_python(self, sizes):
        assert sizes["data_ptr"] == 0

    def test_only_the_binding_looks_at_kernels(self, sizes):
        assert all(name.startswith("pcdeq/kernels/") for name in sizes["files that look at kernels"])

    def test_few_autograd_functions(self, sizes):
        """The equilibrium's, that of its derivatives, three small ones, and the neural ODE's."""
        assert sizes["autograd functions"] <= 6

    def test_files_are_short(self, house, sizes):
        assert not sizes[f"files above {house.LONGEST_FILE} lines"]


class TestCounting:
    def test_python(self, house):
        text = '''"""A module."""

# a comment
import os  # counts


def f(
    x,
):
    """What it does.

    In two paragraphs.
    """
    text = """a string

    that is no docstring"""
    return text
'''
        assert house.python_lines(text) == 8  # the blank line within the string is part of it

    def test_c(self, house):
        text = """/* A comment
   of two lines. */
int f(void) /* another */
{
    // a third
    puts("/* no comment");

    return 1; /* the last
*/ }
"""
        assert house.c_lines(text) == 5

    def test_kernels_and_gradients(self, house):
        assert house.looks_at_kernels("from pcdeq.kernels import KERNELS")
        assert house.looks_at_kernels("import_module('pcdeq._kernels')")
        assert not house.looks_at_kernels('"""KERNELS are named in a docstring."""\nfrom pcdeq.kernels import solve')
        text = "class A(torch.autograd.Function): pass\nclass B(Function): pass\nclass C: pass"
        assert house.autograd_functions(text) == ["A", "B"]
