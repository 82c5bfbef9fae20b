"""Runs async handlers: one event loop per child, each handler a task of its own, its leftovers cancelled
after it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dtq_child.errors import Interruption

_LEFTOVER_PATIENCE_S = 1.0

log = logging.getLogger("dtq.child")


class HandlerLoop:
    """The loop lives as long as the child, so clients that an application binds to it stay usable."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def opened(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        return self._loop

    def close(self) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        _end(loop, list(asyncio.all_tasks(loop)))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class AsyncCall:
    """One call of an async handler. Calling it runs the loop until the handler's end."""

    __slots__ = ("_context", "_loop", "_message", "_raised", "_returned", "_start", "_task")

    def __init__(
        self, loop: HandlerLoop, start: Callable[[], Awaitable[Any]], context: contextvars.Context
    ) -> None:
        self._loop = loop.opened()
        self._start, self._context = start, context
        self._task: asyncio.Task[None] | None = None
        self._message: str | None = None
        self._returned: list[Any] = []
        self._raised: list[BaseException] = []

    def __call__(self) -> Any:
        """The value of what `start` makes awaitable, or its exception."""
        loop = self._loop
        others = asyncio.all_tasks(loop)
        self._task = task = loop.create_task(self._hold(), context=self._context)
        if self._message is not None:
            task.cancel(self._message)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError as cancelled:
            # Before its first step; or after its last, and then there is an outcome already.
            if not self._returned and not self._raised:
                self._raised.append(cancelled)
        except BaseException as stray:  # noqa: BLE001 - SystemExit of another task of the loop, loop.stop() …
            self._raised.insert(0, stray)
        _end(loop, [left for left in asyncio.all_tasks(loop) if left not in others])
        if self._raised:
            raise self._raised[0]
        return self._returned[0]

    async def _hold(self) -> None:
        # Not left to the task: a cancel that comes after the last await would take the place of a value
        # already computed, and SystemExit would leave through the loop.
        try:
            self._returned.append(await self._start())
        except BaseException as error:  # noqa: BLE001 - it is raised again outside of the loop
            self._raised.append(error)

    def cancel(self, interruption: Interruption) -> None:
        """At any time, by a signal handler: cancels the handler at its next await, the message saying why.

        A cancellation and nothing else: task groups, timeouts and most libraries know exactly CancelledError,
        and take any other exception, subclasses too, for a failure of what they wait for."""
        self._message = f"{type(interruption).__name__}: {interruption}"
        if self._task is not None and not self._loop.is_closed():
            self._task.cancel(self._message)
            # The selector may be in the middle of a long wait.
            self._loop.call_soon_threadsafe(_wake_up)


def _wake_up() -> None:
    """What a loop is given to do so that it looks around."""


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
