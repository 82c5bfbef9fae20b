"""What the log says of calls that Redis does not do: when it begins, rarely while it lasts, when it is over.

Nine duties meet the same outage, each in its own thread. It is told once, of the supervisor as a whole, and
is over when every duty that had failed has been answered or has nothing to ask any more. What Redis answers
and refuses is told for each duty, for their reasons differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dtq_child.errors import BrokerError, BrokerUnavailable
from dtq_supervisor.events import Fact
from dtq_supervisor.logs import say

OUTAGE = ""
"""The trouble of all; others have the name of their duty."""
REMIND_S = (5.0, 10.0, 15.0)
"""From each line about an outage to the next; then LATER_S. That of a refusal is repeated after LATER_S."""
LATER_S = 30.0
QUIET_S = 5.0
"""Of troubles in quick succession not each is told."""


@dataclass(slots=True)
class Trouble:
    """`duties`: those whose last call failed. `heard`: Redis has answered a call that was sent after the last
    failure."""

    since: float
    next_line: float
    failed_at: float = 0.0
    heard: bool = False
    lines: int = 0
    duties: set[str] = field(default_factory=set)

    def fail(self, duty: str, now: float) -> None:
        self.duties.add(duty)
        self.failed_at, self.heard = now, False

    def answer(self, duty: str, sent: float) -> None:
        self.duties.discard(duty)
        self.heard = self.heard or sent > self.failed_at


class Troubles:
    """Thread-safe; monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._now: dict[str, Trouble] = {}
        self._quiet_until: dict[str, float] = {}
        self._last_reply = 0.0
        self._late: set[str] = set()

    def failed(self, duty: str, error: BrokerError, sent: float) -> None:
        """The duty's call, sent then, was not answered, or by an error."""
        with self._lock:
            now, reason = self._clock(), str(error)
            say("debug", "call_failed", {"duty": duty, "reason": reason})
            if not isinstance(error, BrokerUnavailable):
                self._heard(OUTAGE, duty, sent, now)
                self._fail(duty, duty, reason, now)
            elif not self._is_late(duty, sent):
                self._fail(OUTAGE, duty, reason, now)

    def answered(self, duty: str, sent: float) -> None:
        """Redis did what the duty asked last, at `sent`."""
        with self._lock:
            now = self._clock()
            self._last_reply = now
            self._late.discard(duty)
            for name in (OUTAGE, duty):
                self._heard(name, duty, sent, now)

    def idle(self, duty: str) -> None:
        """It had nothing to ask: whether Redis answers is for the others to find out."""
        with self._lock:
            if OUTAGE in self._now:
                self._now[OUTAGE].duties.discard(duty)
                self._end(OUTAGE, self._clock())

    def _is_late(self, duty: str, sent: float) -> bool:
        """Others were answered since it was sent: an old connection that has died, and the next call will be
        answered, too. The second time in a row it says something."""
        if sent >= self._last_reply or duty in self._late or OUTAGE in self._now:
            return False
        self._late.add(duty)
        return True

    def _fail(self, name: str, duty: str, reason: str, now: float) -> None:
        trouble = self._now.setdefault(name, Trouble(now, self._quiet_until.get(name, 0.0)))
        trouble.fail(duty, now)
        if now < trouble.next_line:
            return
        facts: dict[str, Fact] = {"duty": duty, "reason": reason, "seconds": now - trouble.since}
        if name:
            key, gap = "redis_refuses", LATER_S
        else:
            key = "redis_still_away" if trouble.lines else "redis_away"
            gap = REMIND_S[trouble.lines] if trouble.lines < len(REMIND_S) else LATER_S
        say("warning", key, facts)
        trouble.lines += 1
        trouble.next_line, self._quiet_until[name] = now + gap, now + QUIET_S

    def _heard(self, name: str, duty: str, sent: float, now: float) -> None:
        if name in self._now:
            self._now[name].answer(duty, sent)
            self._end(name, now)

    def _end(self, name: str, now: float) -> None:
        trouble = self._now[name]
        if trouble.duties or not trouble.heard:
            return
        del self._now[name]
        if trouble.lines:
            facts: dict[str, Fact] = {"duty": name, "seconds": now - trouble.since}
            say("warning", "redis_accepts" if name else "redis_back", facts)
