"""Which children stay idle although their queues hold entries for them (R37). Pure.

An idle child is healthy, and so is an entry that waits while all are busy. Both together, for as long as no
claim, bell or pause can explain, are a child that is stopped, stuck, or deaf to Redis without knowing it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtq_supervisor.slot import State
from dtq_supervisor.snapshot import SlotView, Snapshot

IDLE_MOST_S = 10.0
WAITING_MS = 1000
"""An entry that is younger may be on its way to a child."""
GAP_S = 6.0
"""Between two looks: nobody knows what was in between, so all is looked at anew."""
SECOND_LOOK_S = 1.0
"""From the finding to the replacement."""
FRUITLESS_MOST = 5
"""A successor that stays idle, too, is given twice the time, and so on as often: another child is no cure."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the queues, at `at` (monotonic seconds). `band`: where the oldest entry waits that nobody
    was given, of the queues that are not paused; "" if none does. `ok_since`: since when our own calls to
    Redis succeed, 0.0 if they do not."""

    at: float
    band: str
    age_ms: int
    ok_since: float


@dataclass(frozen=True, slots=True)
class Idler:
    """A child that should have taken something. `seq`: its last execution. `since`: monotonic seconds.
    `replace`: it is time for another one."""

    slot: int
    life: int
    seq: int
    pid: int
    since: float
    band: str
    replace: bool


class Idleness:
    """What the looks of the last seconds have shown."""

    def __init__(self, idle_most_s: float = IDLE_MOST_S) -> None:
        self._idle_most_s = idle_most_s
        self._last = 0.0
        self._waiting_since = 0.0
        self._allowed_since: dict[tuple[int, int], float] = {}
        self._fruitless: dict[int, int] = {}
        self._counted: set[tuple[int, int]] = set()

    def forget(self) -> None:
        """Nothing is known of the time until now."""
        self._waiting_since = 0.0
        self._allowed_since.clear()

    def look(self, look: Look, snapshot: Snapshot) -> tuple[Idler, ...]:
        """Those that are idle without a reason now."""
        if look.at - self._last > GAP_S:
            self.forget()
        self._last = look.at
        waits = bool(look.band) and look.age_ms >= WAITING_MS
        self._waiting_since = (self._waiting_since or look.at) if waits else 0.0
        allowed = list(_allowed(snapshot))
        self._note(look.at, allowed)
        if not self._waiting_since or not look.ok_since:
            return ()
        found = [self._judge(look, slot) for slot in allowed if slot.idle]
        return tuple(idler for idler in found if idler is not None)

    def _note(self, now: float, allowed: list[SlotView]) -> None:
        before = self._allowed_since
        self._allowed_since = {_who(slot): before.get(_who(slot), now) for slot in allowed}
        for slot in allowed:
            if slot.row is not None and slot.row.seq:
                self._fruitless.pop(slot.number, None)

    def _judge(self, look: Look, slot: SlotView) -> Idler | None:
        row = slot.row
        if row is None or not row.redis_ok_since:
            return None
        since = max(
            row.idle_since,
            row.redis_ok_since,
            look.ok_since,
            self._waiting_since,
            self._allowed_since[_who(slot)],
        )
        if look.at - since < self._idle_most_s:
            return None
        patience = self._idle_most_s * 2 ** self._fruitless.get(slot.number, 0)
        replace = look.at - since >= patience + SECOND_LOOK_S or _who(slot) in self._counted
        if replace:
            self._count(slot)
        return Idler(slot.number, slot.life, row.seq, slot.pid, row.idle_since, look.band, replace)

    def _count(self, slot: SlotView) -> None:
        if _who(slot) in self._counted:
            return
        self._counted = {who for who in self._counted if who[0] != slot.number} | {_who(slot)}
        self._fruitless[slot.number] = min(FRUITLESS_MOST, self._fruitless.get(slot.number, 0) + 1)


def _allowed(snapshot: Snapshot) -> Iterable[SlotView]:
    """Children that may claim."""
    if not snapshot.claiming or snapshot.stopping:
        return ()
    return (slot for slot in snapshot.slots if slot.state is State.READY and slot.may_claim)


def _who(slot: SlotView) -> tuple[int, int]:
    return slot.number, slot.life
