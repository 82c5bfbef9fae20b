"""One client's connection through the fault proxy: two sockets, and a lane for each direction."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, Protocol, cast

from tests.support.resp import PUSH, Frames, arguments
from tests.support.rule import Rule

Side = Literal["client", "server"]
_RESET = struct.pack("ii", 1, 0)
# After these, replies no longer answer requests one by one.
_STREAMING = {"SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE", "MONITOR"}


class Proxy(Protocol):
    """What a connection wants from the proxy that it runs through."""

    loop: asyncio.AbstractEventLoop
    target_port: int
    links: set[Link]
    connections: int
    round_trips: int
    commands: Counter[str]
    request_delay: float
    reply_delay: float
    swallow_new: Literal["no", "lose", "hold"]

    @property
    def rules(self) -> Sequence[Rule]: ...


class Lane:
    """One direction: messages on their way, each with the instant of its arrival, and at last the closing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.out: asyncio.Transport | None = None
        self._held = False
        self._loop = loop
        self._queue: deque[tuple[float, bytes]] = deque()
        self._last_due = 0.0
        self._closing: Literal["no", "fin", "reset"] = "no"

    def put(self, message: bytes, delay: float) -> None:
        self._last_due = max(self._last_due, self._loop.time() + delay)
        self._queue.append((self._last_due, message))
        self.pump()

    def close(self, delay: float, *, reset: bool) -> None:
        if reset and self._held:
            self._queue.clear()  # it never left the sender's kernel, which has forgotten it
        self._closing = "reset" if reset else "fin"
        self.put(b"", delay)

    def pump(self) -> None:
        """Lets arrive what is due. Runs at each put and, with a delay, at each message's instant."""
        while self._queue and self.out is not None and not self._held:
            due, message = self._queue[0]
            now = self._loop.time()
            if due > now:
                self._loop.call_at(due, self.pump)
                return
            self._queue.popleft()
            self.out.write(message)
        if self.out is not None and not self._held and not self._queue and self._closing != "no":
            out, self.out = self.out, None
            if self._closing == "reset":
                abort(out)
            else:
                out.close()

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        self.pump()

    def clear(self) -> None:
        self._queue.clear()
        self.out = None


def abort(transport: asyncio.Transport) -> None:
    """Ends a connection by a reset, whatever is still unsent."""
    try:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    except OSError:
        return  # it is closed already
    transport.abort()


class End(asyncio.Protocol):
    """One of the two sockets of a link."""

    def __init__(self, link: Link, side: Side) -> None:
        self._link = link
        self._side = side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link.connected(self._side, cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._link.received(self._side, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.lost(self._side, reset=exc is not None)


class Link:
    """Passes whole messages, in the order of RESP: the n-th reply answers the n-th request."""

    def __init__(self, proxy: Proxy) -> None:
        self.client: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._proxy = proxy
        self._to_server = Lane(proxy.loop)
        self._to_client = Lane(proxy.loop)
        self._requests = Frames()
        self._replies = Frames()
        # What is to come in place of each outstanding reply: itself, nothing but a reset, or these bytes.
        self._expected: deque[Literal["reply", "reset after reply", "reset"] | bytes] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._begun = False
        self._streaming = False
        self._doomed = False
        self._dumb = False

    def end(self, side: Side) -> End:
        return End(self, side)

    # -- what asyncio tells

    def connected(self, side: Side, transport: asyncio.Transport) -> None:
        if side == "server":
            self._server = self._to_server.out = transport
            self._to_server.pump()
            return
        self.client = self._to_client.out = transport
        self._proxy.links.add(self)
        self._proxy.connections += 1
        if self._proxy.swallow_new == "no":
            self._connect()
        else:
            self.swallow(hold=self._proxy.swallow_new == "hold")

    def received(self, side: Side, data: bytes) -> None:
        if self._dumb:
            return
        if side == "client":
            for request in self._requests.feed(data):
                self._request(request)
        else:
            for reply in self._replies.feed(data):
                self._reply(reply)

    def lost(self, side: Side, *, reset: bool) -> None:
        if side == "client":
            self.client = None
            onward, back, delay = self._to_server, self._to_client, self._proxy.request_delay
        else:
            self._server = None
            onward, back, delay = self._to_client, self._to_server, self._proxy.reply_delay
        back.clear()
        if not self._dumb:
            onward.close(delay, reset=reset)
        if self.client is None and self._server is None and self._connecting is None:
            self._proxy.links.discard(self)

    # -- the way there and back

    def _connect(self) -> None:
        self._begun = True
        self._connecting = self._proxy.loop.create_task(self._reach())

    async def _reach(self) -> None:
        try:
            await self._proxy.loop.create_connection(
                lambda: self.end("server"), "127.0.0.1", self._proxy.target_port
            )
        except OSError:
            self.reset()
        finally:
            self._connecting = None

    def _request(self, request: bytes) -> None:
        if self._doomed:
            return
        words = arguments(request)
        name = words[0].upper().decode(errors="replace") if words else ""
        self._proxy.commands[name] += 1
        self._proxy.round_trips += not self._expected
        self._streaming = self._streaming or name in _STREAMING
        rule = None if self._streaming else next((r for r in self._proxy.rules if r.strikes(words)), None)
        if rule is None or rule.kind == "drop_reply":
            self._expected.append("reply" if rule is None else "reset after reply")
            self._to_server.put(request, self._proxy.request_delay)
        else:
            self._expected.append(rule.answer if rule.kind == "answer" else "reset")
            self._doomed = rule.kind == "drop_request"
            self._answer_what_is_next()

    def _reply(self, reply: bytes) -> None:
        # Some servers speak first, too: -ERR max number of clients reached.
        if self._streaming or reply[0] == PUSH or not self._expected:
            self._to_client.put(reply, self._proxy.reply_delay)
        elif self._expected.popleft() == "reply":
            self._to_client.put(reply, self._proxy.reply_delay)
            self._answer_what_is_next()
        else:
            self.reset()

    def _answer_what_is_next(self) -> None:
        """Serves the entries that wait for no reply of Redis, once the replies before them have come."""
        while self._expected and self._expected[0] not in ("reply", "reset after reply"):
            answer = self._expected.popleft()
            if isinstance(answer, bytes):
                self._to_client.put(answer, self._proxy.reply_delay)
            else:
                self.reset()

    # -- faults

    def swallow(self, hold: bool) -> None:
        if hold:
            self._to_server.hold()
            self._to_client.hold()
        else:
            self._dumb = True
            self._to_server.clear()
            self._to_client.clear()

    def heal(self) -> None:
        if self._dumb:
            if self.client is None:
                self.reset()
            return
        if not self._begun:
            self._connect()
        self._to_server.release()
        self._to_client.release()

    def reset(self) -> None:
        self._proxy.links.discard(self)
        self._to_server.clear()
        self._to_client.clear()
        self._expected.clear()
        if self._connecting is not None and self._connecting is not asyncio.current_task(self._proxy.loop):
            self._connecting.cancel()
        for transport in (self.client, self._server):
            if transport is not None:
                abort(transport)
        self.client = self._server = None
