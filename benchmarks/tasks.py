"""The handlers that measurements run."""

from __future__ import annotations

import os
import time

from dtq_child import App, current_task

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
def hold(path: str, gate: str, spin: bool) -> None:
    """Notes its task, its process and the time (the monotonic clock's nanoseconds), then runs until the file
    `gate` exists, with `spin` in Python code that burns a core."""
    with open(path, "ab", buffering=0) as file:
        file.write(b"%b %d %d\n" % (current_task().id.encode(), os.getpid(), time.monotonic_ns()))
    rounds = 0
    while rounds % 10_000 or not os.path.exists(gate):
        if spin:
            rounds += 1
        else:
            time.sleep(0.005)


@app.task()
def clock(path: str) -> None:
    """Notes its task and the time (epoch nanoseconds) in its first line."""
    now = time.time_ns()
    with open(path, "ab", buffering=0) as file:
        file.write(b"%b %d\n" % (current_task().id.encode(), now))
