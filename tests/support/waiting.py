"""Waits for a condition with a deadline; the tests' only way to let time pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    timeout: float,
    message: str | Callable[[], str] = "the condition never came true",
    *,
    interval: float = 0.01,
) -> T:
    """Asks `condition` every `interval` seconds until its answer is true, and returns that answer.

    Raises AssertionError after `timeout` seconds with `message` (a callable is asked then, to describe the
    last state). What `condition` raises is not caught: name the errors that mean "not yet" in the condition
    itself.
    """
    deadline = time.monotonic() + timeout
    while True:
        # The clock is read first: a condition that came true while we slept past the deadline still counts.
        late = time.monotonic() >= deadline
        answer = condition()
        if answer:
            return answer
        if late:
            text = message() if callable(message) else message
            raise AssertionError(f"after {timeout:g} s: {text} (last answer: {answer!r})")
        time.sleep(interval)
