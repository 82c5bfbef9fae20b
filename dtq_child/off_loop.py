"""What the async twins wait with, so that the event loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_thread(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What `call` returns or raises, from a thread of the loop's default executor. If the awaiting task is
    cancelled the call goes on to its end all the same."""
    return await _asyncio().to_thread(call, *args, **kwargs)  # type: ignore[no-any-return]


async def pause(seconds: float) -> None:
    await _asyncio().sleep(seconds)


def _asyncio() -> Any:
    # At the top it would be a third of what `import dtq_child` takes; whoever awaits has imported it.
    import asyncio  # noqa: PLC0415

    return asyncio
