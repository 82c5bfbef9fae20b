"""Writes lines to the log's descriptor without ever waiting for its reader: what does not fit is dropped and
counted, and the count is told with the next line that fits.

    fd 2 leads to            lines go
    -------------            --------
    a pipe, a terminal       through an open file description of our own, which alone is non-blocking: the
                             other one is shared with the supervisor, the shell, programs that tasks start
    a pipe that we may not   through a copy of it, if it has room at that moment
    open (another user's)
    a socket (the journal)   through a copy, each send without waiting
    a file, /dev/null        through a copy: one of our own would have its own idea of the file's end

Tasks close descriptors, and a number that is free is the next file's, or connection's. So each time it is
looked at what the number means now.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
from collections.abc import Callable

PATIENCE_S = 0.02
"""For a reader that is only slow. After a line that did not fit there is no waiting until one has fitted."""
_ATOMIC = 4096
"""A pipe that says it has room takes so much at once."""

Write = Callable[[bytes], int]


class Outlet:
    """To where `fd` leads at the beginning. For one thread at a time; the lock of a logging handler sees to
    that. `notice` words the number of lines that were dropped."""

    def __init__(self, fd: int, notice: Callable[[int], str]) -> None:
        self.dropped = 0
        """Not told yet."""
        self._fd, self._notice = fd, notice
        self._where = _identity(fd)
        self._own, self._write = _open(fd) if self._where else (-1, _nowhere)
        self._rest = b""
        """Of a line that has gone out in part."""
        self._stuck = False

    def put(self, line: str) -> None:
        if not self._stands() or not self._gone(self._rest):
            self.dropped += 1
            return
        if self.dropped:
            told, self.dropped = self.dropped, 0
            if not self._line(self._notice(told)):
                self.dropped = told + 1
                return
        if not self._line(line):
            self.dropped += 1

    def close(self) -> None:
        if self._own >= 0 and _identity(self._own) == self._where:
            os.close(self._own)
        self._own, self._where = -1, None

    def _line(self, line: str) -> bool:
        """Whether it goes out, at once or its rest with the next one."""
        return not self._rest and self._gone(line.encode("utf-8", "backslashreplace") + b"\n", whole=True)

    def _gone(self, raw: bytes, whole: bool = False) -> bool:
        """Whether `raw` has gone out. Of a `whole` line a part is enough: the rest is kept."""
        begun = not whole
        while raw:
            sent = self._try(raw)
            begun, raw = begun or sent > 0, raw[sent:]
            if not sent:
                break
        self._rest = raw if begun else b""
        return not raw or (whole and begun)

    def _try(self, raw: bytes) -> int:
        """How many bytes went; 0: it does not fit."""
        try:
            sent = self._write(raw)
            if not sent and not self._stuck and _has_room(self._own, PATIENCE_S):
                sent = self._write(raw)
        except OSError:  # its reader is gone, its disk is full
            sent = 0
        self._stuck = not sent
        return sent

    def _stands(self) -> bool:
        """Whether our number still leads where it did; if not, the original one may."""
        if self._where is None:
            return False
        if _identity(self._own) != self._where:
            if _identity(self._fd) != self._where:
                return False
            # Not closed: the number is somebody else's by now, or nobody's.
            self._own, self._write = _open(self._fd)
        return self._own >= 0


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open(fd: int) -> tuple[int, Write]:
    """A descriptor of our own to where `fd` leads, and how to write to it without waiting."""
    kind = os.fstat(fd).st_mode
    terminal = os.isatty(fd)
    if terminal or stat.S_ISFIFO(kind):
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC
            own = os.open(f"/proc/self/fd/{fd}", flags)
        except OSError:
            pass_on = _if_room
        else:
            now = _to_terminal if terminal else _now
            return own, lambda raw: now(own, raw)
    elif stat.S_ISSOCK(kind):
        pass_on = _send
    else:
        pass_on = _now
    try:
        own = os.dup(fd)
    except OSError:  # no number is free
        return -1, _nowhere
    return own, lambda raw: pass_on(own, raw)


def _now(fd: int, raw: bytes) -> int:
    try:
        return os.write(fd, raw)
    except BlockingIOError:
        return 0


def _to_terminal(fd: int, raw: bytes) -> int:
    """A terminal may stop those that write in the background (`stty tostop`), and every child is there. We
    have a handler for that signal; unblocked, each try would be answered by it, for ever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        return _now(fd, raw)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _if_room(fd: int, raw: bytes) -> int:
    return os.write(fd, raw[:_ATOMIC]) if _has_room(fd, 0) else 0


def _send(fd: int, raw: bytes) -> int:
    # A socket object that is kept would close its number in the end, whosever that is by then.
    with socket.socket(fileno=os.dup(fd)) as copy:
        try:
            return copy.send(raw, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0


def _nowhere(_raw: bytes) -> int:
    return 0


def _has_room(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(round(seconds * 1000)))
