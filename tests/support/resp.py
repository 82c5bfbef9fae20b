"""Cuts a byte stream into whole RESP messages (2 and 3); understands no more of them than their ends."""

from __future__ import annotations

from collections.abc import Generator, Iterator

_BULK = b"$!="
_AGGREGATE = b"*~>"
_PAIRS = b"%|"
PUSH = ord(">")


class Frames:
    """Feed it what arrived; it yields each message once its last byte is there. Linear in the bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scan = self._scanner()
        self._needed = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= self._needed:
            step = next(self._scan)
            self._needed = max(step, 0)
            if step < 0:
                message = bytes(self._buffer[:-step])
                del self._buffer[:-step]
                yield message

    def _scanner(self) -> Generator[int, None, None]:
        """Yields how long the buffer must be for another look, or minus the length of a whole message."""
        while True:
            position, parts = 0, 1
            while parts:
                end = yield from self._line_end(position)
                body, more = self._measure(position, end)
                if body:
                    yield end + body
                position, parts = end + body, parts - 1 + more
            yield -position

    def _line_end(self, start: int) -> Generator[int, None, int]:
        searched = start
        while (found := self._buffer.find(b"\r\n", searched)) < 0:
            searched = max(start, len(self._buffer) - 1)
            yield len(self._buffer) + 1
        return found + 2

    def _measure(self, start: int, end: int) -> tuple[int, int]:
        """For the header line at `start`: bytes of its body, and how many messages more belong to it."""
        kind = self._buffer[start]
        if kind in _BULK:
            size = int(self._buffer[start + 1 : end - 2])
            return (size + 2 if size >= 0 else 0), 0
        if kind in _AGGREGATE:
            return 0, max(0, int(self._buffer[start + 1 : end - 2]))
        if kind in _PAIRS:
            pairs = int(self._buffer[start + 1 : end - 2])
            # An attribute is no message of its own: the one that it describes follows.
            return 0, 2 * pairs + (1 if kind == ord("|") else 0)
        return 0, 0  # a simple line, or a command typed inline


def arguments(request: bytes) -> list[bytes]:
    """The words of one request: an array of bulk strings, or an inline command."""
    if not request.startswith(b"*"):
        return request.split()
    words, position = [], request.index(b"\r\n") + 2
    while position < len(request):
        end = request.index(b"\r\n", position)
        size = int(request[position + 1 : end])
        words.append(request[end + 2 : end + 2 + size])
        position = end + 2 + size + 2
    return words
