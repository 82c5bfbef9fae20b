"""What every duty needs to know: who we are, what the main loop last published, and the way back to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dtq_child.connection import REPLY_TIMEOUT_S, Link
from dtq_child.keys import Keys
from dtq_child.row import COUNTERS, Counters
from dtq_child.scoreboard import Scoreboard
from dtq_child.scripts import Constants, Scripts
from dtq_child.settings import Settings
from dtq_supervisor.duties import STALE_S
from dtq_supervisor.inbox import Inbox
from dtq_supervisor.snapshot import Snapshot
from dtq_supervisor.troubles import Troubles

SLOW_REPLY_S = 1.0
"""A connection that answers later than this is not whole: what others told the server may be as late."""
SILENCE_S = 2.0
"""The reaper alone calls more than once in this time. Whoever did not has stood still, and so perhaps have
others: machines are suspended together."""


class Life(NamedTuple):
    """One child that exists, or was asked for. The row is this life's only while it says `life` itself."""

    row: int
    slot: int
    life: int
    consumer: str


class Shown(NamedTuple):
    """The stacks of one child as they went into the log; empty if it did not show them. `at`: monotonic."""

    life: int
    at: float
    text: str


@dataclass(slots=True)
class Published:
    """What the main loop tells the duties. Each field is replaced whole: readers see the old or the new."""

    lives: tuple[Life, ...] = ()
    at_work: int = 0
    """Children that may execute."""
    procs: int = 0
    """Children that there are to be; 0: as many as at the start."""
    task_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    generation: int = 0
    reload: str = ""
    """How the last reload has ended, JSON."""
    past: Counters = field(default_factory=Counters)
    """What the lives that have ended had counted."""
    replaced: Mapping[str, int] = field(default_factory=dict)
    """Children that others took the place of, by reason."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    shown: Mapping[int, Shown] = field(default_factory=dict)
    """The last stacks by slot."""


def summed(several: Iterable[Counters]) -> Counters:
    total = dict.fromkeys(COUNTERS, 0)
    for counters in several:
        for name in COUNTERS:
            total[name] += getattr(counters, name)
    return Counters(**total)


class MakeLink(Protocol):
    """A new link, named so in the server's list of clients."""

    def __call__(self, name: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Link: ...


class RedisPulse:
    """What the calls of all duties say about the connection as a whole. Thread-safe; monotonic seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ok_since = self._whole_since = self._last = 0.0
        self.errors = 0

    def success(self, sent: float, received: float) -> None:
        with self._lock:
            self._ok_since = self._ok_since or received
            late, silent = received - sent > SLOW_REPLY_S, sent - self._last > SILENCE_S
            if not self._whole_since or late or silent:
                self._whole_since = received
            self._last = max(self._last, received)

    def failure(self) -> None:
        with self._lock:
            self.errors += 1
            self._ok_since = self._whole_since = 0.0

    def ok_since(self) -> float:
        """Since when every call has succeeded; 0.0 while the last one failed, or there was none."""
        with self._lock:
            return self._ok_since

    def heard_at(self) -> float:
        """When the last reply came; 0.0 before the first."""
        with self._lock:
            return self._last

    def whole_since(self, now: float) -> float:
        """Since when every call has succeeded without delay, and none was long in coming (R30); 0.0 if that
        is not so now."""
        with self._lock:
            return self._whole_since if now - self._last <= SILENCE_S else 0.0


@dataclass(slots=True)
class Seat:
    """`started_at`: monotonic seconds. `settings`, `scripts` and `former_queues` are replaced by a reload."""

    settings: Settings
    procs: int
    worker_id: str
    keys: Keys
    scripts: Scripts
    scoreboard: Scoreboard
    inbox: Inbox
    redis_ok: RedisPulse
    make_link: MakeLink
    started_at: float
    published: Published = field(default_factory=Published)
    troubles: Troubles = field(default_factory=Troubles)
    former_queues: tuple[str, ...] = ()
    """Not ours since a reload. Our children, living and dead, may still have entries there."""

    def adopt(self, settings: Settings) -> None:
        """For the main thread: a reload is through. Duties follow with their next round."""
        before = {*self.settings.queues, *self.former_queues}
        self.former_queues = tuple(sorted(before - {*settings.queues}))
        self.settings, self.scripts = settings, Scripts(self.keys, Constants.of(settings))

    @property
    def queues(self) -> tuple[str, ...]:
        return self.settings.queues

    @property
    def task_types(self) -> Mapping[str, Mapping[str, Any]]:
        """Task type → what it declares, as the newest template told."""
        return self.published.task_types

    def lives(self) -> tuple[Life, ...]:
        return self.published.lives

    def concurrency(self) -> int:
        return self.published.procs or self.procs

    def generation(self) -> int:
        """Of the newest template that has imported the application; 0 before the first."""
        return self.published.generation

    def counted(self) -> Counters:
        """What all lives have counted, those that have ended included."""
        rows = [(life, self.scoreboard.read_row(life.row)) for life in self.lives()]
        living = [row.counters for life, row in rows if row is not None and row.life == life.life]
        return summed([self.published.past, *living])

    def healthy(self) -> bool:
        """The main loop ticks."""
        return time.monotonic() - self.scoreboard.stamp_value < STALE_S

    def children_claim(self) -> bool:
        """Some child of ours may take what is in the park."""
        board = self.scoreboard
        return self.published.at_work > 0 and board.claiming and not board.stopping

    def quiet(self) -> bool:
        """Claims are held (SIGTSTP), or Redis has not answered yet."""
        return not (self.scoreboard.claiming or self.scoreboard.stopping)

    def may_reap(self) -> bool:
        """Whoever cannot start a task takes none over (R30)."""
        return self.children_claim()
