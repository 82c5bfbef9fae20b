"""Numbers to events. A handler leaves a note and nothing else; the loop acts on it.

Equal signals that are pending at the same time are one to the kernel, and a SIGCONT that is sent while a
SIGTSTP, SIGTTIN or SIGTTOU is pending takes that away, as these take a pending SIGCONT. What is delivered is
noted in its order, each time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import FrameType
from typing import NamedTuple

from dtq_supervisor.events import (
    Event,
    QuietAsked,
    ReloadAsked,
    ResizeAsked,
    ResumeAsked,
    StacksAsked,
    Stop,
    StopMode,
)

MEANINGS: Mapping[signal.Signals, Event] = {
    signal.SIGTERM: Stop(StopMode.GRACEFUL),
    signal.SIGINT: Stop(StopMode.GRACEFUL),
    signal.SIGQUIT: Stop(StopMode.IMMEDIATE),
    signal.SIGHUP: ReloadAsked(),
    signal.SIGTTIN: ResizeAsked(1),
    signal.SIGTTOU: ResizeAsked(-1),
    signal.SIGTSTP: QuietAsked(),
    signal.SIGCONT: ResumeAsked(),
    signal.SIGUSR2: StacksAsked(),
}
MEANINGLESS = (signal.SIGUSR1, signal.SIGCHLD)
"""Handled, so that they do not end this process, and wake the loop. Never SIG_IGN: what we start would
inherit that."""
COUNTED = frozenset({signal.SIGTTIN, signal.SIGTTOU})
"""Each one counts; of all others several are one."""
PIPE_BYTES = 65536


class Came(NamedTuple):
    """A signal, and how often it came in a row (1 for those that are not counted)."""

    number: int
    times: int


class SignalNotes:
    """The signals that came since they were last taken, in their order."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, object] = {}

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._reader

    def install(self) -> None:
        """For the main thread."""
        for number in (*MEANINGS, *MEANINGLESS):
            self._before[number] = signal.signal(number, self._note)
        # C code writes a byte for each signal at the moment of its delivery. Python's own handlers run later,
        # once for several, and in the order of their numbers: a CONT would come before an earlier TSTP.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def take(self) -> list[Came]:
        came = list(self._read())
        if len(came) >= PIPE_BYTES:  # what found the pipe full is in the set
            came += self._noted.difference(came)
        self._noted.clear()
        return in_order(came)

    def restore(self) -> None:
        """Gives the handlers back, and closes."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

    def _read(self) -> bytes:
        read = b""
        try:
            while some := os.read(self._reader, PIPE_BYTES):
                read += some
        except BlockingIOError:
            pass  # nothing there
        return read

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.add(number)


def in_order(numbers: list[int]) -> list[Came]:
    """Those that count in runs; the others once, where they came last."""
    last = {number: at for at, number in enumerate(numbers)}
    came: list[Came] = []
    for at, number in enumerate(numbers):
        if number not in COUNTED:
            if last[number] == at:
                came.append(Came(number, 1))
        elif came and came[-1].number == number:
            came[-1] = Came(number, came[-1].times + 1)
        else:
            came.append(Came(number, 1))
    return came
