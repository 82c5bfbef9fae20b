"""The options of a declaration and of one call: checked when they are given, laid over each other in
`make_call`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict

from dtq_child import payload
from dtq_child.errors import InvalidTask, PayloadError
from dtq_child.retry import Backoff
from dtq_child.task import (
    Call,
    check_idempotency_key,
    check_priority,
    check_queue,
    check_task_id,
)
from dtq_child.times import (
    MAX_DELAY_MS,
    Seconds,
    check_duration,
    check_moment,
    check_timeout,
    check_timeouts,
)

MAX_COUNT = 1_000_000
METADATA_MAX = 8192


class Given(TypedDict, total=False):
    """What `Task.options()`, `App.enqueue()` and their like take; what is left out is as declared.

    queue: its name. priority: 0 (last) to 9 (first). delay: seconds or timedelta until it may start, by the
    clock of Redis. eta: an aware datetime instead; one in the past means at once. expires: seconds or
    timedelta from now, or an aware datetime, by which it must have started. idempotency_key: at most one
    unfinished task per queue and key. timeout, soft_timeout: seconds or timedelta, at most 7 days.
    max_attempts, max_crashes: from 1. retry: a Backoff. store_result: whether `result()` will have it.
    metadata: a JSON object for the handler and for operators. task_id: instead of a new one; enqueueing an
    id again changes nothing."""

    queue: str
    priority: int
    delay: Seconds | None
    eta: datetime | None
    expires: Seconds | datetime | None
    idempotency_key: str | None
    timeout: Seconds | None
    soft_timeout: Seconds | None
    max_attempts: int | None
    max_crashes: int | None
    retry: Backoff | None
    store_result: bool
    metadata: Mapping[str, Any] | None
    task_id: str | None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The same, checked and in the units of the record. None: not given."""

    queue: str | None = None
    priority: int | None = None
    delay_ms: int | None = None
    eta_ms: int | None = None
    expires_ms: int | None = None
    expires_at_ms: int | None = None
    idempotency_key: str = ""
    timeout_ms: int | None = None
    soft_timeout_ms: int | None = None
    max_attempts: int | None = None
    max_crashes: int | None = None
    retry: str = ""
    store_result: bool | None = None
    metadata: str = ""
    task_id: str | None = None


NOTHING_GIVEN = CallOptions()


@dataclass(frozen=True, slots=True)
class Declared:
    """The options of a declaration, checked. None: the worker's settings decide."""

    queue: str = "default"
    priority: int = 5
    timeout_ms: int | None = None
    soft_timeout_ms: int | None = None
    max_attempts: int | None = None
    max_crashes: int | None = None
    retry: Backoff | None = None
    store_result: bool = True


UNDECLARED = Declared()


def check_declared(
    *,
    queue: str,
    priority: int,
    timeout: Seconds | None,
    soft_timeout: Seconds | None,
    max_attempts: int | None,
    max_crashes: int | None,
    retry: Backoff | None,
    store_result: bool,
) -> Declared:
    """Raises InvalidTask."""
    declared = Declared(
        queue=check_queue(queue),
        priority=check_priority(priority),
        timeout_ms=check_timeout(timeout, "timeout"),
        soft_timeout_ms=check_timeout(soft_timeout, "soft_timeout"),
        max_attempts=check_count(max_attempts, "max_attempts"),
        max_crashes=check_count(max_crashes, "max_crashes"),
        retry=check_retry(retry),
        store_result=check_flag(store_result, "store_result"),
    )
    check_timeouts(declared.timeout_ms, declared.soft_timeout_ms)
    return declared


def check_options(given: Given, now_ms: int, declared: Declared = UNDECLARED) -> CallOptions:
    """`given`, checked by itself and beside the declaration. Raises InvalidTask for a value, TypeError for
    a name.

    `now_ms`: epoch milliseconds of this machine; far-off times are refused by it, no due time is reckoned
    from it."""
    if not given:
        return NOTHING_GIVEN
    unknown = given.keys() - Given.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"no such option: {', '.join(sorted(unknown))}; there are {', '.join(Given.__annotations__)}"
        )
    options = CallOptions(
        queue=check_queue(given["queue"]) if "queue" in given else None,
        priority=check_priority(given["priority"]) if "priority" in given else None,
        delay_ms=_optional(given.get("delay"), "delay"),
        eta_ms=check_moment(given["eta"], "eta", now_ms) if given.get("eta") is not None else None,
        **_expiry(given.get("expires"), now_ms),
        idempotency_key=_optional_key(given.get("idempotency_key")),
        timeout_ms=check_timeout(given.get("timeout"), "timeout"),
        soft_timeout_ms=check_timeout(given.get("soft_timeout"), "soft_timeout"),
        max_attempts=check_count(given.get("max_attempts"), "max_attempts"),
        max_crashes=check_count(given.get("max_crashes"), "max_crashes"),
        retry=_policy(given.get("retry")),
        store_result=check_flag(given["store_result"], "store_result") if "store_result" in given else None,
        metadata=_metadata(given.get("metadata")),
        task_id=_optional_id(given.get("task_id")),
    )
    _check_due(options)
    check_timeouts(
        options.timeout_ms or declared.timeout_ms, options.soft_timeout_ms or declared.soft_timeout_ms
    )
    return options


def make_call(task_type: str, task_id: str, data: bytes, given: CallOptions, declared: Declared) -> Call:
    """Queue, priority and store_result must be known now; the rest of the declaration is left empty, so
    that the code that executes the task decides, and a deploy reaches what is already queued."""
    return Call(
        task_id=given.task_id or task_id,
        queue=given.queue if given.queue is not None else declared.queue,
        task_type=task_type,
        payload=data,
        priority=given.priority if given.priority is not None else declared.priority,
        timeout_ms=given.timeout_ms,
        soft_timeout_ms=given.soft_timeout_ms,
        max_attempts=given.max_attempts,
        max_crashes=given.max_crashes,
        retry=given.retry,
        store_result=given.store_result if given.store_result is not None else declared.store_result,
        delay_ms=given.delay_ms or None,
        eta_ms=given.eta_ms,
        expires_ms=given.expires_ms,
        expires_at_ms=given.expires_at_ms,
        idempotency_key=given.idempotency_key,
        metadata=given.metadata,
    )


def _check_due(options: CallOptions) -> None:
    if options.delay_ms is not None and options.eta_ms is not None:
        raise InvalidTask("delay and eta are both given: a task has one due time, leave one out")
    for due, end in ((options.delay_ms, options.expires_ms), (options.eta_ms, options.expires_at_ms)):
        if due is not None and end is not None and end <= due:
            raise InvalidTask(
                "the task would expire before it is due: expires counts from now, not from the due time"
            )


def check_count(value: object, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise InvalidTask(f"{name} {value!r}: a whole number from 1 to {MAX_COUNT} is needed")
    return value


def check_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidTask(f"{name} {value!r}: True or False is needed")
    return value


def check_retry(value: object) -> Backoff | None:
    if value is not None and not isinstance(value, Backoff):
        raise InvalidTask(f"retry {value!r}: give a Backoff, like Backoff(base=10, factor=4, cap=3600)")
    return value


def _optional(value: object, name: str) -> int | None:
    return None if value is None else check_duration(value, name, MAX_DELAY_MS)


def _optional_key(value: str | None) -> str:
    return "" if value is None else check_idempotency_key(value)


def _optional_id(value: str | None) -> str | None:
    return None if value is None else check_task_id(value)


def _expiry(value: object, now_ms: int) -> dict[str, int]:
    if value is None:
        return {}
    if isinstance(value, datetime):
        return {"expires_at_ms": check_moment(value, "expires", now_ms)}
    milliseconds = check_duration(value, "expires", MAX_DELAY_MS)
    if milliseconds == 0:
        raise InvalidTask(f"expires {value!r}: it must be above 0, or no worker could start the task in time")
    return {"expires_ms": milliseconds}


def _policy(value: object) -> str:
    backoff = check_retry(value)
    return "" if backoff is None else backoff.policy.to_json()


def _metadata(value: object) -> str:
    if not value:
        return ""
    if not isinstance(value, Mapping):
        raise InvalidTask(f"metadata {value!r}: a mapping of names to JSON values is needed")
    try:
        data = payload.dumps(dict(value))
    except PayloadError as error:
        raise PayloadError(
            error.reason, "metadata" + error.path.removeprefix("$"), error.value_repr
        ) from None
    if len(data) > METADATA_MAX:
        raise InvalidTask(f"metadata of {len(data)} bytes as JSON: at most {METADATA_MAX} are allowed")
    return data.decode()
