"""One attempt of a task in the caller's own thread, for tests: `runner` without what makes the process a
child.

It judges as the runner does, by the same `outcome`. It leaves alone what belongs to the test (signals,
working directory, threads), enforces no timeout, and lets pass what means the test and not the task:
KeyboardInterrupt, and what test frameworks raise to end a test."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor
from types import CoroutineType
from typing import Any

from dtq_child import context, hooks, payload
from dtq_child.app import App
from dtq_child.context import CurrentTask
from dtq_child.declaration import Task
from dtq_child.error_text import class_names, error_text
from dtq_child.errors import Interruption, PayloadError, RejectTask, RetryTask
from dtq_child.outcome import BadArgs, Happening, Raised, Returned

FAILURES = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError, Interruption)


def attempt(
    app: App, task: Task[..., Any], data: bytes, current: CurrentTask, store_result: bool
) -> tuple[Happening, BaseException | None]:
    """What happened, and what was raised if that failed."""
    try:
        arguments = payload.load_arguments(data)
        task.check_arguments(arguments)
    except (PayloadError, TypeError) as unfit:
        return BadArgs(error_text(unfit)), unfit
    value, error = _called(app, task, arguments, current)
    if error is not None:
        return _raised(error), error
    limit = app.settings().result_max_bytes
    return Returned(payload.dump_result(value, limit) if store_result else None), None


def _called(
    app: App, task: Task[..., Any], arguments: dict[str, Any], current: CurrentTask
) -> tuple[Any, BaseException | None]:
    """What the handler returned, what it raised; the task's hooks around it, all in a context of their
    own."""
    space = contextvars.copy_context()
    space.run(context.enter, current)
    value, error = None, None
    try:
        space.run(hooks.run, app.hooks.task_start, current)
        value = space.run(task.fn, **arguments)
        if type(value) is CoroutineType:
            value = _awaited(value, space)
    except FAILURES as raised:
        # Without the frame of this file: the traceback in the record begins with the handler.
        error = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
    space.run(hooks.run, app.hooks.task_end, current, error)
    return value, error


def _raised(error: BaseException) -> Raised:
    return Raised(
        error_text(error),
        class_names(error),
        wants_retry=isinstance(error, RetryTask),
        retry_delay_s=getattr(error, "delay", None) if isinstance(error, RetryTask) else None,
        rejected=isinstance(error, RejectTask),
    )


def _awaited(coroutine: CoroutineType[Any, Any, Any], space: contextvars.Context) -> Any:
    """The value of a coroutine, also when this thread's event loop is running: then on another one, in a
    thread."""

    def run() -> Any:
        with asyncio.Runner() as runner:
            return runner.run(coroutine, context=space)

    if asyncio._get_running_loop() is None:
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
