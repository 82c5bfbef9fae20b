"""Looks for children that stay idle while their queues hold entries, and has them replaced (R37)."""

from __future__ import annotations

import time
from typing import NamedTuple

from dtq_child.errors import BrokerError
from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.events import StayedIdle
from dtq_supervisor.idleness import IDLE_MOST_S, Idleness, Idler, Look
from dtq_supervisor.line import Line
from dtq_supervisor.seat import Seat

EVERY_S = 2.0


class Waiting(NamedTuple):
    """`band`: where the oldest entry waits that no child was given, "" if none does."""

    band: str
    age_ms: int
    paused: tuple[str, ...]


def look(line: Line) -> Waiting:
    """Raises BrokerError."""
    queues, keys = line.queues, line.keys
    flags = [keys.paused(queue) for queue in queues]
    bands = [band for queue in queues for band in keys.bands(queue)]
    band, age_ms, *paused = line.run("waiting", [*flags, *bands], [len(queues)])
    return Waiting(band.decode(), int(age_ms), tuple(queues[int(number) - 1] for number in paused))


class Idlers(RedisDuty):
    """One cheap look every two seconds. What it found is replaced whole, for other threads to read."""

    name = "idlers"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        # A child that missed a bell looks by itself after a block time.
        self._idleness = Idleness(max(IDLE_MOST_S, 3 * seat.settings.block_ms / 1000))
        self.found: tuple[Idler, ...] = ()
        self.paused: tuple[str, ...] | None = None
        """None: not known at this moment."""

    def beat(self) -> float:
        waiting = look(self.line)
        self.paused = waiting.paused
        now, ok_since = time.monotonic(), self.seat.redis_ok.ok_since()
        snapshot = self.seat.published.snapshot
        self.found = self._idleness.look(Look(now, waiting.band, waiting.age_ms, ok_since), snapshot)
        for idler in self.found:
            if idler.replace:
                self.seat.inbox.put(StayedIdle(idler.slot, idler.life, idler.seq))
        return EVERY_S

    def troubled(self, error: BrokerError) -> None:
        self._idleness.forget()
        self.found, self.paused = (), None
        super().troubled(error)
