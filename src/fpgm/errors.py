"""All errors that users can see, in one hierarchy.

    FpgmError
    ├── RequestError        an argument is invalid: rate, budget, pattern, criterion
    │   └── UnknownOptionError  a keyword that the function does not have: a TypeError too
    ├── ModelError          the model or its example input cannot be used
    │   └── ForwardError    the model's own forward fails on the example input
    ├── PlanError           the plan was made for another model
    ├── VerificationError   the compact model is not the masked original: never ignored
    ├── FileError           a file is missing, not ours, truncated or cannot be written
    │   └── BusyError       another process is writing there
    └── RankError           another process that shares the work has failed or ended

Messages are one line: what is wrong, where, and what to do. They may quote names from a file, so
control characters in them are shown as escapes.
"""

from fpgm.utils.text import escape_text


class FpgmError(Exception):
    """Base of all errors raised on purpose by this package."""

    def __str__(self) -> str:
        return escape_text(" ".join(line.strip() for line in super().__str__().strip().split("\n")))


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
    """A file is missing, not ours, truncated or cannot be written."""


class BusyError(FileError):
    """Another process is writing there."""


class RankError(FpgmError):
    """Another process that shares the work has failed or ended."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """Name of the error's class on the rank that failed."""
