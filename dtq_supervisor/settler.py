"""Ends the leases of dead and killed children: one script a death, tried until Redis answers (R28)."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from random import random

from dtq_child import oddities
from dtq_child.errors import BrokerUnavailable
from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.events import DeathSettled, Fact, Level
from dtq_supervisor.fate import fate
from dtq_supervisor.judgement import Death, judge
from dtq_supervisor.line import Line, counts_of, pairs_of
from dtq_supervisor.logs import say
from dtq_supervisor.seat import Seat

__all__ = ["Death", "Settled", "Settler", "settle_dead"]

IDLE_S = 0.2
_CALLS_MOST = 50
"""Calls for one death; each ends up to 256 entries, and a child holds 17."""


@dataclass(frozen=True, slots=True)
class Settled:
    """`told`: (task id, what became of it)."""

    told: list[tuple[str, str]]
    counts: dict[str, int]


def settle_dead(line: Line, death: Death, to_anyone: bool, random01: float) -> Settled:
    """Ends everything that is pending for the dead child and forgets its consumer; may be repeated.
    `to_anyone`: none of our children may claim, so what it held goes to others. Raises BrokerError."""
    head = [death.consumer, line.worker_id, line.park, "1" if to_anyone else "0"]
    words = judge(death, random01).words(death, random01)
    told: list[tuple[str, str]] = []
    counts: Counter[str] = Counter()
    for _ in range(_CALLS_MOST):
        left, some, counted = line.run(
            "settle_dead", [line.bell, *line.streams_of_children()], [*head, *words]
        )
        told += pairs_of(some)
        counts.update(counts_of(counted))
        if not left:
            break
    return Settled(told, dict(counts))


class Settler(RedisDuty):
    """`put` never waits; deaths are settled in order, by a thread of its own."""

    name = "settler"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._changed = threading.Condition()
        self._deaths: deque[Death] = deque()

    def put(self, death: Death) -> None:
        with self._changed:
            self._deaths.append(replace(death, at=death.at or time.monotonic()))
            self._changed.notify_all()

    def pending(self) -> int:
        """Deaths not settled yet."""
        with self._changed:
            return len(self._deaths)

    def unsettled(self) -> set[str]:
        """The consumers of those: what is pending for them is no stray."""
        with self._changed:
            return {death.consumer for death in self._deaths}

    def flush(self, deadline: float) -> bool:
        """Waits until every death is settled, at most until `deadline` (monotonic). False: some are not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._deaths, max(0.0, deadline - time.monotonic()))

    def beat(self) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._deaths), IDLE_S):
                return 0.0
            death = self._deaths[0]
        self.line.follow(self.seat)  # while we waited
        random01 = random()
        self._tell(death, self._settle(death, random01), random01)
        with self._changed:
            self._deaths.remove(death)
            self._changed.notify_all()
        self.seat.inbox.put(DeathSettled(death.slot, death.life))
        return 0.0

    def _settle(self, death: Death, random01: float) -> Settled:
        board = self.seat.scoreboard
        try:
            return settle_dead(self.line, death, not self.seat.children_claim(), random01)
        except BrokerUnavailable:
            raise
        except Exception:
            # Redis answers and objects to this one, or we cannot word it: the others do not wait for it.
            with self._changed:
                self._deaths.rotate(-1)
            raise
        finally:
            # Answered or not: what it may have parked is looked for.
            board.park_changed()

    def _tell(self, death: Death, settled: Settled, random01: float) -> None:
        judgement = judge(death, random01)
        for task_id, what in settled.told:
            level: Level = "info" if what == "released" else "warning"
            facts: dict[str, Fact] = {"slot": death.slot, "life": death.life, "task_id": task_id}
            # Or the line would name its slot and our own pid.
            facts["pid"] = death.row.pid if death.row else None
            if judgement.named and judgement.named.task_id == task_id:
                facts["queue"] = self.line.keys.split_stream(judgement.named.stream)[0]
            say(level, "settled", facts | fate(task_id, what, judgement, random01))
        for odd in oddities.words(settled.counts):
            say("warning", "odd", {"words": odd})
