"""The stacks of children: one file in memory for each row of the scoreboard, shared with that row's child.

Both hold the same open file, so its position is shared, too: the child writes where the supervisor has put
it. The child's last words in a fatal error are there, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from dtq_child.signals import DUMP_SIGNAL

LIMIT = 64 * 1024
PATIENCE_S = 0.2
STEADY_S = 0.03
_HEAD = LIMIT // 4


@dataclass(slots=True)
class _Asked:
    """`size` is what the file had at `since`, and has had since."""

    at: float
    size: int = 0
    since: float = 0.0


class Dumps:
    """`send(slot, life, signal number)` signals a child, if it is there."""

    def __init__(
        self, rows: int, send: Callable[[int, int, int], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fds = [os.memfd_create(f"dtq-stacks-{row}") for row in range(rows)]
        self._send, self._clock = send, clock
        self._asked: dict[int, _Asked] = {}

    def clear(self, row: int) -> None:
        """Before a fork: what is there afterwards is the new child's."""
        self._asked.pop(row, None)
        os.lseek(self.fds[row], 0, os.SEEK_SET)
        os.ftruncate(self.fds[row], 0)

    def ask(self, row: int, slot: int, life: int) -> None:
        """Makes the child write its stacks. What was there is lost."""
        self.clear(row)
        now = self._clock()
        self._asked[row] = _Asked(at=now, since=now)
        self._send(slot, life, DUMP_SIGNAL)

    def done(self, row: int) -> bool:
        """Whether the stacks that were asked for are written, or their time is over. Never waits: look
        again."""
        asked = self._asked.get(row)
        now = self._clock()
        if asked is None or now - asked.at >= PATIENCE_S:
            return True
        size = os.fstat(self.fds[row]).st_size
        if size != asked.size:
            asked.size, asked.since = size, now
        # Nothing marks the end of a dump. It is written by one signal handler: it stops growing when it is
        # whole.
        return size > 0 and now - asked.since >= STEADY_S and self.read(row).endswith("\n")

    def read(self, row: int) -> str:
        """What is there, at most 64 KB: the beginning and, of a longer one, the end, where the main thread
        is."""
        fd, size = self.fds[row], os.fstat(self.fds[row]).st_size
        if size <= LIMIT:
            return _text(os.pread(fd, LIMIT, 0))
        mark = f"\n… {size} bytes in all, the middle left out …\n".encode()
        tail = LIMIT - _HEAD - len(mark)
        return _text(os.pread(fd, _HEAD, 0) + mark + os.pread(fd, tail, size - tail))

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _text(raw: bytes) -> str:
    # A file that was cut while it was written has a hole of NULs.
    return raw.replace(b"\0", b"").decode("utf-8", "replace")
