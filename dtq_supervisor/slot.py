"""One slot of the pool: its states, the edges between them, and what was begun against its child. Pure.

EMPTY ──fork──▶ STARTING ──ready──▶ READY ⇄ SOFT_TIMED_OUT        (soft_timeout, recover)
  ▲                │  │               │  stop  │
  │                │  │               ▼        ▼
  │                │  └────doom──▶ DOOMED ◀── STOPPING            (doom, from all that live)
  │                │                  │            │
  │◀───────────────┼──────gone────────┴────────────┘              (and READY, SOFT_TIMED_OUT that die)
  │                ▼
  └──give_up── BACKOFF ──fork──▶ STARTING                         (boot_died; boot_died_unwanted → EMPTY)
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dtq_supervisor.events import Verdict

BACKOFF_FIRST_S = 0.5
BACKOFF_MOST_S = 30.0
BACKOFF_KILLED_S = 0.05
FORGIVEN = 5
MOURNING_MOST_S = 1.0
"""While Redis answers, a death is settled in milliseconds; a settling that fails must not idle a slot."""


class State(enum.StrEnum):
    EMPTY = "empty"
    STARTING = "starting"
    READY = "ready"
    SOFT_TIMED_OUT = "soft_timed_out"
    STOPPING = "stopping"
    DOOMED = "doomed"
    BACKOFF = "backoff"


ALIVE = frozenset({State.STARTING, State.READY, State.SOFT_TIMED_OUT, State.STOPPING, State.DOOMED})
"""A child exists, or was asked for."""
WORKING = frozenset({State.READY, State.SOFT_TIMED_OUT})
RUNNING = WORKING | {State.STOPPING}
"""States in which a child may be executing and has not been killed."""


@dataclass(frozen=True, slots=True)
class Edge:
    sources: frozenset[State]
    to: State


def _edge(to: State, *sources: State) -> Edge:
    return Edge(frozenset(sources), to)


EDGES: Mapping[str, Edge] = MappingProxyType(
    {
        "fork": _edge(State.STARTING, State.EMPTY, State.BACKOFF),
        "ready": _edge(State.READY, State.STARTING),
        "soft_timeout": _edge(State.SOFT_TIMED_OUT, State.READY),
        "recover": _edge(State.READY, State.SOFT_TIMED_OUT),
        "stop": _edge(State.STOPPING, State.READY, State.SOFT_TIMED_OUT),
        "doom": _edge(State.DOOMED, State.STARTING, State.READY, State.SOFT_TIMED_OUT, State.STOPPING),
        "boot_died": _edge(State.BACKOFF, State.STARTING, State.DOOMED),
        "boot_died_unwanted": _edge(State.EMPTY, State.STARTING, State.DOOMED),
        "gone": _edge(State.EMPTY, State.READY, State.SOFT_TIMED_OUT, State.STOPPING, State.DOOMED),
        "give_up": _edge(State.EMPTY, State.BACKOFF),
    }
)
"""Every edge of DESIGN §3 by its name."""


class IllegalEdge(Exception):
    """A step tried an edge that is not drawn: an error in the pool itself."""


@dataclass(slots=True)
class Slot:
    """A numbered place. `life` is the number of its present or last child; what follows `pid` belongs to the
    present one."""

    number: int
    state: State = State.EMPTY
    life: int = 0
    failures: int = 0
    """Boots that failed in a row."""
    held_until: float = 0.0
    """No fork before that: the end of a BACKOFF, or of an EMPTY that must not spin."""
    trouble: str = ""
    """Why the last boot failed, until one does not."""
    generation: int = 0
    row: int = -1
    pid: int = 0
    """0 while the fork was asked for and not reported."""
    boot_deadline: float = 0.0
    mourned: int = 0
    """The life whose end is not settled yet. Its successor claims nothing before: it would take up new work,
    and the task of the dead would find every child busy."""
    mourned_until: float = 0.0
    turn_until: float = 0.0
    """The child was told to end because its successor stands by, and other slots wait that long for it."""
    verdict: Verdict | None = None
    leaving: str = ""
    """Why it was told to end, as its replacement is counted."""
    unlimited: bool = False
    """The memory limits are too small for it, and do not hold."""
    soft_seq: int = 0
    dump_seq: int = 0
    cancel_seq: int = 0
    cancel_deadline: float = 0.0

    def take(self, edge: str) -> None:
        drawn = EDGES[edge]
        if self.state not in drawn.sources:
            raise IllegalEdge(f"slot {self.number}: {edge} from {self.state}")
        self.state = drawn.to

    def begin_life(self, life: int, generation: int, row: int, boot_deadline: float) -> None:
        self.take("fork")
        self.life, self.generation, self.row, self.boot_deadline = life, generation, row, boot_deadline
        self.pid, self.verdict, self.held_until, self.turn_until = 0, None, 0.0, 0.0
        self.leaving, self.unlimited = "", False
        self.soft_seq = self.dump_seq = self.cancel_seq = 0

    def mourn(self, now: float) -> None:
        """The present life has ended, and is to be settled."""
        self.mourned, self.mourned_until = self.life, now + MOURNING_MOST_S

    def is_now(self, life: int) -> bool:
        return self.life == life and self.state in ALIVE

    def hold(self, now: float, *, killed: bool = False) -> float:
        """Notes one more failed boot and says how long to wait: 0.5 s doubling to 30 s. `killed`: from
        outside, which says nothing about the next one; a few in a row are forgiven."""
        delay = BACKOFF_KILLED_S if killed and self.failures < FORGIVEN else backoff(self.failures)
        self.failures += 1
        self.held_until = now + delay
        return delay


def backoff(failures: int) -> float:
    """Seconds after that many failures before this one; no number of failures overflows it."""
    return min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(failures, 16))
