"""How the duty threads talk to the main loop: they put events, and the loop wakes."""

from __future__ import annotations

import os
from collections import deque

from dtq_supervisor.events import Event


class Inbox:
    """Any thread puts, the main loop takes. Neither ever waits."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when something was put."""
        return self._bell

    def put(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._bell, 1)

    def take(self) -> list[Event]:
        """All that was put, oldest first."""
        try:
            os.eventfd_read(self._bell)  # first, so that what is put meanwhile rings again
        except BlockingIOError:
            return []
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self) -> None:
        os.close(self._bell)
