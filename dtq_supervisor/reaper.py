"""Takes over the entries of supervisors that are not heard of, into our park (R30)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import random, uniform

from dtq_child import oddities
from dtq_child.errors import BrokerError
from dtq_supervisor import fate, strays
from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.holdings import children
from dtq_supervisor.judgement import crash_delays
from dtq_supervisor.line import Line, Word, counts_of, pairs_of
from dtq_supervisor.logs import say
from dtq_supervisor.seat import Seat
from dtq_supervisor.server_clock import ServerClock

EVERY_S = 1.0
HURRY_S = 0.05
"""While the park is full and more waits elsewhere; doubled as long as nothing is taken."""
REPEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reaped:
    """`startable`: entries in our park that a child could start, before what was `taken`. `more`: some were
    left for want of room. `go_on`: (stream number, id) where this call stopped looking, None at the end."""

    server_ms: int
    startable: int
    taken: int
    more: bool
    go_on: tuple[int, str] | None
    told: list[tuple[str, str]]
    problems: list[str]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Terms:
    """On which a reaper works. `window`: server times, ms, in which a running task may be judged (None: none
    may). `delays`: ms after the 2nd, 3rd … crash."""

    visibility_ms: int
    room: int
    window: tuple[int, int] | None
    delays: Sequence[int]


def reap(line: Line, terms: Terms, go_on: tuple[int, str] = (1, "")) -> Reaped:
    """One call, from where the last one stopped. Raises BrokerError."""
    queues = line.queues
    keys = [line.bell, *(line.keys.paused(queue) for queue in queues), *line.streams()]
    window: Sequence[Word] = terms.window or ("", "")
    words: list[Word] = [line.worker_id, line.park, terms.visibility_ms, terms.room, *window]
    words += [len(queues), *queues, *go_on, *terms.delays]
    server_ms, startable, taken, more, stream, entry, told, problems, counts = line.run("reap", keys, words)
    return Reaped(
        server_ms=int(server_ms),
        startable=int(startable),
        taken=int(taken),
        more=bool(more),
        go_on=(int(stream), entry.decode()) if stream else None,
        told=pairs_of(told),
        problems=[problem.decode("utf-8", "backslashreplace") for problem in problems],
        counts=counts_of(counts),
    )


def open_park(line: Line) -> int:
    """Whatever lies in our park is idle past every timeout from now on. Returns how many entries were not
    already. Raises BrokerError."""
    return int(line.run("open_park", line.streams(), [line.park]))


class Reaper(RedisDuty):
    """Looks once a second, and again at once while there is more than the park has room for.

    `unsettled` tells the consumers of children whose death is still to be settled."""

    name = "reaper"

    def __init__(self, seat: Seat, unsettled: Callable[[], set[str]]) -> None:
        super().__init__(seat)
        self._unsettled = unsettled
        settings = seat.settings
        self._visibility_ms = round(settings.visibility_timeout_s * 1000)
        self._proof_s = settings.heartbeat_interval_s + 1.0
        self._clock = ServerClock(min(1000, self._visibility_ms // 2))
        self._hurry_s = HURRY_S
        self._suspects: set[strays.Pending] = set()
        self._next_strays = 0.0
        self._said: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        """Of all rounds: taken, parked, scheduled, dead, absorbed, bodies_gone, strays …"""

    def beat(self) -> float:
        wait = self._reap() if self.seat.may_reap() else EVERY_S
        if self.seat.quiet():
            self._open_park()
        if time.monotonic() >= self._next_strays:
            self._next_strays = time.monotonic() + EVERY_S
            self._look_for_strays()
        return wait * uniform(0.8, 1.2)

    def _reap(self) -> float:
        go_on: tuple[int, str] | None = (1, "")
        taken, more = 0, False
        while go_on is not None:
            reaped = self._call(go_on)
            taken, more, go_on = taken + reaped.taken, more or reaped.more, reaped.go_on
        if not more:
            return EVERY_S
        self._hurry_s = HURRY_S if taken else min(EVERY_S, 2 * self._hurry_s)
        return self._hurry_s

    def _call(self, go_on: tuple[int, str]) -> Reaped:
        room = 2 * self.seat.concurrency()
        terms = Terms(self._visibility_ms, room, self._window(), crash_delays(random()))
        try:
            reaped = reap(self.line, terms, go_on)
        except BrokerError:
            self.seat.scoreboard.park_changed()
            raise
        if reaped.startable + reaped.taken:
            self.seat.scoreboard.park_changed()
        self._note(reaped)
        return reaped

    def _window(self) -> tuple[int, int] | None:
        """None unless our connection has been whole and the server's clock steady for long enough: else what
        looks like another's silence may be our own deafness."""
        now = time.monotonic()
        whole_since = self.seat.redis_ok.whole_since(now)
        if not whole_since or now - max(whole_since, self._clock.steady_since) < self._proof_s:
            return None
        return self._clock.window(now)

    def _note(self, reaped: Reaped) -> None:
        jump_ms = self._clock.observe(self.line.sent, self.line.received, reaped.server_ms)
        if jump_ms:
            say("warning", "clock_jumped", {"seconds": jump_ms / 1000})
        self.counts.update(reaped.counts)
        for task_id, what in reaped.told:
            say(
                "info" if what == "taken" else "warning",
                "reaped",
                {"task_id": task_id, "what": what, "fate": fate.OF_OTHERS.get(what, what)},
            )
        for odd in oddities.words(reaped.counts):
            say("warning", "odd", {"words": odd})
        now = time.monotonic()
        for problem in reaped.problems:
            if now >= self._said.get(problem, 0.0):
                self._said[problem] = now + REPEAT_S
                say("error", "band_problem", {"problem": problem})

    def _open_park(self) -> None:
        """Ours claim nothing: what waits for them is anybody's."""
        opened = open_park(self.line)
        if opened:
            self.counts["opened"] += opened
            say("info", "park_opened", {"count": opened})

    def _look_for_strays(self) -> None:
        before = children(self.seat)
        found = strays.list_unnamed(self.line, strays.named_by(before))
        now = strays.suspects(found, before, children(self.seat), self._unsettled())
        certain, self._suspects = now & self._suspects, now
        if certain:
            try:
                released = strays.release(self.line, sorted(certain, key=str))
            finally:
                self.seat.scoreboard.park_changed()
            self.counts["strays"] += released
            say("warning", "strays", {"count": released})
