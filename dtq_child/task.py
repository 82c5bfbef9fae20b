"""What a task is: its record, its states and their edges, its entry's fields, its names' alphabets. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtq_child import payload
from dtq_child.errors import InvalidTask

QUEUE_ALPHABET = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
TASK_ID_ALPHABET = re.compile(r"[A-Za-z0-9_\-]{1,64}")
TASK_TYPE_MAX = 200
IDEMPOTENCY_KEY_MAX = 256
MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
MAX_EXECUTIONS = 20
ENTRY_FIELDS = (
    "task_id",
    "queue",
    "task_type",
    "payload",
    "attempt",
    "max_attempts",
    "priority",
    "timeout_ms",
    "idempotency_key",
)


class Status(enum.StrEnum):
    """Where a task is in its life; the values are what the record holds."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    RETRY_SCHEDULED = "retry_scheduled"
    SUCCEEDED = "succeeded"
    DEAD_LETTERED = "dead_lettered"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


TERMINAL = frozenset({Status.SUCCEEDED, Status.DEAD_LETTERED, Status.CANCELLED, Status.EXPIRED})
WAITING = frozenset({Status.QUEUED, Status.SCHEDULED, Status.RETRY_SCHEDULED})

EDGES: Mapping[Status | None, frozenset[Status]] = {
    None: frozenset({Status.QUEUED, Status.SCHEDULED, Status.DEAD_LETTERED}),
    Status.QUEUED: frozenset({Status.RUNNING, Status.EXPIRED, Status.CANCELLED}),
    Status.SCHEDULED: frozenset({Status.QUEUED, Status.EXPIRED, Status.CANCELLED}),
    Status.RUNNING: frozenset(
        {
            Status.SUCCEEDED,
            Status.RETRY_SCHEDULED,
            Status.DEAD_LETTERED,
            Status.QUEUED,
            Status.CANCELLED,
            Status.RUNNING,
        }
    ),
    Status.RETRY_SCHEDULED: frozenset({Status.QUEUED, Status.CANCELLED}),
    Status.SUCCEEDED: frozenset(),
    Status.DEAD_LETTERED: frozenset({Status.QUEUED}),
    Status.CANCELLED: frozenset(),
    Status.EXPIRED: frozenset(),
}
"""Every edge of the life of a record (DESIGN §5). RUNNING → RUNNING is a delivery taken over by the next one;
DEAD_LETTERED → QUEUED an operator's requeue."""


@dataclass(frozen=True, slots=True)
class Call:
    """A task to be enqueued: everything but where it goes in Redis. Empty (None) options are resolved by the
    worker that claims it, from its own declaration of the task, then from its settings."""

    task_id: str
    queue: str
    task_type: str
    payload: bytes
    priority: int = 5
    timeout_ms: int | None = None
    soft_timeout_ms: int | None = None
    max_attempts: int | None = None
    max_crashes: int | None = None
    retry: str = ""
    store_result: bool = True
    delay_ms: int | None = None
    eta_ms: int | None = None
    expires_ms: int | None = None
    expires_at_ms: int | None = None
    idempotency_key: str = ""
    metadata: str = ""
    trace: str = ""


@dataclass(slots=True, unsafe_hash=True)
class Token:
    """The identity of one delivery: a settle counts only if all of it matches the record (R11)."""

    task_id: str
    stream: str
    entry_id: str
    delivery: int
    consumer: str


def text(value: bytes | str) -> str:
    """Redis bytes as text; what is no UTF-8 is shown by backslash escapes, never an error."""
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


class Record:
    """The authoritative record of a task as read from Redis: raw bytes with typed views (DESIGN §5)."""

    __slots__ = ("fields",)

    def __init__(self, fields: Mapping[str, bytes]) -> None:
        self.fields = dict(fields)

    def get(self, name: str) -> str:
        return text(self.fields.get(name, b""))

    def number(self, name: str) -> int | None:
        raw = self.fields.get(name, b"")
        try:
            return int(raw)
        except ValueError:
            return None

    @property
    def status(self) -> Status | None:
        value = self.get("status")
        return Status(value) if value in Status._value2member_map_ else None

    @property
    def metadata(self) -> dict[str, Any]:
        return _object(self.fields.get("metadata", b""))

    def executions(self) -> list[dict[str, Any]]:
        """The executions kept, oldest first, each with its `delivery`."""
        kept = []
        for name, raw in self.fields.items():
            if name.startswith("execution:"):
                kept.append({"delivery": int(name.partition(":")[2]), **_object(raw)})
        return sorted(kept, key=lambda execution: int(execution["delivery"]))

    def as_dict(self) -> dict[str, str]:
        return {name: text(raw) for name, raw in self.fields.items()}


def _object(raw: bytes) -> dict[str, Any]:
    if not raw:
        return {}
    try:
        value = payload.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def check_queue(queue: str) -> str:
    if not isinstance(queue, str) or not QUEUE_ALPHABET.fullmatch(queue):
        raise InvalidTask(f"queue {queue!r}: 1 to 64 characters of A-Z a-z 0-9 _ . - are allowed")
    return queue


def check_task_id(task_id: str) -> str:
    if not isinstance(task_id, str) or not TASK_ID_ALPHABET.fullmatch(task_id):
        raise InvalidTask(f"task id {task_id!r}: 1 to 64 characters of A-Z a-z 0-9 _ - are allowed")
    return task_id


def check_task_type(task_type: str) -> str:
    if not isinstance(task_type, str) or not 1 <= len(task_type.encode("utf-8", "replace")) <= TASK_TYPE_MAX:
        raise InvalidTask(f"task type {task_type!r}: 1 to {TASK_TYPE_MAX} bytes of text are allowed")
    if not task_type.isprintable():
        raise InvalidTask(f"task type {task_type!r}: only printable characters are allowed")
    return task_type


def check_priority(priority: int) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 9:
        raise InvalidTask(f"priority {priority!r}: a whole number from 0 (last) to 9 (first) is needed")
    return priority


def check_idempotency_key(key: str) -> str:
    try:
        size = len(key.encode())
    except (AttributeError, UnicodeEncodeError):
        size = 0
    if not 1 <= size <= IDEMPOTENCY_KEY_MAX:
        raise InvalidTask(f"idempotency key {key!r}: 1 to {IDEMPOTENCY_KEY_MAX} bytes of text are allowed")
    return key
