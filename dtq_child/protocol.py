"""What supervisor and template say to each other, and what a template hands to the children it forks.

They talk over a socketpair of type SOCK_SEQPACKET. A message is one JSON object with a field `kind`:

    supervisor → template   hello   protocol, supervisor_pid, worker_id, generation, app, preload, settings,
                                    scoreboard {fd, rows}, dump_fds [one a row]
                            fork    slot, life, row
                            quit    no more forks are wanted; the template lives until its last child is gone
    template → supervisor   hello          protocol, pid
                            imported       seconds, threads [names], native_threads, sockets,
                                           task_types {type: declared}
                            import_failed  error_class, message, traceback
                            forked         slot, life, row, pid
                            fork_failed    slot, life, row, error

The hellos come first, before anything that another version might not understand: their fields `kind` and
`protocol` never change. A `forked` is sent before the child goes on, so no child ever works unreported.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from dtq_child.app import App
from dtq_child.scoreboard import Scoreboard
from dtq_child.settings import Settings

PROTOCOL = 1

PART = 64 * 1024
"""Longer messages travel in several packets: one packet must fit the socket's send buffer."""

_MORE, _LAST = b"+", b"."  # a JSON object begins with a brace
MAX_MESSAGE = 64 * 1024 * 1024


class Garbled(ValueError):
    """What came over the socket is no message."""


@dataclass(frozen=True, slots=True)
class ChildContext:
    """What a child is told about itself. `preloaded`: whether the template had imported the application."""

    slot: int
    life: int
    row: int
    generation: int
    worker_id: str
    supervisor_pid: int
    settings: Settings
    app: App
    scoreboard: Scoreboard
    dump_fd: int
    preloaded: bool


def socketpair() -> tuple[socket.socket, socket.socket]:
    """The supervisor's end, which never blocks, and the template's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def packets(message: Mapping[str, Any]) -> list[bytes]:
    """The packets of one message."""
    whole = orjson.dumps(message)
    if len(whole) <= PART:
        return [whole]
    parts = [whole[start : start + PART] for start in range(0, len(whole), PART)]
    return [*(_MORE + part for part in parts[:-1]), _LAST + parts[-1]]


class Assembler:
    """Makes messages of packets."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def take(self, packet: bytes) -> dict[str, Any] | None:
        """The message that this packet completes. Raises Garbled."""
        if packet[:1] in (_MORE, _LAST):
            self._parts.append(packet[1:])
            if sum(map(len, self._parts)) > MAX_MESSAGE:
                raise Garbled(f"a message of more than {MAX_MESSAGE} bytes")
            if packet[:1] == _MORE:
                return None
            packet = b"".join(self._parts)
            self._parts.clear()
        return _message(packet)


class SupervisorLink:
    """The template's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._assembler = Assembler()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def receive(self) -> dict[str, Any] | None:
        """The next message; None: the supervisor is gone. Raises Garbled."""
        while True:
            try:
                packet = self._sock.recv(PART + 1)
            except OSError:
                return None
            if not packet:
                return None
            message = self._assembler.take(packet)
            if message is not None:
                return message

    def send(self, message: Mapping[str, Any]) -> bool:
        """False: the supervisor is gone."""
        try:
            for packet in packets(message):
                self._sock.send(packet)
        except OSError:
            return False
        return True


def _message(raw: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Garbled(f"{raw[:80]!r}: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise Garbled(f"{raw[:80]!r}: no object with a field kind")
    return message
