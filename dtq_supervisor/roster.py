"""Who is where: the slots, the template they come from, a stop under way. Moved by `pool.step`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from dtq_supervisor.events import (
    Action,
    Alarm,
    BackoffOver,
    BootOverdue,
    CancelGraceOver,
    GraceOver,
    GraceWarning,
    HardKill,
    LeaveLoop,
    MourningOver,
    PatienceOver,
    Say,
    StopMode,
    TemplateBackoffOver,
    TemplateOverdue,
    Verdict,
)
from dtq_supervisor.recycling import Limits
from dtq_supervisor.slot import ALIVE, RUNNING, WORKING, Slot, State

SAME_SIGNAL_S = 1.0
"""Copies of a stop signal within this time are one request: init and a shell both forward them."""
WARNING_MOST_S = 2.0
STEADY_S = 60.0
"""A template that was up this long has proven itself: its death begins a new row of failures."""
PATIENCE_S = 1.0


@dataclass(slots=True)
class Template:
    """The one template that is asked for children. "down" while it is dead and not replaced yet."""

    generation: int = 0
    state: Literal["down", "starting", "up"] = "down"
    deadline: float = 0.0
    up_at: float = 0.0
    retry_at: float = 0.0
    failures: int = 0
    trouble: str = ""
    """Why the last one was lost, until the next one is up."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that steps depend on; seconds."""

    boot_timeout_s: float = 60.0
    shutdown_grace_s: float = 25.0
    cancel_grace_s: float = 5.0
    preload: bool = True
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class Stopping:
    mode: StopMode
    asked_at: float
    warn_at: float
    over_at: float
    patience_at: float = 0.0
    warned: bool = False


@dataclass(slots=True)
class Pool:
    slots: list[Slot]
    free_rows: list[int]
    policy: Policy
    template: Template = field(default_factory=Template)
    stopping: Stopping | None = None
    exit_code: int = 0
    imported: bool = False
    """The application has been imported once: what fails later is waited out."""
    proven: bool = False
    """A child has been READY."""
    contact: bool = False
    """Redis has answered, and will do."""
    told_ready: bool = False
    replaced: Counter[str] = field(default_factory=Counter)
    """Children that others took the place of, by reason."""
    unlimited_generation: int = 0
    """Whose children the memory limits are too small for, as was told."""
    left: bool = False
    most: int = 0
    """How many slots there may be."""
    closed: set[int] = field(default_factory=set)
    """Slots that get no child any more; the one they have may still be at work."""
    told_bound: bool = False
    quiet: bool = False
    """Nothing is claimed until somebody resumes."""

    @classmethod
    def of(cls, procs: int, policy: Policy, rows: int | None = None, most: int | None = None) -> Pool:
        most = most or procs
        return cls([Slot(number) for number in range(procs)], list(range(rows or most)), policy, most=most)

    def procs(self) -> int:
        """How many children there are to be."""
        return len(self.slots) - len(self.closed)

    def living(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state in ALIVE]

    def at_work(self) -> int:
        return sum(slot.state in WORKING for slot in self.slots)

    def find(self, slot: int, life: int, states: Iterable[State] = ALIVE) -> Slot | None:
        """The slot, if it still holds that life and is in one of the states."""
        found = self.slots[slot] if 0 <= slot < len(self.slots) else None
        return found if found and found.is_now(life) and found.state in states else None

    def alarms(self) -> list[Alarm]:
        """What comes by itself; each is gone once its event was stepped."""
        found = [alarm for slot in self.slots for alarm in _slot_alarms(slot)]
        template = self.template
        if template.state == "starting":
            found.append(Alarm(template.deadline, TemplateOverdue(template.generation)))
        elif template.state == "down" and template.retry_at and not self.stopping:
            found.append(Alarm(template.retry_at, TemplateBackoffOver()))
        return [] if self.left else found + _stop_alarms(self.stopping)


def _slot_alarms(slot: Slot) -> list[Alarm]:
    found = []
    if slot.state is State.STARTING:
        found.append(Alarm(slot.boot_deadline, BootOverdue(slot.number, slot.life)))
    if slot.held_until and slot.state not in ALIVE:
        found.append(Alarm(slot.held_until, BackoffOver(slot.number)))
    if slot.mourned:
        found.append(Alarm(slot.mourned_until, MourningOver(slot.number, slot.mourned)))
    if slot.cancel_seq and slot.state in RUNNING:
        event = CancelGraceOver(slot.number, slot.life, slot.cancel_seq)
        found.append(Alarm(slot.cancel_deadline, event))
    return found


def _stop_alarms(stopping: Stopping | None) -> list[Alarm]:
    if stopping is None:
        return []
    if stopping.patience_at:
        return [Alarm(stopping.patience_at, PatienceOver())]
    found = [Alarm(stopping.over_at, GraceOver())]
    if not stopping.warned:
        found.append(Alarm(stopping.warn_at, GraceWarning()))
    return found


def free_row(pool: Pool, slot: Slot) -> None:
    pool.free_rows.append(slot.row)
    pool.free_rows.sort()
    slot.row, slot.pid = -1, 0


def doom(slot: Slot, verdict: Verdict, actions: list[Action]) -> None:
    slot.take("doom")
    slot.verdict = verdict
    if slot.pid:
        actions.append(HardKill(slot.number, slot.life, verdict.seq, verdict))


def tell_ready(pool: Pool, actions: list[Action]) -> None:
    """Once, when there are both: a child that is ready, and a Redis that it can take tasks from."""
    ready = next((slot for slot in pool.slots if slot.state in WORKING), None)
    if pool.contact and ready and not pool.told_ready:
        pool.told_ready = True
        actions.append(Say("info", "ready", {"slot": ready.number, "pid": ready.pid}))


def leave(pool: Pool, exit_code: int, actions: list[Action]) -> None:
    pool.left = True
    actions.append(LeaveLoop(exit_code))
