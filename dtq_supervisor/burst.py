"""`--burst`: stops the supervisor when its queues hold nothing that is undelivered or pending."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dtq_supervisor.duty import UNWELL_S, RedisDuty
from dtq_supervisor.events import Stop, StopMode
from dtq_supervisor.seat import Seat

EVERY_S = 0.2


class Burst(RedisDuty):
    """An entry is in its band until its task is settled, so bands of length 0 say that nothing is left."""

    name = "burst"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._told = False

    def run(self, stop: threading.Event, healthy: Callable[[], bool]) -> None:
        while not stop.is_set() and not self._told:
            self.rest(stop, self.attempt() if healthy() else UNWELL_S)
        self.line.link.close()

    def beat(self) -> float:
        if not any(self.line.call("XLEN", stream) for stream in self.line.streams()):
            self._told = True  # once: a second request would mean "at once"
            self.seat.inbox.put(Stop(StopMode.GRACEFUL))
        return EVERY_S
