"""Where the command `fpgm` begins, so that Ctrl-C ends it tidily from the first moment.

It is no part of the package because to import any of that is to import torch, which takes seconds:
just those in which whoever mistyped something stops the command.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # what runs in the background need not hear of it
        signal.signal(signal.SIGINT, _stop)
    from fpgm.cli import app

    signal.signal(signal.SIGINT, before)
    app()


def _stop(*_: object) -> None:
    """At once: nothing has been begun, and an exception might be swallowed by what is imported."""
    sys.stderr.write("fpgm: stopped.\n")
    sys.stderr.flush()
    os._exit(130)
