"""Who is where: the slots, their successors, the template they come from, a reload or a stop under way.
Moved by `pool.step`. Pure."""

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
    Fork,
    GraceOver,
    GraceWarning,
    HardKill,
    LeaveLoop,
    MourningOver,
    PatienceOver,
    ReloadDue,
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


ReloadPhase = Literal["settings", "template", "canary", "rolling"]


@dataclass(slots=True)
class Reload:
    """An answer to SIGHUP that is under way. `number` counts them, `begun` is monotonic.

    `candidate` becomes the pool's template when its first child, the canary, is ready: what fails before that
    changes nothing."""

    number: int
    begun: float
    phase: ReloadPhase = "settings"
    policy: Policy = field(default_factory=Policy)
    candidate: Template = field(default_factory=Template)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """How a reload has ended. `generation`: the one that children are born from since."""

    number: int
    begun: float
    done: bool
    reason: str
    generation: int


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
    standbys: dict[int, Slot] = field(default_factory=dict)
    """Successors by the number of their slot: born of a newer generation, and without a claim before they
    have moved into it."""
    era: int = 0
    """Children of an older generation are to be replaced."""
    reload: Reload | None = None
    reload_wanted: bool = False
    """SIGHUP came, and its reload has not begun."""
    reloaded: Reloaded | None = None
    boot_failures: int = 0
    """Successors that failed in a row."""
    boots_held_until: float = 0.0
    generations: int = 0
    reloads: int = 0
    lives: dict[int, int] = field(default_factory=dict)
    """The last life that was given to each slot number."""
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

    def everyone(self) -> list[Slot]:
        """The slots, and the successors that stand by for some."""
        return [*self.slots, *self.standbys.values()]

    def living(self) -> list[Slot]:
        return [slot for slot in self.everyone() if slot.state in ALIVE]

    def spare(self) -> int:
        """How many successors there may be at a time."""
        return max(1, self.procs() // 4)

    def policy_of(self, generation: int) -> Policy:
        """What holds for a child of that generation when it boots."""
        reload = self.reload
        return reload.policy if reload and reload.candidate.generation == generation else self.policy

    def next_generation(self) -> int:
        self.generations += 1
        return self.generations

    def at_work(self) -> int:
        return sum(slot.state in WORKING for slot in self.slots)

    def find(self, slot: int, life: int, states: Iterable[State] = ALIVE) -> Slot | None:
        """The slot, or the successor for it, if it holds that life and is in one of the states."""
        here = self.slots[slot] if 0 <= slot < len(self.slots) else None
        for found in (here, self.standbys.get(slot)):
            if found and found.is_now(life) and found.state in states:
                return found
        return None

    def stands_by(self, slot: Slot) -> bool:
        return self.standbys.get(slot.number) is slot

    def alarms(self) -> list[Alarm]:
        """What comes by itself; each is gone once its event was stepped."""
        if self.left:
            return []
        found = [alarm for slot in self.everyone() for alarm in _slot_alarms(slot)]
        found += _template_alarms(self.template)
        if self.reload:
            found += _template_alarms(self.reload.candidate)
        if self.stopping:
            return [alarm for alarm in found if alarm.event != TemplateBackoffOver()] + _stop_alarms(
                self.stopping
            )
        return found + ([Alarm(self.boots_held_until, ReloadDue())] if self.boots_held_until else [])


def _template_alarms(template: Template) -> list[Alarm]:
    if template.state == "starting":
        return [Alarm(template.deadline, TemplateOverdue(template.generation))]
    if template.state == "down" and template.retry_at:
        return [Alarm(template.retry_at, TemplateBackoffOver())]
    return []


def _slot_alarms(slot: Slot) -> list[Alarm]:
    found = []
    if slot.state is State.STARTING:
        found.append(Alarm(slot.boot_deadline, BootOverdue(slot.number, slot.life)))
    if slot.held_until and slot.state not in ALIVE:
        found.append(Alarm(slot.held_until, BackoffOver(slot.number)))
    if slot.turn_until:
        found.append(Alarm(slot.turn_until, ReloadDue()))
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


def fork(
    pool: Pool, now: float, slot: Slot, template: Template, actions: list[Action], *, may_claim: bool
) -> None:
    """A new life for the slot, from that template. There is a free row."""
    number, policy = slot.number, pool.policy_of(template.generation)
    row = number if number in pool.free_rows else pool.free_rows[0]
    pool.free_rows.remove(row)
    life = pool.lives[number] = pool.lives.get(number, 0) + 1
    slot.begin_life(life, template.generation, row, now + policy.boot_timeout_s)
    stop_after = policy.limits.tasks_of(number, life)
    actions.append(Fork(number, life, template.generation, row, may_claim, stop_after))


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
