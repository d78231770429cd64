"""All errors that users can see, in one hierarchy.

    FpgmError
    ├── RequestError        an argument is invalid: rate, budget, pattern, criterion
    │   └── UnknownOptionError  a keyword that the function does not have: a TypeError too
    ├── ModelError          the model or its example input cannot be used
    │   └── ForwardError    the model's own forward fails on the example input
    ├── PlanError           the plan was made for another model
    ├── VerificationError   the compact model is not the masked original: never ignored
    ├── FileError           a file is missing, truncated, not written by fpgm, or cannot be written
    │   └── BusyError       another process is writing there
    └── RankError           another process that shares the work has failed or ended

Messages are one line: what is wrong, where, and what to do. They may quote names from a file, so
control characters in them are shown as escapes.
"""

from __future__ import annotations

import sys
from typing import TypeVar

from fpgm.utils.text import escape_text

Self = TypeVar("Self", bound="FpgmError")


class FpgmError(Exception):
    """Base of all errors raised on purpose by this package."""

    max_length = 1000
    """A longer message loses its middle, unless it quotes a runtime, which is never cut."""

    def __str__(self) -> str:
        text = " ".join(line.strip() for line in super().__str__().strip().split("\n"))
        return escape_text(text, self.max_length)

    def keep_full_message(self: Self) -> Self:
        """Return the error with a message of any length."""
        self.max_length = sys.maxsize
        return self


class RequestError(FpgmError, ValueError):
    """An argument is invalid."""


class UnknownOptionError(RequestError, TypeError):
    """A keyword is misspelled, or belongs to another function."""


class ModelError(FpgmError):
    """The model or its example input cannot be used."""


class ForwardError(ModelError):
    """The model's own forward fails on the example input."""


class PlanError(FpgmError, ValueError):
    """The plan does not fit the model it is applied to."""


class VerificationError(FpgmError):
    """The compact model does not compute what the masked original computes."""


class FileError(FpgmError, OSError):
    """A file is missing, truncated, not written by fpgm, or cannot be written."""


class BusyError(FileError):
    """Another process is writing there."""


class RankError(FpgmError):
    """Another process that shares the work has failed or ended."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """Name of the error's class on the rank that failed."""
