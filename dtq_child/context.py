"""`current_task()`: what a handler may know about the task that it executes (R26)."""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from dtq_child.errors import DtqError


class TaskLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the task to each line's `extra`, beside what the line itself brings (the stock adapter drops
    that)."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def _never() -> bool:
    return False


def _no_metadata() -> Mapping[str, Any]:
    return {}


@dataclass(slots=True)
class CurrentTask:
    """One execution, as its handler sees it.

    `attempt` counts from 1; `crashes` are the deaths of processes that executed it before; `delivery` is the
    number of this handing-out, `redelivered` whether there was one before. `deadline`: when the process is
    killed, by time.monotonic(). `metadata`: what the producer gave."""

    id: str
    task_type: str
    queue: str
    attempt: int = 1
    max_attempts: int = 1
    crashes: int = 0
    delivery: int = 1
    redelivered: bool = False
    deadline: float = float("inf")
    metadata: Mapping[str, Any] = field(default_factory=_no_metadata)
    should_stop: Callable[[], bool] = field(default=_never, repr=False, compare=False)

    def remaining(self) -> float:
        """Seconds until the hard timeout, never below 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def stopping(self) -> bool:
        """Whether the process was told to end after this task: a long handler may save its work and raise
        RetryTask."""
        return self.should_stop()

    @property
    def logger(self) -> TaskLogger:
        """Logs under the task type's name, with `task_id`, `task_type`, `queue` and `attempt` as extra."""
        return TaskLogger(logging.getLogger(self.task_type), _about(self))


_current: contextvars.ContextVar[CurrentTask | None] = contextvars.ContextVar(
    "dtq_current_task", default=None
)


def current_task() -> CurrentTask:
    """The task that is executed here. Raises DtqError outside of one.

    A thread that a handler starts has a context of its own: pass the value to it, or use asyncio.to_thread or
    contextvars.copy_context().run, which carry it."""
    task = _current.get()
    if task is None:
        raise DtqError(
            "current_task() was called outside of a task: call it in the handler, "
            "and pass what it returns to threads that the handler starts"
        )
    return task


def inside_task() -> bool:
    return _current.get() is not None


def about_task() -> dict[str, Any]:
    """The facts of the task that is executed here, for a log line; none outside of one."""
    task = _current.get()
    return {} if task is None else _about(task)


def _about(task: CurrentTask) -> dict[str, Any]:
    return {
        "task_id": task.id,
        "task_type": task.task_type,
        "queue": task.queue,
        "attempt": task.attempt,
    }


def enter(task: CurrentTask) -> contextvars.Token[CurrentTask | None]:
    """Makes `task` the current one until `leave` is given the token returned here."""
    return _current.set(task)


def leave(token: contextvars.Token[CurrentTask | None]) -> None:
    _current.reset(token)
