"""The living children as they really are: their rows, their stacks, and what is left of them when they die.

For the main thread. A (slot, life) is looked for in its row only while it lives; its row is copied at its
death, before the slot is given away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dtq_child.row import Order, Phase, Row
from dtq_child.scoreboard import Scoreboard
from dtq_child.signals import SOFT_SIGNAL
from dtq_supervisor.deadlines import Watched
from dtq_supervisor.death import OomEvidence
from dtq_supervisor.dumps import Dumps
from dtq_supervisor.process import Child, Exit, Processes
from dtq_supervisor.slot import Slot
from dtq_supervisor.snapshot import IDLE

TORN_S = 1.0
"""A child stopped in the middle of a write leaves its row torn: after so long, what was last read counts."""


@dataclass(slots=True)
class Member:
    """`seq`: the execution that a dump is for, 0 if for none; `shown`: the dump is for the log."""

    row: int
    seen: Row | None = None
    torn_since: float = 0.0
    dumping: bool = False
    seq: int = 0
    shown: bool = False


@dataclass(frozen=True, slots=True)
class Remains:
    """What a dead child has left. `row` is None if it died while it wrote there."""

    end: Exit
    row: Row | None
    stack: str
    oom: OomEvidence | None

    @property
    def was_ready(self) -> bool:
        row = self.row
        return row is not None and (row.seq > 0 or row.idle_since > 0 or row.phase in _AT_WORK)

    @property
    def was_busy(self) -> bool:
        return self.row is None or self.row.execution is not None

    @property
    def is_spent(self) -> bool:
        """It had begun as many executions as it was to."""
        return self.row is not None and 0 < self.row.stop_after <= self.row.seq

    @property
    def has_released(self) -> bool:
        """A task of its own was interrupted, and handed back."""
        return self.row is not None and self.row.counters.released > 0


_AT_WORK = frozenset({Phase.READY, Phase.CLAIMING, Phase.EXECUTING, Phase.SETTLING})


class Crew:
    """Every child between its fork and its collected exit."""

    def __init__(
        self,
        board: Scoreboard,
        processes: Processes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._processes, self._clock = board, processes, clock
        self._members: dict[Child, Member] = {}
        self.dumps = Dumps(board.rows, processes.signal, clock)

    def enlist(self, slot: int, life: int, row: int, *, may_claim: bool, stop_after: int = 0) -> None:
        """Before the fork: from now on the row is that life's."""
        self.dumps.clear(row)
        self._board.reset_row(row, life, may_claim=may_claim, stop_after=stop_after)
        self._members[Child(slot, life)] = Member(row)

    def bury(self, end: Exit, who: Child, oom: OomEvidence | None) -> Remains:
        member = self._members.pop(who, None)
        if member is None:
            return Remains(end, None, "", oom)
        row = self._board.read_row(member.row)
        return Remains(end, row, self.dumps.read(member.row), oom)

    def keep(self, living: set[Child]) -> None:
        """Forgets all others: those that were never born."""
        for who in self._members.keys() - living:
            del self._members[who]

    # Rows.

    def look(self, slot: int, life: int) -> Row | None:
        """The row as it is now; None if it cannot be told at this moment."""
        member = self._members.get(Child(slot, life))
        if member is None:
            return None
        row = self._board.read_row(member.row)
        if row is not None:
            member.seen, member.torn_since = row, 0.0
            return row
        now = self._clock()
        member.torn_since = member.torn_since or now
        return member.seen if now - member.torn_since >= TORN_S else None

    def idles(self, slot: int, life: int, seq: int) -> bool:
        """It has nothing to execute, and has begun nothing since execution `seq`."""
        row = self.look(slot, life)
        return row is not None and row.phase in IDLE and row.seq == seq

    def seen(self, slot: int, life: int) -> Row | None:
        """The row as it was last read."""
        member = self._members.get(Child(slot, life))
        return member.seen if member else None

    # What is done to a child.

    def order(self, slot: int, life: int, seq: int, kind: Order) -> Row | None:
        """A soft kill of that execution, or with `seq` 0 of whatever is executed now. Returns the row that it
        found; None: nothing was done."""
        member, row = self._members.get(Child(slot, life)), self.look(slot, life)
        if member is None or row is None or row.phase is not Phase.EXECUTING or seq not in (0, row.seq):
            return None
        self._board.order(member.row, kind, row.seq)
        return row if self._processes.signal(slot, life, SOFT_SIGNAL) else None

    def allow_claims(self, slot: int, life: int) -> None:
        member = self._members.get(Child(slot, life))
        if member is not None:
            self._board.allow_claim(member.row)

    def order_stop(self, slot: int, life: int) -> None:
        member = self._members.get(Child(slot, life))
        if member is not None:
            self._board.stop_row(member.row)

    def kill(self, slot: int, life: int) -> bool:
        return self._processes.kill_group(slot, life)

    # Stacks.

    def ask_stack(self, slot: int, life: int, seq: int = 0, *, shown: bool = False) -> None:
        """For a kill of execution `seq`, or to be `shown`; both may be under way at once."""
        member = self._members.get(Child(slot, life))
        if member is None:
            return
        member.seq, member.shown = seq or member.seq, shown or member.shown
        member.dumping = True
        if seq:
            # First: the signal ends many a wait in C code, and the handler would go on and have an outcome.
            self._board.condemn(member.row, seq)
        self.dumps.ask(member.row, slot, life)

    @property
    def dumping(self) -> bool:
        return any(member.dumping for member in self._members.values())

    def dumped(self) -> list[Dumped]:
        """Those whose stacks are written, or whose time for that is over, each once."""
        return [
            self._finish(who, member)
            for who, member in self._members.items()
            if member.dumping and self.dumps.done(member.row)
        ]

    def _finish(self, who: Child, member: Member) -> Dumped:
        done = Dumped(who.slot, who.life, member.seq, self.dumps.read(member.row) if member.shown else None)
        member.dumping, member.seq, member.shown = False, 0, False
        return done

    def drop_stack(self, slot: int, life: int) -> None:
        """It was not for a kill after all: what the child writes when it dies of itself is not to be mixed
        with it."""
        member = self._members.get(Child(slot, life))
        if member is not None:
            self.dumps.clear(member.row)


@dataclass(frozen=True, slots=True)
class Dumped:
    """`seq`: the execution to be killed, 0 if none; `shown`: the text for the log, None if not asked for."""

    slot: int
    life: int
    seq: int
    shown: str | None


def watched(slot: Slot, row: Row) -> Watched:
    """What the row says, beside what was begun against its child."""
    execution = row.execution
    against = (slot.soft_seq, slot.dump_seq, slot.cancel_seq)
    if execution is None or row.phase not in (Phase.EXECUTING, Phase.SETTLING):
        leaving_since = row.idle_since if row.phase is Phase.EXITING else 0.0
        return Watched(slot.number, slot.life, against=against, leaving_since=leaving_since)
    executing = row.phase is Phase.EXECUTING
    return Watched(
        slot.number,
        slot.life,
        executing=execution.seq if executing else 0,
        settling=0 if executing else execution.seq,
        soft_deadline=execution.soft_deadline,
        hard_deadline=execution.hard_deadline,
        settling_since=row.settling_since,
        soft_sent=slot.soft_seq,
        hard_sent=slot.dump_seq,
        against=against,
    )
