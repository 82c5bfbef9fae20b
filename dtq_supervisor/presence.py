"""The record of ourselves in Redis: the hash of this worker, and the sets that name it (DESIGN §4)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import orjson

from dtq_child.row import Phase
from dtq_child.version import VERSION
from dtq_supervisor.holdings import Child
from dtq_supervisor.line import Line, Word
from dtq_supervisor.seat import Seat


def announce(line: Line, ttl_ms: int, seat: Seat, fields: dict[str, Word]) -> bool:
    """Writes it anew for the next `ttl_ms`. True if nobody knew us. Raises BrokerError."""
    keys = line.keys
    types = [word for name, declared in seat.task_types.items() for word in (name, orjson.dumps(declared))]
    age_ms = max(0, round((time.monotonic() - seat.started_at) * 1000))
    words: list[Word] = [
        line.worker_id,
        ttl_ms,
        age_ms,
        len(line.queues),
        *line.queues,
        len(types) // 2,
        *types,
    ]
    words += [word for field in fields.items() for word in field]
    places = [keys.worker(line.worker_id), keys.workers, keys.queues, keys.task_types, line.bell]
    return bool(line.run("presence", places, words))


def say_farewell(line: Line) -> int:
    """Takes it away, with the bell and every consumer of ours that has nothing pending, and opens our park to
    others. Returns how many consumers went. Raises BrokerError."""
    keys = line.keys
    places = [keys.worker(line.worker_id), keys.workers, line.bell, *line.streams_of_children()]
    return int(line.run("farewell", places, [line.worker_id, line.park]))


def fields_of(seat: Seat, ours: Sequence[Child]) -> dict[str, Word]:
    """All but what the script knows better: last_heartbeat and started_at are times of the server."""
    counted = seat.counted()
    return {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "active_tasks": sum(_phase(child) is Phase.EXECUTING for child in ours),
        "concurrency": seat.concurrency(),
        "tasks_processed": counted.processed,
        "tasks_failed": counted.failed,
        "tasks_retried": counted.retried,
        "status": status_of(seat, ours),
        "queues": ",".join(seat.queues),
        "version": VERSION,
        "generation": seat.generation(),
        "replaced": orjson.dumps(dict(seat.published.replaced), option=orjson.OPT_SORT_KEYS),
        "reload": seat.published.reload,
        "children": orjson.dumps([_told(child) for child in ours]),
    }


def status_of(seat: Seat, ours: Sequence[Child]) -> str:
    """starting | running | quiet (claims nothing) | stopping."""
    if seat.scoreboard.stopping:
        return "stopping"
    if not seat.scoreboard.claiming:
        return "quiet"
    booted = any(_phase(child) not in (None, Phase.BOOTING) for child in ours)
    return "running" if booted else "starting"


def _phase(child: Child) -> Phase | None:
    return child.row.phase if child.row else None


def _told(child: Child) -> dict[str, Any]:
    told: dict[str, Any] = {"slot": child.slot, "life": child.life}
    if child.row is not None:
        told |= {"pid": child.row.pid, "phase": child.row.phase.name.lower()}
    if child.row is not None and child.row.execution is not None:
        e = child.row.execution
        seconds = round(time.monotonic() - e.started, 3)
        told |= {"task_id": e.task_id, "task_type": e.task_type, "attempt": e.attempt, "running_s": seconds}
    return told
