"""Entry point of the `fpgm` command, which handles Ctrl-C before torch is imported.

It is outside the package because importing the package imports torch, which takes seconds, and
users may press Ctrl-C in that time.
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
    from fpgm.utils.allocator import share_memory_among_threads

    signal.signal(signal.SIGINT, before)
    share_memory_among_threads()
    app()


def _stop(*_: object) -> None:
    """Exit at once: nothing has started, and a module being imported might swallow an exception."""
    sys.stderr.write("fpgm: stopped.\n")
    sys.stderr.flush()
    os._exit(130)
