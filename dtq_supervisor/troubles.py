"""What the log says of calls that Redis does not do: when it begins, rarely while it lasts, when it is over.

Nine duties meet the same outage, each in its own thread. It is told once, of the supervisor as a whole, and
is over when every duty that had failed has been answered or has nothing to ask any more. One failure is none:
a connection that nobody used may have died long ago, and the next call opens another. What Redis answers and
refuses is told for each duty, for their reasons differ.
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
        self._doubts: dict[str, float] = {}
        """Duties that have failed once, without an outage, and when."""
        self._replied_at = 0.0

    def failed(self, duty: str, error: BrokerError, sent: float) -> None:
        """The duty's call, sent then, was not answered, or by an error."""
        with self._lock:
            now, reason = self._clock(), str(error)
            say("debug", "call_failed", {"duty": duty, "reason": reason})
            if not isinstance(error, BrokerUnavailable):
                self._replied(duty, sent, now)
                self._fail(duty, duty, reason, now)
            elif OUTAGE in self._now or self._is_outage(duty, now):
                self._fail(OUTAGE, duty, reason, now)

    def answered(self, duty: str, sent: float) -> None:
        """Redis did what the duty asked last, at `sent`."""
        with self._lock:
            now = self._clock()
            self._replied(duty, sent, now)
            self._heard(duty, duty, sent, now)

    def idle(self, duty: str) -> None:
        """It had nothing to ask: whether Redis answers is for the others to find out."""
        with self._lock:
            self._doubts.pop(duty, None)
            if OUTAGE in self._now:
                self._now[OUTAGE].duties.discard(duty)
                self._end(OUTAGE, self._clock())

    def redis_away(self) -> bool:
        """An outage lasts."""
        with self._lock:
            return OUTAGE in self._now

    def _is_outage(self, duty: str, now: float) -> bool:
        """The second failure of one duty, or of two while nobody was answered. If so, it begins here."""
        before = [at for who, at in self._doubts.items() if who == duty or at >= self._replied_at]
        self._doubts.setdefault(duty, now)
        if not before:
            return False
        quiet_until = self._quiet_until.get(OUTAGE, 0.0)
        self._now[OUTAGE] = Trouble(min(before), quiet_until, duties=set(self._doubts))
        self._doubts.clear()
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

    def _replied(self, duty: str, sent: float, now: float) -> None:
        self._replied_at = now
        self._doubts.pop(duty, None)
        self._heard(OUTAGE, duty, sent, now)

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
