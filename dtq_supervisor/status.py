"""What `/status` tells: one supervisor and its slots, as plain data for JSON. Pure.

Times are durations in seconds, for the monotonic clock means nothing outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtq_child.error_text import clip_middle
from dtq_child.row import Counters, Execution, Phase, Row
from dtq_supervisor.health import Facts, Health, live, ready, redis_reachable
from dtq_supervisor.roster import Reloaded
from dtq_supervisor.snapshot import SlotView

REASON_BYTES = 4000


@dataclass(frozen=True, slots=True)
class About:
    """What `Facts` do not hold. `paused`: None if it is not known at this moment. `replaced`: children that
    others took the place of, by reason."""

    worker_id: str
    hostname: str
    pid: int
    version: str
    app: str
    queues: tuple[str, ...]
    redis_url: str
    started_at: float
    leader: bool
    paused: tuple[str, ...] | None
    redis_errors: int
    counted: Counters
    replaced: Mapping[str, int]


def status(facts: Facts, about: About, *, with_ids: bool) -> dict[str, Any]:
    """`with_ids`: whoever asks may know the ids of tasks."""
    snapshot, now = facts.snapshot, facts.now
    return {
        "worker_id": about.worker_id,
        "hostname": about.hostname,
        "pid": about.pid,
        "version": about.version,
        "app": about.app,
        "up_s": _seconds(now - about.started_at),
        "state": _state(facts),
        "live": _health(live(facts)),
        "ready": _health(ready(facts)),
        "tick_age_s": _seconds(now - facts.tick),
        "queues": list(about.queues),
        "paused_queues": None if about.paused is None else list(about.paused),
        "leader": about.leader,
        "redis": {
            "url": about.redis_url,
            "reachable": redis_reachable(facts),
            "ok_s": _since(now, facts.redis_ok_since),
            "heard_s": _since(now, facts.redis_heard_at),
            "errors": about.redis_errors,
        },
        "template": {
            "generation": snapshot.generation,
            "state": snapshot.template,
            "trouble": snapshot.trouble or None,
            "next_try_s": _until(now, snapshot.template_next_at),
        },
        "reload": {
            "phase": snapshot.reload_phase or None,
            "standing_by": snapshot.standing_by,
            "last": _reloaded(snapshot.reloaded) if snapshot.reloaded else None,
        },
        "counters": dataclasses.asdict(about.counted),
        "replaced": dict(about.replaced),
        "slots": [_slot(now, slot, with_ids) for slot in snapshot.slots],
    }


def _state(facts: Facts) -> str:
    if facts.snapshot.stopping:
        return "stopping"
    if not facts.snapshot.contact or not facts.snapshot.ready():
        return "starting"
    return "running" if facts.snapshot.claiming else "quiet"


def _health(health: Health) -> dict[str, Any]:
    return {"ok": health.well, "reasons": list(health.reasons)}


def _reloaded(how: Reloaded) -> dict[str, Any]:
    reason = clip_middle(how.reason, REASON_BYTES) or None
    outcome = "done" if how.done else "failed"
    return {"number": how.number, "outcome": outcome, "generation": how.generation, "reason": reason}


def _slot(now: float, slot: SlotView, with_ids: bool) -> dict[str, Any]:
    row = slot.row
    return {
        "slot": slot.number,
        "state": str(slot.state),
        "pid": slot.pid or None,
        "life": slot.life,
        "generation": slot.generation or None,
        "phase": row.phase.name.lower() if row else None,
        "since_s": _since(now, _phase_since(row)) if row else None,
        "may_claim": slot.may_claim,
        "redis_ok_s": _since(now, row.redis_ok_since) if row else None,
        "trouble": slot.trouble or None,
        "next_try_s": _until(now, slot.next_try_at),
        "task": _task(now, row.execution, with_ids) if row and row.execution else None,
        "held": len(row.held) if row else 0,
        "counters": dataclasses.asdict(row.counters) if row else None,
    }


def _phase_since(row: Row) -> float:
    if row.execution is not None:
        return row.settling_since if row.phase is Phase.SETTLING else row.execution.started
    return row.idle_since


def _task(now: float, execution: Execution, with_ids: bool) -> dict[str, Any]:
    told = {
        "task_type": execution.task_type,
        "stream": execution.stream,
        "attempt": execution.attempt,
        "max_attempts": execution.max_attempts,
        "crashes": execution.crashes,
        "delivery": execution.delivery,
        "running_s": _seconds(now - execution.started),
        "timeout_s": execution.timeout_ms / 1000,
        "soft_deadline_s": _until(now, execution.soft_deadline),
        "deadline_s": _until(now, execution.hard_deadline),
    }
    return {"task_id": execution.task_id, **told} if with_ids else told


def _seconds(duration: float) -> float:
    return round(duration, 3)


def _since(now: float, moment: float) -> float | None:
    return _seconds(now - moment) if moment else None


def _until(now: float, moment: float) -> float | None:
    """Negative if it has passed."""
    return _seconds(moment - now) if moment else None
