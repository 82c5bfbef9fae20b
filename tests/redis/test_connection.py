"""Links to Redis: what an error means, when a call ends, and that nothing is sent twice (R10, R14)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dtq_child.broker import Broker
from dtq_child.connection import (
    Link,
    LinkPool,
    NoSuchScript,
    Pause,
    ServerReply,
    connector,
    open_link,
)
from dtq_child.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    RedisOutOfMemory,
    TaskCancelled,
)
from dtq_child.settings import defaults
from dtq_child.turns import Want
from dtq_child.wire import Direct, Through
from tests.conftest import ProxyStarter
from tests.redis.desk import OPERATOR, Desk, call
from tests.support.ports import free_port
from tests.support.servers import RedisServer
from tests.support.waiting import until

SCRIPT = "redis.call('DEL', KEYS[1]) redis.call('SET', KEYS[1], '1') return 1"
TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8


def refused_by(url: str, *words: str) -> BrokerError:
    link = open_link(url)
    try:
        with pytest.raises(BrokerError) as raised:
            link.call(*words)
    finally:
        link.close()
    return raised.value


def both_ways(url: str) -> set[type[BrokerError]]:
    """What a write is refused with: as a command, and within a script."""
    return {type(refused_by(url, "SET", "k", "1")), type(refused_by(url, "EVAL", SCRIPT, "1", "k"))}


# -- what errors mean, said by real servers


def test_a_replica_is_waited_out(every_redis: RedisServer) -> None:
    every_redis.cli("REPLICAOF", "127.0.0.1", free_port())
    assert both_ways(every_redis.url) == {BrokerUnavailable}
    with Desk(every_redis, enqueue_timeout_s=0.3) as desk:
        with pytest.raises(BrokerUnavailable, match="read only replica"):
            desk.enqueue("t1")
        with pytest.raises(BrokerUnavailable):
            desk.child().turn(None, Want())
        with pytest.raises(BrokerUnavailable):
            desk.broker.cancel("t1")
    every_redis.cli("CONFIG", "SET", "replica-serve-stale-data", "no")
    assert both_ways(every_redis.url) == {BrokerUnavailable}
    assert isinstance(refused_by(every_redis.url, "GET", "k"), BrokerUnavailable)


def test_a_primary_without_its_replicas_is_waited_out(every_redis: RedisServer) -> None:
    every_redis.cli("CONFIG", "SET", "min-replicas-to-write", 1)
    assert both_ways(every_redis.url) == {BrokerUnavailable}


def test_a_server_that_cannot_save_is_waited_out(every_redis: RedisServer) -> None:
    in_the_way = every_redis.folder / "dump.rdb"
    in_the_way.mkdir()
    every_redis.cli("CONFIG", "SET", "save", "3600 1")
    every_redis.cli("BGSAVE")
    until(lambda: every_redis.info("persistence")["rdb_last_bgsave_status"] == "err", 10)
    try:
        assert both_ways(every_redis.url) == {BrokerUnavailable}
    finally:
        in_the_way.rmdir()


def test_a_server_busy_with_a_script_is_waited_out(every_redis: RedisServer) -> None:
    every_redis.cli("CONFIG", "SET", "lua-time-limit", 1)
    killed: list[BrokerError] = []
    endless = threading.Thread(
        target=lambda: killed.append(refused_by(every_redis.url, "EVAL", "while true do end", "0"))
    )
    endless.start()
    link = open_link(every_redis.url)

    def busy() -> BrokerError | None:
        try:
            link.call("GET", "k")
        except BrokerUnavailable as error:
            return error
        return None

    answer = until(busy, 5)
    link.call("SCRIPT", "KILL")
    endless.join()
    link.close()
    assert "BUSY" in str(answer)
    assert isinstance(killed[0], ServerReply)


def test_a_full_server_is_out_of_memory(every_redis: RedisServer) -> None:
    every_redis.cli("CONFIG", "SET", "maxmemory", 1)
    first_write = "redis.call('SET', KEYS[1], '1') return 1"
    assert isinstance(refused_by(every_redis.url, "SET", "k", "1"), RedisOutOfMemory)
    assert isinstance(refused_by(every_redis.url, "EVAL", first_write, "1", "k"), RedisOutOfMemory)


def test_passwords_and_permissions_are_refusals(every_redis: RedisServer) -> None:
    every_redis.cli("ACL", "SETUSER", "reader", "on", ">pw", "~*", "&*", "+@all", "-set")
    every_redis.cli("ACL", "SETUSER", "stranger", "on", ">pw", "~x*", "&*", "+@all")
    address = f"127.0.0.1:{every_redis.port}/0"
    for user in ("reader", "stranger"):
        assert both_ways(f"redis://{user}:pw@{address}") == {BrokerRefused}
        inside = "redis.call('DEL', 'k') redis.call('SET', 'k', '1')"
        assert isinstance(refused_by(f"redis://{user}:pw@{address}", "EVAL", inside, "0"), BrokerRefused)
    assert isinstance(refused_by(f"redis://reader:wrong@{address}", "PING"), BrokerRefused)
    assert isinstance(refused_by(f"redis://:wrong@{address}", "PING"), BrokerRefused)
    every_redis.cli("ACL", "SETUSER", "default", "resetpass", ">secret")
    for url in (every_redis.url, every_redis.url + "?protocol=3"):
        assert isinstance(refused_by(url, "PING"), BrokerRefused)
    with contextlib.closing(open_link(f"redis://:secret@{address}")) as link:
        assert link.call("PING") == b"PONG"


def test_what_this_server_does_not_have_is_a_refusal(every_redis: RedisServer) -> None:
    assert isinstance(refused_by(every_redis.url, "NOSUCH"), BrokerRefused)
    assert isinstance(refused_by(every_redis.url, "EVAL", "redis.call('NOSUCH')", "0"), BrokerRefused)
    elsewhere = every_redis.url.removesuffix("0") + "99"
    assert isinstance(refused_by(elsewhere, "PING"), BrokerRefused)


def test_other_errors_are_replies_and_leave_the_connection_alone(every_redis: RedisServer) -> None:
    with contextlib.closing(open_link(every_redis.url)) as link:
        link.call("SET", "k", "1")
        for words in (("XLEN", "k"), ("EVAL", "redis.call('XLEN', 'k')", "0"), ("EVAL", "error('no')", "0")):
            with pytest.raises(ServerReply):
                link.call(*words)
        with pytest.raises(NoSuchScript):
            link.call("EVALSHA", "0" * 40, "0")
        assert link.connects == 1


@pytest.mark.parametrize("behind", [b"-", b"-ERR "])
def test_each_word_of_a_server_has_one_meaning(
    redis_server: RedisServer, start_proxy: ProxyStarter, behind: bytes
) -> None:
    proxy = start_proxy(redis_server.port)
    waited_out = "LOADING READONLY MASTERDOWN TRYAGAIN CLUSTERDOWN MISCONF NOREPLICAS BUSY UNBLOCKED NOGROUP"
    meanings: dict[type[BrokerError], str] = {
        BrokerUnavailable: waited_out,
        NoSuchScript: "NOSCRIPT",
        BrokerRefused: "NOAUTH NOPERM WRONGPASS DENIED",
        RedisOutOfMemory: "OOM",
        ServerReply: "BUSYGROUP WRONGTYPE BUSYKEY NOTBUSY EXECABORT",
    }
    link = open_link(proxy.url)
    for meaning, words in meanings.items():
        for word in words.split():
            proxy.heal()
            proxy.answer(b"GET k", behind + word.encode() + b" so it is said")
            with pytest.raises(BrokerError) as raised:
                link.call("GET", "k")
            assert type(raised.value) is meaning, word
            if meaning in (BrokerUnavailable, NoSuchScript, ServerReply):
                assert link.connected == (meaning is not BrokerUnavailable), word
    proxy.heal()
    assert link.call("GET", "k") is None
    link.close()


# -- a link


def test_a_link_connects_when_it_is_needed_and_again_after_an_error(
    redis_server: RedisServer, start_proxy: ProxyStarter
) -> None:
    proxy = start_proxy(redis_server.port)
    link = open_link(proxy.url)
    assert (link.connected, link.connects, proxy.connections) == (False, 0, 0)
    assert link.call("PING") == b"PONG"
    proxy.cut()
    with pytest.raises(BrokerUnavailable):
        link.call("INCR", "n")
    assert not link.connected
    assert link.call("INCR", "n") == 1, "nothing was sent twice"
    proxy.refuse()
    proxy.cut()
    for _ in range(3):
        with pytest.raises(BrokerUnavailable):
            link.call("INCR", "n")
    proxy.heal()
    assert link.call("INCR", "n") == 2
    assert link.connects == 3
    link.close()


def test_a_lost_reply_is_an_error_and_no_resend(redis_server: RedisServer, start_proxy: ProxyStarter) -> None:
    proxy = start_proxy(redis_server.port)
    link = open_link(proxy.url)
    lost = proxy.drop_reply(b"INCR n")
    with pytest.raises(BrokerUnavailable):
        link.call("INCR", "n")
    assert (lost.fired, proxy.commands["INCR"]) == (1, 1)
    assert link.call("GET", "n") == b"1"
    link.close()


def test_a_silent_server_is_given_up_after_the_timeout(fresh_redis: RedisServer) -> None:
    link = open_link(fresh_redis.url, 0.2)
    link.call("SET", "k", "1")
    fresh_redis.pause()
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        link.call("GET", "k")
    with pytest.raises(BrokerUnavailable):
        link.call("GET", "k")
    assert 0.35 < time.monotonic() - began < 3
    fresh_redis.resume()
    assert link.call("GET", "k") == b"1"
    link.close()


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, Callable[[], socket.socket]]]:
    """A server that says nothing: its URL, and its end of the next connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        # No library names: they would wait for an answer.
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0", lambda: listener.accept()[0]


def state_of(sock: socket.socket) -> int:
    return int(struct.unpack("B", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))[0])


def test_a_link_closes_by_a_reset_and_drops_what_is_unsent() -> None:
    with listening() as (url, accept):
        make = connector(url, 0.3)

        def quiet() -> object:
            raw = make()
            raw.driver_info = None  # type: ignore[attr-defined]
            return raw

        link = Link(quiet)  # type: ignore[arg-type]
        size = 24 * 1024 * 1024
        with pytest.raises(BrokerUnavailable):
            link.call("SET", "k", b"x" * size)
        assert not link.connected
        with accept() as theirs:
            until(lambda: state_of(theirs) == TCP_CLOSE, 5, lambda: f"state {state_of(theirs)}")
            heard = 0
            with contextlib.suppress(ConnectionResetError):
                while part := theirs.recv(1 << 20):
                    heard += len(part)
            assert heard < size


BOTH_EXCHANGES = pytest.mark.parametrize(("query", "exchange"), [("", Direct), ("?protocol=3", Through)])


@BOTH_EXCHANGES
def test_an_interrupted_call_leaves_no_half_read_reply(
    fresh_redis: RedisServer, query: str, exchange: type
) -> None:
    """What the interrupted command was answered is not taken for the answer to the next."""
    link = open_link(fresh_redis.url + query)
    link.call("SET", "k", "old")
    assert type(link._exchange) is exchange

    def interrupt(*_: object) -> None:
        raise TaskCancelled

    before = signal.signal(signal.SIGALRM, interrupt)
    fresh_redis.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TaskCancelled):
            link.call("GET", "k")
    finally:
        fresh_redis.resume()
        signal.signal(signal.SIGALRM, before)
    assert link.call("ECHO", "mine") == b"mine"
    link.close()


@BOTH_EXCHANGES
def test_commands_and_replies_of_any_size_come_whole(
    redis_server: RedisServer, query: str, exchange: type
) -> None:
    link = open_link(redis_server.url + query)
    for size in (0, 1, 65535, 65536, 65537, 5_000_000):
        value = os.urandom(size)
        assert link.call("ECHO", value) == value
    assert link.call("EVAL", "return {1, {2, {false, 'x'}}, redis.error_reply('ERR inside')}", 0)[:2] == [
        1,
        [2, [None, b"x"]],
    ]
    assert type(link._exchange) is exchange
    link.close()


@BOTH_EXCHANGES
def test_no_answer_is_told_of_as_such(fresh_redis: RedisServer, query: str, exchange: type) -> None:
    link = open_link(fresh_redis.url + query, 0.2)
    link.call("PING")
    assert type(link._exchange) is exchange
    fresh_redis.pause()
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"no answer within 0\.2 s|Timeout reading"):
        link.call("PING")
    assert 0.15 < time.monotonic() - began < 2.0
    fresh_redis.resume()
    assert link.call("PING") in (b"PONG", "PONG", True)
    link.close()


@BOTH_EXCHANGES
def test_a_connection_that_the_server_closed_is_unavailable_once(
    redis_server: RedisServer, query: str, exchange: type
) -> None:
    link = open_link(redis_server.url + query)
    name = link.call("CLIENT", "ID")
    assert type(link._exchange) is exchange
    redis_server.cli("CLIENT", "KILL", "ID", name)
    with pytest.raises(BrokerUnavailable):
        link.call("PING")
    assert link.call("ECHO", "again") == b"again"
    link.close()


def test_a_short_deadline_at_connecting_does_not_stay(fresh_redis: RedisServer) -> None:
    link = open_link(fresh_redis.url, 5.0)
    link.deadline = time.monotonic() + 0.3
    link.call("PING")
    link.deadline = time.monotonic() + 5.0
    assert link.call("BLPOP", "nothing", "0.5") is None
    link.close()


def test_a_deadline_shortens_connecting_and_waiting(fresh_redis: RedisServer) -> None:
    link = open_link(fresh_redis.url, 5.0)
    link.call("PING")
    fresh_redis.pause()
    for _ in range(2):  # the open connection, then a new one
        began = time.monotonic()
        link.deadline = began + 0.2
        with pytest.raises(BrokerUnavailable):
            link.call("PING")
        assert 0.15 < time.monotonic() - began < 2
    fresh_redis.resume()
    link.deadline = time.monotonic() + 5
    assert link.call("PING") == b"PONG"
    link.close()


# -- a pool


def test_threads_share_a_pool_and_never_a_link(redis_server: RedisServer) -> None:
    pool = LinkPool(lambda: open_link(redis_server.url))
    together, seen = threading.Barrier(8), []

    def work(number: int) -> None:
        for _ in range(3):
            together.wait(5)
            with pool.link() as link:
                seen.append(link)
                assert link.call("ECHO", f"{number}") == f"{number}".encode()
                together.wait(5)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 24
    assert len(set(map(id, seen))) == 8
    pool.close()


def in_a_fork(work: Callable[[], bytes]) -> bytes:
    """What `work` answers in a forked process; its error's text if it raised."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = work()
        except BaseException as error:  # noqa: BLE001 - the test in the parent tells it
            told = repr(error).encode()
        os.write(ours, told)
        os._exit(0)
    os.close(ours)
    os.set_blocking(theirs, False)
    try:

        def read() -> bytes:
            with contextlib.suppress(BlockingIOError):
                return os.read(theirs, 4096)
            return b""

        return until(read, 5, "the forked process did not answer")
    finally:
        os.close(theirs)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_forked_process_starts_with_links_of_its_own(redis_server: RedisServer) -> None:
    pool = LinkPool(lambda: open_link(redis_server.url))

    def client_id() -> bytes:
        with pool.link() as link:
            return b"%d" % link.call("CLIENT", "ID")

    ours = client_id()
    with pool._lock:  # as if another thread were just taking one
        assert in_a_fork(client_id) not in (ours, b"")
    assert client_id() == ours, "the parent's connection lives on"
    with pool.link() as link:
        inside = b"%d" % link.call("CLIENT", "ID")

        def leave() -> bytes:
            client_id()
            pool._give_back(link, os.getppid())  # as the end of the parent's block does
            return client_id()

        told = in_a_fork(leave)
        assert told.isdigit()
        assert told != inside
        assert link.call("PING") == b"PONG"
    pool.close()


# -- a producer's call ends in time


@pytest.mark.parametrize("fault", ["silent", "silent from the start", "refused", "cut", "loading"])
def test_a_producers_call_ends_within_its_time(
    redis_server: RedisServer, start_proxy: ProxyStarter, fault: str
) -> None:
    proxy = start_proxy(redis_server.port)
    broker = Broker(defaults(redis_url=proxy.url, enqueue_timeout_s=0.5))
    if fault != "silent from the start":
        broker.enqueue([call("warm")])
    if fault.startswith("silent"):
        proxy.black_hole(new=True)
    elif fault == "refused":
        proxy.refuse()
        proxy.cut()
    elif fault == "cut":
        proxy.drop_request(lambda words: b"EVALSHA" in words[0], count=1000)
    else:
        proxy.answer(b"EVALSHA", b"-LOADING Redis is loading the dataset in memory")
    for ask in (lambda: broker.enqueue([call("t1")]), lambda: broker.discard("t1", OPERATOR)):
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            ask()
        assert time.monotonic() - began < 1.5
    proxy.heal()
    broker.settings = defaults(redis_url=proxy.url)
    assert broker.enqueue([call("t1")])[0].task_id == "t1"
    broker.close()


def test_several_slow_steps_end_in_time_together(
    redis_server: RedisServer, start_proxy: ProxyStarter
) -> None:
    """Each would be answered in time if it were the only one."""
    proxy = start_proxy(redis_server.port)
    warm, cold = (Broker(defaults(redis_url=proxy.url, enqueue_timeout_s=1.0)) for _ in range(2))
    warm.enqueue([call("warm")])
    proxy.delay(0.7, "reply")
    proxy.answer(b"EVALSHA", b"-LOADING not yet", count=1)
    with pytest.raises(BrokerUnavailable):
        warm.enqueue([call("t1")])
    with pytest.raises(BrokerUnavailable):
        cold.discard("t1", OPERATOR)
    for broker in (warm, cold):
        broker.close()


def test_a_short_outage_is_waited_out(redis_server: RedisServer, start_proxy: ProxyStarter) -> None:
    proxy = start_proxy(redis_server.port)
    broker = Broker(defaults(redis_url=proxy.url))
    proxy.answer(b"EVALSHA", b"-MASTERDOWN Link with MASTER is down", count=3)
    assert broker.enqueue([call("t1")])[0].new
    broker.close()


def test_pauses_grow_to_their_cap_and_never_overflow() -> None:
    pause = Pause(base_s=0.05, cap_s=2.0)
    first = [pause.next() for _ in range(4)]
    for wait, ceiling in zip(first, (0.05, 0.1, 0.2, 0.4), strict=True):
        assert ceiling / 2 <= wait <= ceiling
    waits = [pause.next() for _ in range(5000)]
    assert all(1.0 <= wait <= 2.0 for wait in waits[10:])
    assert len(set(waits)) > 4000, "jittered"
    pause.reset()
    assert pause.next() <= 0.05
