"""The first steps of a child, between the fork and the code that executes tasks. Every signal is still
blocked."""

from __future__ import annotations

import os
import resource
import signal
import time

from dtq_child import prctl, stacks
from dtq_child.quiet import quiet
from dtq_child.signals import OPERATOR_SIGNALS, PARENT_DIED_SIGNAL, SOFT_SIGNAL

ADOPTION_S = 5.0
OOM_SCORE = 500


def adopted_by(supervisor_pid: int) -> bool:
    """Waits until the supervisor is the parent; then the kernel will tell of its death. False: it is gone."""
    deadline = time.monotonic() + ADOPTION_S
    while os.getppid() != supervisor_pid:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    prctl.on_parents_death(PARENT_DIED_SIGNAL)
    return os.getppid() == supervisor_pid


def offer_to_oom_killer() -> None:
    """When memory runs out, a child goes before the supervisor and before what else runs on the machine."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            score = min(1000, int(file.read()) + OOM_SCORE)
            file.seek(0)
            file.write(str(score))
    except (OSError, ValueError):
        return  # a hidden or read-only /proc: the kernel's own choice is no worse than without us


def limit_descriptors(soft: int | None) -> None:
    """Gives the limit back that the supervisor found, and has raised for itself. None: it has not."""
    if soft is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def take_signals(dump_fd: int) -> None:
    """Gives every signal that will come a handler, then lets them come."""
    stacks.write_to(dump_fd)
    quiet_signals()
    quiet((SOFT_SIGNAL, PARENT_DIED_SIGNAL))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def quiet_signals() -> None:
    quiet(OPERATOR_SIGNALS)
