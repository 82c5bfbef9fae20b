"""The signals between a supervisor and its children, and those from people.

The former are real-time signals: no program means something else by them.
"""

from __future__ import annotations

import signal

# Where there are none (not Linux) nothing is ever sent; importing must work all the same.
_FIRST: int = getattr(signal, "SIGRTMIN", 34)

SOFT_SIGNAL: int = _FIRST + 4
"""To a child: look at your row, it holds an order for the handler that is running."""

DUMP_SIGNAL: int = _FIRST + 5
"""To a child: write all stacks into your row's dump file. C code does it, even while C code holds the GIL."""

PARENT_DIED_SIGNAL: int = _FIRST + 6
"""From the kernel to a child: the supervisor is gone."""

OPERATOR_SIGNALS: tuple[int, ...] = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""What people send to a supervisor. Service managers may send it to every process of the service, so in
templates and children these have handlers that do nothing (`quiet`). Never SIG_IGN, which programs that
tasks start would inherit."""
