"""Light to install: the core needs torch, numpy and safetensors, and what needs more says which command installs it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pcdeq
from pcdeq import extras
from pcdeq.data import load_dataset
from pcdeq.errors import MissingExtra
from pcdeq.extras import EXTRAS
from pcdeq.models import Network

ROOT = Path(__file__).parents[1]
CORE = {"torch", "numpy", "safetensors"}
SOURCES = sorted(Path(pcdeq.__file__).parent.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def packages(requirements: list[str]) -> set[str]:
    """The names under which requirements are imported."""
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements if "pcdeq[" not in requirement}
    return {{"pillow": "PIL"}.get(name, name) for name in names}


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) if node.module}
    return {name.partition(".")[0] for name in plain | named}


class TestWhatIsInstalled:
    def test_the_core_is_three_packages(self):
        assert packages(PROJECT["dependencies"]) == CORE

    def test_extras_have_what_the_messages_say(self):
        optional = PROJECT["optional-dependencies"]
        for name, modules in EXTRAS.items():
            assert packages(optional[name]) <= set(modules), name
        listed = re.findall(r"\w+", re.search(r"\[(.*)\]", optional["all"][0])[1])
        assert set(EXTRAS) | {"tensorboard"} == set(listed)

    def test_nothing_else_is_imported(self):
        known = CORE | {"pcdeq"} | {module for modules in EXTRAS.values() for module in modules}
        for path in SOURCES:
            strangers = imported(path) - set(sys.stdlib_module_names) - known
            assert not strangers, f"{path}: {strangers}"


# In an interpreter without the extras: what must work, and what must be said.
ALONE = """
import importlib, pkgutil, sys
from pcdeq.extras import EXTRAS
for modules in EXTRAS.values():
    for module in modules:
        sys.modules[module] = None
import torch
import pcdeq
from pcdeq.cli import main
layer = pcdeq.PcDEQLinear(8)
x = torch.randn(2, 8)
layer(x).sum().backward()
assert layer.enclose(x).certified.all() and pcdeq.check(layer).holds
network = pcdeq.load("pcdeq-1-l-tanh-mnist")
images = torch.rand(2, 1, 28, 28)
assert pcdeq.certify(network, images).share == 1.0
pcdeq.freeze(network)(images)
above = ("cli", "commands", "training", "report", "reproduce")
for found in pkgutil.walk_packages(pcdeq.__path__, "pcdeq."):
    if found.name.split(".")[1] not in above and not found.name.endswith("__main__"):
        importlib.import_module(found.name)
for name in ("pcdeq.training.trainer", "pcdeq.report.tables", "pcdeq.reproduce.plan"):
    try:
        importlib.import_module(name)
    except pcdeq.errors.MissingExtra as error:
        print(error)
print("--version", main(["--version"]), "train", main(["train"]))
"""


def test_the_core_works_alone_and_the_rest_says_what_it_needs():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    wanted = extras.command("train")
    lines = done.stdout.splitlines()
    assert [line.endswith(wanted) for line in lines] == [True, True, True, False, False], done.stdout
    assert lines[-1] == "--version 0 train 1"
    assert done.stderr == f"pcdeq: the command line needs tyro, which is not installed: {wanted}\n"


class TestWhatIsSaid:
    @pytest.mark.parametrize(
        ("package", "name", "use"),
        [
            ("torchdiffeq", "baselines", lambda folder: pcdeq.build("node")),
            ("huggingface_hub", "hub", lambda folder: Network.from_pretrained("some/one")),
            ("huggingface_hub", "hub", lambda folder: pcdeq.build("pcdeq-1-l-tanh").push_to_hub("some/one")),
            ("PIL", "train", lambda folder: load_dataset(folder)),
            ("pooch", "train", lambda folder: load_dataset("mnist", data_dir=folder)),
        ],
    )
    def test_where_it_is_needed(self, package, name, use, tmp_path, monkeypatch):
        for label in "ab":
            (tmp_path / label).mkdir()
            (tmp_path / label / "picture.png").touch()
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtra, match=f"needs {package}, which is not installed: .*pip install .*{name}"):
            use(tmp_path)

    def test_the_command_is_that_of_the_checkout_or_of_any(self, tmp_path, monkeypatch):
        monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
        assert extras.command("hub") == "in the checkout, pip install -c constraints.txt '.[hub]'"
        (tmp_path / "constraints.txt").touch()
        assert extras.command("hub") == f"pip install -c {tmp_path}/constraints.txt -e '{tmp_path}[hub]'"

    def test_other_failures_keep_their_own_words(self):
        with pytest.raises(ModuleNotFoundError, match="another") as caught, extras.needing("train", "training"):
            raise ModuleNotFoundError("No module named 'another'", name="another")
        assert not isinstance(caught.value, MissingExtra)

    def test_it_is_an_import_error(self):
        """So that `try: ... except ImportError` around ours does what it says."""
        assert issubclass(MissingExtra, ImportError)
