"""Rows and a clock in, who is overdue and when to look again out. Pure.

All times are monotonic seconds, 0.0 is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtq_supervisor.events import (
    Alarm,
    Concerning,
    Event,
    ExecutionOver,
    HardDue,
    LeaveOverdue,
    SettlingStuck,
    SoftDue,
)
from dtq_supervisor.recycling import LEAVE_MOST_S

SETTLING_MOST_S = 10.0
GAP_S = 2.0
MERCY_S = 1.0


@dataclass(frozen=True, slots=True)
class Watched:
    """What one row says about its child, and what the pool has begun against it.

    `executing`, `settling`: the sequence number of the execution in that phase, 0 if it is in another.
    `against`: sequence numbers of executions that something was begun against.
    """

    slot: int
    life: int
    executing: int = 0
    settling: int = 0
    soft_deadline: float = 0.0
    hard_deadline: float = 0.0
    settling_since: float = 0.0
    soft_sent: int = 0
    hard_sent: int = 0
    against: tuple[int, ...] = ()
    leaving_since: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """The loop did not run between `since` and a moment before `until`. Deadlines that fell into it count at
    `until`, so that handlers that were stopped together with us can end first (R8)."""

    since: float = 0.0
    until: float = 0.0

    def moved(self, deadline: float) -> float:
        return self.until if self.since < deadline < self.until else deadline


NO_GAP = Gap()


def gap_between(last: float, now: float, missed_s: float) -> Gap | None:
    """The gap between two ticks, if they were too far apart. `missed_s` is by the clock that also counts
    suspended time, `last` and `now` by the monotonic one."""
    return Gap(last, now + MERCY_S) if missed_s > GAP_S else None


def row_alarms(row: Watched, redis_ok_since: float, gap: Gap = NO_GAP) -> list[Alarm]:
    """Everything that comes by itself for this child. `redis_ok_since`: since when our own calls succeed."""
    seq = row.executing
    alarms = [Alarm(0.0, ExecutionOver(row.slot, row.life, old)) for old in sorted({*row.against} - {0, seq})]
    if seq and row.soft_deadline and row.soft_sent != seq:
        alarms.append(Alarm(gap.moved(row.soft_deadline), SoftDue(row.slot, row.life, seq)))
    if seq and row.hard_deadline and row.hard_sent != seq:
        alarms.append(Alarm(gap.moved(row.hard_deadline), HardDue(row.slot, row.life, seq)))
    if row.settling and redis_ok_since:
        # Counted from when Redis is back for us: after an outage the child may still sleep in its back-off.
        stuck = max(row.settling_since, redis_ok_since, gap.until) + SETTLING_MOST_S
        alarms.append(Alarm(stuck, SettlingStuck(row.slot, row.life, row.settling)))
    return alarms


def leave_alarms(row: Watched, gap: Gap = NO_GAP) -> list[Alarm]:
    """Not for a stop, which gives a child its whole grace."""
    if not row.leaving_since:
        return []
    return [Alarm(max(row.leaving_since, gap.until) + LEAVE_MOST_S, LeaveOverdue(row.slot, row.life))]


def overdue(alarms: Iterable[Alarm], now: float) -> list[Event]:
    """The events whose time has come, oldest first."""
    due = sorted((alarm for alarm in alarms if alarm.at <= now), key=lambda alarm: alarm.at)
    return [alarm.event for alarm in due]


def next_look(alarms: Iterable[Alarm], now: float) -> float:
    """Seconds until the next alarm; 0 if one is due, infinity if there is none."""
    return max(0.0, min((alarm.at for alarm in alarms), default=math.inf) - now)


def confirmed(event: Concerning, row: Watched | None) -> Event:
    """The event if the row, read again, still says so; else that its execution is over."""
    if row is not None and (row.slot, row.life) == (event.slot, event.life):
        still = row.settling if isinstance(event, SettlingStuck) else row.executing
        if still == event.seq:
            return event
    return ExecutionOver(event.slot, event.life, event.seq)
