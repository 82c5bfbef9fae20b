"""Every exception dtq raises, in one tree. Each says what was wrong, the value, and the fix.

    DtqError
    ├─ BadConfiguration          settings that cannot work, one line a problem
    ├─ EnqueueError              the task was not accepted
    │  ├─ PayloadError           a value that JSON cannot carry unaltered
    │  ├─ PayloadTooLarge
    │  ├─ InvalidTask            a name, id, queue, priority, time … outside its bounds
    │  ├─ QueueFull
    │  ├─ IdempotencyConflict    the key belongs to a task with another payload
    │  └─ EnqueueManyError       a later batch failed; carries the accepted handles
    ├─ BrokerError               Redis did not do it
    │  ├─ BrokerUnavailable      not reached, or not answered, in time
    │  ├─ BrokerRefused          reached, and says no: authentication, permission, version, cluster
    │  └─ RedisOutOfMemory       at maxmemory: refused whole, nothing written
    ├─ TaskNotFound
    ├─ ResultError               `handle.result()` has no value to give
    │  ├─ ResultTimeout
    │  ├─ TaskFailed             dead-lettered; class, text and traceback of the handler's error
    │  ├─ TaskExpired
    │  ├─ ResultTruncated        larger than DTQ_RESULT_MAX_BYTES; holds the part that was kept
    │  └─ ResultUnavailable
    ├─ TaskDecision              raised by handlers to steer their own outcome
    │  ├─ RetryTask
    │  └─ RejectTask
    └─ NotSupported              not on this platform or Python

    BaseException
    └─ Interruption              raised into a running handler from outside
       ├─ SoftTimeout
       ├─ TaskCancelled          a handler sees it raised
       │  └─ CancelledResult     also a ResultError, and an Exception: what a producer gets from `result()`
       └─ ShutdownRequested

The names of verdicts that only ever appear as text in a record: TaskTimeout, PoisonTask, UnknownTaskType,
BadArguments, UnreadableEntry, ChildDied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TASK_TIMEOUT = "TaskTimeout"
POISON_TASK = "PoisonTask"
UNKNOWN_TASK_TYPE = "UnknownTaskType"
BAD_ARGUMENTS = "BadArguments"
UNREADABLE_ENTRY = "UnreadableEntry"
CHILD_DIED = "ChildDied"


class DtqError(Exception):
    """The root of what dtq raises."""


class BadConfiguration(DtqError):
    """Settings that cannot work. `problems`: one line each, with value, origin and fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class NotSupported(DtqError):
    """This platform or Python cannot do it."""


class EnqueueError(DtqError):
    """The task was not accepted, and nothing was written."""


class PayloadError(EnqueueError, ValueError):
    """A value that JSON cannot carry unaltered. `path` is like `$.items[3].price`."""

    def __init__(self, reason: str, path: str = "$", value_repr: str = "") -> None:
        self.reason, self.path, self.value_repr = reason, path, value_repr
        shown = f" (value: {value_repr})" if value_repr else ""
        super().__init__(f"{path}: {reason}{shown}")


class PayloadTooLarge(EnqueueError):
    """`size` and `limit` in bytes of the JSON payload."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(
            f"the payload is {size} bytes of JSON, the limit is {limit}; "
            "store the data elsewhere and pass a reference, or raise DTQ_PAYLOAD_MAX_BYTES"
        )


class InvalidTask(EnqueueError, ValueError):
    """A name, id, queue, priority, delay or time outside its bounds."""


class QueueFull(EnqueueError):
    """`depth` counts the queue's entries in flight and waiting, or the schedule's members."""

    def __init__(self, queue: str, depth: int, limit: int) -> None:
        self.queue, self.depth, self.limit = queue, depth, limit
        super().__init__(
            f"{queue} holds {depth} tasks, the limit is {limit}; slow the producer down, add workers, "
            "or raise DTQ_QUEUE_MAX_DEPTH"
        )


class IdempotencyConflict(EnqueueError):
    """The key is held by `task_id`, whose payload differs."""

    def __init__(self, queue: str, key: str, task_id: str) -> None:
        self.queue, self.key, self.task_id = queue, key, task_id
        super().__init__(
            f"idempotency key {key!r} of queue {queue} belongs to task {task_id} with another payload; "
            "use another key for another payload"
        )


class EnqueueManyError(EnqueueError):
    """A batch failed. `accepted`: handles of the batches before it; `cause`: what stopped it."""

    def __init__(self, accepted: Sequence[Any], cause: BaseException) -> None:
        self.accepted, self.cause = list(accepted), cause
        super().__init__(f"{len(self.accepted)} tasks were accepted before this: {cause}")


class BrokerError(DtqError):
    """Redis did not do what was asked."""


class BrokerUnavailable(BrokerError):
    """Not reached or not answered in time: the command may or may not have run."""


class BrokerRefused(BrokerError):
    """Reached, and it says no for good: authentication, permission, version, cluster."""


class RedisOutOfMemory(BrokerError):
    """Redis is at maxmemory: refused whole, nothing was written."""


class TaskNotFound(DtqError):
    """No record: never enqueued here, or its retention is over."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        super().__init__(
            f"no record of task {task_id}: never enqueued under this prefix, or its retention is over"
        )


class ResultError(DtqError):
    """`result()` has no value to give."""


class ResultTimeout(ResultError, TimeoutError):
    """The task did not end in the time given to `result()`."""


class TaskFailed(ResultError):
    """The task is in the dead letters. `error_class`, `message`, `traceback`: its last error."""

    def __init__(self, task_id: str, error_class: str, message: str, traceback: str = "") -> None:
        self.task_id, self.error_class = task_id, error_class
        self.message, self.traceback = message, traceback
        super().__init__(f"task {task_id} failed: {error_class}: {message}")


class TaskExpired(ResultError):
    """`expires` passed before the task first started."""


class ResultTruncated(ResultError):
    """The result was larger than DTQ_RESULT_MAX_BYTES. `part`: the bytes kept; `size`: the whole."""

    def __init__(self, task_id: str, part: bytes, size: int) -> None:
        self.task_id, self.part, self.size = task_id, part, size
        super().__init__(
            f"the result of task {task_id} was {size} bytes, {len(part)} were kept; "
            "return a reference, or raise DTQ_RESULT_MAX_BYTES"
        )


class ResultUnavailable(ResultError):
    """The task succeeded and its result is not there: not storable, not stored, or its retention is over."""


class TaskDecision(DtqError):
    """Raised by a handler to decide its own outcome."""


class RetryTask(TaskDecision):
    """Try again, after `delay` seconds if given, else after the policy's delay. Spends an attempt."""

    def __init__(self, delay: float | None = None, reason: str = "") -> None:
        self.delay, self.reason = delay, reason
        super().__init__(reason or "the task asked to be tried again")


class RejectTask(TaskDecision):
    """Straight to the dead letters."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason or "the task rejected itself")


class Interruption(BaseException):
    """Raised into a running handler from outside; `except Exception` lets it pass."""


class SoftTimeout(Interruption):
    """The soft timeout passed: clean up and end before the hard one kills the process."""


class ShutdownRequested(Interruption):
    """The shutdown grace is nearly over."""


class TaskCancelled(Interruption):
    """The task was cancelled: raised into a running handler, and by `result()` for a producer."""


class CancelledResult(TaskCancelled, ResultError):
    """What `result()` raises for a cancelled task.

    An Exception, unlike the TaskCancelled that is raised into a handler from outside: whoever waits for a
    task that was cancelled has not been cancelled itself, and a web framework must be able to catch it."""
