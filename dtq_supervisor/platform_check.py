"""Where a supervisor can run (R6)."""

from __future__ import annotations

import os
import sys

OLDEST = (3, 11)
TESTED = ((3, 11), (3, 12), (3, 13))


def unsupported() -> str:
    """Why it cannot run here; empty if it can."""
    if sys.platform != "linux":
        return f"dtq-supervisor needs Linux, this is {sys.platform}: run `dtq dev`, one process, here"
    if sys.implementation.name != "cpython" or sys.version_info < OLDEST:
        here = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}"
        return f"dtq-supervisor needs CPython 3.11 or newer, this is {here}: `dtq dev` asks for less"
    missing = [name for name in ("pidfd_open", "memfd_create") if not hasattr(os, name)]
    if missing:
        return f"dtq-supervisor needs os.{missing[0]}, which this build of Python lacks: run `dtq dev`"
    try:
        os.getcwd()
    except OSError as error:
        return f"the working directory is gone ({error.strerror}): start in one that exists"
    return ""


def untested() -> str:
    """The version of this Python if nobody has tried it; empty if somebody has."""
    version = sys.version_info[:2]
    return "" if version in TESTED else f"{version[0]}.{version[1]}"
