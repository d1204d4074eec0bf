"""How the documentation is built: ``make docs``. No network is needed, neither here nor in the reader's browser."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from pathlib import Path

from pcdeq import __version__, cli, load
from pcdeq.commands import COMMANDS
from pcdeq.play import SHIPPED, write_page

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"

project = "pcdeq"
author = "The pcdeq developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "results/README.md"]  # that one is included by paper.md
smartquotes_action = "D"  # dashes only: s' is a derivative
default_role = "py:obj"  # a `Name` in a docstring links to its description

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "pcdeq"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
# Small enough for lines of 100 characters.
html_theme_options = {name: {"code-font-size": "75%"} for name in ("light_css_variables", "dark_css_variables")}
html_show_sphinx = html_show_copyright = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def copy_results() -> None:
    """Bring the measured results into the source tree, so that their links and pictures are part of the site.

    Links become relative to the root, because one of the pages is included in another; what is not copied, such as
    a folder of runs, is named but not linked.
    """
    target = DOCS / "results"
    shutil.rmtree(target, ignore_errors=True)
    for source in RESULTS.rglob("*"):
        place = source.relative_to(RESULTS)
        if source.suffix not in (".md", ".png", ".svg") or "runs" in place.parts:
            continue
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            (target / place).write_text(_with_links_from_the_root(source))
        else:
            shutil.copy(source, target / place)


def _with_links_from_the_root(page: Path) -> str:
    def rewrite(match: re.Match[str]) -> str:
        label, link = match.groups()
        if re.match(r"\w+:|#", link):
            return match[0]
        place = Path(os.path.relpath(page.parent / link, RESULTS))
        copied = place.suffix in (".md", ".png", ".svg") and ".." not in place.parts and (RESULTS / place).exists()
        page_itself = "/paper.md" if place == Path("README.md") else f"/results/{place}"
        return f"{label}({page_itself})" if copied else label.lstrip("!").strip("[]")

    return re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", rewrite, page.read_text())


def help_of(*arguments: str) -> str:
    """What ``--help`` prints, without its rules."""
    os.environ |= {"COLUMNS": "92", "NO_COLOR": "1"}
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        cli.parse([*arguments, "--help"])
    plain = re.sub(r"^ -+ *\n", "", text.getvalue(), flags=re.MULTILINE)  # rules under headings
    return re.sub(r"^ (?=\S)(.*?) *$", r"\1:", plain, flags=re.MULTILINE).strip()


def complete(app: object, page: str, source: list[str]) -> None:
    """Put the real ``--help`` of every command where the page about the command line says so.

    And let links to the results, which on GitHub leave this folder, go to their copies.
    """
    source[0] = re.sub(r"\]\((\.\./)+results/", "](/results/", source[0]).replace("/results/README.md", "/paper.md")
    if page != "command-line":
        return
    texts = {"pcdeq": help_of()} | {f"pcdeq {n}": help_of(n) for n in (kind.__name__.lower() for kind in COMMANDS)}
    sections = [f"## `{command}`\n\n````text\n{text}\n````\n" for command, text in texts.items()]
    source[0] = source[0].replace("<!-- help -->", "\n".join(sections))


def write_play(app, error: Exception | None) -> None:
    """The page to play with, from the weights of the package, beside the page about it."""
    if error is None:
        networks = {name: load(name) for name in SHIPPED}
        write_page(networks, Path(app.outdir) / "see-it-think.html", certify="tutorials/certify.html")


def setup(app) -> None:
    copy_results()
    app.connect("build-finished", write_play)
    app.connect("source-read", complete)
