"""Promotes what is due: the leader moves it from the schedule to its band, in two steps (R31)."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.line import Line, counts_of
from dtq_supervisor.logs import say
from dtq_supervisor.seat import Seat
from dtq_supervisor.term import Term

BATCH = 200
LOOK_S = 0.2
"""The longest sleep of a leader: a task delayed by less is late by no more than this. Asked instead of being
told of new ones, for a subscription would bring every event of the fleet."""


@dataclass(frozen=True, slots=True)
class Due:
    """`moved`: due members that are claimed now; `wait_ms` until the next is due, None if there is none."""

    moved: int
    wait_ms: int | None
    claimed: int


@dataclass(frozen=True, slots=True)
class Added:
    """`looked`: claims that were worked on; `claimed`: how many are left."""

    looked: int
    promoted: int
    claimed: int
    problems: list[str]
    counts: dict[str, int]


def claim_due(line: Line, most: int = BATCH) -> Due | None:
    """Step 1. None: we do not lead. Raises BrokerError."""
    keys = line.keys
    places = [keys.lock, keys.schedule, keys.claimed]
    moved, wait, claimed = line.run("promote_claim", places, [line.worker_id, most])
    return None if moved < 0 else Due(int(moved), int(wait) if wait else None, int(claimed))


def add_claimed(line: Line, most: int = BATCH) -> Added | None:
    """Step 2. None: we do not lead. Raises BrokerError."""
    keys = line.keys
    places = [keys.lock, keys.claimed, keys.schedule, keys.cancelled, keys.queues]
    looked, promoted, claimed, problems, counts = line.run("promote_add", places, [line.worker_id, most])
    if looked < 0:
        return None
    told = [problem.decode("utf-8", "backslashreplace") for problem in problems]
    return Added(int(looked), int(promoted), int(claimed), told, counts_of(counts))


class Scheduler(RedisDuty):
    """Sleeps until the next is due while we lead, and does nothing while we do not."""

    name = "scheduler"

    def __init__(self, seat: Seat, term: Term) -> None:
        super().__init__(seat)
        self._term = term
        self.counts: Counter[str] = Counter()
        """promoted, expired, cancelled, set_aside, recordless, not_due."""

    def beat(self) -> float:
        if not self._term.trusted(time.monotonic()):
            return LOOK_S
        due = claim_due(self.line)
        if due is None:
            self._term.doubt()
            return LOOK_S
        added = add_claimed(self.line) if due.claimed else None
        if added is not None:
            self.counts.update(added.counts)
            for problem in added.problems:
                say("error", "set_aside", {"problem": problem})
        if due.moved == BATCH or (added is not None and added.claimed):
            return 0.0
        return LOOK_S if due.wait_ms is None else min(LOOK_S, due.wait_ms / 1000)
