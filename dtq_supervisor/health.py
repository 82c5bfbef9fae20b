"""Live, and ready: facts in, verdict and reasons out (R37). Pure.

Live says whether a restart would help: the main loop ticks. Ready says whether tasks are taken: Redis is
reachable, a child is READY, and none stays idle while its queues hold entries. Nothing to do, paused queues
and long tasks are healthy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dtq_supervisor.idleness import Idler
from dtq_supervisor.slot import State
from dtq_supervisor.snapshot import SlotView, Snapshot

LIVE_S = 30.0
CLAIMS_S = 5.0
"""Children claim only while the main loop's stamp is younger (R7)."""
SILENT_S = 6.0
"""Some duty asks Redis more than once a second, and gives up after 5 s."""
DOUBT_S = 1.0
"""A call that fails may have met one dead connection: others are answered meanwhile, if Redis is there."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All times are monotonic seconds. `tick`: of the main loop's last round. `redis_ok_since`: since when
    our calls succeed, 0.0 if the last one failed; `redis_heard_at`: when the last reply came; `redis_away`:
    it is an outage, and no single dead connection."""

    now: float
    tick: float
    snapshot: Snapshot = field(default_factory=Snapshot)
    redis_ok_since: float = 0.0
    redis_heard_at: float = 0.0
    redis_away: bool = False
    idlers: tuple[Idler, ...] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """Well if there is no reason against it."""

    reasons: tuple[str, ...] = ()

    @property
    def well(self) -> bool:
        return not self.reasons

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.reasons or ("ok",))


def live(facts: Facts) -> Health:
    age = facts.now - facts.tick
    return Health((f"the main loop has not ticked for {age:.0f} s",)) if age > LIVE_S else Health()


def ready(facts: Facts) -> Health:
    age = facts.now - facts.tick
    if age > CLAIMS_S:
        # All else is as old, and the duties pause with the loop.
        return Health((f"the main loop has not ticked for {age:.0f} s, so no child claims",))
    if facts.snapshot.stopping:
        return Health(("it is stopping",))
    return Health((*_redis(facts), *_children(facts), *_idlers(facts)))


def redis_reachable(facts: Facts) -> bool:
    return not _redis(facts)


def _redis(facts: Facts) -> list[str]:
    silent = facts.now - facts.redis_heard_at
    if not facts.redis_heard_at:
        return ["Redis has not answered yet"]
    if facts.redis_away or (not facts.redis_ok_since and silent > DOUBT_S):
        return [f"Redis is not available: the last answer came {silent:.0f} s ago"]
    if not facts.snapshot.contact:
        return ["Redis has not been found fit yet"]
    return [f"Redis has not answered for {silent:.0f} s"] if silent > SILENT_S else []


def _children(facts: Facts) -> list[str]:
    ready = facts.snapshot.ready()
    if not ready:
        return [f"no child is ready: {_why_none(facts)}"]
    claiming = [slot for slot in ready if slot.may_claim] if facts.snapshot.claiming else []
    if claiming and not any(slot.row and slot.row.redis_ok_since for slot in claiming):
        return ["no child reaches Redis"]
    return []


def _why_none(facts: Facts) -> str:
    """The slots' own troubles, each once, before the template's."""
    snapshot = facts.snapshot
    told = dict.fromkeys(_trouble(facts.now, slot) for slot in snapshot.slots if slot.trouble)
    if told:
        return "; ".join(told)
    if snapshot.trouble:
        return f"the template was lost: {snapshot.trouble}{_next(facts.now, snapshot.template_next_at)}"
    if snapshot.template == "starting":
        return "the application is being imported"
    starting = sum(slot.state is State.STARTING for slot in snapshot.slots)
    return f"{starting} of {len(snapshot.slots)} are starting"


def _trouble(now: float, slot: SlotView) -> str:
    return f"child {slot.number}: {slot.trouble}{_next(now, slot.next_try_at)}"


def _next(now: float, at: float) -> str:
    return f", the next try in {at - now:.0f} s" if at > now else ""


def _idlers(facts: Facts) -> list[str]:
    return [
        f"child {idler.slot} (pid {idler.pid}) has been idle for {facts.now - idler.since:.0f} s "
        f"while {idler.band} holds entries"
        for idler in facts.idlers
    ]
