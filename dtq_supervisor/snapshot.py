"""How everything stood at one tick of the main loop: what other threads may look at as long as they like.
Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtq_child.row import Phase, Row
from dtq_supervisor.roster import Pool, Reloaded
from dtq_supervisor.slot import ALIVE, Slot, State

IDLE = frozenset({Phase.READY, Phase.CLAIMING})
"""Phases of a child that has nothing to execute; looking for something is one of them."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """`row`: None if there is no child, or its row cannot be read. `next_try_at`: monotonic seconds, 0.0 if
    no pause is under way. `trouble`: why the last child did not start."""

    number: int
    state: State
    life: int = 0
    generation: int = 0
    pid: int = 0
    row: Row | None = None
    next_try_at: float = 0.0
    trouble: str = ""

    @property
    def idle(self) -> bool:
        row = self.row
        return row is not None and row.phase in IDLE and row.idle_since > 0

    @property
    def may_claim(self) -> bool:
        """As far as its own row says."""
        return self.row is not None and self.row.may_claim and not self.row.stop


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`at`: monotonic seconds, 0.0 before the first tick. `template`: down, starting or up; `trouble`: why
    the last one was lost. `contact`: Redis has answered, and will do. `reload_phase`: of the reload under
    way, empty if there is none; `reloaded`: how the last one has ended; `standing_by`: successors that are
    not in their slots yet."""

    at: float = 0.0
    slots: tuple[SlotView, ...] = ()
    generation: int = 0
    template: str = "down"
    template_next_at: float = 0.0
    trouble: str = ""
    reload_phase: str = ""
    reloaded: Reloaded | None = None
    standing_by: int = 0
    contact: bool = False
    claiming: bool = False
    stopping: bool = False

    def ready(self) -> list[SlotView]:
        """The slots whose child takes tasks, or may."""
        return [slot for slot in self.slots if slot.state in (State.READY, State.SOFT_TIMED_OUT)]


def take(pool: Pool, rows: Iterable[tuple[Slot, Row]], now: float, *, claiming: bool) -> Snapshot:
    """`rows` were read in this round; a slot may have been given away since. Closed slots without a child are
    none."""
    seen = {slot.number: row for slot, row in rows if slot.is_now(row.life)}
    template = pool.template
    slots = [slot for slot in pool.slots if slot.state in ALIVE or slot.number not in pool.closed]
    return Snapshot(
        at=now,
        slots=tuple(_view(slot, seen.get(slot.number)) for slot in slots),
        generation=template.generation,
        template=template.state,
        template_next_at=template.retry_at,
        trouble=template.trouble,
        reload_phase=pool.reload.phase if pool.reload else "",
        reloaded=pool.reloaded,
        standing_by=len(pool.standbys),
        contact=pool.contact,
        claiming=claiming,
        stopping=pool.stopping is not None,
    )


def _view(slot: Slot, row: Row | None) -> SlotView:
    return SlotView(
        number=slot.number,
        state=slot.state,
        life=slot.life,
        generation=slot.generation,
        pid=slot.pid,
        row=row,
        next_try_at=slot.held_until,
        trouble=slot.trouble,
    )
