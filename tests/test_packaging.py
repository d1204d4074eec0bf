"""What surrounds the code: the version, the wheel, the configurations that run the same checks in other places."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import pcdeq

ROOT = Path(__file__).parents[1]


def test_one_version_that_is_semantic():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", pcdeq.__version__)
    assert version("pcdeq") == pcdeq.__version__


def test_the_changelog_has_a_place_for_what_is_new():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0].startswith(pcdeq.__version__)


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "pcdeq", "list"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pcdeq-1-mc-relu6-aug" in done.stdout


def test_it_is_typed():
    assert Path(pcdeq.__file__).with_name("py.typed").is_file()


def test_the_linters_are_the_same_everywhere():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert lint is not None
    wanted = {line.split("/")[1].removesuffix(" .").replace(" --check", "") for line in lint[1].splitlines()}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"].split("/")[-1].removesuffix(" --force-exclude") for hook in hooks} == wanted
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert {"run": ".ci/run"} in jobs["check"]["steps"]
    assert {"run": "make test-wheel"} in jobs["wheel"]["steps"]


FILES = {
    "pcdeq/_version.py": '__version__ = "1.2.3"\n',
    "pcdeq/py.typed": "",
    "pcdeq/data/mnist_mini.npz": "",
    "pcdeq/weights/pcdeq-1-l-tanh-mnist.safetensors": "",
    "pcdeq/report/page.css": "",
    "pcdeq/report/page.js": "",
    "pcdeq/play/page.html": "",
    "pcdeq/play/numerics.js": "",
    "pcdeq/_kernels.so": "",
    "pcdeq/cli.py": "",
    "pcdeq-1.2.3.dist-info/licenses/LICENSE": "",
    "pcdeq-1.2.3.dist-info/entry_points.txt": "",
    "pcdeq-1.2.3.dist-info/METADATA": "Name: pcdeq\nVersion: 1.2.3\n",
}


@pytest.fixture(scope="module")
def problems():
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.problems


def wheel(folder, files):
    with zipfile.ZipFile(folder / "x.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return folder / "x.whl"


class TestCheckWheel:
    def test_a_good_one_passes(self, problems, tmp_path):
        assert problems(wheel(tmp_path, FILES)) == []

    @pytest.mark.parametrize("missing", FILES)
    def test_nothing_may_be_missing(self, problems, tmp_path, missing):
        files = {name: content for name, content in FILES.items() if name != missing}
        assert problems(wheel(tmp_path, files))

    @pytest.mark.parametrize(
        "change",
        [
            {"tests/test_it.py": ""},
            {"pcdeq/_version.py": '__version__ = "1.2.4"\n'},
            {"pcdeq/_version.py": '__version__ = "next"\n'},
            {"pcdeq/large.bin": "x" * 8_000_000},
        ],
    )
    def test_what_should_not_be_is_refused(self, problems, tmp_path, change):
        assert problems(wheel(tmp_path, FILES | change))
