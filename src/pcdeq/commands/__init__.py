"""The commands of the command line: a dataclass each, whose fields are the options.

To add one, write a dataclass with a ``run`` method and put it into `COMMANDS`. What needs torch is
imported where it is used, so that ``--help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated, get_type_hints

from tyro.conf import arg

from pcdeq.commands.export import Export
from pcdeq.commands.listing import Data, List
from pcdeq.commands.playing import Play
from pcdeq.commands.proving import Certify, Check
from pcdeq.commands.reproduction import Report, Reproduce
from pcdeq.commands.shared import Command
from pcdeq.commands.training import Evaluate, Predict, Train

__all__ = ["COMMANDS", "Command", "Train"]

COMMANDS: tuple[type[Command], ...] = (
    *(Train, Evaluate, Certify, Check, Predict, Play, Export),
    *(Reproduce, Report, List, Data),
)

# Where None means "as the text says", tyro would add "(default: None)".
for _command in COMMANDS:
    for _name, _kind in get_type_hints(_command, include_extras=True).items():
        if getattr(_command, _name, "") is None:
            _command.__annotations__[_name] = Annotated[_kind, arg(help_behavior_hint="")]
