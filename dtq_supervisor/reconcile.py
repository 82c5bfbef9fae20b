"""Looks for stranded work and for what the dead left behind; the leader, once a minute (R32)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from dtq_child.errors import BrokerError, BrokerUnavailable
from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.line import Line, Word
from dtq_supervisor.logs import say
from dtq_supervisor.seat import Seat
from dtq_supervisor.term import Term

EVERY_S = 60.0
UNTOUCHED_MS = 60_000
PAGE = 200
CANCELLED_MOST = 10_000
LOOK_S = 0.2


class NotLeading(Exception):
    """The lock is another's: the round ends here."""


def release_strays(line: Line, stream: str) -> int:
    """Entries of a band that were handed out and are pending for nobody are released. Returns how many.
    Raises NotLeading, BrokerError."""
    found, go_on = 0, ""
    while True:
        words: list[Word] = [line.worker_id, line.park, go_on, PAGE]
        next_id, strays = line.run("reconcile_bands", [line.keys.lock, line.bell, stream], words)
        found, go_on = found + len(strays), next_id.decode()
        if go_on == "-":
            raise NotLeading
        if not go_on:
            return found


def find_placeless(line: Line, untouched_ms: int = UNTOUCHED_MS) -> dict[str, str]:
    """Newest tasks that say they wait or run and are nowhere: task id → when its record was last written.
    Raises NotLeading, BrokerError."""
    found: dict[str, str] = {}
    rank = 0
    while True:
        words: list[Word] = [line.worker_id, rank, PAGE, untouched_ms]
        rank, flat = line.run("reconcile_records", [line.keys.lock, line.keys.recent], words)
        if rank < 0:
            raise NotLeading
        found |= {flat[at].decode(): flat[at + 1].decode() for at in range(0, len(flat), 2)}
        if not rank:
            return found


def requeue_placeless(
    line: Line, seen: Mapping[str, str], untouched_ms: int = UNTOUCHED_MS
) -> tuple[list[str], list[str]]:
    """Those that still are as they were seen get a place again: (their ids, problems). Raises NotLeading,
    BrokerError."""
    done: list[str] = []
    problems: list[str] = []
    for page in _pages(sorted(seen.items())):
        words: list[Word] = [
            line.worker_id,
            untouched_ms,
            len(page),
            *(word for pair in page for word in pair),
        ]
        number, trouble, ids = line.run("requeue_placeless", [line.keys.lock, line.keys.queues], words)
        if number < 0:
            raise NotLeading
        done += [task_id.decode() for task_id in ids]
        problems += [problem.decode("utf-8", "backslashreplace") for problem in trouble]
    return done, problems


def sweep_consumers(line: Line, stream: str) -> int:
    """Consumers of dead workers with nothing pending in a band are deleted. Returns how many.
    Raises NotLeading, BrokerError."""
    swept = 0
    while True:
        deleted = int(line.run("sweep_consumers", [line.keys.lock, stream], [line.worker_id, PAGE]))
        if deleted < 0:
            raise NotLeading
        swept += deleted
        if deleted < PAGE:
            return swept


def sweep_workers(line: Line) -> list[str]:
    """Workers whose record has ended without a farewell are forgotten. Raises NotLeading, BrokerError."""
    gone = line.run("sweep_workers", [line.keys.lock, line.keys.workers], [line.worker_id])
    if not isinstance(gone, list):
        raise NotLeading
    return [worker.decode() for worker in gone]


def sweep_cancelled(line: Line) -> int:
    """Ids of tasks that are over leave the cancelled set, and what is above its bound. Returns how many.
    Raises NotLeading, BrokerError."""
    cursor, dropped = "0", 0
    while True:
        words: list[Word] = [line.worker_id, cursor, CANCELLED_MOST]
        reply, some = line.run("sweep_cancelled", [line.keys.lock, line.keys.cancelled], words)
        cursor, dropped = reply.decode(), dropped + int(some)
        if cursor == "-":
            raise NotLeading
        if cursor == "0":
            return dropped


def all_streams(line: Line) -> list[str]:
    """The bands of every queue that was ever used, and of our own. Raises BrokerError."""
    used = {name.decode() for name in line.call("SMEMBERS", line.keys.queues)}
    return [stream for queue in sorted(used | set(line.queues)) for stream in line.keys.bands(queue)]


def _pages(pairs: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    for at in range(0, len(pairs), PAGE):
        yield pairs[at : at + PAGE]


class Reconciler(RedisDuty):
    """A first round soon after leadership began, then one a minute, in calls that are short each."""

    name = "reconcile"

    def __init__(self, seat: Seat, term: Term, every_s: float = EVERY_S) -> None:
        super().__init__(seat)
        self._term = term
        self._every_s = every_s
        self._seen: dict[str, str] = {}
        self._next = 0.0
        self.counts: Counter[str] = Counter()
        """strays, requeued, consumers, workers, cancelled."""

    def beat(self) -> float:
        now = time.monotonic()
        if not self._term.trusted(now):
            # What a former term saw is not seen twice in a row.
            self._seen = {}
            return LOOK_S
        if now < self._next:
            return min(LOOK_S * 5, self._next - now)
        self._next = now + self._every_s
        try:
            self._round()
        except NotLeading:
            self._term.doubt()
            self._seen = {}
        except BrokerUnavailable:
            self._next = now
            raise
        return LOOK_S

    def _round(self) -> None:
        for worker in sweep_workers(self.line):
            self.counts["workers"] += 1
            say("warning", "worker_stale", {"worker": worker})
        for stream in all_streams(self.line):
            self._band(stream)
        self._records()
        self.counts["cancelled"] += sweep_cancelled(self.line)

    def _band(self, stream: str) -> None:
        try:
            strays = release_strays(self.line, stream)
        except BrokerError:
            self.seat.scoreboard.park_changed()
            raise
        if strays:
            self.seat.scoreboard.park_changed()
            self.counts["strays"] += strays
            say("warning", "stranded", {"count": strays, "stream": stream})
        self.counts["consumers"] += sweep_consumers(self.line, stream)

    def _records(self) -> None:
        found = find_placeless(self.line)
        twice = {task_id: when for task_id, when in found.items() if self._seen.get(task_id) == when}
        self._seen = found
        done, problems = requeue_placeless(self.line, twice)
        for problem in problems:
            say("error", "set_aside", {"problem": problem})
        if done:
            self.counts["requeued"] += len(done)
            say("warning", "requeued", {"count": len(done)})
