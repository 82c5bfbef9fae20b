"""Durations and moments as people give them, checked and in milliseconds. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from dtq_child.errors import InvalidTask
from dtq_child.task import MAX_TIMEOUT_MS

MAX_DELAY_MS = 3650 * 24 * 3600 * 1000
"""Ten years. Beyond it lie year 9999 and milliseconds taken for seconds, not plans."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

Seconds = float | timedelta


def check_duration(value: object, name: str, limit_ms: int) -> int:
    """Milliseconds, rounded up: nothing is ever early. Refuses what is no finite number from 0 to
    `limit_ms`."""
    if isinstance(value, timedelta):
        in_bounds = timedelta(0) <= value <= timedelta(milliseconds=limit_ms)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTask(f"{name} {value!r}: give seconds as a number, or a timedelta")
    else:
        in_bounds = 0 <= value <= limit_ms / 1000  # not so for a NaN
    if not in_bounds:
        raise InvalidTask(f"{name} {value!r}: from 0 to {limit_ms // 1000} seconds are allowed")
    if isinstance(value, timedelta):
        whole, rest = divmod(value, _MILLISECOND)
        return whole + bool(rest)
    # Rounded first, because 2.007 * 1000 is a little above 2007.
    return math.ceil(round(value * 1000, 6))


def check_moment(value: object, name: str, now_ms: int) -> int:
    """Epoch milliseconds, rounded up. Refuses naive datetimes and what is more than ten years ahead of
    `now_ms`."""
    if not isinstance(value, datetime):
        raise InvalidTask(f"{name} {value!r}: give an aware datetime, like datetime.now(timezone.utc) + …")
    if value.utcoffset() is None:
        raise InvalidTask(
            f"{name} {value!r} has no time zone, so it is another moment on another machine: "
            "give an aware one, with tzinfo=timezone.utc or zoneinfo.ZoneInfo(…)"
        )
    milliseconds = -((_EPOCH - value) // _MILLISECOND)
    if milliseconds > now_ms + MAX_DELAY_MS:
        raise InvalidTask(f"{name} {value!r}: at most ten years ahead are allowed")
    # Redis keeps due times as numbers from 0: what is long past is at once, however long.
    return max(0, milliseconds)


def check_timeout(value: object, name: str) -> int | None:
    """Milliseconds, at least 1; None stays None."""
    if value is None:
        return None
    milliseconds = check_duration(value, name, MAX_TIMEOUT_MS)
    if milliseconds == 0:
        raise InvalidTask(
            f"{name} {value!r}: it must be above 0; every task has a timeout, of at most 7 days"
        )
    return milliseconds


def check_timeouts(timeout_ms: int | None, soft_timeout_ms: int | None) -> None:
    """None stands for a setting of the worker's, which only the worker can compare."""
    if timeout_ms is not None and soft_timeout_ms is not None and soft_timeout_ms >= timeout_ms:
        raise InvalidTask(
            f"soft_timeout {soft_timeout_ms / 1000:g} s with timeout {timeout_ms / 1000:g} s: the soft one "
            "would never come, give one below the timeout"
        )
