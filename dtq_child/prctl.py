"""The two requests to the kernel that Python has no function for. Linux only."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def on_parents_death(signum: int) -> None:
    """The kernel sends us `signum` (0: nothing) when the thread that is our parent ends. If it ended before,
    nothing comes: compare getppid() afterwards."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper() -> None:
    """Orphans below this process become its children, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
