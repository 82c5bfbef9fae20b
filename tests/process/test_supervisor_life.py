"""The life of a whole supervisor: what it replaces, what ends it and how it says so. Timeouts, cancels and
stops have files of their own."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dtq_child.task import Status
from tests.conftest import ProxyStarter, ServerStarter, SupervisorStarter
from tests.process.producer import Producer
from tests.support.ledger import Ledger
from tests.support.processes import alive
from tests.support.servers import RedisServer
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until

F_SETPIPE_SZ = 1031


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


@pytest.fixture
def pool(start_supervisor: SupervisorStarter, redis_server: RedisServer) -> SupervisorProcess:
    """Two children, ready, with a grace of 10 s."""
    started = start_supervisor(server=redis_server, flags=["--shutdown-grace", "10"])
    return started.wait_ready()


def started(ledger: Ledger, task_id: str, times: int = 1, timeout: float = 10.0) -> int:
    """Waits until the task has started so often. Returns the pid that executes it."""
    until(lambda: len(ledger.starts(task_id)) >= times, timeout, f"{task_id} has not started {times} times")
    return ledger.starts(task_id)[times - 1].pid


def stands_again(pool: SupervisorProcess, without: set[int], timeout: float = 2.0) -> None:
    """All slots are filled by children that work, and are none of the dead."""

    def full() -> bool:
        pids = {child.pid for child in pool.tree() if "] g" in child.title and "starting" not in child.title}
        return len(pids) == pool.procs and not pids & without

    until(full, timeout, pool.describe)


# --- deaths


def test_all_children_killed_at_the_same_instant_are_all_replaced(pool: SupervisorProcess) -> None:
    for _ in range(5):
        pids = pool.child_pids()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        stands_again(pool, without=set(pids))
    assert pool.exit_code is None


def test_a_dead_template_is_replaced_and_its_children_go_on(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    task_id = producer.send("wait_for_file", {"path": str(gate)})
    pid = started(ledger, task_id)
    old = pool.template()
    old.kill()
    until(lambda: [t.pid for t in pool.templates() if t.pid != old.pid], 10, pool.describe)
    gate.touch()
    producer.wait(task_id, Status.SUCCEEDED)
    assert len(ledger.starts(task_id)) == 1
    # The next child comes from the new one.
    until(lambda: "template g2" in pool.log() and "imported" in pool.log().split("template g2")[-1], 10)
    os.kill(pid, signal.SIGKILL)
    stands_again(pool, without={pid})
    until(lambda: any(" g2: " in p.title for p in pool.tree() if p.title.startswith("dtq-child")), 5)


MOODY = """
import os, time
from dtq_child import App

app = App()

@app.on_child_start
def boot() -> None:
    while os.path.exists("hang"):
        time.sleep(0.01)
    if os.path.exists("fail"):
        os._exit(3)
"""


@pytest.fixture
def moody(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> SupervisorProcess:
    """Two children of an application that boots as it likes: files in the folder decide."""
    (tmp_path / "moody.py").write_text(MOODY)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    pool = start_supervisor("moody:app", server=redis_server, flags=["--boot-timeout", "2"], env=env)
    return pool.wait_ready()


def test_a_child_that_hangs_while_it_boots_is_killed_and_the_next_one_tried(
    moody: SupervisorProcess,
) -> None:
    hang = moody.folder / "hang"
    hang.touch()
    victim = moody.child_pids()[0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: "is killed: it was not ready within the boot timeout" in moody.log(), 5, moody.describe)
    hang.unlink()
    stands_again(moody, without={victim}, timeout=5)


def test_a_template_that_does_not_answer_is_replaced(moody: SupervisorProcess) -> None:
    hung, victim = moody.template(), moody.child_pids()[0]
    hung.suspend()
    os.kill(victim, signal.SIGKILL)
    until(lambda: "template g1 is lost: it does not answer" in moody.log(), 5, moody.describe)
    stands_again(moody, without={victim}, timeout=8)
    assert moody.template().pid != hung.pid
    assert not hung.is_running()


# --- timeouts and cancel


def test_a_short_timeout_is_seen_in_time_too(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger
) -> None:
    lates = []
    for _ in range(5):
        task_id = producer.send("gil_sleep", {"seconds": 60}, timeout=0.1, max_attempts=1)
        pid = started(ledger, task_id)
        begun = ledger.starts(task_id)[0].monotonic_ns / 1e9
        until(lambda pid=pid: not alive(pid), 5, "never killed", interval=0.002)  # type: ignore[misc]
        lates.append(time.monotonic() - begun - 0.1)
    assert max(lates) < 0.5, lates


@pytest.mark.slow
def test_a_child_that_cannot_settle_while_we_have_redis_is_killed_and_counted_as_a_crash(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, start_proxy: ProxyStarter, ledger: Ledger
) -> None:
    proxy = start_proxy(redis_server.port)
    pool = start_supervisor(server=redis_server, url=proxy.url, procs=1).wait_ready()
    with Producer(redis_server) as producer:
        task_id = producer.send("note", {"value": 1})
        # A settle names its task and carries the outcome; nothing else of that child is touched.
        proxy.drop_request(lambda words: b"ok" in words and task_id.encode() in words, count=100)
        pid = started(ledger, task_id)
        until(lambda: not alive(pid), 25, pool.describe)
        assert f"(pid {pid}) is killed: it could not settle its task" in pool.log()
        until(lambda: producer.record(task_id).number("crashes") == 1, 5, pool.describe)


# --- the stop


def test_helpers_in_sessions_of_their_own_end_with_the_supervisor(
    pool: SupervisorProcess, producer: Producer
) -> None:
    task_id = producer.send("grandchild_own_session", {"seconds": 600})
    producer.wait(task_id, Status.SUCCEEDED)
    helpers = [p for p in pool.tree() if "sleep" in p.title and not p.title.startswith("dtq")]
    assert pool.stop(timeout=5) == 0
    assert helpers
    assert not any(alive(helper.pid) for helper in helpers)


# --- other signals


def test_signals_without_a_meaning_change_nothing(pool: SupervisorProcess) -> None:
    pids = pool.child_pids()
    for number in (signal.SIGUSR1, signal.SIGCHLD):
        pool.signal(number)
    until(lambda: "has no meaning yet" in pool.log(), 5, pool.describe)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        for pid in [*pids, pool.template().pid]:
            os.kill(pid, number)
    assert pool.child_pids() == pids
    assert pool.exit_code is None


def test_a_storm_of_signals_loses_none(pool: SupervisorProcess) -> None:
    for n in range(200):
        pool.signal((signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)[n % 3])
    os.kill(pool.child_pids()[0], signal.SIGKILL)
    assert pool.stop(timeout=5) == 0


def test_a_supervisor_that_was_stopped_enforces_what_fell_into_the_gap_a_second_later(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger
) -> None:
    """Its children are stopped with it; the handler that would end within a second is let."""
    ends = producer.send("sleep", {"seconds": 0.6}, timeout=1.5)
    hangs = producer.send("gil_sleep", {"seconds": 60}, timeout=1.5, max_attempts=1)
    pids = [started(ledger, ends), started(ledger, hangs), pool.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    until(lambda: time.monotonic() - stopped_at > 3.0, 5)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    producer.wait(ends, Status.SUCCEEDED)
    producer.wait(hangs, Status.DEAD_LETTERED)
    assert "the main loop did not run" in pool.log()


# --- exit codes


BROKEN = {
    "raises": "import nothing_of_that_name",
    "syntax": "def",
    "exits": "raise SystemExit(0)",
    "segfaults": "import ctypes; ctypes.string_at(0)",
}


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DTQ_")}
    return subprocess.run(
        [sys.executable, "-m", "dtq_supervisor", *arguments],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), "DTQ_METRICS_BIND": "off", **env},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize(
    ("how", "preload"),
    # Without preload it is a child that dies of the signal, and that is tried again.
    [(how, preload) for how in BROKEN for preload in (True, False) if preload or how != "segfaults"],
)
def test_an_application_that_cannot_be_imported_ends_it_with_4(
    tmp_path: Path, redis_server: RedisServer, how: str, preload: bool
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN[how])
    flags = [] if preload else ["--no-preload"]
    done = run(tmp_path, "broken:app", "--procs", "2", "--redis-url", redis_server.url, *flags)
    assert done.returncode == 4, done.stderr
    assert "cannot be imported" in done.stderr
    if how == "raises":
        assert "nothing_of_that_name" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--no-preload"]])
def test_an_import_that_takes_too_long_ends_it_with_4(
    tmp_path: Path, redis_server: RedisServer, flags: list[str]
) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    url = redis_server.url
    done = run(tmp_path, "slow:app", "--procs", "1", "--redis-url", url, "--boot-timeout", "1.5", *flags)
    assert done.returncode == 4, done.stderr
    assert "--boot-timeout" in done.stderr


def test_an_application_that_is_not_where_it_is_said_to_be_is_bad_configuration(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    (tmp_path / "empty.py").write_text("from dtq_child import App\ntasks = App()")
    for name, fix in (("empty:app", "empty:tasks"), ("nowhere:app", "start in the application's folder")):
        done = run(tmp_path, name, "--redis-url", redis_server.url)
        assert done.returncode == 78, done.stderr
        assert fix in done.stderr


def test_an_application_that_enqueues_elsewhere_is_bad_configuration(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    (tmp_path / "elsewhere.py").write_text("from dtq_child import App\napp = App(key_prefix='other:')")
    done = run(tmp_path, "elsewhere:app", "--redis-url", redis_server.url)
    assert done.returncode == 78, done.stderr
    assert "other:" in done.stderr


def test_a_stop_does_not_wait_for_an_import(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    pool = start_supervisor("slow:app", server=redis_server, env=env)
    until(pool.templates, 10, pool.describe)
    assert pool.stop(timeout=3) == 0


def test_bad_configuration_is_78_with_a_line_for_each_problem(tmp_path: Path) -> None:
    done = run(tmp_path, "shop.tasks", "--procs", "0", DTQ_TIMEOUT="5")
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 3, done.stderr


def test_a_wrong_flag_is_2(tmp_path: Path) -> None:
    assert run(tmp_path, "shop:app", "--no-such-flag").returncode == 2


def test_check_shows_every_setting_and_imports_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "not_there:app", "--check", "--procs", "3", DTQ_MAX_ATTEMPTS="7")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "flag --procs" in lines["procs"]
    assert "environment DTQ_MAX_ATTEMPTS" in lines["max_attempts"]
    assert lines["redis_url"].endswith("default")


def test_version_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "dtq")


REFUSALS = {
    "eviction": ({"maxmemory-policy": "allkeys-lru"}, "--allow-eviction"),
    "cluster": ({"cluster-enabled": "yes"}, "cluster"),
}


@pytest.mark.parametrize("why", ["eviction", "cluster"])
def test_a_redis_that_cannot_be_trusted_is_refused_with_69(
    tmp_path: Path, start_redis: ServerStarter, start_supervisor: SupervisorStarter, why: str
) -> None:
    settings, word = REFUSALS[why]
    server = start_redis(settings=settings)
    pool = start_supervisor(server=server)
    assert pool.wait(timeout=10) == 69
    (line,) = (line for line in pool.log().splitlines() if '"refused"' in line)
    assert word in line


def test_a_wrong_password_is_refused_with_69(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    url = redis_server.url.replace("redis://", "redis://nobody:wrong@")
    pool = start_supervisor(server=redis_server, url=url)
    assert pool.wait(timeout=10) == 69
    assert "wrong@" not in pool.log()


def test_an_evicting_redis_may_be_accepted(
    start_redis: ServerStarter, start_supervisor: SupervisorStarter
) -> None:
    server = start_redis(settings={"maxmemory-policy": "volatile-ttl"})
    pool = start_supervisor(server=server, flags=["--allow-eviction"]).wait_ready()
    assert "may evict tasks" in pool.log()
    assert pool.stop(timeout=5) == 0


def test_another_layout_of_the_keys_is_refused_naming_both(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    redis_server.cli("SET", "dtq:schema", "7.3")
    pool = start_supervisor(server=redis_server)
    assert pool.wait(timeout=10) == 69
    assert "7.3" in pool.log()
    assert redis_server.cli("GET", "dtq:schema") == b"7.3"


def test_a_redis_that_forbids_to_look_is_taken_as_it_is(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    redis_server.cli("ACL", "SETUSER", "default", "-config", "-info")
    pool = start_supervisor(server=redis_server).wait_ready()
    assert pool.stop(timeout=5) == 0


def test_a_redis_that_is_not_there_is_waited_for(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, start_proxy: ProxyStarter, ledger: Ledger
) -> None:
    proxy = start_proxy(redis_server.port)
    proxy.refuse()
    pool = start_supervisor(server=redis_server, url=proxy.url)
    until(lambda: len(pool.children()) == 2, 15, pool.describe)
    with Producer(redis_server) as producer:
        task_id = producer.send("note", {"value": 1})
        proxy.heal()
        producer.wait(task_id, Status.SUCCEEDED)


def test_a_supervisor_that_never_met_redis_stops_all_the_same(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, start_proxy: ProxyStarter
) -> None:
    proxy = start_proxy(redis_server.port)
    proxy.refuse()
    pool = start_supervisor(server=redis_server, url=proxy.url)
    until(lambda: len(pool.children()) == 2, 15, pool.describe)
    assert pool.stop(timeout=4) == 0


# --- burst, embedded, logs


def test_a_supervisor_whose_embedded_redis_dies_ends_and_says_so(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    pool = start_supervisor(server=redis_server, flags=["--embedded", "--shutdown-grace", "1"])
    until(lambda: "takes tasks" in pool.log(), 20, pool.describe)
    (server,) = (
        p for p in psutil.Process(pool.pid).children() if "redis" in p.name() or "valkey" in p.name()
    )
    server.kill()
    assert pool.wait(timeout=6) == 69
    assert "private Redis has ended" in pool.log()


def test_a_log_that_nobody_reads_holds_nothing_up(
    tmp_path: Path, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "dtq_supervisor", "tests.support.handlers:app", "--procs", "2"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DTQ_METRICS_BIND": "off",
            "DTQ_REDIS_URL": redis_server.url,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=writer,
    )
    try:
        first = producer.send("sleep", {"seconds": 0.0})
        producer.wait(first, Status.SUCCEEDED, timeout=15)
        # Until it is full, and then more: a line of stacks has some hundred bytes.
        until(lambda: full(process, writer), 10, interval=0.1)
        for _ in range(20):
            process.send_signal(signal.SIGUSR2)
            assert not writable(writer)
        second = producer.send("gil_sleep", {"seconds": 60}, timeout=0.2, max_attempts=1)
        producer.wait(second, Status.DEAD_LETTERED)
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def full(process: subprocess.Popen[bytes], fd: int) -> bool:
    """Makes it say something, and looks."""
    process.send_signal(signal.SIGUSR2)
    return not writable(fd)


def writable(fd: int) -> bool:
    return bool(select.select((), (fd,), (), 0)[1])
