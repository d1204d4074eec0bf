"""The command line: parse, run the command, turn errors into one line.

Commands live in `pcdeq.commands`, one dataclass each. Nothing here imports torch, so that ``--help``
answers at once.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NoReturn

from pcdeq._version import __version__
from pcdeq.errors import PcdeqError, UsageError
from pcdeq.extras import needing

if TYPE_CHECKING:
    from pcdeq.commands import Command

EXAMPLES = """
  pcdeq train                                     learn handwritten digits, in about a minute, offline
  pcdeq train pcdeq-1-mc-relu6 --data cifar10     a row of the paper, with the paper's hyperparameters
  pcdeq train pcdeq-1-sc-tanh --data my-pictures --size 32   the same network for pictures of your own
  pcdeq train --resume runs/demo-mnist-mini-seed0
  pcdeq predict runs/demo-mnist-mini-seed0 seven.png
  pcdeq certify runs/demo-mnist-mini-seed0        prove what the exact network says
  pcdeq play                                      a page to draw on, and to watch a network settle
  torchrun --nproc-per-node=2 -m pcdeq train pcdeq-1-mc-relu6 --data cifar10   on several GPUs or processes
"""

# What shells expect: 128 and the number of the signal that ended it.
INTERRUPTED, CLOSED_PIPE, TERMINATED = (128 + number for number in (signal.SIGINT, 13, signal.SIGTERM))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    >>> main(["train", "pcdeq-1-l-than"])  # one line on standard error: did you mean pcdeq-1-l-tanh?
    2
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"pcdeq {__version__}")
        return 0
    try:
        with _terminable(), needing("train", "the command line"):
            parse(arguments).run()
            sys.stdout.flush()  # here a reader that has left is noticed
        return 0
    except PcdeqError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt as stop:
        _complain(str(stop) or "interrupted")
        return TERMINATED if isinstance(stop, _Terminated) or isinstance(stop.__cause__, _Terminated) else INTERRUPTED
    except BrokenPipeError:  # the reader, say `head`, has seen enough; who wanted it all must be able to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers send before they kill: it ends a command as Ctrl-C does."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """For the time of a command, SIGTERM is an interruption."""

    def stop(_number: int, _frame: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # where Python does not let signals be handled
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(code: int) -> NoReturn:
    """End the process with this exit code.

    One of several processes ends at once: the threads of torch's process group outlive it, and one that still runs
    when the interpreter is taken apart aborts the process ("terminate called without an active exception").
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def parse(arguments: Sequence[str]) -> Command:
    """The command that the arguments spell, or a `UsageError` that says in one line what is wrong."""
    import tyro.extras

    from pcdeq.commands import COMMANDS

    names = {kind.__name__.lower(): kind for kind in COMMANDS}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(names))
        raise SystemExit(0)
    if arguments[0] not in names and not arguments[0].startswith("-"):
        near = difflib.get_close_matches(arguments[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise UsageError(f"unknown command {arguments[0]!r}; {hint} (see pcdeq --help)")
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.extras.subcommand_cli_from_dict(
                names,
                prog="pcdeq",
                args=list(arguments),
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.DisallowNone),
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # --help has been printed
        command = " ".join(["pcdeq", *(name for name in arguments[:1] if name in names)])
        raise UsageError(f"{_one_line(messages.getvalue())} (see {command} --help)") from None


def _overview(commands: dict[str, type[Command]]) -> str:
    """All commands, a line each: what the first sentence of each says before it explains."""
    sentences = {name: re.split(r"[.:;]", kind.__doc__ or "")[0] for name, kind in commands.items()}
    lines = "\n".join(f"  {name:<11}{sentence}" for name, sentence in sentences.items())
    about = "Equilibrium networks that provably converge (pcDEQ). `pcdeq COMMAND --help` explains a command:"
    return f"usage: pcdeq COMMAND [OPTIONS], pcdeq --version\n\n{about}\n\n{lines}\n\nExamples:{EXAMPLES}".rstrip()


def _one_line(box: str) -> str:
    """What matters in tyro's framed error: what is wrong and what was perhaps meant."""
    lines = [line.strip("╭╮╰╯│─ ") for line in box.splitlines()[1:]]  # the first is a title
    first, *others = (" ".join(group) for full, group in groupby(lines, bool) if full)
    message = re.sub(r"^Error parsing [A-Z]\w+: ", "", first).rstrip(".")
    if misfit := re.match(r"Error parsing (--\S+): no type matching (.+) could be instantiated from \[(.+)\]", message):
        option, kind, given = misfit.groups()
        message = f"{option} takes {_KINDS.get(kind, 'numbers')}, got {given}"
    for paragraph in others:
        if paragraph.startswith("Perhaps you meant:"):
            message += f"; did you mean {paragraph.split()[3]}?"
        elif paragraph.startswith("Available subcommands:"):
            message += f"; there are {paragraph.partition(': ')[2]}"
    return message


_KINDS = {"INT": "a whole number", "FLOAT": "a number", "{[INT [INT ...]]}": "whole numbers"}


def _complain(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print(f"pcdeq: {' '.join(message.split())}", file=sys.stderr)
