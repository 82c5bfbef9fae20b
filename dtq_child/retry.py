"""When a task is tried again: the policy that a record carries, and the delays that follow (R17). Pure.

Every delay is a function of its arguments alone; the caller draws `random01`, a number from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from dtq_child.error_text import class_name, plain_name

MAX_DELAY_S = 366 * 86400
"""No delay is longer: a record awaiting its retry outlives its due time by a year, so it is never lost."""

MAX_FACTOR = 1000.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The resolved policy, as it travels in records, scoreboard rows and scripts.

    The delay after attempt n is min(`cap_s`, `base_s` · `factor`^(n-1)) seconds, more or less by up to the
    fraction `jitter` of itself. An exception whose class or base is named in `never` is not tried again."""

    base_s: float
    factor: float
    cap_s: float
    jitter: float
    never: tuple[str, ...] = ()

    def forbids(self, class_names: Iterable[str]) -> bool:
        """Whether an exception whose class and bases have these names goes straight to the dead letters."""
        return bool(self.never) and not set(self.never).isdisjoint(class_names)

    def to_json(self) -> str:
        fields = {"base_s": self.base_s, "factor": self.factor, "cap_s": self.cap_s, "jitter": self.jitter}
        return orjson.dumps({**fields, "never": self.never}).decode()

    @staticmethod
    def from_json(text: str | bytes | None) -> RetryPolicy:
        """The policy in a record's `retry` field, which other programs may write, too. Never raises: unknown
        keys are ignored, numbers missing or out of bounds are the default's, all of it if it is no object."""
        try:
            given = orjson.loads(text or b"")
        except orjson.JSONDecodeError:
            return DEFAULT_RETRY
        if not isinstance(given, dict):
            return DEFAULT_RETRY
        base_s = _number(given, "base_s", 0, MAX_DELAY_S)
        never = given.get("never")
        return RetryPolicy(
            base_s=base_s,
            factor=_number(given, "factor", 1, MAX_FACTOR),
            cap_s=max(base_s, _number(given, "cap_s", 0, MAX_DELAY_S)),
            jitter=_number(given, "jitter", 0, 1),
            never=tuple(name for name in never if isinstance(name, str)) if isinstance(never, list) else (),
        )


def _number(given: dict[str, Any], name: str, low: float, high: float) -> float:
    value = given.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    return float(getattr(DEFAULT_RETRY, name))


@dataclass(frozen=True, slots=True)
class Backoff:
    """How a task is tried again, for `@app.task(retry=Backoff(...))`.

    `base`: seconds before the second attempt; `factor`: each further delay is that many times the one before;
    `cap`: seconds that the growth stops at; `jitter`: fraction by which a delay is longer or shorter by
    chance, so that tasks that failed together don't return together; `never`: exception classes, or their
    names as "module.Class", that go straight to the dead letters, as do their subclasses.

    Defaults: 10 s, doubling up to an hour, ± 25 %, nothing excluded. Doubling with jitter is the custom of
    the field; ten seconds outlast a restart of most of the services that a task depends on.
    Raises ValueError or TypeError, which name the argument."""

    base: float = 10.0
    factor: float = 2.0
    cap: float = 3600.0
    jitter: float = 0.25
    never: tuple[type[BaseException] | str, ...] = ()
    policy: RetryPolicy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        base = _checked("base", self.base, 0, MAX_DELAY_S, "seconds")
        factor = _checked("factor", self.factor, 1, MAX_FACTOR, "a multiplier")
        cap = _checked("cap", self.cap, base, MAX_DELAY_S, "seconds, and not below base")
        jitter = _checked("jitter", self.jitter, 0, 1, "a fraction")
        policy = RetryPolicy(base, factor, cap, jitter, _names(self.never))
        object.__setattr__(self, "policy", policy)


def _checked(name: str, value: object, low: float, high: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Backoff({name}={value!r}): a number is needed ({what})")
    if not low <= value <= high:
        raise ValueError(f"Backoff({name}={value!r}): a number from {low:g} to {high:g} is needed ({what})")
    return float(value)


def _names(never: object) -> tuple[str, ...]:
    if isinstance(never, (str, type)) or not isinstance(never, Iterable):
        raise TypeError(f"Backoff(never={never!r}): a tuple is needed, like never=(ValueError,)")
    return tuple(_name(entry) for entry in never)


def _name(entry: object) -> str:
    if isinstance(entry, type) and issubclass(entry, BaseException):
        return class_name(entry)
    if isinstance(entry, str) and entry:
        return plain_name(entry)
    raise TypeError(f"Backoff(never=…): {entry!r} is neither an exception class nor the name of one")


# Beyond it an int is no float any more, and a factor of 1 would overflow as well.
_MAX_EXPONENT = 2**53

DEFAULT_RETRY = Backoff().policy

# After a process death, from the second on, and ± 25 % like the default: 1, 4, 16, 60 seconds.
_AFTER_CRASH = RetryPolicy(base_s=1.0, factor=4.0, cap_s=60.0, jitter=0.25)
_UNKNOWN_FIRST_S, _UNKNOWN_CAP_S, _UNKNOWN_JITTER = 5.0, 60.0, 0.25


def delay_ms(policy: RetryPolicy, attempt: int, random01: float) -> int:
    """Milliseconds to wait after attempt `attempt` (1, 2, …), jitter included; at most cap · (1 + jitter)."""
    return _jittered_ms(_nominal_s(policy, attempt), policy.jitter, random01)


def crash_delay_ms(crashes: int, random01: float) -> int:
    """Milliseconds to wait after the process died for the `crashes`-th time: 0 after the first (R16)."""
    return 0 if crashes <= 1 else delay_ms(_AFTER_CRASH, crashes - 1, random01)


def unknown_delay_ms(seen_ms: int, random01: float) -> int:
    """Milliseconds until an unknown task_type is looked at again, `seen_ms` after it was first met (R19).

    Waiting 5 s longer than the type has been unknown so far doubles the delays, with nothing to count."""
    seconds = min(_UNKNOWN_CAP_S, _UNKNOWN_FIRST_S + max(0, seen_ms) / 1000)
    return _jittered_ms(seconds, _UNKNOWN_JITTER, random01)


def _nominal_s(policy: RetryPolicy, attempt: int) -> float:
    if policy.base_s == 0:  # not left to the formula: zero times an overflow is no number
        return 0.0
    try:
        growth = policy.factor ** min(max(0, attempt - 1), _MAX_EXPONENT)
    except OverflowError:
        return policy.cap_s
    return min(policy.cap_s, policy.base_s * growth)


def _jittered_ms(seconds: float, jitter: float, random01: float) -> int:
    return int(seconds * 1000 * (1 + jitter * (2 * random01 - 1)))
