"""Puts back what a task may have changed in its process: signal handlers, mask, timers, working directory
(R26).

Comparing is what happens thousands of times a second, putting back hardly ever: so everything that can be
looked at is compared with a snapshot, and only what differs is touched. Other process state (environment,
umask, locale, limits, modules) is not restored.
"""

from __future__ import annotations

# The wrappers of these in `signal` turn each number into an enum member: 94 µs for all signals instead of 3.
import _signal  # type: ignore[import-not-found]
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from dtq_child import stacks
from dtq_child.quiet import quiet
from dtq_child.signals import DUMP_SIGNAL

_SIGNALS: tuple[int, ...] = tuple(
    sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
)
_ALARM = signal.ITIMER_REAL
_TIMERS = {_ALARM: "alarm", signal.ITIMER_VIRTUAL: "virtual timer", signal.ITIMER_PROF: "profiling timer"}
_OFF = (0.0, 0.0)
_STRAYS: tuple[int, ...] = (
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
    *([signal.SIGPWR] if hasattr(signal, "SIGPWR") else []),
    *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else []),
)
_NO_WAKEUP = -1

_handler_of: Callable[[int], Any] = _signal.getsignal
_timer = signal.getitimer
_set_mask: Callable[[int, Any], set[int]] = _signal.pthread_sigmask

log = logging.getLogger("dtq.child")


class Guards:
    """A snapshot of the process, taken once before the first task, and the way back to it."""

    __slots__ = ("_directory", "_directory_fd", "_dump_fd", "_handlers", "_mask", "_threads", "_timers")

    def __init__(self, dump_fd: int | None = None) -> None:
        """`dump_fd`: where stacks are written, if they are. C code does that, whose handlers Python cannot
        list."""
        self._dump_fd = dump_fd
        self._handlers = list(map(_handler_of, _SIGNALS))
        self._mask = frozenset(_set_mask(signal.SIG_BLOCK, ()))
        # A profiler that the application started before the first task keeps its timer.
        self._timers = tuple(timer for timer in _TIMERS if _timer(timer) == _OFF)
        self._directory = os.getcwd()
        self._directory_fd = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._threads = frozenset(threading.enumerate())

    def restore(self) -> tuple[str, ...]:
        """Puts back what differs, and names it. May be called again after a signal handler that the task left
        behind has raised in it; timers and handlers come first, so that every such call gets further."""
        changed: tuple[str, ...] = ()
        same = list(map(_handler_of, _SIGNALS)) == self._handlers
        if not same or _timer(_ALARM) != _OFF:
            changed += self._stop_timers()
        if not same:
            changed += self._restore_handlers()
        if signal.set_wakeup_fd(_NO_WAKEUP) != _NO_WAKEUP:
            changed += ("wakeup fd",)
        if _set_mask(signal.SIG_SETMASK, self._mask) != self._mask:
            changed += ("signal mask",)
        if getattr(sys.stderr, "closed", False):
            # A log line that cannot be written is told of there, which would raise out of the logging call.
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
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
        # asyncio_…: the pool of the handlers' event loop, which lives as long as the child.
        new = tuple(
            sorted(
                thread.name
                for thread in alive - self._threads
                if not thread.daemon and not thread.name.startswith("asyncio_")
            )
        )
        self._threads = alive
        return new

    def close(self) -> None:
        os.close(self._directory_fd)

    def _stop_timers(self) -> tuple[str, ...]:
        """The alarm's is looked at after each task. The other two run by CPU time and are set by profilers,
        hardly ever without a handler of their own, so they are looked at when a handler has changed."""
        names: tuple[str, ...] = ()
        for timer in self._timers:
            if _timer(timer) != _OFF:
                signal.setitimer(timer, 0)
                names += (_TIMERS[timer],)
        return names

    def _restore_handlers(self) -> tuple[str, ...]:
        # In between, a request for the stacks would meet the default action and kill.
        before = _set_mask(signal.SIG_BLOCK, (DUMP_SIGNAL,))
        names: tuple[str, ...] = ()
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
            if _handler_of(number) is handler:
                continue
            names += (f"handler of signal {number}",)
            if handler == signal.SIG_DFL and number != signal.SIGCHLD:
                # Discards one that is pending, which was meant for the task's handler and would kill now.
                signal.signal(number, signal.SIG_IGN)
            # None: installed by C code before the snapshot, which Python can neither name nor put back.
            if handler is not None:
                signal.signal(number, handler)
        if self._dump_fd is not None:
            # Without these two faulthandler takes itself for registered still, and does nothing.
            faulthandler.disable()
            faulthandler.unregister(DUMP_SIGNAL)
            stacks.write_to(self._dump_fd)
        _set_mask(signal.SIG_SETMASK, before)
        return names

    def _restore_directory(self) -> None:
        """By descriptor, unasked: cheaper than getcwd() and a comparison, and the directory may have been
        renamed."""
        try:
            os.fchdir(self._directory_fd)
        except OSError as by_fd:
            # A task that closed every descriptor closed this one, too; the number may be another file's by
            # now.
            try:
                os.chdir(self._directory)
                self._directory_fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as by_name:
                log.warning("cannot go back to %s: %s, %s", self._directory, by_fd, by_name)


def quiet_strays() -> None:
    """Gives a handler that does nothing to every signal that would end the process and means no error of it:
    the alarm of a task that has ended, a real-time signal sent by mistake. Signals that C code has taken stay
    its own."""
    with open("/proc/self/status", encoding="ascii") as status:
        lines = dict(line.split(":", 1) for line in status)
    taken = int(lines["SigCgt"], 16) | int(lines["SigIgn"], 16)
    quiet(
        number
        for number in _STRAYS
        if _handler_of(number) == signal.SIG_DFL and not taken >> (number - 1) & 1
    )
