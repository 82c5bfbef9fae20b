"""Where a child's stacks go: those it is asked for, and the last words of a fatal error."""

from __future__ import annotations

import faulthandler

from dtq_child.signals import DUMP_SIGNAL


def write_to(fd: int) -> None:
    """From now on DUMP_SIGNAL, and a fatal error like SIGSEGV, write all stacks to `fd`. Call it again after
    code that may have changed signal handlers."""
    faulthandler.enable(file=fd, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)
