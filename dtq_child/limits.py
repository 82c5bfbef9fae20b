"""What one execution may use up: the record's values win over the declaration's, those over the settings'.
Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from dtq_child.call import MAX_COUNT
from dtq_child.retry import DEFAULT_RETRY, Backoff, RetryPolicy
from dtq_child.settings import Settings
from dtq_child.task import MAX_TIMEOUT_MS


class Stated(Protocol):
    """What a declaration says, and a record may; None: it doesn't say."""

    @property
    def timeout_ms(self) -> int | None: ...
    @property
    def soft_timeout_ms(self) -> int | None: ...
    @property
    def max_attempts(self) -> int | None: ...
    @property
    def max_crashes(self) -> int | None: ...


class StatedByDeclaration(Stated, Protocol):
    @property
    def retry(self) -> Backoff | None: ...


class StatedByRecord(Stated, Protocol):
    @property
    def retry(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Resolved. `soft_timeout_ms` is None where there is none, and always below `timeout_ms`."""

    timeout_ms: int
    soft_timeout_ms: int | None
    max_attempts: int
    max_crashes: int
    policy: RetryPolicy


def declared_limits(declared: StatedByDeclaration | None, settings: Settings) -> Limits:
    """Those of a task whose record says nothing; `declared` None: of a type that is not known here."""
    soft = settings.soft_timeout_s
    base = Limits(
        timeout_ms=round(settings.timeout_s * 1000),
        soft_timeout_ms=None if soft is None else round(soft * 1000),
        max_attempts=settings.max_attempts,
        max_crashes=settings.max_crashes,
        policy=DEFAULT_RETRY,
    )
    if declared is None:
        return base
    return _laid_over(base, declared, base.policy if declared.retry is None else declared.retry.policy)


def limits_of(record: StatedByRecord, declared: Limits) -> Limits:
    """`declared` with what the record says laid over it."""
    if (
        record.timeout_ms is None
        and record.max_attempts is None
        and record.soft_timeout_ms is None
        and record.max_crashes is None
        and not record.retry
    ):
        return declared
    policy = declared.policy
    if record.retry:
        given = RetryPolicy.from_json(record.retry)
        # Exception classes don't travel in a call: the declaration's stay true for its own delays.
        policy = given if given.never else replace(given, never=policy.never)
    return _laid_over(declared, record, policy)


def _laid_over(base: Limits, stated: Stated, policy: RetryPolicy) -> Limits:
    timeout_ms = base.timeout_ms if stated.timeout_ms is None else stated.timeout_ms
    # Other programs write records, too.
    timeout_ms = min(max(1, timeout_ms), MAX_TIMEOUT_MS)
    soft_ms = base.soft_timeout_ms if stated.soft_timeout_ms is None else stated.soft_timeout_ms
    if soft_ms is not None and not 0 < soft_ms < timeout_ms:
        soft_ms = None
    return Limits(
        timeout_ms=timeout_ms,
        soft_timeout_ms=soft_ms,
        max_attempts=_count(base.max_attempts, stated.max_attempts),
        max_crashes=_count(base.max_crashes, stated.max_crashes),
        policy=policy,
    )


def _count(base: int, stated: int | None) -> int:
    return base if stated is None else min(max(1, stated), MAX_COUNT)
