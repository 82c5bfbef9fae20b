"""Runs async handlers: one event loop per child, each handler a task of its own, its leftovers cancelled after it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dtq_child.errors import Interruption

_LEFTOVER_PATIENCE_S = 1.0

log = logging.getLogger(__name__)


class HandlerLoop:
    """The loop lives as long as the child, so clients that an application binds to it stay usable."""

    __slots__ = ("_loop", "_message", "_task")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._message: str | None = None

    def run(self, start: Callable[[], Awaitable[Any]], context: contextvars.Context) -> Any:
        """The value of the awaitable that `start` makes, or its exception. To be called from signal-free code only
        in so far as `cancel` may come at any time; other exceptions of signal handlers end the handler."""
        loop = self._opened()
        others = asyncio.all_tasks(loop)
        returned: list[Any] = []
        raised: list[BaseException] = []
        self._task = task = loop.create_task(_hold(start, returned, raised), context=context)
        if self._message is not None:
            task.cancel(self._message)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError as cancelled:
            # Cancelled before its first step, or after its last: then there is an outcome already.
            if not returned and not raised:
                raised.append(cancelled)
        except BaseException as stray:  # noqa: BLE001 - SystemExit of another task of the loop, loop.stop() …
            raised.insert(0, stray)
        self._task = self._message = None
        _end(loop, [left for left in asyncio.all_tasks(loop) if left not in others])
        if raised:
            raise raised[0]
        return returned[0]

    def cancel(self, interruption: Interruption) -> None:
        """From a signal handler: cancels the handler's task at its next await, its message saying why.

        A cancellation and nothing else: task groups, timeouts and most libraries know exactly CancelledError, and
        take any other exception, subclasses too, for a failure of their own children."""
        self._message = f"{type(interruption).__name__}: {interruption}"
        task, loop = self._task, self._loop
        if task is not None and loop is not None and not loop.is_closed():
            task.cancel(self._message)
            # The selector may be in the middle of a long wait.
            loop.call_soon_threadsafe(_nothing)

    def close(self) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        _end(loop, list(asyncio.all_tasks(loop)))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def _opened(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        return self._loop


def _nothing() -> None:
    """What a loop is woken up with."""


async def _hold(
    start: Callable[[], Awaitable[Any]], returned: list[Any], raised: list[BaseException]
) -> None:
    # Not left to the task: a cancel that comes after the last await would replace a value already computed, and
    # SystemExit would leave through the loop.
    try:
        returned.append(await start())
    except BaseException as error:  # noqa: BLE001 - it is raised again outside of the loop
        raised.append(error)


def _end(loop: asyncio.AbstractEventLoop, left: list[asyncio.Task[Any]]) -> None:
    """Cancels what a handler started and did not wait for."""
    if not left:
        return
    for task in left:
        task.cancel("the handler that started this task has ended")
    try:
        loop.run_until_complete(asyncio.wait(left, timeout=_LEFTOVER_PATIENCE_S))
    except BaseException:  # one of them raised SystemExit through the loop
        log.exception("a task that the handler left behind ended badly")
    for task in left:
        if not task.done():
            log.warning("a task that the handler left behind ignores its cancellation: %s", task.get_name())
        elif not task.cancelled() and task.exception() is not None:
            log.warning("a task that the handler left behind failed: %r", task.exception())
