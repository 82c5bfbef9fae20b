"""The supervisor's HTTP endpoint: a few short answers to few clients, none of which may hold up anything.

One request a connection, one thread each, few at a time. A connection has a deadline, whatever trickles in;
if too many are open, the oldest one is cut off for the newest, for that may be a probe that counts.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dtq_supervisor.answers import Answer, Request
from dtq_supervisor.listener import Listener
from dtq_supervisor.visitor import Visitor

MOST = 16
"""Connections at a time; beyond twice as many the newest is closed unheard."""
DEADLINE_S = 10.0
"""From the connection to the end of its answer."""
POLL_S = 0.2
BODY_MOST = 4096
_CREDENTIALS = struct.Struct("3i")

log = logging.getLogger("dtq.supervisor")


class Endpoint:
    """A duty like the others, but that it works without Redis, and while the main loop hangs."""

    name = "endpoint"

    def __init__(self, listener: Listener, answer: Callable[[Request], Answer]) -> None:
        self._listener, self._answer = listener, answer
        self._open: dict[socket.socket, float] = {}
        """Deadlines by connection, oldest first; each goes when its thread ends."""

    def run(self, stop: threading.Event, healthy: Callable[[], bool]) -> None:
        poll = select.poll()
        poll.register(self._listener.socket, select.POLLIN)
        while not stop.is_set():
            if poll.poll(POLL_S * 1000):
                self._accept()
            self._cut_late()
        self._cut(list(self._open))

    def _accept(self) -> None:
        try:
            connection, address = self._listener.socket.accept()
        except BlockingIOError:
            return  # it has gone again
        except OSError as error:
            log.warning("the endpoint cannot take a connection: %s", error)
            time.sleep(POLL_S)
            return
        if len(self._open) >= MOST:
            self._cut(list(self._open)[:1])
        if len(self._open) >= 2 * MOST:
            connection.close()
            return
        connection.settimeout(DEADLINE_S)
        self._open[connection] = time.monotonic() + DEADLINE_S
        thread = threading.Thread(
            target=self._serve, args=(connection, address), name="dtq-endpoint-client", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            log.warning("the endpoint cannot serve a connection: %s", error)
            self._close(connection)

    def _serve(self, connection: socket.socket, address: Any) -> None:
        try:
            _Handler(connection, address, self._answer)
        except OSError as error:
            log.debug("a client of the endpoint went away: %s", error)
        except Exception:
            log.exception("a request could not be answered")
        finally:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._open.pop(connection, None)
        connection.close()

    def _cut_late(self) -> None:
        now = time.monotonic()
        self._cut([connection for connection, deadline in list(self._open.items()) if deadline <= now])

    def _cut(self, connections: list[socket.socket]) -> None:
        """Whoever waits for them is told at once; their threads close them."""
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("a connection of the endpoint had ended: %s", error)


class _Handler(BaseHTTPRequestHandler):
    """One request. HTTP/1.0: the connection ends with the answer."""

    server_version, sys_version = "dtq", ""
    timeout = DEADLINE_S

    def __init__(self, connection: socket.socket, address: Any, answer: Callable[[Request], Answer]) -> None:
        self._answer_to = answer
        self._address = address[0] if isinstance(address, tuple) else ""
        super().__init__(connection, address, None)  # type: ignore[arg-type]  # no server stands behind it

    def _any(self) -> None:
        if len(self.headers.get_all("host", [])) > 1:
            self._send(Answer.of(400, "more than one Host"))
        elif not self._drained():
            self._send(Answer.of(413, f"a body of more than {BODY_MOST} bytes"))
        else:
            self._send(self._answered())

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _any

    def _answered(self) -> Answer:
        try:
            request = self._request()
        except ValueError as error:
            return Answer.of(400, f"the target cannot be read: {error}")
        try:
            return self._answer_to(request)
        except Exception:
            log.exception("%s %s could not be answered", request.method, request.path)
            return Answer.of(500, "an error of the supervisor; its log says more")

    def _request(self) -> Request:
        target = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        visitor = Visitor(self._address, headers, -1 if self._address else _peer(self.connection))
        return Request(self.command, target.path, dict(parse_qsl(target.query)), visitor)

    def _drained(self) -> bool:
        """Reads the body that nobody needs: closed with it unread, the connection would be reset, and the
        answer with it."""
        length = self.headers.get("content-length", "0")
        # Thousands of digits are more than int() takes.
        if not length.isdecimal() or len(length) > 9 or int(length) > BODY_MOST:
            return False
        self.rfile.read(int(length))
        return True

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request that we could read."""
        self.command, self.request_version = self.command or "", "HTTP/1.0"
        self._send(Answer.of(code, message or self.responses.get(code, ("error", ""))[0]))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug("endpoint: %s", format % args)


def _peer(connection: socket.socket) -> int:
    """The user behind a unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
