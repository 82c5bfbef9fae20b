"""One beat: the leases of all that our children have in hand, then the record of ourselves (R29)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from dtq_child.connection import REPLY_TIMEOUT_S
from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.holdings import Child, Holding, children
from dtq_supervisor.line import Line, Word
from dtq_supervisor.presence import announce, fields_of, say_farewell
from dtq_supervisor.revocation import revoke
from dtq_supervisor.seat import Seat

CHUNK = 200
"""Leases renewed by one call: a script must not keep the server from others for long."""
_LOOK_S = 0.1


def renew(line: Line, holdings: Sequence[Holding]) -> list[tuple[Holding, str]]:
    """What each has become: ours (renewed) | settled | cancelled | superseded | gone. Raises BrokerError."""
    answers: list[tuple[Holding, str]] = []
    for at in range(0, len(holdings), CHUNK):
        chunk = holdings[at : at + CHUNK]
        keys = [line.keys.task(h.task_id) if h.task_id else line.keys.nil for h in chunk]
        words: list[Word] = [len(chunk), *(word for holding in chunk for word in holding.words())]
        reply = line.run("heartbeat", keys, words)
        answers += [(holding, word.decode()) for holding, word in zip(chunk, reply, strict=True)]
    return answers


class Heartbeat(RedisDuty):
    """Beats each interval, at once after an error was overcome, and when told to."""

    name = "heartbeat"

    def __init__(self, seat: Seat) -> None:
        interval = seat.settings.heartbeat_interval_s
        # An outage ends, and other supervisors believe their own connection after an interval and a second
        # (R30). Our first beat comes before, whatever a try that began in the outage is still waiting for.
        super().__init__(seat, min(REPLY_TIMEOUT_S, 0.5 + interval / 2), min(2.0, interval / 4))
        self._interval = interval
        self._ttl_ms = max(1, round(3 * interval * 1000))
        self._woken = threading.Event()
        self.last_success = 0.0
        """When the last whole beat was confirmed, monotonic seconds; 0.0 before the first."""
        self.answers: Counter[str] = Counter()

    def send_now(self) -> None:
        """Any thread: the next beat is due."""
        self._woken.set()

    def rest(self, stop: threading.Event, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not stop.is_set() and time.monotonic() < end:
            if self._woken.wait(min(_LOOK_S, max(0.0, end - time.monotonic()))):
                return

    def beat(self) -> float:
        self._woken.clear()
        begun = time.monotonic()
        ours = children(self.seat)
        self._renew(begun, ours)
        announce(self.line, self._ttl_ms, self.seat, fields_of(self.seat, ours))
        self.last_success = time.monotonic()
        return max(0.0, begun + self._interval - time.monotonic())

    def _renew(self, begun: float, ours: Sequence[Child]) -> None:
        answers = renew(self.line, [holding for child in ours for holding in child.holdings()])
        self.answers.update(word for _, word in answers)
        for holding, word in answers:
            if word == "ours" and holding.seq:
                # The time before the rows were read: whatever a row executes meanwhile was claimed later.
                self.seat.scoreboard.renewed(holding.index, begun)
        revoke(self.seat, answers)

    def farewell(self) -> int:
        """The very last call, from any thread once ours has ended: our record goes, and our consumers with
        nothing pending. Returns how many of those; raises BrokerError."""
        return say_farewell(self.line)
