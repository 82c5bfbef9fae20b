"""Puts back what a task may have changed in its process: signal handlers, mask, timers, working directory (R26).

Comparing is what happens thousands of times a second, putting back hardly ever: so everything that can be looked
at is compared with a snapshot, and only what differs is touched. Other process state (environment, umask, locale,
limits, modules) is not restored; `--max-tasks-per-child 1` isolates that.
"""

from __future__ import annotations

# The wrappers of these in `signal` turn each number into an enum member: 94 µs for all signals instead of 3.
import _signal  # type: ignore[import-not-found]
import logging
import operator
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_SIGNALS: tuple[int, ...] = tuple(
    sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_OFF = (0.0, 0.0)
_NO_WAKEUP = -1

_handler_of: Callable[[int], Any] = _signal.getsignal
_set_mask: Callable[[int, Any], set[int]] = _signal.pthread_sigmask

log = logging.getLogger(__name__)


class Guards:
    """A snapshot of the process, taken once before the first task, and the way back to it."""

    __slots__ = ("_directory", "_directory_fd", "_handlers", "_mask", "_threads", "_timers", "_wake_stacks")

    def __init__(self, wake_stacks: Callable[[], None] | None = None) -> None:
        """`wake_stacks` registers the stack dumps again: their handlers are C code, which Python cannot list."""
        self._wake_stacks = wake_stacks
        self._handlers = tuple(map(_handler_of, _SIGNALS))
        self._mask = frozenset(_set_mask(signal.SIG_BLOCK, ()))
        # A profiler that the application started before the first task keeps its timer.
        self._timers = tuple(timer for timer in _TIMERS if signal.getitimer(timer) == _OFF)
        self._directory = os.getcwd()
        self._directory_fd = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._threads = frozenset(threading.enumerate())

    def restore(self) -> tuple[str, ...]:
        """Puts back what differs, and names it. May be called again after a signal handler that the task left
        behind has raised in it; timers and handlers come first, so that every such call gets further."""
        changed: tuple[str, ...] = ()
        for timer in self._timers:
            if signal.getitimer(timer) != _OFF:
                signal.setitimer(timer, 0)
                changed += (f"timer {timer}",)
        if not all(map(operator.is_, map(_handler_of, _SIGNALS), self._handlers)):
            changed += self._restore_handlers()
        if signal.set_wakeup_fd(_NO_WAKEUP) != _NO_WAKEUP:
            changed += ("wakeup fd",)
        if _set_mask(signal.SIG_SETMASK, self._mask) != self._mask:
            changed += ("signal mask",)
        self._restore_directory()
        return changed

    def hold_signals(self) -> None:
        """Blocks all signals: what is still to come is at most what has already reached the interpreter.
        `restore` opens the mask again."""
        _set_mask(signal.SIG_SETMASK, _SIGNALS)

    def new_threads(self) -> tuple[str, ...]:
        """The names of non-daemon threads that were not there before; each is named once."""
        if threading.active_count() == len(self._threads):
            return ()
        alive = frozenset(threading.enumerate())
        new = tuple(sorted(thread.name for thread in alive - self._threads if not thread.daemon))
        self._threads = alive
        return new

    def close(self) -> None:
        os.close(self._directory_fd)

    def _restore_handlers(self) -> tuple[str, ...]:
        names: tuple[str, ...] = ()
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
            if _handler_of(number) is handler:
                continue
            names += (f"handler of signal {number}",)
            # None: installed by C code before the snapshot, which Python can neither name nor put back.
            if handler is not None:
                signal.signal(number, handler)
        if self._wake_stacks is not None:
            self._wake_stacks()
        return names

    def _restore_directory(self) -> None:
        """By descriptor, unasked: cheaper than getcwd() and a comparison, and the directory may have been renamed."""
        try:
            os.fchdir(self._directory_fd)
        except OSError as by_fd:
            # A task that closed every descriptor closed this one, too; the number may be another file's by now.
            try:
                os.chdir(self._directory)
                self._directory_fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as by_name:
                log.warning("cannot go back to %s: %s, %s", self._directory, by_fd, by_name)
