"""What all duties have in common: a line of their own, and patience while Redis is away (R14)."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from dtq_child.connection import REPLY_TIMEOUT_S, Pause
from dtq_child.errors import BrokerError, BrokerUnavailable
from dtq_supervisor.line import Line
from dtq_supervisor.logs import say
from dtq_supervisor.seat import Seat

REMIND_S = 5.0
UNWELL_S = 0.2


class RedisDuty(abc.ABC):
    """A thread's work: `beat` again and again until told to stop. No error of Redis ends it."""

    name: ClassVar[str]

    def __init__(self, seat: Seat, reply_timeout_s: float = REPLY_TIMEOUT_S, pause_s: float = 2.0) -> None:
        """`pause_s`: the longest pause after an error."""
        self.seat = seat
        self.line = Line.of(seat, self.name, reply_timeout_s)
        self._pause = Pause(cap_s=pause_s)
        self._outage_since = 0.0
        self._quiet_until = 0.0
        self._outage_told = False

    @abc.abstractmethod
    def beat(self) -> float:
        """One round. Returns the seconds until the next; raises BrokerError."""

    def run(self, stop: threading.Event, healthy: Callable[[], bool]) -> None:
        while not stop.is_set():
            self.rest(stop, self.attempt() if healthy() else UNWELL_S)
        self.end()
        self.line.link.close()

    def end(self) -> None:  # noqa: B027 - most have nothing to do
        """The last thing the thread does."""

    def rest(self, stop: threading.Event, seconds: float) -> None:
        stop.wait(seconds)

    def attempt(self) -> float:
        """A round that may fail; seconds until the next."""
        try:
            wait = self.beat()
        except BrokerError as error:
            self.troubled(error)
            return self._pause.next()
        self.recovered()
        return wait

    def troubled(self, error: BrokerError) -> None:
        """Told when it begins and every few seconds while it lasts; of outages in quick succession not each
        is."""
        now = time.monotonic()
        self._outage_since = self._outage_since or now
        if now >= self._quiet_until:
            self._quiet_until, self._outage_told = now + REMIND_S, True
            key = "redis_away" if isinstance(error, BrokerUnavailable) else "redis_refuses"
            say("warning", key, {"duty": self.name, "reason": str(error)})

    def recovered(self) -> None:
        self._pause.reset()
        if self._outage_told:
            seconds = time.monotonic() - self._outage_since
            say("warning", "redis_back", {"duty": self.name, "seconds": seconds})
        self._outage_since, self._outage_told = 0.0, False
