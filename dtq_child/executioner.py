"""Ends the children of a supervisor that died, each before another worker may take over its task (R7).

A child without a supervisor ends by itself at its next task boundary. One that never gets there, stuck in C
code or in its handler, must be gone when its lease is over: by then somebody else may execute the task.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dtq_child import logs
from dtq_child.scoreboard import Phase, Row, Scoreboard

LOOK_S = 0.05
LAST_STEPS_S = 1.0
"""What a child that has just become idle gets for ending by itself, its stop hooks included."""

_PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2  # Linux 6.9


@dataclass(slots=True)
class Ward:
    """A living child. `until`: how long it may live, in monotonic seconds; None before the first look."""

    slot: int
    life: int
    row: int
    pid: int
    pidfd: int
    busy: bool = False
    until: float | None = None
    killed: bool = False


def lease_end(row: Row, visibility_s: float) -> float:
    """When the lease of what the row executes or settles runs out, or before that its time."""
    execution = row.execution
    assert execution is not None
    end = max(execution.claim_sent, row.renewed) + visibility_s
    # A settling child has its outcome in hand: the handler's time has nothing to do with it any more.
    if row.phase is Phase.EXECUTING and execution.hard_deadline > 0:
        return min(end, execution.hard_deadline)
    return end


def judge(ward: Ward, row: Row | None, now: float, visibility_s: float) -> None:
    """Sets how long the ward may live, by what its row says at `now`. Pure."""
    if row is None:
        # It stands still while it writes its row: what the row said before counts, or that it might be busy.
        ward.until = now + visibility_s if ward.until is None else ward.until
    elif row.life != ward.life:
        ward.until = now
    elif row.execution is not None:
        ward.busy, ward.until = True, lease_end(row, visibility_s)
    elif ward.busy or (ward.until is None and row.phase is Phase.EXITING):
        ward.busy, ward.until = False, now + LAST_STEPS_S
    elif ward.until is None:
        ward.until = now


def execute(wards: Iterable[Ward], board: Scoreboard, visibility_s: float) -> None:
    """Returns when all wards are dead."""
    living = {ward.pidfd: ward for ward in wards}
    poll = select.poll()
    for pidfd in living:
        poll.register(pidfd, select.POLLIN)
    if living:
        words = "the supervisor is gone, its children end with their leases at the latest"
        logs.past_the_application(f"{words} ({len(living)} left)")
    while living:
        now = time.monotonic()
        for ward in living.values():
            judge(ward, board.read_row(ward.row), now, visibility_s)
            if ward.until is not None and ward.until <= now:
                _kill(ward)
        for pidfd, _ in poll.poll(LOOK_S * 1000):
            poll.unregister(pidfd)
            _bury(living.pop(pidfd))


def _kill(ward: Ward) -> None:
    if not ward.killed:
        words = f"killing child {ward.slot}, pid {ward.pid}, which its supervisor left behind"
        logs.past_the_application(words)
    ward.killed = True
    if not _signal_group(ward.pidfd):
        _signal_group_by_number(ward)
    # Itself, too: a task can have moved it to another group.
    _signal(ward.pidfd, signal.SIGKILL)


def _bury(ward: Ward) -> None:
    """The child is dead; what it started may not be."""
    _signal_group(ward.pidfd)
    os.close(ward.pidfd)


def _signal_group(pidfd: int) -> bool:
    """Kills the group that the process leads, or led. False: this kernel has no way to do it by pidfd."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL, None, _PIDFD_SIGNAL_PROCESS_GROUP)
    except OSError as error:
        return (
            error.errno != errno.EINVAL
        )  # any other: there is no such group any more, or it is not ours to kill
    return True


def _signal_group_by_number(ward: Ward) -> None:
    """On older kernels. Whoever adopted the child may collect it at any moment, and its pid may be another
    group's then; but one that stands still does not end by itself."""
    if not _signal(ward.pidfd, signal.SIGSTOP):
        return
    try:
        os.killpg(ward.pid, signal.SIGKILL)
    except OSError:
        return  # no such group: it has moved to another one


def _signal(pidfd: int, number: int) -> bool:
    """False: the process has ended."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True
