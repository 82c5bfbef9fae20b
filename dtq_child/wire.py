"""How the bytes of a command and its reply go over a connection that redis-py has opened.

redis-py resolves names, connects, authenticates and selects. After that a busy child sends and reads
thousands of times a second, where redis-py's way (a poll before every send and every read, three layers of
calls) costs as much as a small task: `Direct` does without, `Through` is redis-py's own, for what `Direct`
does not do (TLS, RESP3, no hiredis).
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Protocol, Self

from redis import exceptions as wire

try:
    import hiredis
except ImportError:  # a platform without a wheel of it: redis-py does without, too
    hiredis = None  # type: ignore[assignment]

_READ_BYTES = 65536
_NOT_YET = object()
_ENDED = "Connection closed by server."


class RawConnection(Protocol):
    """The part of redis-py's connections that we use."""

    def connect(self) -> Any: ...
    def disconnect(self) -> Any: ...
    def send_packed_command(self, command: Any, check_health: bool = True) -> Any: ...
    def read_response(self) -> Any: ...
    def pack_command(self, *args: Any) -> Any: ...


class Exchange(Protocol):
    """Sends one packed command and reads its reply. Raises redis-py's exceptions or OSError; after any of
    them but a ResponseError the connection is of no use."""

    def __call__(self, packed: bytes) -> Any: ...

    def within(self, seconds: float) -> None:
        """The next reply is waited for no longer than that, nor than the connection's own timeout."""


class Direct:
    """By the socket and hiredis. The kernel keeps the timeout, so that a read is one system call."""

    def __init__(self, sock: socket.socket, timeout_s: float, reader: Any) -> None:
        self._sock, self._own_s, self._timeout_s = sock, timeout_s, 0.0
        sock.settimeout(None)
        self._set_timeout(timeout_s)
        self._send, self._recv = sock.sendall, sock.recv
        self._feed, self._gets = reader.feed, reader.gets

    @classmethod
    def over(cls, sock: object, timeout_s: float, protocol: object) -> Self | None:
        """None where it would not do."""
        if hiredis is None or type(sock) is not socket.socket or str(protocol) != "2":
            return None
        reader = hiredis.Reader(
            protocolError=wire.InvalidResponse, replyError=wire.ResponseError, notEnoughData=_NOT_YET
        )
        return cls(sock, timeout_s, reader)

    def __call__(self, packed: bytes) -> Any:
        try:
            self._send(packed)
            while True:
                data = self._recv(_READ_BYTES)
                if not data:
                    raise wire.ConnectionError(_ENDED)
                self._feed(data)
                reply = self._gets()
                if reply is not _NOT_YET:
                    break
        except BlockingIOError as error:
            raise wire.TimeoutError(f"no answer within {self._timeout_s:g} s") from error
        if isinstance(reply, Exception):
            raise reply
        return reply

    def within(self, seconds: float) -> None:
        self._set_timeout(min(seconds, self._own_s))

    def _set_timeout(self, seconds: float) -> None:
        if seconds == self._timeout_s:
            return
        self._timeout_s = seconds
        whole = int(seconds)
        packed = struct.pack("@ll", whole, int((seconds - whole) * 1e6) or int(not whole))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


class Through:
    """By redis-py."""

    def __init__(self, raw: RawConnection, timeout_s: float) -> None:
        self._raw, self._own_s = raw, timeout_s

    def __call__(self, packed: bytes) -> Any:
        self._raw.send_packed_command((packed,), check_health=False)
        return self._raw.read_response()

    def within(self, seconds: float) -> None:
        sock = getattr(self._raw, "_sock", None)
        if isinstance(sock, socket.socket):
            sock.settimeout(min(seconds, self._own_s))
