"""The tests' own tools, tried before anything is built on them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from dtq_child.errors import TaskFailed
from dtq_child.testing import inline
from tests.support import handlers, leftovers, ports, servers
from tests.support.ledger import Ledger
from tests.support.processes import alive, descriptors, group_members, groups, look, stopped
from tests.support.proxy import FaultProxy
from tests.support.resp import Frames, arguments
from tests.support.servers import RedisServer
from tests.support.snapshot import snapshot
from tests.support.supervisor import ROOT, log_says_ready
from tests.support.waiting import until

PYTHON_PATH = {**os.environ, "PYTHONPATH": str(ROOT)}


# -- servers


def test_each_version_is_what_it_says(every_redis: RedisServer) -> None:
    facts = every_redis.info("server")
    told = facts.get("valkey_version", facts["redis_version"])
    assert told == ".".join(map(str, every_redis.version))
    assert facts["process_id"] == str(every_redis.pid)
    assert every_redis.cli("CONFIG", "GET", "save") == [b"save", b""]


def test_a_restart_keeps_the_data_and_the_port(every_redis: RedisServer) -> None:
    port, pid = every_redis.port, every_redis.pid
    every_redis.cli("SET", "kept", "1")
    every_redis.restart()
    assert every_redis.cli("GET", "kept") == b"1"
    assert (every_redis.port, every_redis.pid) != (port, pid)
    assert every_redis.port == port
    every_redis.restart(keep=False)
    assert every_redis.cli("DBSIZE") == 0


def test_a_kill_loses_all_or_with_persistence_nothing(start_redis: Any) -> None:
    for persist, expected in ((False, 0), (True, 1)):
        server = start_redis(persist=persist)
        server.restart()
        server.cli("SET", "written", "1")
        server.kill()
        with pytest.raises(redis.ConnectionError):
            server.cli("PING")
        server.start()
        assert server.cli("DBSIZE") == expected


def test_a_paused_server_keeps_its_connections_and_answers_nothing(fresh_redis: RedisServer) -> None:
    client = fresh_redis.client(socket_timeout=0.2)
    client.ping()
    fresh_redis.pause()
    with pytest.raises(redis.TimeoutError):
        client.ping()
    fresh_redis.resume()
    until(client.ping, 5)
    fresh_redis.pause()
    fresh_redis.stop()  # a stopped process would not hear TERM


def test_a_shared_server_is_as_new_for_the_next_test(every_redis: RedisServer) -> None:
    every_redis.cli("SET", "left", "1")
    every_redis.cli("CONFIG", "SET", "maxmemory", "1mb")
    every_redis.cli("ACL", "SETUSER", "default", "-xpending")
    every_redis.cli("ACL", "SETUSER", "guest", "on")
    every_redis.cli("REPLICAOF", "127.0.0.1", "1")
    pid = every_redis.pid
    every_redis.reset()
    assert every_redis.pid == pid
    assert every_redis.cli("DBSIZE") == 0
    assert every_redis.cli("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"0"]
    assert every_redis.cli("ACL", "USERS") == [b"default"]
    assert every_redis.info("replication")["role"] == "master"
    every_redis.cli("XADD", "s", "*", "f", "v")
    every_redis.cli("XGROUP", "CREATE", "s", "g", "0")
    assert every_redis.cli("XPENDING", "s", "g")[0] == 0


def test_a_server_that_locked_us_out_is_made_anew(every_redis: RedisServer) -> None:
    every_redis.cli("CONFIG", "SET", "requirepass", "secret")
    with pytest.raises(redis.AuthenticationError):
        every_redis.cli("PING")
    every_redis.reset()
    assert every_redis.cli("PING") == b"PONG"


def test_a_taken_port_is_not_mistaken_for_ours(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, start_redis: Any
) -> None:
    candidates = iter([redis_server.port, redis_server.port, ports.free_port()])
    monkeypatch.setattr(servers, "free_port", lambda: next(candidates))
    server = start_redis()
    assert server.port != redis_server.port
    assert next(candidates, None) is None


def test_a_server_started_by_a_passing_thread_outlives_it(fresh_redis: RedisServer) -> None:
    thread = threading.Thread(target=fresh_redis.restart)
    thread.start()
    thread.join()
    with pytest.raises(AssertionError):
        until(lambda: not alive(fresh_redis.pid), 0.2)
    assert fresh_redis.cli("PING") == b"PONG"


def test_servers_die_with_a_killed_pytest(tmp_path: Path) -> None:
    program = """
        import signal
        from tests.support.servers import RedisServer
        print(RedisServer().pid, flush=True)
        signal.pause()
    """
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        env={**PYTHON_PATH, "TMPDIR": str(tmp_path)},
    )
    assert starter.stdout is not None
    with starter, starter.stdout:
        server = int(starter.stdout.readline())
        assert alive(server)
        starter.kill()
        until(lambda: not alive(server), 5, "the server outlived its starter")


# -- what a test leaves behind


HIDING = """
import os, signal, sys
from setproctitle import setproctitle

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        setproctitle("well hidden")
        with open(sys.argv[1], "w") as file:
            file.write(f"{os.getpid()} ")
        signal.pause()
os._exit(0)
"""

LEAVING = """
import subprocess, sys
from pathlib import Path
from tests.support.waiting import until

def test_it():
    here = Path(__file__).parent
    subprocess.run([sys.executable, here / "hiding.py", here / "pid"], check=True)
    until(lambda: (here / "pid").exists() and " " in (here / "pid").read_text(), 10)
"""


def test_a_hidden_process_fails_the_test_that_left_it(tmp_path: Path) -> None:
    """Its parent is gone, its session its own, its environment overwritten: found and killed all the same."""
    (tmp_path / "hiding.py").write_text(HIDING)
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    plain = ["-p", "tests.conftest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plain, str(tmp_path)]
    ran = subprocess.run(command, env=PYTHON_PATH, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "well hidden" in ran.stdout
    assert "1 passed, 1 error" in ran.stdout
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_process_is_seen_under_the_title_that_it_took(tmp_path: Path) -> None:
    program = (
        "import setproctitle, signal; setproctitle.setproctitle('dtq-child[3] g2: idle'); signal.pause()"
    )
    with (tmp_path / "log").open("wb") as log:
        process = leftovers.spawn([sys.executable, "-c", program], tag=os.environ[leftovers.TAG], output=log)
    pid = process.pid

    def title() -> str | None:
        found = look(pid)
        return found.title if found is not None else None

    until(lambda: title() == "dtq-child[3] g2: idle", 5, lambda: f"it is {title()}")
    assert groups(os.getpid())[pid] == [pid]
    assert group_members(pid) == [pid]
    assert descriptors(pid)[2] == str(tmp_path / "log")
    assert [found.pid for found in leftovers.left_behind(patience=0)] == [pid]
    process.kill()
    until(lambda: not alive(pid), 5)
    assert psutil.pid_exists(pid)  # a zombie, until it is waited for
    assert leftovers.left_behind(patience=0) == []
    assert process.wait() == -signal.SIGKILL


def test_threads_that_end_do_not_disturb_the_looking() -> None:
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            thread = threading.Thread(target=lambda: None)
            thread.start()
            thread.join()

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        assert all(leftovers.left_behind(patience=0) == [] for _ in range(500))
    finally:
        done.set()
        churning.join()


# -- waiting


def test_waiting_answers_with_what_came_true() -> None:
    counter = itertools.count()
    assert until(lambda: next(counter) > 3 and "there", 5) == "there"


def test_waiting_in_vain_describes_the_last_state() -> None:
    states = iter(["first", "second"])
    with pytest.raises(AssertionError, match="after 0 s: still first"):
        until(lambda: None, 0, lambda: f"still {next(states)}")


# -- the ledger


def test_many_processes_write_whole_lines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    program = """
        import sys
        from tests.support.ledger import Ledger
        for number in range(int(sys.argv[2])):
            Ledger.from_environment().note(f"{sys.argv[1]}-{number % 10}", "start", text="ä" * number)
    """
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), name, "300"],
            env={**PYTHON_PATH, "DTQ_TEST_LEDGER": str(ledger.path)},
        )
        for name in ("a", "b", "c")
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    entries = ledger.entries()
    assert len(entries) == 900
    assert {entry.pid for entry in entries} == {writer.pid for writer in writers}
    assert len(ledger.by_task()) == 30
    assert [len(entry.facts["text"]) for entry in ledger.starts("b-7")] == list(range(7, 300, 10))
    own = [entry.monotonic_ns for entry in entries if entry.pid == writers[0].pid]
    assert own == sorted(own)
    assert abs(entries[-1].wall - time.time()) < 60


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.entries() == []
    ledger.note("t1", "start", attempt=1)
    ledger.note("t1", "end")
    with ledger.path.open("ab") as file:
        file.write(b'{"task_id": "t2", "wo')
    assert [(entry.task_id, entry.word) for entry in ledger.entries()] == [("t1", "start"), ("t1", "end")]
    assert ledger.starts("t1")[0].facts == {"attempt": 1}
    assert len(ledger.ends("t1")) == 1


def test_the_probes_note_what_they_did(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    helper = 0
    with inline(handlers.app):
        assert handlers.just_note.delay({"a": 1}).result() == {"a": 1}
        assert handlers.fail_times.delay(1).result() == 2
        assert handlers.retry_task.delay(0, times=1).result() == 2
        assert handlers.swallow.delay("SoftTimeout", 0).result() == 0
        assert handlers.crash_once.delay(str(tmp_path / "there")).result() == os.getpid()
        for harmless in (handlers.sleep, handlers.async_sleep, handlers.spin, handlers.gil_sleep):
            harmless.delay(0.01).result()
        handlers.wait_for_file.delay(str(tmp_path / "there")).result()
        assert handlers.eat_memory.delay(2).result() == 2 << 20
        helper = handlers.grandchild_own_session.delay(1000).result()
        failed = handlers.fail.delay("as told")
        with pytest.raises(TaskFailed, match="as told"):
            failed.result()
    assert os.getsid(helper) == helper
    os.kill(helper, signal.SIGKILL)
    until(lambda: not alive(helper), 5)
    words = [[note.word for note in notes] for notes in ledger.by_task().values()]
    assert words.count(["start", "end"]) == 8
    assert words.count(["start", "raised", "start", "end"]) == 2
    assert words.count(["start", "eaten", "end"]) == 1
    assert words.count(["start", "helper", "end"]) == 1
    attempts = {note.facts["attempt"] for note in ledger.notes(failed.id, "raised")}
    assert attempts == {1, 2, 3}


# -- RESP


MESSAGES = [
    b"+OK\r\n",
    b"-ERR no\r\n",
    b":-12\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$4\r\n\r\n\r\n\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n*0\r\n$-1\r\n",
    b"_\r\n",
    b"#t\r\n",
    b",1.5\r\n",
    b"(123456789012345678901234567890\r\n",
    b"!5\r\nERR x\r\n",
    b"=7\r\ntxt:abc\r\n",
    b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n",
    b"~2\r\n:1\r\n:2\r\n",
    b">2\r\n+message\r\n$3\r\nabc\r\n",
    b"|1\r\n+ttl\r\n:3\r\n*1\r\n+described\r\n",
    b"PING inline\r\n",
]


@given(messages=st.lists(st.sampled_from(MESSAGES), max_size=8), data=st.data())
def test_messages_are_cut_alike_however_the_bytes_arrive(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    frames = Frames()
    edges = [0, *cuts, len(stream)]
    parts = [stream[start:end] for start, end in itertools.pairwise(edges)]
    assert [message for part in parts for message in frames.feed(part)] == messages


def test_words_of_a_request() -> None:
    assert arguments(b"*3\r\n$3\r\nSET\r\n$2\r\n\r\n\r\n$0\r\n\r\n") == [b"SET", b"\r\n", b""]
    assert arguments(b"PING  now\r\n") == [b"PING", b"now"]


# -- the fault proxy


@pytest.fixture
def proxy(redis_server: RedisServer, start_proxy: Any) -> FaultProxy:
    started: FaultProxy = start_proxy(redis_server.port)
    return started


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[redis.Redis]:
    opened = open_through(proxy)
    yield opened
    opened.close()


def open_through(proxy: FaultProxy, **options: Any) -> redis.Redis:
    defaults = {"socket_timeout": 5, "retry": Retry(NoBackoff(), 0)}
    opened = redis.Redis(port=proxy.port, **{**defaults, **options})
    opened.ping()
    return opened


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_proxy_passes_everything_on(proxy: FaultProxy, protocol: int) -> None:
    client = open_through(proxy, protocol=protocol)
    before, trips = proxy.commands.copy(), proxy.round_trips
    big = os.urandom(8 << 20)
    client.set("big", big)
    assert client.get("big") == big
    with client.pipeline(transaction=True) as pipeline:
        for number in range(100):
            pipeline.hset("hash", str(number), "\r\n")
        pipeline.hgetall("hash")
        assert len(pipeline.execute()[-1]) == 100
    assert client.hget("hash", "7") == b"\r\n"
    counted = proxy.commands - before
    assert counted == {"SET": 1, "GET": 1, "MULTI": 1, "HSET": 100, "HGETALL": 1, "EXEC": 1, "HGET": 1}
    assert proxy.round_trips - trips == 4
    assert (proxy.connections, proxy.open) == (1, 1)
    client.close()
    until(lambda: proxy.open == 0, 5)


def test_a_cut_resets_and_the_next_connection_is_welcome(proxy: FaultProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as sender:
        sender.sendall(b"PING\r\n")
        assert sender.recv(100) == b"+PONG\r\n"
        proxy.cut()
        assert received(sender) == (b"", True)
    open_through(proxy).close()
    assert proxy.connections == 2


def test_refused_connections_leave_the_others_alone(
    proxy: FaultProxy, client: redis.Redis, redis_server: RedisServer
) -> None:
    proxy.refuse()
    with pytest.raises(redis.ConnectionError, match="refused"):
        open_through(proxy)
    assert client.ping()
    proxy.heal()
    open_through(proxy).close()


def test_a_black_hole_swallows_old_connections_and_not_new_ones(
    proxy: FaultProxy, redis_server: RedisServer
) -> None:
    old = open_through(proxy, socket_timeout=0.3)
    proxy.black_hole()
    with open_through(proxy) as new:
        new.set("by", "new")
    with pytest.raises(redis.TimeoutError):
        old.set("by", "old")
    old.close()
    assert redis_server.cli("GET", "by") == b"new"


def test_a_black_hole_for_new_connections_accepts_and_says_nothing(
    proxy: FaultProxy, client: redis.Redis
) -> None:
    proxy.black_hole(existing=False, new=True)
    with pytest.raises(redis.TimeoutError):
        open_through(proxy, socket_timeout=0.3)
    assert client.ping()
    proxy.heal()
    open_through(proxy).close()


def test_forgotten_connections_stay_dumb_after_the_healing(proxy: FaultProxy) -> None:
    old = open_through(proxy, socket_timeout=0.3)
    proxy.black_hole()
    proxy.heal()
    with pytest.raises(redis.TimeoutError):
        old.ping()
    old.close()


def test_held_bytes_arrive_with_the_healing(proxy: FaultProxy, redis_server: RedisServer) -> None:
    """Of three commands sent into a partition, the one whose sender reset its connection never arrives."""
    senders = {
        how: socket.create_connection(("127.0.0.1", proxy.port)) for how in ("stays", "closes", "resets")
    }
    until(lambda: proxy.open == 3, 5)
    proxy.black_hole(hold=True)
    for how, sender in senders.items():
        sender.sendall(f"SET {how} 1\r\n".encode())
    until(lambda: proxy.commands["SET"] == 3, 5)
    senders["resets"].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    senders["resets"].close()
    senders["closes"].close()
    until(lambda: proxy.open == 1, 5)
    assert redis_server.cli("KEYS", "*") == []
    proxy.heal()
    with senders["stays"] as sender:
        assert sender.recv(100) == b"+OK\r\n"
    until(lambda: redis_server.cli("GET", "closes"), 5)
    # Its place in the proxy is gone, so nothing of it can come any more.
    until(lambda: proxy.open == 0, 5)
    assert sorted(redis_server.cli("KEYS", "*")) == [b"closes", b"stays"]


def test_a_new_connection_into_a_short_partition_is_served_after_it(proxy: FaultProxy) -> None:
    proxy.black_hole(existing=False, new=True, hold=True)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as sender:
        sender.sendall(b"PING\r\n")
        until(lambda: proxy.commands["PING"] == 1, 5)
        proxy.heal()
        assert sender.recv(100) == b"+PONG\r\n"


@pytest.mark.parametrize("direction", ["request", "reply"])
def test_a_delay_makes_the_reply_late(
    proxy: FaultProxy, client: redis.Redis, redis_server: RedisServer, direction: Any
) -> None:
    proxy.delay(0.3, direction)
    sent = time.monotonic()
    with client.pipeline(transaction=False) as pipeline:
        pipeline.time()
        pipeline.incr("n")
        pipeline.incr("n")
        seconds, micros = redis_server.cli("TIME")
        (ran_s, ran_us), *numbers = pipeline.execute()
    assert numbers == [1, 2]
    assert 0.3 <= time.monotonic() - sent < 3
    ran_after = ran_s - int(seconds) + (ran_us - int(micros)) / 1e6
    assert (ran_after > 0.25) is (direction == "request")
    proxy.heal()
    sent = time.monotonic()
    client.ping()
    assert time.monotonic() - sent < 0.25


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_dropped_reply_leaves_the_command_done(
    proxy: FaultProxy, redis_server: RedisServer, protocol: int
) -> None:
    client = open_through(proxy, protocol=protocol)
    rule = proxy.drop_reply(b"INCRBY counter", skip=1)
    assert client.incr("counter") == 1
    client.set("counter of others", "INCRBY")
    with pytest.raises(redis.ConnectionError):
        client.incr("counter")
    assert redis_server.cli("GET", "counter") == b"2"
    assert rule.fired == 1
    assert client.incr("counter") == 3  # over the next connection; the rule is used up
    client.close()


def test_a_dropped_reply_in_a_pipeline_takes_the_later_ones_with_it(
    proxy: FaultProxy, redis_server: RedisServer
) -> None:
    proxy.drop_reply(lambda words: words[:2] == [b"INCR", b"b"])
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as sender:
        sender.sendall(b"INCR a\r\nINCR b\r\nINCR c\r\n")
        assert received(sender) == (b":1\r\n", True)
    until(lambda: redis_server.cli("MGET", "a", "b", "c") == [b"1", b"1", b"1"], 5)


def test_a_dropped_request_is_never_executed(proxy: FaultProxy, redis_server: RedisServer) -> None:
    rule = proxy.drop_request(b"INCR b")
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as sender:
        sender.sendall(b"INCR a\r\nINCR b\r\nINCR c\r\n")
        assert received(sender) == (b":1\r\n", True)
    until(lambda: proxy.open == 0, 5)
    assert redis_server.cli("MGET", "a", "b", "c") == [b"1", None, None]
    assert rule.fired == 1


def received(sender: socket.socket) -> tuple[bytes, bool]:
    """All that comes until the end, and whether the end was a reset."""
    got = b""
    while True:
        try:
            part = sender.recv(1000)
        except ConnectionResetError:
            return got, True
        if not part:
            return got, False
        got += part


def test_a_false_answer_comes_in_its_turn_until_healed(proxy: FaultProxy, redis_server: RedisServer) -> None:
    rule = proxy.answer(b"INCR b", b"-LOADING Redis is loading the dataset in memory")
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as sender:
        for _ in range(2):
            sender.sendall(b"INCR a\r\nINCR b\r\nINCR c\r\n")
            expected = b":%d\r\n-LOADING Redis is loading the dataset in memory\r\n:%d\r\n"
            number = int(redis_server.cli("GET", "a") or 0)
            wanted = expected % (number + 1, number + 1)
            got = b""
            until(lambda: redis_server.cli("GET", "c"), 5)
            while len(got) < len(wanted):
                got += sender.recv(1000)
            assert got.count(b"-LOADING") == 1
            assert got.startswith(b":")
            assert got.endswith(b"\r\n")
            assert got.index(b"-LOADING") == 4
        assert rule.fired == 2
        proxy.heal()
        sender.sendall(b"INCR b\r\n")
        assert sender.recv(100) == b":1\r\n"


def test_pushes_are_not_taken_for_replies(proxy: FaultProxy, redis_server: RedisServer) -> None:
    """An invalidation that comes between a request and its reply must not use up the reply's turn."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as sender:
        sender.sendall(b"HELLO 3\r\nCLIENT TRACKING ON\r\nGET watched\r\nBLPOP bell 5\r\n")
        until(lambda: redis_server.info("clients")["blocked_clients"] == "1", 5)
        rule = proxy.drop_reply(b"GET dropped")
        sender.sendall(b"GET dropped\r\n")
        redis_server.cli("SET", "watched", "changed")
        redis_server.cli("RPUSH", "bell", "rung")
        got, reset = received(sender)
    assert reset
    assert rule.fired == 1
    assert b">2\r\n$10\r\ninvalidate\r\n" in got
    assert got.endswith(b"*2\r\n$4\r\nbell\r\n$4\r\nrung\r\n")


def test_a_subscriber_hears_through_the_proxy(proxy: FaultProxy, redis_server: RedisServer) -> None:
    with open_through(proxy) as client, client.pubsub() as heard:
        heard.subscribe("a", "b")
        until(lambda: redis_server.cli("PUBSUB", "NUMSUB", "b")[1] == 1, 5)
        redis_server.cli("PUBLISH", "b", "news")
        until(lambda: (heard.get_message(timeout=0.1) or {}).get("data") == b"news", 5)


def test_new_connections_follow_the_proxy_to_another_server(
    proxy: FaultProxy, client: redis.Redis, fresh_redis: RedisServer
) -> None:
    fresh_redis.cli("SET", "who", "other")
    proxy.retarget(fresh_redis.port)
    assert client.get("who") is None
    proxy.cut()
    with open_through(proxy) as new:
        assert new.get("who") == b"other"
    fresh_redis.kill()
    with pytest.raises(redis.ConnectionError, match=r"reset by peer|closed"):
        open_through(proxy)


# -- the snapshot


def test_the_snapshot_places_every_task(every_redis: RedisServer) -> None:
    client = every_redis.client()
    for prefix in ("dtq:", "other[*]:"):
        fill(client, prefix)
    for prefix in ("dtq:", "other[*]:"):
        places = snapshot(client, prefix, task_ids=["asked", "never"])
        assert {
            i: places.where(i) for i in ("fresh", "held", "delayed", "moving", "done", "dead", "stray")
        } == {
            "fresh": {"undelivered"},
            "held": {"pending"},
            "delayed": {"schedule"},
            "moving": {"claimed"},
            "done": {"terminal"},
            "dead": {"dead_letter"},
            "stray": set(),
        }
        assert places.where("both") == {"undelivered", "schedule"}
        assert places.homeless(["fresh", "stray", "never", "done"]) == {"stray", "never"}
        (mine,) = places.held_by("w1:0.1")
        assert (mine.task_id, mine.deliveries, mine.stream) == ("held", 1, f"{prefix}stream:default:p5")
        assert mine.idle_ms >= 0
        assert [stray.task_id for stray in places.strays] == ["stray"]
        assert [p.task_id for p in places.pending if p.consumer == "w1:park"] == [""]
        assert places.odd == [f"{prefix}stream:default:p3"]
        assert places.lengths == {f"{prefix}stream:default:p5": 4, f"{prefix}stream:default:p9": 1}
        assert places.last_delivered[f"{prefix}stream:default:p9"] == ""
        assert places.depth() == 5
        assert not places.at_rest()
        assert places.status("asked") == "queued"
        assert places.status("done") == "succeeded"
        assert places.status("never") is None
        assert places.schedule["delayed"] == 1893456000123
        assert abs(places.time_ms / 1000 - time.time()) < 60
        assert "\udcff" in {waiting.task_id for waiting in places.undelivered}


def fill(client: redis.Redis, prefix: str) -> None:
    """One task for each place, and what should not be: a stray, a body deleted under its owner, a bad key."""
    band = f"{prefix}stream:default:p5"
    client.xgroup_create(band, "workers", id="0", mkstream=True)
    for task_id in ("held", "stray"):
        client.xadd(band, {"queue": "default", "task_id": task_id})
    bodiless = client.xadd(band, {"queue": "default", "task_id": "bodiless"})
    for consumer in ("w1:0.1", "w1:1.1", "w1:park"):
        client.xreadgroup("workers", consumer, {band: ">"}, count=1)
    client.xgroup_delconsumer(band, "workers", "w1:1.1")
    client.xdel(band, bodiless or "")
    for task_id in ("fresh", "both"):
        client.xadd(band, {"task_id": task_id})
    client.xadd(f"{prefix}stream:default:p9", {"task_id": b"\xff"})
    client.set(f"{prefix}stream:default:p3", "no stream")
    client.zadd(f"{prefix}retry:schedule", {"delayed": 1893456000123, "both": 1})
    client.zadd(f"{prefix}retry:claimed", {"moving": 1})
    client.xadd(f"{prefix}stream:dead-letter", {"task_id": "dead"})
    client.zadd(f"{prefix}tasks:recent", {"done": 1})
    client.hset(f"{prefix}task:done", mapping={"status": "succeeded", "delivery": 1})
    client.hset(f"{prefix}task:asked", "status", "queued")


def test_an_empty_redis_is_at_rest(every_redis: RedisServer) -> None:
    places = snapshot(every_redis.client())
    assert places.at_rest()
    assert places.depth() == 0
    assert places.homeless(["any"]) == {"any"}


# -- the supervisor's starter, with a stand-in for the supervisor


STAND_IN = """
import json, os, signal, subprocess, sys, time
import redis
from setproctitle import setproctitle

POLL_SECONDS = 0.01
procs = int(sys.argv[sys.argv.index("--procs") + 1])
print("started with", sys.argv[1:], file=sys.stderr, flush=True)
if "--broken" in sys.argv:
    sys.exit(78)

def fork(title):
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        setproctitle(title)
        while os.getppid() == parent or "template" not in title:
            time.sleep(POLL_SECONDS)
        help_out()
        os._exit(0)
    return pid

def help_out():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True)

helper = help_out()
template = fork("dtq-supervisor: template g1")
children = [fork(f"dtq-child[{slot}] g1: idle") for slot in reversed(range(procs))]
setproctitle("dtq-supervisor: master")

def stop(number, frame):
    for pid in [template, *children]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
record = {"pid": os.getpid(), "children": json.dumps([{"pid": pid, "phase": "ready"} for pid in children])}
client = redis.Redis.from_url(os.environ["DTQ_REDIS_URL"])
client.hset("dtq:worker:stand-in", mapping=record)
print("ready", file=sys.stderr, flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> list[str]:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return [sys.executable, str(tmp_path / "stand_in.py")]


def test_a_supervisor_is_watched_and_stopped(
    stand_in: list[str], start_supervisor: Any, redis_server: RedisServer
) -> None:
    supervisor = start_supervisor(server=redis_server, procs=3, program=stand_in, flags=["--flag"])
    supervisor.wait_ready(10)
    supervisor.wait_ready(10, ready=log_says_ready)
    assert "'--flag'" in supervisor.log()
    titles = [look(pid).title for pid in supervisor.child_pids()]  # type: ignore[union-attr]
    assert titles == [f"dtq-child[{slot}] g1: idle" for slot in range(3)]
    assert {os.getpgid(pid) for pid in supervisor.child_pids()} == set(supervisor.child_pids())
    assert supervisor.template().ppid() == supervisor.pid
    supervisor.signal(signal.SIGSTOP)
    until(lambda: stopped(supervisor.pid), 5)
    assert len(supervisor.children()) == 3
    supervisor.signal(signal.SIGCONT)
    everyone = [process.pid for process in supervisor.tree()]
    assert len(everyone) == 6
    assert supervisor.stop(10) == 0
    helpers = [pid for pid in everyone if alive(pid)]
    assert len(helpers) == 1
    supervisor.destroy()  # the helper, in its own session, with a parent that is gone
    assert not alive(helpers[0])


def test_what_a_killed_supervisor_leaves_is_cleared_away(
    stand_in: list[str], start_supervisor: Any, redis_server: RedisServer
) -> None:
    first, second = (
        start_supervisor(server=redis_server, procs=2, program=stand_in).wait_ready(10, ready=log_says_ready)
        for _ in range(2)
    )
    left, kept, template = first.child_pids(), second.child_pids(), first.template().pid
    first.kill()
    assert first.exit_code == -signal.SIGKILL
    assert all(map(alive, left))
    # It starts one more helper, which nobody has seen before and no living parent leads to.
    until(lambda: not alive(template), 5)
    first.destroy()
    assert not any(map(alive, left))
    assert all(map(alive, kept))
    second.destroy()
    assert leftovers.left_behind(patience=0) == []


def test_a_supervisor_that_ends_early_is_quoted(
    stand_in: list[str], start_supervisor: Any, redis_server: RedisServer
) -> None:
    supervisor = start_supervisor(server=redis_server, program=stand_in, flags=["--broken"])
    with pytest.raises(AssertionError, match=r"(?s)ended with 78.*started with"):
        supervisor.wait_ready(10)
