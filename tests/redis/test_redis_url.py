"""Where Redis is, as a URL says it: what works, what is refused, what it cannot change (R10, R14)."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from dtq_child.connection import (
    ServerReply,
    open_link,
)
from dtq_child.errors import (
    BadConfiguration,
    BrokerUnavailable,
)
from dtq_child.sentinel_url import SentinelUrl, parse_sentinel_url
from tests.conftest import ProxyStarter, ServerStarter
from tests.redis.desk import Desk, claim, succeeded
from tests.support import leftovers
from tests.support.ports import free_port
from tests.support.servers import RedisServer
from tests.support.waiting import until


def test_a_url_cannot_change_what_is_ours(redis_server: RedisServer, start_proxy: ProxyStarter) -> None:
    proxy = start_proxy(redis_server.port)
    ours = (
        "?decode_responses=true&retry_on_timeout=true&health_check_interval=1&socket_timeout=0.001"
        "&socket_connect_timeout=0.001&max_connections=1&protocol=3"
    )
    link = open_link(proxy.url + ours)
    link.call("SET", "k", b"\xff")
    assert link.call("GET", "k") == b"\xff"
    lost = proxy.drop_reply(b"INCR n")
    with pytest.raises(BrokerUnavailable):
        link.call("INCR", "n")
    assert (lost.fired, proxy.commands["INCR"]) == (1, 1)
    proxy.delay(0.05)
    assert link.call("GET", "n") == b"1"
    link.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/0",
        "redis://127.0.0.1:port/0",
        "redis://127.0.0.1/0?nonsense=1",
        "redis://127.0.0.1/0?protocol=5",
        "redis://[::1/0",
        "redis://secret..example/0",
        "redis+sentinel://h1",
        "redis+sentinel://h1,h2..example/mymaster",
        "redis+sentinel:///mymaster",
        "redis+sentinel://user:secret@h1/mymaster/first",
        "redis+sentinel://h1/mymaster?protocol=x",
    ],
)
def test_a_url_that_cannot_work_is_said_so(url: str) -> None:
    with pytest.raises(BadConfiguration) as raised:
        open_link(url)
    assert "redis url" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_unix_socket(start_redis: ServerStarter, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    start_redis(settings={"unixsocket": str(path)})
    with contextlib.closing(open_link(f"unix://{path}?db=2")) as link:
        link.call("SET", "k", "1")
        assert link.call("GET", "k") == b"1"


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis+sentinel://h1/m", SentinelUrl((("h1", 26379),), "m", 0, None, None, False, 2)),
        (
            "redis+sentinel://u:p%40w@h1:1,h2,[::1]:3,[::2]/my%20m/4?ssl=true&protocol=3",
            SentinelUrl(
                (("h1", 1), ("h2", 26379), ("::1", 3), ("::2", 26379)), "my m", 4, "u", "p@w", True, 3
            ),
        ),
        ("redis+sentinel://:pw@h1/m", SentinelUrl((("h1", 26379),), "m", 0, None, "pw", False, 2)),
    ],
)
def test_the_parts_of_a_sentinel_url(url: str, parts: SentinelUrl) -> None:
    assert parse_sentinel_url(url) == parts


class Watch:
    """A Sentinel of our own that is told which server is the primary."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.port = free_port()
        config = folder / "sentinel.conf"
        config.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder / 'log'}\n")
        tag = os.environ[leftovers.TAG]
        with (folder / "output").open("wb") as output:
            words = [str(server.binary.path), str(config), "--sentinel"]
            self._process = leftovers.spawn(words, tag=tag, output=output)
        self.link = open_link(f"redis://127.0.0.1:{self.port}/0")
        until(self._answers, 10, "the Sentinel does not answer")

    def _answers(self) -> bool:
        with contextlib.suppress(BrokerUnavailable):
            return bool(self.link.call("PING") == b"PONG")
        return False

    def point_to(self, server: RedisServer) -> None:
        with contextlib.suppress(ServerReply):
            self.link.call("SENTINEL", "REMOVE", "shop")
        self.link.call("SENTINEL", "MONITOR", "shop", "127.0.0.1", server.port, 1)

    def end(self) -> None:
        self.link.close()
        self._process.kill()
        self._process.wait()


def test_sentinels_are_asked_at_every_connect(start_redis: ServerStarter, tmp_path: Path) -> None:
    first, second = start_redis(), start_redis()
    first.cli("SELECT", 0)
    watch = Watch(first, tmp_path)
    try:
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{watch.port}/shop/3"
        link = open_link(url)
        with pytest.raises(BrokerUnavailable, match="shop"):
            link.call("PING")
        watch.point_to(first)
        link.call("SET", "k", "first")
        assert link.call("CLIENT", "LIST").count(b" db=3 ") == 1
        watch.point_to(second)
        assert link.call("GET", "k") == b"first", "an open connection is kept"
        first.cli("REPLICAOF", "127.0.0.1", second.port)  # what a failover does to the old primary
        with pytest.raises(BrokerUnavailable):
            link.call("SET", "k", "late")
        assert link.call("SET", "k", "second") == b"OK"
        assert link.connects == 2
        link.close()
        with Desk(second, url) as desk:
            child = desk.child()
            assert child.settle(succeeded(desk.began(child, "t1"))) == "settled"
            desk.enqueue("t2")
            assert claim(child).token.task_id == "t2"
    finally:
        watch.end()
        shutil.rmtree(tmp_path)
