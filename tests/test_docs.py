"""Every block of code in the README and the documentation runs, as written, page by page from top to bottom.

By the language of its fence: ``python`` is run, ``pycon`` is run and its output compared, ``console`` is run and its
output, where the page shows any, compared. ``sh`` holds what takes too long or needs the network: its commands must
exist and parse. There are no others but ``text`` and Sphinx's directives.
"""

from __future__ import annotations

import doctest
import pkgutil
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

import pcdeq
from pcdeq.cli import main, parse
from pcdeq.testing import self_check

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if not {"_build", "results"} & set(p.parts))]
FENCE = re.compile(r"^( *)(`{3,}|:{3,})(\S*)[^\n]*\n(.*?)^\1\2 *$", flags=re.MULTILINE | re.DOTALL)
NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


class Checker(doctest.OutputChecker):
    """Pages show what was printed when they were written; elsewhere numbers may differ a little.

    Words must agree, numbers to 15 % (whole ones may be 1 off), ``...`` stands for anything, white space for any.
    """

    def check_output(self, want: str, got: str, optionflags: int = 0) -> bool:
        pieces = re.findall(rf"\.\.\.|{NUMBER}|\s+|.", want.strip())
        special = {"...": ".*?"}
        pattern = "".join(
            f"({NUMBER})" if re.fullmatch(NUMBER, piece) else special.get(piece, re.escape(piece))
            if piece.strip() else r"\s+"
            for piece in pieces
        )  # fmt: skip
        match = re.fullmatch(pattern, got.strip(), flags=re.DOTALL)
        numbers = [piece for piece in pieces if re.fullmatch(NUMBER, piece)]
        return match is not None and all(map(self.close, numbers, match.groups()))

    @staticmethod
    def close(want: str, got: str) -> bool:
        slack = 1.0 if want.isdigit() and got.isdigit() else 0.0
        a, b = (float(number.replace(",", "").rstrip(".") or 0) for number in (want, got))
        return abs(a - b) <= max(slack, 0.15 * abs(a))


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """Language, text and first line of every block."""
    text = page.read_text()
    found = [(m[3], m[4], text.count("\n", 0, m.start(4)) + 1) for m in FENCE.finditer(text)]
    assert not re.search(r"^(    |\t)(\$|>>>|pcdeq |make )", text, flags=re.MULTILINE), "a block without a fence"
    return found


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


# What torch says about itself while it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for language, text, line in blocks(page):
        where = f"{page_id(page)}:{line}"
        if language == "python":
            # Newlines in front: tracebacks then show the page's own line.
            exec(compile("\n" * (line - 1) + text, str(page), "exec", dont_inherit=True), names)
        elif language == "pycon":
            run_session(text, names, where)
        elif language == "console":
            run_commands(text, where, capsys)
        elif language == "sh":
            for command in text.splitlines():
                check_command(command, where)
        else:
            assert language == "text" or language.startswith("{"), f"{where}: what is {language!r}?"


def run_session(text: str, names: dict[str, object], where: str) -> None:
    test = doctest.DocTestParser().get_doctest(text, names, where, where, 0)
    test.globs = names
    report: list[str] = []
    result = doctest.DocTestRunner(Checker(), verbose=False).run(test, out=report.append, clear_globs=False)
    assert not result.failed, "".join(report)


def run_commands(text: str, where: str, capsys) -> None:
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, flags=re.MULTILINE):
        program, *arguments = shlex.split(command, comments=True)
        capsys.readouterr()
        if program == "pcdeq":
            assert main(arguments) == 0, f"{where}: {command}: {capsys.readouterr().err}"
        else:
            assert (program, len(arguments)) == ("python", 1), f"{where}: cannot run {command!r}"
            runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
        printed = capsys.readouterr().out
        if expected.strip():
            assert Checker().check_output(expected, printed), f"{where}: {command}:\n{printed}"


def check_command(line: str, where: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    match words:
        case []:
            pass
        case ["pcdeq", *arguments] | ["torchrun", _, "-m", "pcdeq", *arguments]:
            parse(arguments)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), f"{where}: {line}"
        case ["python", "-m", "pcdeq.testing", *arguments]:
            self_check.parse(arguments)
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"{where}: no {script}"
        case ["pip", "install", *_] | ["git", "clone", *_] | ["cd", _]:
            pass
        case _:
            pytest.fail(f"{where}: what is {line!r}?")


def test_links_of_the_readme():
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], link


def test_the_checker_sees_differences():
    check = Checker().check_output
    assert check("Picard [14, 9] 1.0e-05 done", "Picard  [15, 9] 1.1e-05\n done\n")
    assert check("a\n...\nloss 0.25", "a\nb\nc 7\nloss 0.26")
    assert not check("True", "False")
    assert not check("steps 14", "steps 20")
    assert not check("loss 0.25", "loss 0.35")
    assert not check("torch.Size([2, 3])", "torch.Size([2, 3, 1])")
    assert not check("", "something")


def public_objects() -> list[str]:
    return [name for name in pcdeq.__all__ if name != "__version__"]


def test_the_api_page_has_every_public_name():
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    assert set(public_objects()) <= set(listed)


@pytest.mark.parametrize("name", public_objects())
def test_every_public_name_has_an_example(name):
    assert ">>>" in getattr(pcdeq, name).__doc__  # which --doctest-modules runs


def test_the_diagram_shows_every_module():
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    diagram = (DOCS / "img" / "architecture.svg").read_text()
    for module in re.findall(r"pcdeq\.([\w.]+)", " ".join(layers)):
        assert f">{module}<" in diagram, f"docs/img/architecture.svg lacks {module}"


def test_the_walk_through_a_layer_names_what_there_is():
    (walk,) = (text for _, text, _ in blocks(DOCS / "contributing.md") if text.startswith("z = layer(x)"))
    names = re.findall(r"^  (\w+\.[\w.]+)(?: |$)", walk, flags=re.MULTILINE)
    assert len(names) >= 14
    for name in names:
        assert callable(pkgutil.resolve_name(f"pcdeq.{name}")), name


@pytest.mark.parametrize("picture", sorted((DOCS / "img").iterdir()), ids=lambda path: path.name)
def test_pictures_are_small_and_used(picture):
    assert picture.stat().st_size < 120_000
    assert any(f"img/{picture.name}" in page.read_text() for page in PAGES), "no page shows it"


SPEED = r"^\| ([\w-]+ over [\w-]+, (?:training|inference)) \|(.+)\|$"


def speeds():
    """Median ratios by what was compared, as the benchmark's page has them: L, SC, MC on MNIST, SC, MC on CIFAR-10."""
    page = (ROOT / "results" / "bench" / "bench.md").read_text()
    rows = re.findall(SPEED, page, re.M)
    first = {name: [cell.split()[:1] for cell in cells.split("|")[:5]] for name, cells in rows}
    found = {name: [cell[0] for cell in cells] for name, cells in first.items() if all(cells)}  # measured on all
    assert len(found) >= 6
    return found


def test_the_speeds_in_the_readme_are_those_of_the_benchmark():
    measured, text = speeds(), (ROOT / "README.md").read_text()
    shown = re.findall(SPEED, text, re.M)
    assert len(shown) >= 6
    for name, cells in shown:
        for cell, ratio in zip(cells.split("|"), measured[name], strict=True):
            digits = len(cell.strip().partition(".")[2])
            assert abs(float(cell) - float(ratio)) <= 0.501 * 10**-digits, f"{name}: {cell} is not {ratio}"


def test_the_speeds_among_the_questions_are_those_of_the_benchmark():
    measured, text = speeds(), " ".join((DOCS / "questions.md").read_text().split())
    for what, inverse in (("explicit", True), ("hook", False)):
        for when in ("training", "inference"):
            ratios = [float(ratio) for ratio in measured[f"{what} over pcdeq, {when}"]]
            low, high = sorted(1 / r if inverse else r for r in ratios)[:: len(ratios) - 1]
            assert f"{low:.1f} to {high:.1f} times" in text, f"{what}, {when}: {low:.1f} to {high:.1f}"


def test_the_results_in_the_readme_are_those_of_the_runs():
    """Nothing is typed in by hand, or at least not wrongly."""
    from pcdeq.report.tables import collect
    from pcdeq.training import find_runs

    lines = [line for group in collect(find_runs(ROOT / "results" / "runs")).values() for line in group if line.is_full]
    measured = {(line.row.title, line.cells()["ours %"], line.cells()["paper %"]) for line in lines}
    shown = re.findall(
        r"^\| (pcDEQ\S+) \| ([\d.]+(?: ± [\d.]+)?) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(shown) >= 4
    assert set(shown) <= measured
