"""A producer's view of one task: where it is, what came of it, and the wish that it be cancelled."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dtq_child import payload
from dtq_child.context import inside_task
from dtq_child.errors import (
    CancelledResult,
    ResultError,
    ResultTimeout,
    ResultTruncated,
    ResultUnavailable,
    TaskExpired,
    TaskFailed,
    TaskNotFound,
)
from dtq_child.off_loop import in_thread, pause
from dtq_child.task import TERMINAL, Record, Status

if TYPE_CHECKING:
    from dtq_child.app import App

FIRST_PAUSE_S, LAST_PAUSE_S, GROWTH = 0.005, 0.25, 1.5


class Handle:
    """One task of one App, by its id. `deduplicated`: the enqueue found a task that was there already.

    Its calls raise TaskNotFound when the record is gone, and BrokerUnavailable when Redis does not answer
    within DTQ_ENQUEUE_TIMEOUT_S; each has a twin for async code, which waits in a thread."""

    __slots__ = ("_app", "deduplicated", "id")

    def __init__(self, app: App, task_id: str, deduplicated: bool = False) -> None:
        self._app = app
        self.id = task_id
        self.deduplicated = deduplicated

    def __repr__(self) -> str:
        return f"<Handle {self.id}{' deduplicated' if self.deduplicated else ''}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and (other.id, other._app) == (self.id, self._app)

    def __hash__(self) -> int:
        return hash(self.id)

    def status(self) -> str:
        """One of `Status`: queued, scheduled, running, retry_scheduled, succeeded, dead_lettered, cancelled,
        expired."""
        return self._app.broker.status(self.id)

    def record(self) -> Record:
        """All that is known of the task: raw text by `get`, typed views beside it."""
        record = self._app.broker.record(self.id)
        if record is None:
            raise TaskNotFound(self.id)
        return record

    def result(self, timeout: float | None = None, allow_in_task: bool = False) -> Any:
        """What the handler returned, as JSON carries it, once the task has ended; waits at most `timeout`
        seconds.

        Raises ResultTimeout, TaskFailed, TaskCancelled, TaskExpired, ResultTruncated, ResultUnavailable."""
        for seconds in self._wait(timeout, allow_in_task):
            time.sleep(seconds)
        return self._outcome()

    def cancel(self) -> str:
        """`cancelled`: it never starts. `stopping`: it is running, its outcome is refused and it is ended
        within seconds. `too_late`: it has ended. `unknown`: there is no record; it is cancelled should it
        turn up."""
        return self._app.broker.cancel(self.id)

    async def astatus(self) -> str:
        return await in_thread(self.status)

    async def arecord(self) -> Record:
        return await in_thread(self.record)

    async def aresult(self, timeout: float | None = None, allow_in_task: bool = False) -> Any:
        """As `result()`. A thread is used for each look and none while waiting, so that thousands may
        wait."""
        wait = self._wait(timeout, allow_in_task)
        while (seconds := await in_thread(next, wait, None)) is not None:
            await pause(seconds)
        return await in_thread(self._outcome)

    async def acancel(self) -> str:
        return await in_thread(self.cancel)

    def _wait(self, timeout: float | None, allow_in_task: bool) -> Iterator[float]:
        if inside_task() and not allow_in_task:
            raise ResultError(
                f"result() of task {self.id} inside a task: when every child waits like this, none is left "
                "to run what they wait for; let that task enqueue what is next, or pass allow_in_task=True"
            )
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout {timeout!r}: seconds from 0, or None to wait for ever, are needed")
        return self._pauses(math.inf if timeout is None else timeout)

    def _pauses(self, timeout: float) -> Iterator[float]:
        """Looks, and yields how long to wait before the next look, growing from 5 to 250 ms; ends when the
        task has ended."""
        end, seconds = time.monotonic() + timeout, FIRST_PAUSE_S
        while self.status() not in TERMINAL:
            left = end - time.monotonic()
            if left <= 0:
                raise ResultTimeout(f"task {self.id} has not ended within {timeout:g} s")
            yield min(seconds, left)
            seconds = min(LAST_PAUSE_S, seconds * GROWTH)

    def _outcome(self) -> Any:
        record = self.record()
        match record.get("status"):
            case Status.SUCCEEDED:
                return self._value(record)
            case Status.DEAD_LETTERED:
                raise TaskFailed(
                    self.id, record.get("last_error_class"), record.get("last_error"), record.get("traceback")
                )
            case Status.CANCELLED:
                raise CancelledResult(f"task {self.id} was cancelled")
            case Status.EXPIRED:
                raise TaskExpired(f"task {self.id} expired before it was started")
            case status:
                raise ResultUnavailable(f"task {self.id} had ended and is {status} again: it was requeued")

    def _value(self, record: Record) -> Any:
        reason = record.get("result_unavailable")
        if reason:
            raise ResultUnavailable(f"the result of task {self.id} was not stored: {reason}")
        size = record.number("result_size")
        if size is None:
            raise ResultUnavailable(f"the result of task {self.id} was not stored: it has store_result=False")
        data = self._app.broker.result(self.id)
        if data is None:
            raise ResultUnavailable(
                f"task {self.id} succeeded, and its result is gone: DTQ_RESULT_RETENTION_S is over"
            )
        if record.get("result_truncated"):
            raise ResultTruncated(self.id, data, size)
        return payload.loads(data)
