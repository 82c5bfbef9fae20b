"""Every Redis key, group, consumer and channel name (DESIGN §4). No other module spells one."""

from __future__ import annotations

import os
import socket

GROUP = "workers"
BANDS = 10
PARK = "park"


class Keys:
    """The names under one prefix."""

    __slots__ = (
        "audit",
        "cancelled",
        "claimed",
        "dead_letter",
        "events",
        "hint",
        "lock",
        "nil",
        "prefix",
        "queues",
        "recent",
        "schedule",
        "schema",
        "task_types",
        "workers",
    )

    def __init__(self, prefix: str = "dtq:") -> None:
        self.prefix = prefix
        self.dead_letter = f"{prefix}stream:dead-letter"
        self.audit = f"{prefix}stream:audit"
        self.schedule = f"{prefix}retry:schedule"
        self.claimed = f"{prefix}retry:claimed"
        self.workers = f"{prefix}workers"
        self.queues = f"{prefix}queues"
        self.task_types = f"{prefix}task_types"
        self.cancelled = f"{prefix}cancelled"
        self.recent = f"{prefix}tasks:recent"
        self.lock = f"{prefix}lock:scheduler"
        self.hint = f"{prefix}hint"
        self.schema = f"{prefix}schema"
        self.nil = f"{prefix}nil"
        self.events = f"{prefix}events"

    def stream(self, queue: str, band: int) -> str:
        return f"{self.prefix}stream:{queue}:p{band}"

    def bands(self, queue: str) -> list[str]:
        """The ten streams of a queue, p9 first."""
        return [self.stream(queue, band) for band in range(BANDS - 1, -1, -1)]

    def task(self, task_id: str) -> str:
        return f"{self.prefix}task:{task_id}"

    def result(self, task_id: str) -> str:
        return f"{self.prefix}result:{task_id}"

    def idempotency(self, queue: str, key: str) -> str:
        return f"{self.prefix}idempotency:{queue}:{key}"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def paused(self, queue: str) -> str:
        return f"{self.prefix}queue:{queue}:paused"

    def bell_queue(self, queue: str) -> str:
        return f"{self.prefix}bell:q:{queue}"

    def bell_worker(self, worker_id: str) -> str:
        return f"{self.prefix}bell:w:{worker_id}"

    def split_stream(self, stream: str) -> tuple[str, int]:
        """The (queue, band) of a band's key."""
        body = stream[len(self.prefix) + len("stream:") :]
        queue, _, band = body.rpartition(":p")
        return queue, int(band)


def new_worker_id() -> str:
    """`<hostname>-<pid>-<hex>`, new at each start (R15)."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def consumer(worker_id: str, slot: int, life: int) -> str:
    """The consumer of one child: one life of one slot."""
    return f"{worker_id}:{slot}.{life}"


def park(worker_id: str) -> str:
    """The consumer under which a supervisor keeps entries that came back."""
    return f"{worker_id}:{PARK}"
