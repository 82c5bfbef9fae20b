"""What happened to a delivery, and what the policy makes of it: succeed, try again, dead-letter … Pure.

Asked by the child about its own handler and by the supervisor about the killed and the dead, so that both
judge alike. The rules are R16 (attempts and crashes), R17 (retries) and R19 (unknown task types):

    happening                         decision
    ---------                         --------
    Returned                          succeed
    Raised: RejectTask, never=        dead
    Raised: else, attempts left       retry, after the policy's or RetryTask's delay; spends an attempt
    Raised: no attempts left          dead
    TimedOut                          as Raised, but never= doesn't apply: nothing was raised
    Crashed, the first time           park: redelivered at once; spends a crash
    Crashed again                     retry, the same attempt; spends a crash
    Crashed, max_crashes reached      dead, as PoisonTask
    UnknownType, within its TTL       retry, the same attempt; spends nothing
    UnknownType, later                dead
    BadArgs                           dead
    Cancelled                         cancelled
    Released                          release: spends nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from math import isnan
from typing import Any, Literal

from dtq_child.error_text import MESSAGE_BYTES, TRACEBACK_BYTES, ErrorText, clip, clip_middle
from dtq_child.errors import BAD_ARGUMENTS, CHILD_DIED, POISON_TASK, TASK_TIMEOUT, UNKNOWN_TASK_TYPE
from dtq_child.payload import Result
from dtq_child.retry import MAX_DELAY_S, RetryPolicy, crash_delay_ms, delay_ms, unknown_delay_ms

Kind = Literal["succeed", "retry", "dead", "park", "release", "cancelled"]


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler returned; `result` is None when the task stores none."""

    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised, SystemExit and the like included. `mro`: names of the class and its bases."""

    error: ErrorText
    mro: tuple[str, ...]
    wants_retry: bool = False
    retry_delay_s: float | None = None
    rejected: bool = False
    soft: bool = False
    """The soft timeout reached it."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Killed at its hard deadline; `stack` shows where it was, `cause` what is known about the death."""

    timeout_ms: int
    stack: str = ""
    cause: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Crashed:
    """The process died, was killed for memory, or its lease ran out. `cause`: signal, exit code, evidence."""

    cause: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A cancel reached it while it ran."""


@dataclass(frozen=True, slots=True)
class Released:
    """It was interrupted through no fault of its own: drain, pause, another task's verdict."""


@dataclass(frozen=True, slots=True)
class UnknownType:
    """This worker has no such task type, first met `first_unknown_ms_ago` ago (0: just now)."""

    first_unknown_ms_ago: int = 0


@dataclass(frozen=True, slots=True)
class BadArgs:
    """The payload is no JSON object or doesn't bind to the handler; the handler was not called."""

    error: ErrorText


Happening = Returned | Raised | TimedOut | Crashed | Cancelled | Released | UnknownType | BadArgs


@dataclass(frozen=True, slots=True)
class Facts:
    """What the record says of the delivery: `attempt` is the one just executed, `crashes` those before it."""

    attempt: int
    max_attempts: int
    crashes: int
    max_crashes: int
    policy: RetryPolicy
    unknown_ttl_ms: int

    @property
    def attempts_left(self) -> bool:
        return self.attempt < self.max_attempts


@dataclass(frozen=True, slots=True)
class Decision:
    """What a settle writes. `retryable`: it runs again by itself. `reason`: a label for metrics and logs."""

    kind: Kind
    reason: str
    delay_ms: int = 0
    spend_attempt: bool = False
    spend_crash: bool = False
    error_class: str = ""
    error_message: str = ""
    traceback: str = ""
    retryable: bool = False
    cause: Mapping[str, Any] | None = None


def decide(happening: Happening, facts: Facts, random01: float) -> Decision:
    """The decision; `random01`, a number from 0 to 1, places the delay within its jitter."""
    match happening:
        case Returned():
            return Decision("succeed", "returned")
        case Cancelled():
            return Decision("cancelled", "cancelled")
        case Released():
            return Decision("release", "released", retryable=True)
        case _:
            return _failed(happening, facts, random01)


def _failed(
    happening: Raised | TimedOut | Crashed | UnknownType | BadArgs, facts: Facts, random01: float
) -> Decision:
    match happening:
        case Raised():
            return _raised(happening, facts, random01)
        case TimedOut():
            return _timed_out(happening, facts, random01)
        case Crashed():
            return _crashed(happening, facts, random01)
        case UnknownType():
            return _unknown(happening, facts, random01)
        case BadArgs(error):
            return _dead("bad_arguments", ErrorText(BAD_ARGUMENTS, error.message, error.traceback))


def _raised(raised: Raised, facts: Facts, random01: float) -> Decision:
    if raised.rejected:
        return _dead("rejected", raised.error, spend_attempt=True)
    # RetryTask was raised on purpose, so it wins over a broad never=(Exception,).
    if not raised.wants_retry and facts.policy.forbids(raised.mro):
        return _dead("never_retried", raised.error, spend_attempt=True)
    if not facts.attempts_left:
        return _dead("attempts_exhausted", raised.error, spend_attempt=True)
    reason = "retry_asked" if raised.wants_retry else "soft_timeout" if raised.soft else "raised"
    delay = asked_delay_ms(raised.retry_delay_s) if raised.wants_retry else None
    if delay is None:
        delay = delay_ms(facts.policy, facts.attempt, random01)
    return _retry(reason, delay, raised.error, spend_attempt=True)


def _timed_out(timed_out: TimedOut, facts: Facts, random01: float) -> Decision:
    seconds = f"{timed_out.timeout_ms / 1000:g}"
    error = ErrorText(
        TASK_TIMEOUT,
        f"still running after its timeout of {seconds} s, so its process was killed",
        clip_middle(timed_out.stack, TRACEBACK_BYTES),
    )
    if not facts.attempts_left:
        return _dead("timeout", error, spend_attempt=True, cause=timed_out.cause)
    delay = delay_ms(facts.policy, facts.attempt, random01)
    return _retry("timeout", delay, error, spend_attempt=True, cause=timed_out.cause)


def _crashed(crashed: Crashed, facts: Facts, random01: float) -> Decision:
    crashes, cause = facts.crashes + 1, crashed.cause
    stack = cause.get("stack")
    traceback = clip_middle(stack, TRACEBACK_BYTES) if isinstance(stack, str) else ""
    died = _how_it_died(cause)
    if crashes >= facts.max_crashes:
        message = f"its processes died {crashes} times, the limit is {facts.max_crashes}; the last {died}"
        error = ErrorText(POISON_TASK, clip(message, MESSAGE_BYTES), traceback)
        return _dead("poison", error, spend_crash=True, cause=cause)
    error = ErrorText(CHILD_DIED, clip(f"its process {died}", MESSAGE_BYTES), traceback)
    if crashes <= 1:
        return replace(_retry("crash", 0, error, spend_crash=True, cause=cause), kind="park")
    return _retry("crash", crash_delay_ms(crashes, random01), error, spend_crash=True, cause=cause)


def _how_it_died(cause: Mapping[str, Any]) -> str:
    if cause.get("signal"):
        return f"was killed by signal {cause['signal']}"
    if cause.get("exit_code") is not None:
        return f"exited with code {cause['exit_code']}"
    return "died, or was not heard of until the lease ran out"


def _unknown(unknown: UnknownType, facts: Facts, random01: float) -> Decision:
    seen, left = unknown.first_unknown_ms_ago, facts.unknown_ttl_ms - unknown.first_unknown_ms_ago
    if left <= 0:
        message = (
            f"no worker knew this task type for {seen / 1000:g} s; add its module to include= of the App "
            "that the workers load, or raise DTQ_UNKNOWN_TASK_TTL_S"
        )
        return _dead("unknown_task_type", ErrorText(UNKNOWN_TASK_TYPE, message, ""))
    error = ErrorText(UNKNOWN_TASK_TYPE, "this worker knows no such task type; waiting for one that does", "")
    # No later than the end of the TTL, so that the verdict comes when it was promised.
    return _retry("unknown_task_type", min(left, unknown_delay_ms(seen, random01)), error)


def asked_delay_ms(asked: object) -> int | None:
    """RetryTask's delay; None, the policy's then, if what the handler gave is not a time to wait."""
    if isinstance(asked, timedelta):
        asked = asked.total_seconds()
    if isinstance(asked, bool) or not isinstance(asked, (int, float)):
        return None
    seconds = min(max(asked, 0), MAX_DELAY_S)
    return None if isnan(seconds) else int(seconds * 1000)


def _dead(
    reason: str,
    error: ErrorText,
    *,
    spend_attempt: bool = False,
    spend_crash: bool = False,
    cause: Mapping[str, Any] | None = None,
) -> Decision:
    return Decision(
        "dead",
        reason,
        spend_attempt=spend_attempt,
        spend_crash=spend_crash,
        error_class=error.class_name,
        error_message=error.message,
        traceback=error.traceback,
        cause=cause,
    )


def _retry(
    reason: str,
    delay: int,
    error: ErrorText,
    *,
    spend_attempt: bool = False,
    spend_crash: bool = False,
    cause: Mapping[str, Any] | None = None,
) -> Decision:
    failed = _dead(reason, error, spend_attempt=spend_attempt, spend_crash=spend_crash, cause=cause)
    return replace(failed, kind="retry", delay_ms=delay, retryable=True)
