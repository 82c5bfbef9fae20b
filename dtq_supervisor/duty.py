"""What all duties have in common: a line of their own, and patience while Redis is away (R14)."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import ClassVar

from dtq_child.connection import REPLY_TIMEOUT_S, Pause
from dtq_child.errors import BrokerError
from dtq_supervisor.line import Line
from dtq_supervisor.seat import Seat

UNWELL_S = 0.2


class RedisDuty(abc.ABC):
    """A thread's work: `beat` again and again until told to stop. No error of Redis ends it."""

    name: ClassVar[str]

    def __init__(self, seat: Seat, reply_timeout_s: float = REPLY_TIMEOUT_S, pause_s: float = 2.0) -> None:
        """`pause_s`: the longest pause after an error."""
        self.seat = seat
        self.line = Line.of(seat, self.name, reply_timeout_s)
        self.done = False
        """Its work is over before it is told to stop."""
        self._pause = Pause(cap_s=pause_s)

    @abc.abstractmethod
    def beat(self) -> float:
        """One round. Returns the seconds until the next; raises BrokerError."""

    def run(self, stop: threading.Event, healthy: Callable[[], bool]) -> None:
        while not stop.is_set() and not self.done:
            self.rest(stop, self.attempt() if healthy() else UNWELL_S)
        self.end()
        self.seat.troubles.idle(self.name)
        self.line.link.close()

    def end(self) -> None:  # noqa: B027 - most have nothing to do
        """The last thing the thread does."""

    def rest(self, stop: threading.Event, seconds: float) -> None:
        stop.wait(seconds)

    def attempt(self) -> float:
        """A round that may fail; seconds until the next."""
        self.line.follow(self.seat)
        last_reply = self.line.received
        try:
            wait = self.beat()
        except BrokerError as error:
            self.troubled(error)
            return self._pause.next()
        if self.line.received > last_reply:
            self._pause.reset()
            self.seat.troubles.answered(self.name, self.line.sent)
        else:
            self.seat.troubles.idle(self.name)
        return wait

    def troubled(self, error: BrokerError) -> None:
        self.seat.troubles.failed(self.name, error, self.line.sent)
