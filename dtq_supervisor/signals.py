"""Numbers to events. A handler leaves a note and nothing else; the loop acts on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import FrameType

from dtq_supervisor.events import Event, ReloadAsked, StacksAsked, Stop, StopMode

MEANINGS: Mapping[signal.Signals, Event] = {
    signal.SIGTERM: Stop(StopMode.GRACEFUL),
    signal.SIGINT: Stop(StopMode.GRACEFUL),
    signal.SIGQUIT: Stop(StopMode.IMMEDIATE),
    signal.SIGHUP: ReloadAsked(),
    signal.SIGUSR2: StacksAsked(),
}
MEANINGLESS = (signal.SIGUSR1, signal.SIGCHLD, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
"""Handled, so that they neither end nor stop this process, and wake the loop. Never SIG_IGN: what we start
would inherit that."""


class SignalNotes:
    """The signals that came since they were last taken. Equal ones are one; none is lost."""

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
        # The pipe only wakes the loop. What came is in the set, so a full pipe loses nothing.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def take(self) -> list[int]:
        """The numbers, those that mean something last."""
        try:
            while len(os.read(self._reader, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass  # nothing there
        noted, self._noted = self._noted, set()
        return sorted(noted, key=lambda number: number in MEANINGS)

    def restore(self) -> None:
        """Gives the handlers back, and closes."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.add(number)
