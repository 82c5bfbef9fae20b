"""The listening socket of the endpoint: a TCP port or the path of a unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from dataclasses import dataclass

OFF = "off"
UNIX = "unix:"
BACKLOG = 64
TRY_S = 1.0
"""A supervisor that was killed a moment ago may still have the port."""


class CannotListen(Exception):
    """Its text says where, and why not."""


@dataclass(slots=True)
class Listener:
    """`host`: "" for a unix socket. `shown`: for people. Not inherited, so no child ever keeps the port."""

    socket: socket.socket
    host: str
    shown: str
    path: str = ""
    inode: int = 0

    def close(self) -> None:
        """The path goes, too, if it is still ours."""
        self.socket.close()
        if self.path and _inode(self.path) == self.inode:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def listen(bind: str) -> Listener:
    """`bind`: host:port, [v6 address]:port or unix:/path, as the settings have checked it. Raises
    CannotListen."""
    give_up = time.monotonic() + TRY_S
    while True:
        try:
            return _unix(bind.removeprefix(UNIX)) if bind.startswith(UNIX) else _tcp(bind)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= give_up:
                raise CannotListen(f"cannot listen on {bind}: {_why(error)}") from error
        time.sleep(0.05)


def _tcp(bind: str) -> Listener:
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    opened = socket.socket(family, kind, protocol)
    try:
        # Or the connections of a supervisor that has ended would keep the port for a minute.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
        opened.setblocking(False)
        bound = opened.getsockname()[1]
    except BaseException:
        opened.close()
        raise
    shown = f"[{host}]" if ":" in host else host
    return Listener(opened, host, f"http://{shown}:{bound}")


def _unix(path: str) -> Listener:
    _clear(path)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.bind(path)
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except BaseException:
        opened.close()
        raise
    return Listener(opened, "", f"{UNIX}{path}", path, _inode(path))


def _clear(path: str) -> None:
    """What a killed supervisor has left there goes; what somebody listens on, or is no socket, stays."""
    if not _inode(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def _inode(path: str) -> int:
    """0 if there is no socket at that path."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "it is taken"
    return error.strerror or str(error)
