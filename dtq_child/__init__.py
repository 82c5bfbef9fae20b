"""dtq: background tasks on Redis Streams. This package is what task processes and producers need.

from dtq_child import App

app = App(include=["shop.tasks"])

@app.task(queue="images", timeout=30)
def resize(path: str, width: int = 128) -> str: ...

handle = resize.delay("a.jpg", width=64)
"""

from dtq_child.app import App
from dtq_child.context import CurrentTask, current_task
from dtq_child.declaration import Task
from dtq_child.errors import (
    BadConfiguration,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    DtqError,
    EnqueueError,
    EnqueueManyError,
    IdempotencyConflict,
    InvalidTask,
    PayloadError,
    PayloadTooLarge,
    QueueFull,
    RedisOutOfMemory,
    RejectTask,
    ResultError,
    ResultTimeout,
    ResultTruncated,
    ResultUnavailable,
    RetryTask,
    ShutdownRequested,
    SoftTimeout,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskNotFound,
)
from dtq_child.handle import Handle
from dtq_child.retry import Backoff
from dtq_child.task import Call, Record, Status
from dtq_child.version import VERSION

__version__ = VERSION
__all__ = [
    "VERSION",
    "App",
    "Backoff",
    "BadConfiguration",
    "BrokerError",
    "BrokerRefused",
    "BrokerUnavailable",
    "Call",
    "CurrentTask",
    "DtqError",
    "EnqueueError",
    "EnqueueManyError",
    "Handle",
    "IdempotencyConflict",
    "InvalidTask",
    "PayloadError",
    "PayloadTooLarge",
    "QueueFull",
    "Record",
    "RedisOutOfMemory",
    "RejectTask",
    "ResultError",
    "ResultTimeout",
    "ResultTruncated",
    "ResultUnavailable",
    "RetryTask",
    "ShutdownRequested",
    "SoftTimeout",
    "Status",
    "Task",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskNotFound",
    "current_task",
]
