"""The memory that a supervisor shares with its children: a header, and rows of two halves, one writer each.

    header   4096 bytes   written by the supervisor
    row      8192 bytes   child half: written by the child of that row (by the supervisor before it is forked)
                          supervisor half: written by the supervisor

Every time in it is CLOCK_MONOTONIC seconds (`time.monotonic()`), 0.0 = none: one clock for all processes of a
machine.

Single numbers are aligned words of eight bytes, which no reader sees half-written. What belongs together in a
child half is written under its version, odd while the child writes; a reader that meets an odd or a changed
version reads again. The rejected way, a lock in shared memory, dies locked with the child that holds it.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from dtq_child import row as layout
from dtq_child.row import (
    CHILD_HALF,
    CONDEMNED,
    COUNTERS,
    EXECUTION,
    EXECUTION_AT,
    HELD_AT,
    HELD_COUNT,
    IDLE_SINCE,
    LAST_CLAIM,
    LIFE,
    MAY_CLAIM,
    ORDER,
    PHASE,
    PID,
    READY_BYTES,
    REDIS_OK_SINCE,
    RENEWED,
    ROW_SIZE,
    SETTLING_SINCE,
    STOP,
    STOP_AFTER,
    VERSION,
    Counters,
    Execution,
    Order,
    Phase,
    Row,
)

__all__ = ["ChildRow", "Counters", "Execution", "Header", "Order", "Phase", "Row", "Scoreboard"]

MAGIC = int.from_bytes(b"dtqboard", "little")
LAYOUT = 2
HEADER_SIZE = 4096
READ_TRIES = 50
_LAST_SEQ = EXECUTION_AT // 8  # an execution begins with its number

# Header words. Those that change have cache lines of their own: the children read them all the time.
_MAGIC, _LAYOUT, _ROWS, _ROW_SIZE, _SUPERVISOR_PID = range(5)
_STAMP, _PARK_COUNTER, _CLAIMING, _STOPPING = 8, 16, 24, 25


@dataclass(frozen=True, slots=True)
class Header:
    """A copy of the header."""

    rows: int
    supervisor_pid: int
    stamp: float
    park_counter: int
    claiming: bool
    stopping: bool


class Scoreboard:
    """The whole memory, as mapped by this process."""

    __slots__ = ("_bytes", "_map", "_park_lock", "_reals", "_words", "fd", "rows")

    def __init__(self, fd: int, rows: int) -> None:
        self.fd, self.rows = fd, rows
        self._map = _map(fd, HEADER_SIZE + rows * ROW_SIZE)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        self._reals = self._bytes.cast("d")
        self._park_lock = threading.Lock()

    @classmethod
    def create(cls, rows: int) -> Scoreboard:
        """For the supervisor: new memory. Its `fd` and `rows` are passed on to templates."""
        fd = os.memfd_create("dtq-scoreboard")
        os.ftruncate(fd, HEADER_SIZE + rows * ROW_SIZE)
        board = cls(fd, rows)
        board._words[_LAYOUT], board._words[_ROWS], board._words[_ROW_SIZE] = LAYOUT, rows, ROW_SIZE
        board._words[_SUPERVISOR_PID] = os.getpid()
        board._words[_CLAIMING] = 1
        board._words[_MAGIC] = MAGIC
        return board

    @classmethod
    def attach(cls, fd: int, rows: int) -> Scoreboard:
        """For the template: the memory behind an inherited descriptor. ValueError if it is not that."""
        size = os.fstat(fd).st_size
        if size != HEADER_SIZE + rows * ROW_SIZE:
            raise ValueError(f"descriptor {fd} holds {size} bytes, no scoreboard of {rows} rows")
        board = cls(fd, rows)
        found = tuple(board._words[at] for at in (_MAGIC, _LAYOUT, _ROWS, _ROW_SIZE))
        if found != (MAGIC, LAYOUT, rows, ROW_SIZE):
            board.close()
            raise ValueError(f"descriptor {fd} holds no scoreboard of layout {LAYOUT}, {rows} rows: {found}")
        return board

    def close(self) -> None:
        """Unmaps the memory. The descriptor stays the caller's."""
        for view in (self._words, self._reals, self._bytes):
            view.release()
        self._map.close()

    # What everybody reads.

    @property
    def stamp_value(self) -> float:
        """When the supervisor's main loop last ticked."""
        return self._reals[_STAMP]

    @property
    def park_counter(self) -> int:
        return self._words[_PARK_COUNTER]

    @property
    def claiming(self) -> bool:
        return self._words[_CLAIMING] != 0

    @property
    def stopping(self) -> bool:
        return self._words[_STOPPING] != 0

    @property
    def supervisor_pid(self) -> int:
        return self._words[_SUPERVISOR_PID]

    def header(self) -> Header:
        return Header(
            rows=self.rows,
            supervisor_pid=self.supervisor_pid,
            stamp=self.stamp_value,
            park_counter=self.park_counter,
            claiming=self.claiming,
            stopping=self.stopping,
        )

    def read_row(self, index: int) -> Row | None:
        """A copy of the row; None if every look met the child writing, or dead or stopped while it wrote,
        or if a task that writes into foreign memory has ruined it."""
        word = self._word(index)
        for _ in range(READ_TRIES):
            version = self._words[word + VERSION]
            if version % 2 == 0:
                half = bytes(self._bytes[word * 8 : word * 8 + CHILD_HALF])
                if self._words[word + VERSION] == version:
                    try:
                        return self._unpack(half, word)
                    except ValueError:
                        return None
            os.sched_yield()
        return None

    def child_row(self, index: int) -> ChildRow:
        """For the child of that row."""
        return ChildRow(self, index)

    # What the supervisor writes.

    def stamp(self, now: float) -> None:
        self._reals[_STAMP] = now

    def set_claiming(self, claiming: bool) -> None:
        self._words[_CLAIMING] = int(claiming)

    def set_stopping(self, stopping: bool) -> None:
        self._words[_STOPPING] = int(stopping)

    def park_changed(self) -> None:
        """Tells the children to look into the park. Any thread of the supervisor may call it."""
        with self._park_lock:
            self._words[_PARK_COUNTER] += 1

    def reset_row(self, index: int, life: int, *, may_claim: bool, stop_after: int = 0) -> None:
        """Before a fork, when the row's last child is dead: everything about that one is wiped.

        `stop_after`: how many executions the new one is to begin, 0 if any number. Told in advance: tasks may
        be shorter than the supervisor's look."""
        word = self._word(index)
        odd = self._words[word + VERSION] | 1
        self._words[word + VERSION] = odd
        start = word * 8
        self._bytes[start + 8 : start + ROW_SIZE] = bytes(ROW_SIZE - 8)
        self._words[word + LIFE] = life
        self._words[word + MAY_CLAIM] = int(may_claim)
        self._words[word + STOP_AFTER] = stop_after
        self._words[word + VERSION] = odd + 1

    def order(self, index: int, kind: int, seq: int) -> None:
        """`kind` (of Order) for execution `seq` and no other; the soft signal makes the child look."""
        self._words[self._word(index) + ORDER] = layout.pack_order(kind, seq)

    def clear_order(self, index: int) -> None:
        self._words[self._word(index) + ORDER] = layout.pack_order(Order.NONE, 0)

    def condemn(self, index: int, seq: int) -> None:
        """The deadline of execution `seq` has passed in its handler: whatever comes of that now doesn't
        count."""
        self._words[self._word(index) + CONDEMNED] = seq

    def stop_row(self, index: int) -> None:
        """The child ends at its next task boundary."""
        self._words[self._word(index) + STOP] = 1

    def allow_claim(self, index: int) -> None:
        self._words[self._word(index) + MAY_CLAIM] = 1

    def renewed(self, index: int, sent: float) -> None:
        """`sent`: when the last heartbeat that Redis confirmed for this row was sent."""
        self._reals[self._word(index) + RENEWED] = sent

    def _word(self, index: int) -> int:
        """The first word of a row."""
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        return (HEADER_SIZE + index * ROW_SIZE) // 8

    def _unpack(self, child_half: bytes, word: int) -> Row:
        return layout.unpack(
            child_half,
            stop=self._words[word + STOP] != 0,
            may_claim=self._words[word + MAY_CLAIM] != 0,
            renewed=self._reals[word + RENEWED],
            order=self._words[word + ORDER],
            stop_after=self._words[word + STOP_AFTER],
        )


class ChildRow:
    """A child's own row: its half to write, the supervisor's half to read. For the child's main thread."""

    __slots__ = ("_bytes", "_counters", "_reals", "_version", "_word", "_words", "board", "index")

    def __init__(self, board: Scoreboard, index: int) -> None:
        self.board, self.index = board, index
        self._bytes, self._words, self._reals = board._bytes, board._words, board._reals
        self._word = board._word(index)
        self._version = self._words[self._word + VERSION]
        first = self._word + layout.FIRST_COUNTER
        self._counters = {name: first + number for number, name in enumerate(COUNTERS)}

    # What the supervisor wants.

    @property
    def stop(self) -> bool:
        return self._words[self._word + STOP] != 0

    @property
    def spent(self) -> bool:
        """As many executions have begun as it is to begin."""
        most = self._words[self._word + STOP_AFTER]
        return most != 0 and self._words[self._word + _LAST_SEQ] >= most

    @property
    def may_claim(self) -> bool:
        return self._words[self._word + MAY_CLAIM] != 0

    @property
    def condemned(self) -> int:
        """The number of the execution that the process is about to be killed for, 0 if of none."""
        return self._words[self._word + CONDEMNED]

    def order(self) -> tuple[int, int]:
        """(kind of Order, number of the execution that it is meant for)."""
        return layout.unpack_order(self._words[self._word + ORDER])

    # What the child does.

    def born(self, pid: int) -> None:
        """The first thing that a new child writes."""
        self._words[self._word + PID] = pid

    def sized(self, resident: int) -> None:
        """Before it gets ready: what it holds before its first task."""
        self._words[self._word + READY_BYTES] = resident

    def ready(self, now: float) -> None:
        """Nothing to do. Looking for work in between makes it no less idle."""
        if self._reals[self._word + IDLE_SINCE] == 0.0:
            self._change(IDLE_SINCE, now, Phase.READY)
        else:
            self._words[self._word + PHASE] = Phase.READY

    idle = ready

    def claiming(self, now: float) -> None:
        self._change(LAST_CLAIM, now, Phase.CLAIMING)

    def executing(self, execution: Execution) -> None:
        """ValueError if a name does not fit; then nothing is written."""
        packed = layout.pack_execution(execution)
        word, start = self._word, self._word * 8 + EXECUTION_AT
        self._words[word + VERSION] = self._version + 1
        self._words[word + PHASE] = Phase.EXECUTING
        self._reals[word + IDLE_SINCE] = 0.0
        self._bytes[start : start + EXECUTION.size] = packed
        self._version += 2
        self._words[word + VERSION] = self._version

    def settling(self, now: float) -> None:
        self._change(SETTLING_SINCE, now, Phase.SETTLING)

    def exiting(self, now: float) -> None:
        """Nothing is in hand any more, and nothing will be."""
        self._change(IDLE_SINCE, now, Phase.EXITING)

    def held(self, pairs: Iterable[tuple[str, str]]) -> None:
        """The (stream, entry id) of all that was claimed and not begun. ValueError above MAX_HELD."""
        count, packed = layout.pack_held(pairs)
        word, start = self._word, self._word * 8 + HELD_AT
        self._words[word + VERSION] = self._version + 1
        self._words[word + HELD_COUNT] = count
        self._bytes[start : start + len(packed)] = packed
        self._version += 2
        self._words[word + VERSION] = self._version

    def redis_ok(self, now: float) -> None:
        """Redis answers; only the first of these after a loss counts."""
        if self._reals[self._word + REDIS_OK_SINCE] == 0.0:
            self._reals[self._word + REDIS_OK_SINCE] = now

    def redis_lost(self) -> None:
        self._reals[self._word + REDIS_OK_SINCE] = 0.0

    def count(self, name: str, n: int = 1) -> None:
        """Adds `n` to one of COUNTERS."""
        self._words[self._counters[name]] += n

    def _change(self, time_at: int, now: float, phase: Phase) -> None:
        words, word = self._words, self._word
        words[word + VERSION] = self._version + 1
        self._reals[word + time_at] = now
        words[word + PHASE] = phase
        self._version += 2
        words[word + VERSION] = self._version


def _map(fd: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, size, trackfd=False)
    # Here a map keeps a duplicate of the descriptor, which children then have, too.
    return mmap.mmap(fd, size)
