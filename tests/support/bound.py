"""Runs a program that the kernel kills when its starter dies: bound.py STARTER_PID PROGRAM ARG...

A program of its own and no preexec_fn, because that runs Python between fork and exec of a process with
threads, which may hang and about which CPython 3.12 warns.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    starter, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The starter may have died before the line above; then no signal will ever come.
    if os.getppid() != starter:
        sys.exit("the process that asked for this program is gone")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
