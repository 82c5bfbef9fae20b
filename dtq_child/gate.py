"""How the three processes of one fork wait for each other: template, middle, child.

Two pipes: the middle says the child's pid in one; at the other, the gate, middle and child wait until the
template lets them pass, or is gone. So no child works that its template has not registered.
"""

from __future__ import annotations

import os
import select

HEAR_S = 5.0
_GO = b"g"


class Gate:
    """Made by the template before the fork; a context that closes what is still open."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        try:
            self._heard, self._said = self._pipe()
            self._gate, self._opener = self._pipe()
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._close(*self._open)

    # The template.

    def hear(self) -> int:
        """The child's pid. OSError: the middle could not fork, or says nothing."""
        self._close(self._said, self._gate)
        poll = select.poll()
        poll.register(self._heard, select.POLLIN)
        if not poll.poll(HEAR_S * 1000):
            raise TimeoutError(f"the middle process said nothing for {HEAR_S:g} s")
        said = os.read(self._heard, 32)
        if not said:
            raise ChildProcessError("the middle process died")
        if int(said) < 0:
            raise OSError(-int(said), os.strerror(-int(said)))
        return int(said)

    def open(self) -> None:
        os.write(self._opener, _GO * 2)

    # The middle and the child.

    def take_lower_end(self) -> None:
        self._close(self._heard, self._opener)

    def say(self, number: int) -> None:
        """The child's pid, or an error's number, negative."""
        os.write(self._said, b"%d" % number)

    def passes(self) -> bool:
        """Waits. False: the template is gone, or has given this fork up."""
        self._close(self._said)
        passed = os.read(self._gate, len(_GO)) == _GO
        self._close(self._gate)
        return passed

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def _close(self, *fds: int) -> None:
        for fd in fds:
            self._open.discard(fd)
            os.close(fd)
