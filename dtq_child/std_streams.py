"""Sees to it that 0, 1 and 2 are what every program takes them for.

A program started with one of them closed (`2>&-`) gets that number for the next thing it opens: shared
memory, a socket, a pipe. Whatever then prints, itself or a program that it starts, writes into that.
"""

from __future__ import annotations

import os
import sys

_LEAST = 3


def open_closed() -> tuple[int, ...]:
    """Opens /dev/null on each that is closed, for ourselves and for whom we start; says which. To be called
    before anything else is opened."""
    closed = tuple(fd for fd in range(_LEAST) if not _is_open(fd))
    for fd in closed:
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
        os.set_inheritable(fd, True)
    # The interpreter has none where it found nothing open.
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    return closed


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
