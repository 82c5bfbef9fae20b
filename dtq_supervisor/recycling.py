"""When a child that works is replaced all the same, and what each replacement is counted as (R34). Pure.

    told in advance        as many executions as its row says         tasks
    between two tasks      larger than --max-memory-per-child         memory
    in mid-task            larger than --hard-memory-per-child        hard_memory: killed, the task blamed

A limit that a new child exceeds would have it replaced for ever. If the first child of all shows that, the
start is refused; later, with work going on, the limits do not hold for such a child, and that is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dtq_supervisor.events import Exited, Verdict

MARGIN_PERCENT = 110
LEAVE_MOST_S = 10.0
"""For stop hooks, once a child has nothing in hand any more: one that hangs there would cost us its slot."""

TASKS, MEMORY, HARD_MEMORY, BOOT, CRASH, ENDED = "tasks", "memory", "hard_memory", "boot", "crash", "ended"
RELOAD = "reload"
SURPLUS: Literal["surplus"] = "surplus"
"""What replacements are counted as. Kills for other reasons are counted by the kind of their verdict; `ended`
is a clean end that nobody asked for, `surplus` one of a child that was asked for again before it had gone."""

# Multiples of these, without their whole part, fall evenly between 0 and 1, however few there are.
_GOLDEN, _SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings; 0 is none. Sizes are bytes."""

    tasks: int = 0
    tasks_jitter: int = 0
    memory: int = 0
    hard_memory: int = 0

    def tasks_of(self, slot: int, life: int) -> int:
        """How many executions that child may begin, 0 for any number. Spread evenly and not at random: so the
        children of one start do not go together even by chance."""
        if not self.tasks:
            return 0
        return self.tasks + math.floor((self.tasks_jitter + 1) * ((slot * _GOLDEN + life * _SILVER) % 1.0))

    def least(self) -> int:
        """Below that, no child is too large."""
        return min((limit for limit in (self.memory, self.hard_memory) if limit), default=0)

    def too_small(self, ready_bytes: int) -> TooSmall | None:
        """What is wrong with the limits for children of that size, 0 if it is not known."""
        named = (("--max-memory-per-child", self.memory), ("--hard-memory-per-child", self.hard_memory))
        least = -(-ready_bytes * MARGIN_PERCENT // 100)  # rounded up
        for flag, limit in named:
            if limit and limit < least:
                return TooSmall(flag, limit, ready_bytes, least)
        return None


@dataclass(frozen=True, slots=True)
class TooSmall:
    """`least`: what would be accepted. Bytes."""

    flag: str
    limit: int
    ready_bytes: int
    least: int


def reason_of(leaving: str, event: Exited, verdict: Verdict | None) -> str:
    """What the replacement of a child that was ready is counted as. `leaving`: why it was told to end, if it
    was."""
    if verdict is not None:
        return HARD_MEMORY if verdict.kind == "memory" else verdict.kind
    if event.code != 0 or event.busy:
        return CRASH
    return leaving or (TASKS if event.spent else ENDED)


def mebibytes(size: int) -> str:
    """As a person would write it into a setting, rounded up."""
    return f"{math.ceil(size / (1 << 20))}M"
