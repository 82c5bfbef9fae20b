"""What our children have in hand at this moment, as their rows say."""

from __future__ import annotations

from dataclasses import dataclass

from dtq_child.row import Phase, Row
from dtq_supervisor.line import Word
from dtq_supervisor.seat import Seat


@dataclass(frozen=True, slots=True)
class Holding:
    """One entry in a child's hands. `seq` is its execution, 0 for one that is held and not begun; then its
    row does not know `task_id` and `delivery` either."""

    index: int
    slot: int
    life: int
    consumer: str
    stream: str
    entry_id: str
    seq: int = 0
    task_id: str = ""
    delivery: int = 0
    executing: bool = False

    def words(self) -> list[Word]:
        """As heartbeat.lua and inflight.lua take them."""
        token: list[Word] = [self.task_id, self.delivery] if self.seq else ["", ""]
        return [self.stream, self.entry_id, self.consumer, *token]


@dataclass(frozen=True, slots=True)
class Child:
    """One living child. `row` is None if it could not be read, or belongs to another life by now."""

    index: int
    slot: int
    life: int
    consumer: str
    row: Row | None

    def holdings(self) -> list[Holding]:
        if self.row is None:
            return []
        who = (self.index, self.slot, self.life, self.consumer)
        found = [Holding(*who, stream, entry_id) for stream, entry_id in self.row.held]
        e = self.row.execution
        if e is not None:
            executing = self.row.phase is Phase.EXECUTING
            found.append(Holding(*who, e.stream, e.entry_id, e.seq, e.task_id, e.delivery, executing))
        return found


def children(seat: Seat) -> list[Child]:
    found = []
    for life in seat.lives():
        row = seat.scoreboard.read_row(life.row)
        ours = row if row and row.life == life.life else None
        found.append(Child(life.row, life.slot, life.life, life.consumer, ours))
    return found


def still_executing(seat: Seat, holding: Holding) -> bool:
    """The row, read again, says so."""
    row = seat.scoreboard.read_row(holding.index)
    return (
        row is not None
        and row.life == holding.life
        and row.phase is Phase.EXECUTING
        and row.seq == holding.seq
    )
