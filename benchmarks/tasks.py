"""The handlers that measurements run."""

from __future__ import annotations

import os
import time

from dtq_child import App

app = App()


@app.task()
def noop() -> None:
    """Nothing: what is measured is the queue."""


@app.task()
def stamp(path: str, sent: int) -> None:
    """Appends the nanoseconds from `sent` (this machine's monotonic clock) to its first line."""
    late = time.monotonic_ns() - sent
    with open(path, "ab", buffering=0) as file:
        file.write(b"%d\n" % late)


@app.task(timeout=120)
def hold(path: str, seconds: float) -> None:
    """Notes its process, its task and the time, then sleeps."""
    note(path, "start")
    time.sleep(seconds)


def note(path: str, word: str) -> None:
    from_task = os.getpid()
    with open(path, "ab", buffering=0) as file:
        file.write(b"%b %d %d\n" % (word.encode(), from_task, time.monotonic_ns()))
