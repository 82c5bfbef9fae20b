"""One child more, one child fewer: SIGTTIN and SIGTTOU. Steps of `pool.step`. Pure."""

from __future__ import annotations

from collections.abc import Set

from dtq_supervisor.births import refill
from dtq_supervisor.events import Action, Fact, ResizeAsked, Say
from dtq_supervisor.recycling import SURPLUS
from dtq_supervisor.roster import Pool
from dtq_supervisor.slot import ALIVE, WORKING, Slot
from dtq_supervisor.stopping import stop_slot

LEAST = 1
SPARE_MOST = 64


def most_for(procs: int) -> int:
    """How many children a start with so many makes room for: rows and descriptors are made at the start."""
    return procs + min(procs, SPARE_MOST)


def on_resize_asked(pool: Pool, now: float, event: ResizeAsked, actions: list[Action]) -> None:
    name = "SIGTTIN" if event.by > 0 else "SIGTTOU"
    if pool.stopping:
        actions.append(Say("info", "too_late", {"name": name}))
        return
    before = pool.procs()
    asked = before + event.by
    procs = max(LEAST, min(pool.most, asked))
    for _ in range(procs - before):
        refill(pool, now, _room(pool), actions)
    for _ in range(before - procs):
        _close(pool, event.busy, actions)
    if procs != before:
        actions.append(Say("info", "resized", {"name": name, "procs": procs, "before": before}))
        pool.told_bound = False
    if procs != asked and not pool.told_bound:
        pool.told_bound = True
        facts: dict[str, Fact] = {"name": name, "procs": procs}
        actions.append(Say("warning", "resize_most" if event.by > 0 else "resize_least", facts))


def _room(pool: Pool) -> Slot:
    """For one child more. A closed slot whose child is still at work is the last choice: the new child has to
    wait for the end of the old."""
    free = sorted(number for number in pool.closed if pool.slots[number].state not in ALIVE)
    if not free and len(pool.slots) < pool.most:
        pool.slots.append(Slot(len(pool.slots)))
        return pool.slots[-1]
    number = free[0] if free else min(pool.closed)
    pool.closed.discard(number)
    return pool.slots[number]


def _close(pool: Pool, busy: Set[int], actions: list[Action]) -> None:
    """Whoever is missed least, and of those the highest number."""
    staying = [slot for slot in pool.slots if slot.number not in pool.closed]
    slot = min(staying, key=lambda slot: (_cost(slot, busy), -slot.number))
    pool.closed.add(slot.number)
    slot.leaving = slot.leaving or SURPLUS
    stop_slot(slot, SURPLUS, actions)


def _cost(slot: Slot, busy: Set[int]) -> int:
    """0: no child, or one that is not ready or is ending anyway; 1: an idle one; 2: one that executes."""
    if slot.state not in WORKING:
        return 0
    return 2 if slot.number in busy else 1
