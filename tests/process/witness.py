"""What stories about a pool ask of the world: who executes what, when did a process die, what was told."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import redis

from tests.support.ledger import Entry, Ledger
from tests.support.processes import descriptors
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until

PATIENCE_S = 30.0
"""For what is promised, but not within a time."""
_LAST = "END OF TAPE"


def started(
    ledger: Ledger,
    task_id: str,
    times: int = 1,
    timeout: float = PATIENCE_S,
    describe: Callable[[], str] = str,
) -> Entry:
    """Waits for the `times`-th start of the task, and returns it."""

    def complaint() -> str:
        return f"{task_id} has not started {times} times\n{describe()}"

    until(lambda: len(ledger.starts(task_id)) >= times, timeout, complaint)
    return ledger.starts(task_id)[times - 1]


def refilled(pool: SupervisorProcess, without: set[int], timeout: float) -> list[int]:
    """Waits until every slot holds a child that has booted and is none of `without`. Returns the pids."""

    def booted() -> list[int]:
        return [child.pid for child in pool.tree() if "] g" in child.title and "starting" not in child.title]

    until(lambda: len(booted()) == pool.procs and not set(booted()) & without, timeout, pool.describe)
    return booted()


def sockets(pid: int) -> set[str]:
    """The sockets that a process has open, by inode."""
    return {target for target in descriptors(pid).values() if target.startswith("socket:")}


class Vigil:
    """Waits beside a process for its death, so as to know the moment. The process must be alive now."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def wait(self, timeout: float = PATIENCE_S) -> float:
        """The monotonic second of its death, or of this call if it was dead before."""
        return deaths([self], timeout)[self.pid]

    def kill(self) -> int:
        """SIGKILLs it. Returns the nanosecond before that, by the monotonic clock."""
        moment = time.monotonic_ns()
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        return moment


def deaths(vigils: Iterable[Vigil], timeout: float = PATIENCE_S) -> dict[int, float]:
    """Waits until all are dead: pid → the monotonic second of its death, or of this call if it was dead
    before."""
    alive, moments = set(vigils), {}
    until_then = time.monotonic() + timeout
    while alive:
        dead, _, _ = select.select(alive, (), (), max(0.0, until_then - time.monotonic()))
        assert dead, f"alive after {timeout:g} s: {sorted(vigil.pid for vigil in alive)}"
        moments.update(dict.fromkeys((vigil.pid for vigil in dead), time.monotonic()))
        alive.difference_update(dead)
    return moments


class Tape:
    """Records every event from now on."""

    def __init__(self, client: redis.Redis, prefix: str = "dtq:") -> None:
        self._client, self._channel = client, f"{prefix}events"
        self._subscription: Any = client.pubsub()  # type: ignore[no-untyped-call]
        self._subscription.subscribe(self._channel)
        until(lambda: self._next() is not None, 10, "no confirmation of the subscription")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._subscription.close()

    def play(self) -> list[dict[str, Any]]:
        """All of them since the last call, in order."""
        self._client.publish(self._channel, _LAST)
        played = []
        while (data := until(self._next, 10, "the tape has no end")["data"]) != _LAST.encode():
            played.append(json.loads(data))
        return played

    def _next(self) -> Any:
        return self._subscription.get_message(timeout=0)


def of_type(events: list[dict[str, Any]], kind: str) -> list[str]:
    """The task ids of the events of that type, in order."""
    return [event["task_id"] for event in events if event["type"] == kind]
