"""Runs a program that the kernel kills when its starter dies: leash.py STARTER_PID PROGRAM ARG...

A script of its own that imports nothing of ours, so that an interpreter without site-packages runs it in some
20 ms; and no preexec_fn, which would run Python between fork and exec of a process that has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL), zero, zero, zero) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # It may have died before the line above; then no signal will ever come.
    if os.getppid() != starter:
        sys.exit("whoever asked for this program is gone")
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"it cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
