"""Children that have grown too large, or that do not end when their work is done (R34). Steps of `pool.step`.
Pure."""

from __future__ import annotations

from dtq_supervisor import reloading
from dtq_supervisor.events import (
    EXIT_CONFIG,
    Action,
    Fact,
    LeaveOverdue,
    MemorySeen,
    OrderStop,
    Say,
    Stop,
    StopMode,
    Verdict,
)
from dtq_supervisor.recycling import MEMORY, TooSmall, mebibytes
from dtq_supervisor.roster import Pool, doom
from dtq_supervisor.slot import RUNNING, WORKING, Slot
from dtq_supervisor.stopping import on_stop


def on_memory_seen(pool: Pool, now: float, event: MemorySeen, actions: list[Action]) -> None:
    """Whoever executes nothing is never killed for its size: told to end, it does so at once and loses
    nothing."""
    slot, limits = pool.find(event.slot, event.life, RUNNING), pool.policy.limits
    if slot is None or slot.unlimited:
        return
    if event.executing and limits.hard_memory and event.size > limits.hard_memory:
        doom(slot, Verdict("memory", event.executing, event.size, limits.hard_memory), actions)
    elif slot.state in WORKING and limits.least() and event.size > limits.least():
        _retire(slot, event.size, limits.least(), actions)


def _retire(slot: Slot, size: int, limit: int, actions: list[Action]) -> None:
    slot.leaving = MEMORY
    slot.take("stop")
    actions.append(OrderStop(slot.number, slot.life))
    facts: dict[str, Fact] = {"slot": slot.number, "life": slot.life, "pid": slot.pid}
    facts |= {"size": mebibytes(size), "limit": mebibytes(limit), "size_bytes": size, "limit_bytes": limit}
    actions.append(Say("info", "outgrown", facts))


def on_leave_overdue(pool: Pool, now: float, event: LeaveOverdue, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, RUNNING)
    if slot is not None and not pool.stopping:  # a stop has a grace of its own
        doom(slot, Verdict("leaving"), actions)


def check_size(pool: Pool, now: float, slot: Slot, ready_bytes: int, actions: list[Action]) -> None:
    """Of a child that has just become ready."""
    flaw = pool.policy_of(slot.generation).limits.too_small(ready_bytes)
    if flaw is None:
        return
    if reloading.is_candidate(pool, slot.generation):
        held, least = mebibytes(flaw.ready_bytes), mebibytes(flaw.least)
        words = f"{flaw.flag} {mebibytes(flaw.limit)} cannot work: a new child holds {held}"
        reloading.fail(pool, now, f"{words}; give at least {least}", actions)
        return
    if not pool.proven:
        actions.append(Say("error", "memory_limit_refused", _worded(flaw)))
        on_stop(pool, now, Stop(StopMode.IMMEDIATE, EXIT_CONFIG), actions)
        return
    slot.unlimited = True
    if pool.unlimited_generation != slot.generation:
        pool.unlimited_generation = slot.generation
        facts: dict[str, Fact] = {**_worded(flaw), "generation": slot.generation}
        actions.append(Say("error", "memory_limit_ignored", facts))


def _worded(flaw: TooSmall) -> dict[str, Fact]:
    return {
        "flag": flaw.flag,
        "limit": mebibytes(flaw.limit),
        "size": mebibytes(flaw.ready_bytes),
        "least": mebibytes(flaw.least),
        "limit_bytes": flaw.limit,
        "size_bytes": flaw.ready_bytes,
    }
