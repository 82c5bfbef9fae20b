"""The scheduler's lock: won, renewed, given back (R31). scheduler.py and reconcile.py do a leader's work.

Every script of the leader compares the lock itself; the term here only keeps a former leader from asking."""

from __future__ import annotations

import threading
import time
from random import uniform

from dtq_child.errors import BrokerError, BrokerUnavailable
from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.line import Line
from dtq_supervisor.logs import say
from dtq_supervisor.seat import Seat
from dtq_supervisor.term import LOCK_MS, Term

RENEW_S = 3.0
STAND_S = 1.0
"""How often those that do not lead try."""
UNABLE_S = 10.0
"""A leader that cannot start a task for so long makes room for one that can."""
_LOOK_S = 0.1


def lead(line: Line) -> str:
    """won | renewed | held (by another). Raises BrokerError."""
    return bytes(line.run("lead", [line.keys.lock], [line.worker_id, LOCK_MS])[0]).decode()


def resign(line: Line) -> bool:
    """False: the lock was not ours. Raises BrokerError."""
    return bool(line.run("resign", [line.keys.lock], [line.worker_id]))


class Leader(RedisDuty):
    """Stands for leadership while a child of ours may claim, and resigns at the stop."""

    name = "leader"

    def __init__(self, seat: Seat, term: Term) -> None:
        super().__init__(seat)
        self.term = term
        self._able_at = 0.0

    def beat(self) -> float:
        now = time.monotonic()
        if self.seat.may_reap():
            self._able_at = now
        elif self.seat.scoreboard.stopping or now - self._able_at > UNABLE_S:
            self._resign("it claims nothing")
            return _LOOK_S
        word = lead(self.line)
        if word != "held":
            if self.term.confirmed(self.line.sent):
                say("info", "leading", {"term": self.term.number})
            return RENEW_S
        if self.term.ended():
            say("warning", "lead_lost", {"reason": "another worker has the lock"})
        return uniform(0.7, 1.0) * STAND_S

    def rest(self, stop: threading.Event, seconds: float) -> None:
        """Until the time is over, or the pool stops: then the lock is free at once. Or until a script did not
        find us leading: it is won again at once if nobody has it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not stop.is_set():
            if self.term.doubted() or (self.seat.scoreboard.stopping and self.term.trusted(time.monotonic())):
                return
            stop.wait(min(_LOOK_S, max(0.0, end - time.monotonic())))

    def end(self) -> None:
        try:
            self._resign("it stops")
        except BrokerError as error:
            # The lock ends by itself in a few seconds.
            self.troubled(error)

    def _resign(self, reason: str) -> None:
        # First for ourselves: no duty asks as a leader any more, whatever becomes of the call.
        if self.term.ended():
            say("info", "lead_lost", {"reason": reason})
            self._give_back()

    def _give_back(self) -> None:
        """Tries once more after an error: a lost try would keep the lock from all others for seconds."""
        try:
            resign(self.line)
        except BrokerUnavailable:
            resign(self.line)
