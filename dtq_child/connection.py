"""Opens Redis connections with our timeouts and no hidden resends (R10); says in our words what went wrong
(R14)."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from redis import exceptions as wire
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from dtq_child import std_streams
from dtq_child.errors import BadConfiguration, BrokerError, BrokerRefused, BrokerUnavailable, RedisOutOfMemory
from dtq_child.sentinel_url import parse_sentinel_url
from dtq_child.wire import Direct, Exchange, RawConnection, Through

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 5.0


class ServerReply(BrokerError):
    """Redis answered with an error that none of the other classes names."""


class NoSuchScript(BrokerUnavailable):
    """NOSCRIPT: the script is not in the server's cache, so nothing ran."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an error is, if redis-py knows it by one of these classes or its words say so."""

    ours: type[BrokerError]
    classes: tuple[type[Exception], ...]
    words: re.Pattern[str]
    told: str


_NEVER = re.compile(r"(?!)")
# The first that fits. An error code stands at the front, or behind `ERR `; 6.2 puts that of a failed script
# behind `-` in the middle.
MEANINGS = (
    Meaning(NoSuchScript, (wire.NoScriptError,), re.compile(r"^(?:ERR )?NOSCRIPT\b"), "{}"),
    Meaning(
        RedisOutOfMemory,
        (wire.OutOfMemoryError,),
        re.compile(r"\bOOM command not allowed|^(?:ERR )?OOM\b"),
        "Redis is at maxmemory and refused the write: {}",
    ),
    Meaning(
        BrokerRefused,
        (wire.AuthenticationError, wire.AuthorizationError, wire.NoPermissionError),
        re.compile(
            r"(?:^|^ERR |-)(?:NOAUTH|NOPERM|WRONGPASS|DENIED)\b|[Uu]nknown (?:Redis )?command|AUTH failed"
            r"|ACL failure|user executing the script can't|DB index is out of range"
        ),
        "Redis refuses: {}",
    ),
    Meaning(BrokerUnavailable, (wire.ConnectionError, wire.TimeoutError, OSError), _NEVER, "{}"),
    Meaning(
        BrokerUnavailable,
        (wire.ReadOnlyError, wire.MasterDownError, wire.TryAgainError, wire.ClusterDownError),
        re.compile(
            r"(?:^|^ERR |[ -])(?:LOADING|READONLY|MASTERDOWN|TRYAGAIN|CLUSTERDOWN|MISCONF|NOREPLICAS|BUSY"
            r"|UNBLOCKED|NOGROUP)\b|max number of clients reached"
        ),
        "Redis says not now: {}",
    ),
)


def as_broker_error(error: Exception) -> BrokerError:
    """What redis-py raised, in our tree."""
    words = str(error) or type(error).__name__
    for meaning in MEANINGS:
        if isinstance(error, meaning.classes) or meaning.words.search(words):
            return meaning.ours(meaning.told.format(words))
    return ServerReply(words)


def reset_at_close(sock: socket.socket) -> None:
    """Closing sends RST and drops what is unsent: what a given-up connection still had to say is not heard
    later (R10)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Link:
    """One plain connection. Connects at its first call; after any error it is closed and the next call opens
    another, resolving names (and asking Sentinel) anew. Never resends. Not thread-safe, never crosses a fork.

    `deadline`: of time.monotonic(), shortens the connection's own timeouts. Whoever sets it once sets it
    before each call."""

    def __init__(self, make: Callable[[], RawConnection]) -> None:
        self._make = make
        self._raw: RawConnection | None = None
        self._exchange: Exchange | None = None
        self.deadline: float | None = None
        self.connects = 0

    @property
    def connected(self) -> bool:
        return self._raw is not None

    def call(self, *args: bytes | str | int | float) -> Any:
        """Sends one command and reads its reply. Raises BrokerError."""
        if self._raw is None:
            self._open()
        packed = self._raw.pack_command(*args)  # type: ignore[union-attr] # just opened
        return self.call_packed(packed[0] if len(packed) == 1 else b"".join(packed))

    def call_packed(self, packed: bytes) -> Any:
        """The same for a command already in wire form."""
        exchange = self._exchange or self._open()
        try:
            if self.deadline is not None:
                exchange.within(_left(self.deadline))
            return exchange(packed)
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

    def _open(self) -> Exchange:
        try:
            # A task may have closed them: what the next one prints would be written to Redis.
            std_streams.open_closed()
            raw = self._make()
            timeout_s = getattr(raw, "socket_timeout", None) or REPLY_TIMEOUT_S
            if self.deadline is not None:
                _shorten(raw, self.deadline)
            raw.connect()
        except (wire.RedisError, OSError) as error:
            raise as_broker_error(error) from error
        sock = getattr(raw, "_sock", None)
        if isinstance(sock, socket.socket):
            reset_at_close(sock)
        direct = Direct.over(sock, timeout_s, getattr(raw, "protocol", None))
        self._raw, self._exchange = raw, direct or Through(raw, timeout_s)
        self.connects += 1
        return self._exchange

    def close(self) -> None:
        raw, self._raw, self._exchange = self._raw, None, None
        if raw is not None:
            raw.disconnect()


_OWN_TIMEOUTS = ("socket_timeout", "socket_connect_timeout")


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _shorten(raw: RawConnection, deadline: float) -> None:
    """Connecting, and each reply of the handshake, is waited for no longer than until the deadline."""
    left = _left(deadline)
    for name in _OWN_TIMEOUTS:
        if own := getattr(raw, name, None):
            setattr(raw, name, min(left, own))


_MOST_IDLE = 64


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
        taken, pid = self._take(), os.getpid()
        try:
            yield taken
        finally:
            self._give_back(taken, pid)

    def _take(self) -> Link:
        if os.getpid() != self._pid:
            # The parent's lock may be held for ever here, and its sockets are its own.
            self._lock, self._idle, self._pid = threading.Lock(), [], os.getpid()
        with self._lock:
            return self._idle.pop() if self._idle else self._make()

    def _give_back(self, link: Link, pid: int) -> None:
        if pid != os.getpid():  # the block forked: its link stays the parent's
            link.close()
            return
        with self._lock:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(link)
                return
        link.close()

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
        ceiling = min(self._cap, self._base * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return ceiling * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0


# What a URL may not change: our replies are bytes, our timeouts are ours, nothing is sent twice.
_OURS = (
    "decode_responses",
    "retry_on_timeout",
    "retry_on_error",
    "health_check_interval",
    "max_connections",
    "timeout",
    "socket_timeout",
    "socket_connect_timeout",
)


def _options(reply_timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": reply_timeout_s,
        "socket_connect_timeout": min(CONNECT_TIMEOUT_S, reply_timeout_s),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }


def connector(url: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Callable[[], RawConnection]:
    """A maker of connections for `redis://`, `rediss://`, `unix://` and `redis+sentinel://` URLs.

    Raises BadConfiguration."""
    try:
        if urlsplit(url).scheme == "redis+sentinel":
            return _sentinel_connector(url, reply_timeout_s)
        parsed = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise BadConfiguration([f"redis url: {error}"]) from error
    _check_host(parsed.get("host") or "")
    kind = parsed.pop("connection_class", Connection)
    for name in _OURS:
        parsed.pop(name, None)
    given = {**_options(reply_timeout_s), **parsed}
    if issubclass(kind, UnixDomainSocketConnection):
        given.pop("socket_connect_timeout", None)
    else:
        given.setdefault("socket_keepalive", True)
    return _tried(kind, given)


def _check_host(name: str) -> None:
    """For some names the resolver raises a UnicodeError at each connect: that is no outage, and never ends.
    The name is not shown: in a URL that is broken it may be part of the password."""
    try:
        name.encode("idna")
    except UnicodeError as error:
        raise BadConfiguration(
            ["redis url: no host has such a name: a part of it is empty or too long"]
        ) from error


def _tried(kind: type, given: dict[str, Any]) -> Callable[[], RawConnection]:
    """A maker whose options have been looked at by redis-py once: what it refuses is the URL's fault."""
    try:
        kind(**given)
    except (TypeError, ValueError, wire.RedisError) as error:
        raise BadConfiguration([f"redis url: {error}"]) from error
    return lambda: cast(RawConnection, kind(**given))


def _sentinel_connector(url: str, reply_timeout_s: float) -> Callable[[], RawConnection]:
    wanted = parse_sentinel_url(url)
    for host, _ in wanted.nodes:
        _check_host(host)
    kind: type[Connection] = SSLConnection if wanted.ssl else Connection
    given = {**_options(reply_timeout_s), "protocol": wanted.protocol, "db": wanted.db}
    given |= {"username": wanted.user, "password": wanted.password, "socket_keepalive": True}
    # All of them are asked within the time that one reply may take.
    patience = min(2.0, reply_timeout_s / len(wanted.nodes))
    asking = {"socket_timeout": patience, "socket_connect_timeout": patience, "retry": Retry(NoBackoff(), 0)}

    def make() -> RawConnection:
        # Asked at every connect: after a failover the next connection goes to the new primary.
        sentinel = Sentinel(wanted.nodes, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        try:
            host, port = sentinel.discover_master(wanted.service)  # type: ignore[no-untyped-call]
        finally:
            for node in sentinel.sentinels:
                node.close()
        return cast(RawConnection, kind(host=host, port=port, **given))

    return make


def open_link(url: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Link:
    """A link that has not connected yet."""
    return Link(connector(url, reply_timeout_s))
