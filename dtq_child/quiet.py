"""Signals that do nothing to templates and children, and mean what they always do in processes that code of
the application forks there.

A fork inherits handlers. With ours, `terminate()` of the standard library's processes would do nothing, and
a pool of them wait for ever for workers that it has told to end. A program that is started instead has the
default actions anyhow.
"""

from __future__ import annotations

# The wrappers of these in `signal` turn each number into an enum member.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_handler_of: Callable[[int], Any] = _signal.getsignal
_set_mask: Callable[[int, Iterable[int]], set[int]] = _signal.pthread_sigmask

_PYTHONS = {int(signal.SIGINT): signal.default_int_handler}
_quiet: set[int] = set()
_before_fork = threading.local()
_watched = False


def quiet(numbers: Iterable[int]) -> None:
    """From now on these do nothing here."""
    _watch_forks()
    for number in numbers:
        _quiet.add(number)
        signal.signal(number, do_nothing)


def do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Not SIG_IGN: programs that a task starts would inherit that."""


def _watch_forks() -> None:
    # Not at import, for a process that quiets nothing has its forks to itself.
    global _watched  # noqa: PLW0603 - what is registered is so for good, and inherited
    if not _watched:
        _watched = True
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_be_loud)


def _hold() -> None:
    # What reaches the new process before it is loud would be lost.
    _before_fork.mask = _set_mask(signal.SIG_BLOCK, _quiet)


def _let_go() -> None:
    _set_mask(signal.SIG_SETMASK, _before_fork.mask)


def _be_loud() -> None:
    try:
        for number in _quiet:
            # Another handler is the application's own, which it would inherit in any program.
            if _handler_of(number) is do_nothing:
                signal.signal(number, _PYTHONS.get(number, signal.SIG_DFL))
        _quiet.clear()
    finally:
        _let_go()
