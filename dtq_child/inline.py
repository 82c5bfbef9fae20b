"""A broker that executes each task at its enqueue, in this process: for tests that need no Redis.

As in a worker arguments are bound and go through JSON, results too, the retry policy says whether there is
another attempt, and the outcome is read from the handle. What it leaves out: waiting (due times and the
delays between attempts pass at once), timeouts, other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dtq_child import payload
from dtq_child.app import App
from dtq_child.context import CurrentTask
from dtq_child.declaration import Task
from dtq_child.errors import UNKNOWN_TASK_TYPE, DtqError, IdempotencyConflict, TaskNotFound
from dtq_child.in_process import attempt
from dtq_child.limits import Limits, declared_limits, limits_of
from dtq_child.outcome import Decision, Facts, Happening, Returned, decide
from dtq_child.task import TERMINAL, Call, Record, Status

MAX_NESTED = 50
MAX_ATTEMPTS = 100
_EVEN_DICE = 0.5
_OUTCOMES = {"succeed": Status.SUCCEEDED, "retry": Status.RETRY_SCHEDULED, "dead": Status.DEAD_LETTERED}


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer for one call."""

    task_id: str
    deduplicated: bool = False


@dataclass(frozen=True, slots=True)
class InlineBroker:
    """`records`: by task id, in the order of enqueueing, with those fields of the real ones that are known
    here.

    `propagate`: what a handler raised in its last attempt is raised at the enqueue, too."""

    app: App
    propagate: bool = False
    records: dict[str, Record] = field(default_factory=dict)
    results: dict[str, bytes] = field(default_factory=dict)
    _holders: dict[tuple[str, str], Call] = field(default_factory=dict)
    _here: threading.local = field(default_factory=threading.local)

    def enqueue(self, calls: Sequence[Call], /) -> list[Accepted]:
        self._refuse_conflicts(calls)
        return [self._known(call) or self._execute(call) for call in calls]

    def record(self, task_id: str, /) -> Record | None:
        return self.records.get(task_id)

    def status(self, task_id: str, /) -> str:
        if task_id not in self.records:
            raise TaskNotFound(task_id)
        return self.records[task_id].get("status")

    def result(self, task_id: str, /) -> bytes | None:
        return self.results.get(task_id)

    def cancel(self, task_id: str, /) -> str:
        """A task is over when its enqueue returns: what can be cancelled is one that executes right now."""
        record = self.records.get(task_id)
        if record is None:
            return "unknown"
        if record.status in TERMINAL:
            return "cancelled" if record.status is Status.CANCELLED else "too_late"
        _write(record, status=Status.CANCELLED)
        return "stopping"

    def _refuse_conflicts(self, calls: Sequence[Call]) -> None:
        """Before the first one is executed: a batch is accepted whole or not at all."""
        holders = dict(self._holders)
        for call in calls:
            if call.idempotency_key and call.task_id not in self.records:
                holder = holders.setdefault((call.queue, call.idempotency_key), call)
                if holder.payload != call.payload:
                    raise IdempotencyConflict(call.queue, call.idempotency_key, holder.task_id)

    def _known(self, call: Call) -> Accepted | None:
        if call.task_id in self.records:
            return Accepted(call.task_id)
        holder = self._holders.get((call.queue, call.idempotency_key)) if call.idempotency_key else None
        return None if holder is None else Accepted(holder.task_id, deduplicated=True)

    def _execute(self, call: Call) -> Accepted:
        depth = getattr(self._here, "depth", 0)
        if depth >= MAX_NESTED:
            self._here.too_deep = call.task_type
            raise DtqError(f"{call.task_type} is enqueued by {depth} tasks, one inside the other")
        self._here.depth = depth + 1
        try:
            error = self._to_its_end(call)
        finally:
            self._here.depth = depth
        too_deep = getattr(self._here, "too_deep", None)
        if depth == 0 and too_deep is not None:
            del self._here.too_deep
            # Raised again: the handler in the middle that met it has failed, and its producers know nothing.
            raise DtqError(
                f"{MAX_NESTED} tasks enqueue one another inline, the last one is {too_deep}: "
                "test what goes on for ever with fake_app() and work(app, limit=…)"
            )
        if error is not None and self.propagate:
            raise error
        return Accepted(call.task_id)

    def _to_its_end(self, call: Call) -> BaseException | None:
        """Executes attempts until there is a terminal status; what the last one raised, if that
        dead-lettered."""
        record = self.records[call.task_id] = _new_record(call)
        if call.idempotency_key:
            self._holders[call.queue, call.idempotency_key] = call
        if _expired(call, time.time_ns() // 1_000_000):
            _write(record, status=Status.EXPIRED)
        task, error = self.app.find(call.task_type), None
        for number in range(1, MAX_ATTEMPTS + 1):
            if record.status in TERMINAL:
                break
            _write(record, status=Status.RUNNING, attempt=number, delivery=number)
            if task is None:
                self._settle(record, call, _unknown(call.task_type), None)
                continue
            limits = limits_of(_Stated.of(call), declared_limits(task.options_declared, self.app.settings()))
            happening, error = self._attempt(task, call, limits, number)
            decision = decide(happening, _facts(number, limits), _EVEN_DICE)
            self._settle(record, call, decision, happening)
        else:
            raise DtqError(
                f"{call.task_type} has failed {MAX_ATTEMPTS} times inline: give it fewer max_attempts"
            )
        if call.idempotency_key and record.status is not Status.SUCCEEDED:
            self._holders.pop((call.queue, call.idempotency_key), None)
        return error if record.status is Status.DEAD_LETTERED else None

    def _attempt(
        self, task: Task[..., Any], call: Call, limits: Limits, number: int
    ) -> tuple[Happening, BaseException | None]:
        current = CurrentTask(
            id=call.task_id,
            task_type=call.task_type,
            queue=call.queue,
            attempt=number,
            max_attempts=limits.max_attempts,
            delivery=number,
            redelivered=number > 1,
            deadline=time.monotonic() + limits.timeout_ms / 1000,
            metadata=payload.loads(call.metadata.encode()) if call.metadata else {},
        )
        return attempt(self.app, task, call.payload, current, call.store_result)

    def _settle(self, record: Record, call: Call, decision: Decision, happening: Happening | None) -> None:
        """Writes the outcome, unless the task was cancelled meanwhile."""
        if record.status is Status.CANCELLED:
            return
        told = {"attempt": record.number("attempt"), "outcome": decision.kind, "delay_ms": decision.delay_ms}
        _write(record, status=_OUTCOMES[decision.kind])
        record.fields[f"execution:{record.get('delivery')}"] = payload.dumps(told)
        if decision.error_class:
            _write(
                record,
                last_error_class=decision.error_class,
                last_error=decision.error_message,
                traceback=decision.traceback,
            )
        result = happening.result if isinstance(happening, Returned) else None
        if result is None:
            return
        if result.unavailable is not None:
            _write(record, result_unavailable=result.unavailable)
            return
        self.results[call.task_id] = result.data
        _write(record, result_size=result.size, result_truncated="1" if result.truncated else "")


@dataclass(frozen=True, slots=True)
class _Stated:
    """What a call says about its limits, as `limits_of` reads it from a record."""

    timeout_ms: int | None
    soft_timeout_ms: int | None
    max_attempts: int | None
    max_crashes: int | None
    retry: bytes

    @classmethod
    def of(cls, call: Call) -> _Stated:
        return cls(
            call.timeout_ms, call.soft_timeout_ms, call.max_attempts, call.max_crashes, call.retry.encode()
        )


def _new_record(call: Call) -> Record:
    record = Record({"payload": call.payload})
    _write(
        record,
        task_id=call.task_id,
        queue=call.queue,
        task_type=call.task_type,
        priority=call.priority,
        status=Status.QUEUED,
        crashes=0,
        idempotency_key=call.idempotency_key,
        metadata=call.metadata,
    )
    return record


def _write(record: Record, **values: object) -> None:
    record.fields.update(
        (name, str(value).encode("utf-8", "backslashreplace")) for name, value in values.items()
    )


def _expired(call: Call, now_ms: int) -> bool:
    due_ms = max(now_ms, call.eta_ms or now_ms + (call.delay_ms or 0))
    end_ms = call.expires_at_ms if call.expires_ms is None else now_ms + call.expires_ms
    return end_ms is not None and end_ms <= due_ms


def _facts(number: int, limits: Limits) -> Facts:
    return Facts(number, limits.max_attempts, 0, limits.max_crashes, limits.policy, unknown_ttl_ms=0)


def _unknown(task_type: str) -> Decision:
    return Decision(
        "dead",
        "unknown_task_type",
        error_class=UNKNOWN_TASK_TYPE,
        error_message=f"this App declares no {task_type!r}: import its module, or call app.load_includes()",
    )
