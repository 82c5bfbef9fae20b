"""Opens Redis connections with our timeouts and no hidden resends (R10), and says in our words what went wrong (R14)."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast
from urllib.parse import parse_qs, unquote, urlsplit

from redis import exceptions as wire
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from dtq_child.errors import BadConfiguration, BrokerError, BrokerRefused, BrokerUnavailable, RedisOutOfMemory

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 5.0
# A reply that only says "not now" (R14). Bare, behind `ERR `, or behind `-` inside the text of a failed script (6.2).
WAITED_OUT = re.compile(
    r"(?:^|^ERR |[ -])(LOADING|READONLY|MASTERDOWN|TRYAGAIN|CLUSTERDOWN|MISCONF|NOREPLICAS|BUSY|UNBLOCKED|NOSCRIPT|NOGROUP)\b"
)
OUT_OF_MEMORY = re.compile(r"\bOOM command not allowed|^OOM\b")
REFUSED = re.compile(r"^(?:ERR )?(NOAUTH|NOPERM|WRONGPASS|DENIED)\b|unknown command|AUTH failed|ACL failure")


class ServerReply(BrokerError):
    """Redis answered with an error that none of the other classes names."""


class NoSuchScript(BrokerUnavailable):
    """NOSCRIPT: the script is not in the server's cache, so nothing ran."""


class RawConnection(Protocol):
    """The part of redis-py's connections that we use."""

    def connect(self) -> Any: ...
    def disconnect(self) -> Any: ...
    def send_packed_command(self, command: Any, check_health: bool = True) -> Any: ...
    def read_response(self) -> Any: ...
    def pack_command(self, *args: Any) -> Any: ...


def as_broker_error(error: Exception) -> BrokerError:
    """What redis-py raised, in our tree."""
    words = str(error)
    kind = type(error).__name__
    if isinstance(error, wire.NoScriptError) or re.search(r"(?:^|ERR )NOSCRIPT\b", words):
        return NoSuchScript(words)
    if isinstance(error, wire.OutOfMemoryError) or OUT_OF_MEMORY.search(words):
        return RedisOutOfMemory(f"Redis is at maxmemory and refused the write: {words}")
    if isinstance(error, wire.AuthenticationError | wire.AuthorizationError | wire.NoPermissionError):
        return BrokerRefused(f"Redis refuses this user: {words}")
    if REFUSED.search(words):
        return BrokerRefused(f"Redis refuses: {words}")
    if isinstance(error, wire.ConnectionError | wire.TimeoutError | OSError | MasterNotFoundError):
        return BrokerUnavailable(words or kind)
    if isinstance(
        error, wire.ReadOnlyError | wire.MasterDownError | wire.TryAgainError | wire.ClusterDownError
    ) or WAITED_OUT.search(words):
        return BrokerUnavailable(f"Redis says not now: {words}")
    return ServerReply(words)


def reset_at_close(sock: socket.socket) -> None:
    """Closing sends RST and drops what is unsent: a late command of a given-up connection cannot land (R10)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Link:
    """One plain connection. Connects at its first call; after any error it is closed and the next call opens another,
    resolving names (and asking Sentinel) anew. Never resends. Not thread-safe, never crosses a fork."""

    def __init__(self, make: Callable[[], RawConnection]) -> None:
        self._make = make
        self._raw: RawConnection | None = None
        self.connects = 0

    @property
    def connected(self) -> bool:
        return self._raw is not None

    def call(self, *args: bytes | str | int | float) -> Any:
        """Sends one command and reads its reply. Raises BrokerError."""
        raw = self._raw or self._open()
        return self._exchange(raw, raw.pack_command(*args))

    def call_packed(self, packed: bytes) -> Any:
        """The same for a command already in wire form."""
        return self._exchange(self._raw or self._open(), (packed,))

    def _exchange(self, raw: RawConnection, packed: Any) -> Any:
        try:
            raw.send_packed_command(packed, check_health=False)
            return raw.read_response()
        except wire.ResponseError as error:
            failure = as_broker_error(error)
            if isinstance(failure, BrokerUnavailable) and not isinstance(failure, NoSuchScript):
                self.close()
            raise failure from error
        except (wire.RedisError, OSError) as error:
            self.close()
            raise as_broker_error(error) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> RawConnection:
        try:
            raw = self._make()
            raw.connect()
        except (wire.RedisError, OSError) as error:
            raise as_broker_error(error) from error
        sock = getattr(raw, "_sock", None)
        if isinstance(sock, socket.socket):
            reset_at_close(sock)
        self._raw = raw
        self.connects += 1
        return raw

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.disconnect()


class LinkPool:
    """A few links shared by the threads of a process. A forked process starts with none of its parent's."""

    def __init__(self, make: Callable[[], Link]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._pid = os.getpid()

    @contextlib.contextmanager
    def link(self) -> Iterator[Link]:
        """A link for the duration of the block; one that failed comes back closed."""
        taken = self._take()
        try:
            yield taken
        finally:
            with self._lock:
                if os.getpid() == self._pid and len(self._idle) < 64:
                    self._idle.append(taken)
                else:
                    taken.close()

    def _take(self) -> Link:
        if os.getpid() != self._pid:
            # The parent's lock may be held for ever here, and its sockets are its own.
            self._lock, self._idle, self._pid = threading.Lock(), [], os.getpid()
        with self._lock:
            return self._idle.pop() if self._idle else self._make()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()


class Pause:
    """Jittered exponential back-off: each next wait is random up to a ceiling that doubles until `cap_s`."""

    def __init__(self, base_s: float = 0.05, cap_s: float = 2.0) -> None:
        self._base, self._cap, self._failures = base_s, cap_s, 0

    def next(self) -> float:
        ceiling = min(self._cap, self._base * 2 ** min(self._failures, 16))
        self._failures += 1
        return ceiling * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0


# What a URL may not change: our replies are bytes, our timeouts are ours, nothing is sent twice.
_OURS = ("decode_responses", "retry_on_timeout", "retry_on_error", "health_check_interval", "max_connections", "timeout")


def _options(reply_timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": reply_timeout_s,
        "socket_connect_timeout": min(CONNECT_TIMEOUT_S, reply_timeout_s),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }


def connector(url: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Callable[[], RawConnection]:
    """A maker of connections for `redis://`, `rediss://`, `unix://` and `redis+sentinel://` URLs. Raises BadConfiguration."""
    if urlsplit(url).scheme == "redis+sentinel":
        return _sentinel_connector(url, reply_timeout_s)
    try:
        parsed = dict(parse_url(url))
    except ValueError as error:
        raise BadConfiguration([f"redis url: {error}"]) from error
    kind = parsed.pop("connection_class", Connection)
    for name in _OURS:
        parsed.pop(name, None)
    given = {**_options(reply_timeout_s), **parsed}
    if issubclass(kind, UnixDomainSocketConnection):
        given.pop("socket_connect_timeout", None)
    else:
        given.setdefault("socket_keepalive", True)
    return lambda: cast(RawConnection, kind(**given))


def sentinel_parts(url: str) -> tuple[list[tuple[str, int]], str, int, str | None, str | None]:
    """(hosts, service, db, user, password) of `redis+sentinel://[user:pw@]h1[:26379][,h2…]/service[/db]`."""
    rest = url.partition("://")[2].partition("?")[0]
    authority, _, path = rest.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    user, _, password = userinfo.partition(":")
    service, _, db = path.partition("/")
    nodes = []
    for host in filter(None, hosts.split(",")):
        name, colon, port = host.rpartition(":")
        if colon and not port.isdigit():
            name, port = host, "26379"
        nodes.append((name or host, int(port) if colon and port.isdigit() else 26379))
    if not nodes or not service or (db and not db.isdigit()):
        raise BadConfiguration([f"redis url {rest.rpartition('@')[2]!r}: redis+sentinel://h1[:26379][,h2…]/service[/db] is needed"])
    return nodes, service, int(db or 0), unquote(user) or None, unquote(password) or None


def _sentinel_connector(url: str, reply_timeout_s: float) -> Callable[[], RawConnection]:
    nodes, service, db, user, password = sentinel_parts(url)
    query = parse_qs(urlsplit(url).query)
    options = _options(reply_timeout_s)
    if "protocol" in query:
        options["protocol"] = int(query["protocol"][0])
    kind: type[Connection] = SSLConnection if query.get("ssl", ["0"])[0] in ("1", "true") else Connection

    def make() -> RawConnection:
        # Asked at every connect: after a failover the next connection goes to the new primary.
        sentinel = Sentinel(nodes, sentinel_kwargs={"socket_timeout": 2.0, "retry": Retry(NoBackoff(), 0)})
        try:
            host, port = sentinel.discover_master(service)
        finally:
            for node in sentinel.sentinels:
                node.close()
        return cast(RawConnection, kind(host=host, port=port, db=db, username=user, password=password, **options))

    return make


def open_link(url: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Link:
    """A link that has not connected yet."""
    return Link(connector(url, reply_timeout_s))
