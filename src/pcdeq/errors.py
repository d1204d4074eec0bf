"""The one error type of the package and its few children.

Every message names the offending value and says what to do. The command line prints the
message as one line and exits with the error's ``exit_code``.
"""

from __future__ import annotations


class PcdeqError(Exception):
    """Base of every error that pcdeq raises on purpose.

    >>> import pcdeq
    >>> try:
    ...     pcdeq.PcDEQLinear(4, activation="relu")
    ... except pcdeq.PcdeqError as error:
    ...     print(type(error).__name__)
    UsageError
    """

    exit_code = 1


class UsageError(PcdeqError, ValueError):
    """A wrong argument: an unknown name, a shape that does not fit, a value out of range."""

    exit_code = 2


class DataError(PcdeqError):
    """A data file or a checkpoint is missing, corrupt, truncated or of another kind."""


class MissingExtra(PcdeqError, ImportError):
    """A package is missing that only some parts need; the message has the command that installs it."""


class ConvergenceError(PcdeqError, RuntimeError):
    """A solve did not reach its tolerance and the solver was told to throw."""


class ConvergenceWarning(UserWarning):
    """A solve did not reach its tolerance; the message says what to change."""
