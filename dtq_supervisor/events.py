"""What may happen to the pool, and what may be done about it: plain facts, no behaviour. Pure.

A (slot, life) names one child for ever, `seq` one execution within that life; 0 means none.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dtq_child.row import Order

if TYPE_CHECKING:
    from dtq_supervisor.roster import Policy

EXIT_IMPORT, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_CONFIG = 4, 1, 69, 78
"""Exit codes of the supervisor that the pool decides on."""

VerdictKind = Literal[
    "timeout",
    "superseded",
    "cancelled",
    "grace",
    "stuck",
    "boot",
    "immediate",
    "memory",
    "leaving",
    "surplus",
    "idle",
    "reload",
]
ENDED_BY_VERDICT = frozenset({"timeout", "superseded", "cancelled"})
"""Kills that end the delivery they name; every other one leaves it to run again."""
KILLED_BECAUSE: Mapping[VerdictKind, str] = {
    "timeout": "its task ran longer than its timeout",
    "superseded": "its task was given to another child",
    "cancelled": "its task was cancelled and did not end within the cancel grace",
    "grace": "the shutdown grace was over",
    "stuck": "it could not settle its task although Redis answered",
    "boot": "it was not ready within the boot timeout",
    "immediate": "an immediate stop was asked for",
    "memory": "it held more than --hard-memory-per-child",
    "leaving": "it had nothing to do any more, and did not end",
    "surplus": "one child fewer was asked for while it booted",
    "idle": "it stayed idle although its queues held entries",
    "reload": "the reload that it was born for has failed",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why we killed a child, and which execution is to blame: all else pending for it is released (R16).

    `size`, `limit`: bytes, when it was for its memory."""

    kind: VerdictKind
    seq: int = 0
    size: int = 0
    limit: int = 0

    @property
    def why(self) -> str:
        sizes = f": {self.size} of {self.limit} bytes" if self.limit else ""
        return KILLED_BECAUSE[self.kind] + sizes


class StopMode(enum.StrEnum):
    GRACEFUL = "graceful"
    IMMEDIATE = "immediate"


# --- what may happen


@dataclass(frozen=True, slots=True)
class Begin:
    """The supervisor starts."""


@dataclass(frozen=True, slots=True)
class TemplateUp:
    """It has imported the application and takes fork requests."""

    generation: int


@dataclass(frozen=True, slots=True)
class TemplateFailed:
    """It could not import the application, or cannot be talked with. `exit_code`: for the very first
    one."""

    generation: int
    reason: str
    exit_code: int = EXIT_IMPORT


@dataclass(frozen=True, slots=True)
class TemplateGone:
    """Its exit was collected, and every report it sent was read."""

    generation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TemplateOverdue:
    """It has neither imported nor failed within the boot timeout."""

    generation: int


@dataclass(frozen=True, slots=True)
class TemplateBackoffOver:
    """A new template may be tried."""


@dataclass(frozen=True, slots=True)
class Forked:
    """The child exists; our own child, by pid."""

    slot: int
    life: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    slot: int
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChildReady:
    """`ready_bytes`: the resident size that it had when it became ready, 0 if not known."""

    slot: int
    life: int
    ready_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BootOverdue:
    """No READY within the boot timeout."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class BackoffOver:
    slot: int


@dataclass(frozen=True, slots=True)
class Exited:
    """An exit was collected. `began`: executions this life had begun; `busy`: it died in or settling one;
    `released`: it had handed one back that was interrupted; `spent`: it had executed as many as it was to."""

    slot: int
    life: int
    pid: int
    code: int | None
    signal: int | None
    began: int = 0
    busy: bool = False
    released: bool = False
    spent: bool = False


@dataclass(frozen=True, slots=True)
class DeathSettled:
    """Redis has settled the end of that life: what was pending for it may be claimed."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class MourningOver:
    """The end of that life is still not settled; its successor need not wait any longer."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class SoftDue:
    slot: int
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class HardDue:
    slot: int
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class DumpDone:
    """The stacks are written, or their time is over, and the row, read again, still executes `seq`."""

    slot: int
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class Revoked:
    """Redis says that the delivery is not ours any more; the row, read again, still executes it."""

    slot: int
    life: int
    seq: int
    why: Literal["cancelled", "superseded"]


@dataclass(frozen=True, slots=True)
class CancelGraceOver:
    slot: int
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class SettlingStuck:
    slot: int
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class MemorySeen:
    """The child's resident size. `executing`: the execution that was in course before and after the look, 0
    if there was none."""

    slot: int
    life: int
    size: int
    executing: int = 0


@dataclass(frozen=True, slots=True)
class LeaveOverdue:
    """It has had nothing in hand for long, was to end, and is still there."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class StayedIdle:
    """Its queues held entries for long, and it took none; the row, read again, still says that it has begun
    nothing since `seq`."""

    slot: int
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class ExecutionOver:
    """`seq` is no longer executed: whatever was begun against it is void."""

    slot: int
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class Stop:
    """`exit_code`: what the supervisor is to end with if nothing worse follows."""

    mode: StopMode
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class GraceWarning:
    """Running tasks are to be told that the grace is nearly over."""


@dataclass(frozen=True, slots=True)
class GraceOver:
    """Whoever is still there is killed."""


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """A killed process that the kernel does not end (stuck in a disk or a driver) must not keep us."""


@dataclass(frozen=True, slots=True)
class StacksAsked:
    """Somebody wants to see where all children are."""


@dataclass(frozen=True, slots=True)
class StackAsked:
    """Somebody wants to see where one child is."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class ReloadAsked:
    """Somebody wants new code, and new settings."""


@dataclass(frozen=True, slots=True)
class SettingsRead:
    """They were read again, and will do. `policy`: what steps need of them."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class SettingsRefused:
    """Not one of them is taken over."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReloadDue:
    """Time has passed that a reload has waited for: it is looked at again, as after every event."""


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    """Somebody wants so many children more, or fewer. `busy`: the slots that execute at this moment."""

    by: int
    busy: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class QuietAsked:
    """Somebody wants no new claims for a while."""


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """Somebody wants claims again."""


@dataclass(frozen=True, slots=True)
class ContactMade:
    """Redis was reached for the first time, and it is one that we can work with."""


@dataclass(frozen=True, slots=True)
class ContactRefused:
    """It was reached, and it says no or is of no use."""

    reason: str


Event = (
    Begin
    | TemplateUp
    | TemplateFailed
    | TemplateGone
    | TemplateOverdue
    | TemplateBackoffOver
    | Forked
    | ForkFailed
    | ChildReady
    | BootOverdue
    | BackoffOver
    | Exited
    | DeathSettled
    | MourningOver
    | SoftDue
    | HardDue
    | DumpDone
    | Revoked
    | CancelGraceOver
    | SettlingStuck
    | MemorySeen
    | LeaveOverdue
    | StayedIdle
    | ExecutionOver
    | Stop
    | GraceWarning
    | GraceOver
    | PatienceOver
    | StacksAsked
    | StackAsked
    | ReloadAsked
    | ResizeAsked
    | QuietAsked
    | ResumeAsked
    | SettingsRead
    | SettingsRefused
    | ReloadDue
    | ContactMade
    | ContactRefused
)
Concerning = SoftDue | HardDue | DumpDone | Revoked | CancelGraceOver | SettlingStuck
"""Events about one execution: true only while the row says so."""


# --- what may be done


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """SettingsRead or SettingsRefused follows."""


@dataclass(frozen=True, slots=True)
class AdoptSettings:
    """What was read last is what counts from now on."""


@dataclass(frozen=True, slots=True)
class StartTemplate:
    """`candidate`: with the settings that were read last, and are not adopted yet."""

    generation: int
    candidate: bool = False


@dataclass(frozen=True, slots=True)
class KillTemplate:
    """The process alone: its children go on."""

    generation: int


@dataclass(frozen=True, slots=True)
class RetireTemplate:
    """Nothing more is asked of it: it ends after its last child."""

    generation: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Reset the row, then ask the template of that generation for a child. `stop_after`: how many executions
    it is to begin, 0 if any number."""

    slot: int
    life: int
    generation: int
    row: int
    may_claim: bool = True
    stop_after: int = 0


@dataclass(frozen=True, slots=True)
class AllowClaims:
    """The child was born while it might not claim; now it may."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class KillStray:
    """A child of ours that no slot expects any more."""

    slot: int
    life: int
    pid: int


@dataclass(frozen=True, slots=True)
class SoftKill:
    """Raise something in the handler. `seq` 0: in whatever the child executes now."""

    slot: int
    life: int
    seq: int
    order: Order


@dataclass(frozen=True, slots=True)
class DumpStack:
    """Ask for the stacks of a child that is about to be killed; DumpDone or ExecutionOver follows."""

    slot: int
    life: int
    seq: int


@dataclass(frozen=True, slots=True)
class ShowStack:
    """Ask for the stacks of a child, for the log."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class HardKill:
    """Kill the child's whole group, now."""

    slot: int
    life: int
    seq: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class OrderStop:
    """The child is to end at its task boundary."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class BeginDuties:
    """Redis will do: all that talks to it begins."""


@dataclass(frozen=True, slots=True)
class OpenClaims:
    """Children may claim."""


@dataclass(frozen=True, slots=True)
class HoldClaims:
    """No child claims anything until claims are opened again; nothing is reaped, the park is opened to
    others."""


@dataclass(frozen=True, slots=True)
class CloseClaims:
    """No child claims anything from now on; the lock is resigned, nothing is reaped."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Whatever is pending for this life's consumer is to be ended or released."""

    slot: int
    life: int
    verdict: Verdict | None
    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class LeaveLoop:
    exit_code: int


Level = Literal["debug", "info", "warning", "error"]
Fact = str | int | float | None
Facts = Mapping[str, Fact]


@dataclass(frozen=True, slots=True)
class Say:
    """`key` names a wording of `logs.WORDS`, `facts` fill it."""

    level: Level
    key: str
    facts: Facts = field(default_factory=dict)


Action = (
    ReadSettings
    | AdoptSettings
    | StartTemplate
    | KillTemplate
    | RetireTemplate
    | Fork
    | AllowClaims
    | KillStray
    | SoftKill
    | DumpStack
    | ShowStack
    | HardKill
    | OrderStop
    | BeginDuties
    | OpenClaims
    | HoldClaims
    | CloseClaims
    | Settle
    | LeaveLoop
    | Say
)


@dataclass(frozen=True, slots=True)
class Alarm:
    """An event that comes by itself at a time of the monotonic clock."""

    at: float
    event: Event
