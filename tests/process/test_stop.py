"""The stop: what runs may finish within the grace, nothing new starts, and nothing is left (R36)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dtq_child.task import Status
from tests.conftest import ProxyStarter, SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import Vigil, deaths, started
from tests.support.ledger import Ledger
from tests.support.processes import alive
from tests.support.servers import RedisServer
from tests.support.snapshot import Pending, snapshot
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until

ODD = "tests.support.odd_handlers:app"
AFTER_GRACE_S = 2.0
INTERPRETERS_END_S = 0.3
"""Python's own end, after the exit code is known."""
DAY_MS = 86_400_000


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


class Gates:
    """Tasks that run until their gate is opened."""

    def __init__(self, producer: Producer, ledger: Ledger, folder: Path, number: int) -> None:
        self._producer = producer
        paths = [folder / f"gate-{n}" for n in range(number)]
        self._by_id = {producer.send("wait_for_file", {"path": str(path)}): path for path in paths}
        for task_id in self._by_id:
            started(ledger, task_id)

    def ids(self) -> list[str]:
        return list(self._by_id)

    def open(self, task_id: str) -> None:
        self._by_id[task_id].touch()
        self._producer.wait(task_id, Status.SUCCEEDED)


def gone_after(pool: SupervisorProcess, number: int, timeout: float) -> float:
    """Signals the supervisor; the seconds until it is gone."""
    with Vigil(pool.pid) as vigil:
        asked = time.monotonic()
        pool.signal(number)
        return deaths([vigil], timeout)[pool.pid] - asked


def keys_of_workers(server: RedisServer) -> set[str]:
    """What a supervisor must take away: its record, bell and lock."""
    keys = set(server.client(decode_responses=True).scan_iter("dtq:*"))
    return {key for key in keys if key.startswith(("dtq:worker:", "dtq:bell:w:", "dtq:lock:"))}


def released(server: RedisServer) -> list[Pending]:
    """What is pending, all of it in a park with idle time past every timeout: anybody may take it at once."""
    pending = snapshot(server.client()).pending
    assert [p for p in pending if not p.consumer.endswith(":park") or p.idle_ms < DAY_MS] == []
    return pending


def check_interrupted(producer: Producer, task_id: str) -> None:
    """Queued as it was, and nothing spent."""
    record = producer.record(task_id)
    assert record.status == Status.QUEUED, record.as_dict()
    assert (record.number("attempt"), record.number("crashes")) == (1, 0)
    assert [e["outcome"] for e in record.executions()] == ["released"]


# --- within the grace

REQUESTS = {
    "TERM": (signal.SIGTERM, False),
    "TERM to every process": (signal.SIGTERM, True),
    "INT to every process": (signal.SIGINT, True),
}


@pytest.mark.parametrize("how", REQUESTS)
def test_what_runs_finishes_nothing_new_starts_and_nothing_is_left(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
    how: str,
) -> None:
    pool = start_supervisor(server=redis_server, procs=4, flags=["--shutdown-grace", "20"]).wait_ready()
    running = Gates(producer, ledger, tmp_path, 4)
    waiting = [producer.send("note") for _ in range(4)]
    everybody = [process.pid for process in pool.tree()]
    number, all_of_them = REQUESTS[how]
    for pid in everybody if all_of_them else [pool.pid]:
        os.kill(pid, number)
    # The lock goes first, so that another leads at once; who we are is known until the last task has ended.
    until(lambda: not redis_server.cli("EXISTS", "dtq:lock:scheduler"), 5, pool.describe)
    for task_id in running.ids():
        assert pool.worker()
        running.open(task_id)
    assert pool.wait(timeout=5) == 0
    assert not any(alive(pid) for pid in everybody)
    check_nothing_is_left(redis_server, waiting)
    for task_id in running.ids():
        assert [e.word for e in ledger.notes(task_id)] == ["start", "end"]
    for task_id in waiting:
        assert ledger.notes(task_id) == []
        assert producer.status(task_id) == Status.QUEUED


def check_nothing_is_left(server: RedisServer, waiting: Sequence[str]) -> None:
    """But these tasks, never handed out, in their order."""
    places = snapshot(server.client())
    assert [w.task_id for w in places.undelivered] == waiting
    assert (places.pending, places.strays) == ([], [])
    assert keys_of_workers(server) == set()
    assert server.cli("SMEMBERS", "dtq:workers") == []
    assert server.cli("XINFO", "CONSUMERS", "dtq:stream:default:p5", "workers") == []


def test_an_idle_pool_is_gone_within_two_seconds(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    pool = start_supervisor(server=redis_server, procs=4).wait_ready()
    assert gone_after(pool, signal.SIGTERM, 5) < 2.0
    assert pool.exit_code == 0


# --- beyond it


def test_what_outlasts_the_grace_is_told_then_killed_and_runs_again_at_once_elsewhere(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    first = start_supervisor(ODD, server=redis_server, procs=3, flags=["--shutdown-grace", "1"]).wait_ready()
    deaf = producer.send("swallow_first", {"seconds": 60})
    stuck = producer.send("hang_first", {"seconds": 60, "stuck": True})
    listens = producer.send("hang_first", {"seconds": 60})
    ids = [deaf, stuck, listens]
    for task_id in ids:
        started(ledger, task_id)
    second = start_supervisor(ODD, server=redis_server, procs=3).wait_ready()
    took = gone_after(first, signal.SIGTERM, 5)
    over = time.monotonic()
    assert first.exit_code == 1
    assert 1.0 <= took < 1.0 + AFTER_GRACE_S + INTERPRETERS_END_S
    for task_id in ids:
        assert started(ledger, task_id, times=2).monotonic_ns / 1e9 - over < 1.5
        record = producer.wait(task_id, Status.SUCCEEDED)
        assert (record.number("attempt"), record.number("crashes")) == (1, 0)
        assert [e["outcome"] for e in record.executions()] == ["released", "succeeded"]
        assert len(ledger.starts(task_id)) == 2
    assert [e.facts["error"] for e in ledger.notes(deaf, "swallowed")] == ["ShutdownRequested"]
    assert [e.facts["error"] for e in ledger.notes(listens, "raised")] == ["ShutdownRequested"]
    assert set(second.child_pids()) >= {ledger.starts(task_id)[1].pid for task_id in ids}


def test_no_handler_holds_the_end_up_and_its_helpers_go_with_it(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, procs=4, flags=["--shutdown-grace", "0.5"]).wait_ready()
    ids = [
        producer.send("ignore_term", {"seconds": 60}),
        producer.send("swallow", {"kind": "BaseException", "seconds": 60}),
        producer.send("gil_sleep", {"seconds": 60}),
        producer.send("grandchild_own_session", {"seconds": 600, "stuck": 60}),
    ]
    for task_id in ids:
        started(ledger, task_id)
    until(lambda: ledger.notes(ids[3], "helper"), 5, pool.describe)
    (helper,) = ledger.notes(ids[3], "helper")
    assert alive(helper.facts["helper"])
    everybody = [process.pid for process in pool.tree()]
    assert 0.5 <= gone_after(pool, signal.SIGTERM, 6) < 0.5 + AFTER_GRACE_S + INTERPRETERS_END_S
    assert pool.exit_code == 1
    assert not any(alive(pid) for pid in [*everybody, helper.facts["helper"]])
    assert {p.task_id for p in released(redis_server)} == set(ids)
    for task_id in ids:
        check_interrupted(producer, task_id)
    assert keys_of_workers(redis_server) == set()


def test_redis_in_a_black_hole_holds_the_end_up_no_longer_than_the_grace(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    start_proxy: ProxyStarter,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    proxy = start_proxy(redis_server.port)
    flags = ["--shutdown-grace", "0.5"]
    pool = start_supervisor(server=redis_server, url=proxy.url, procs=3, flags=flags).wait_ready()
    gate = tmp_path / "gate"
    settling = producer.send("wait_for_file", {"path": str(gate)})
    stuck = producer.send("gil_sleep", {"seconds": 60})
    for task_id in (settling, stuck):
        started(ledger, task_id)
    everybody = [process.pid for process in pool.tree()]
    proxy.black_hole(existing=True, new=True)
    gate.touch()
    until(lambda: ledger.ends(settling), 5, pool.describe)
    assert gone_after(pool, signal.SIGTERM, 6) < 0.5 + AFTER_GRACE_S + INTERPRETERS_END_S
    assert pool.exit_code == 1
    assert not any(alive(pid) for pid in everybody)
    # Nobody could be told: both stay leased until the lease runs out.
    assert {producer.status(task_id) for task_id in (settling, stuck)} == {Status.RUNNING}


# --- asked again, asked to hurry


def test_copies_of_the_request_are_one_and_a_second_one_means_at_once(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=redis_server, flags=["--shutdown-grace", "30"]).wait_ready()
    running = Gates(producer, ledger, tmp_path, 2)
    finishes, interrupted = running.ids()
    asked = time.monotonic()
    pool.signal(signal.SIGTERM)
    until(lambda: time.monotonic() - asked >= 0.005, 1, interval=0.001)
    pool.signal(signal.SIGTERM)
    until(lambda: time.monotonic() - asked >= 1.2, 2)
    running.open(finishes)
    pid = ledger.starts(interrupted)[0].pid
    assert alive(pid)
    assert gone_after(pool, signal.SIGTERM, 5) < 1.5
    assert pool.exit_code == 1
    assert not alive(pid)
    check_interrupted(producer, interrupted)
    assert [p.task_id for p in released(redis_server)] == [interrupted]


def test_quit_kills_collects_and_releases_at_once(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, procs=3, flags=["--shutdown-grace", "30"]).wait_ready()
    ids = [
        producer.send("gil_sleep", {"seconds": 60}),
        producer.send("swallow", {"kind": "BaseException", "seconds": 60}),
    ]
    for task_id in ids:
        started(ledger, task_id)
    everybody = [process.pid for process in pool.tree()]
    assert gone_after(pool, signal.SIGQUIT, 5) < 1.5
    assert pool.exit_code == 1
    assert not any(alive(pid) for pid in everybody)
    assert {p.task_id for p in released(redis_server)} == set(ids)
    for task_id in ids:
        check_interrupted(producer, task_id)
    assert keys_of_workers(redis_server) == set()


# --- before there is anything to stop

SLOW_IMPORT = "import time\ntime.sleep(60)\n"
SLOW_BOOT = """
import pathlib, time
from dtq_child import App

app = App()

@app.on_child_start
def boot() -> None:
    pathlib.Path("booting").touch()
    time.sleep(60)
"""
BEGINNINGS = {"imports": SLOW_IMPORT, "boots": SLOW_BOOT}


@pytest.mark.parametrize("what", BEGINNINGS)
def test_an_application_that_is_still_coming_up_is_not_waited_for(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer, what: str
) -> None:
    (tmp_path / "slow.py").write_text(BEGINNINGS[what])
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    pool = start_supervisor("slow:app", server=redis_server, env=env)
    until(pool.templates if what == "imports" else (pool.folder / "booting").exists, 15, pool.describe)
    everybody = [process.pid for process in pool.tree()]
    assert gone_after(pool, signal.SIGTERM, 5) < 2.0
    assert pool.exit_code == 0
    assert not any(alive(pid) for pid in everybody)


# --- signals that ask for something else


def test_other_signals_interrupt_nobody_and_usr2_shows_where_everybody_is(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=redis_server, procs=4, flags=["--shutdown-grace", "0"]).wait_ready()
    running = Gates(producer, ledger, tmp_path, 1)
    stuck = started(ledger, producer.send("gil_sleep", {"seconds": 60})).pid
    waits = started(ledger, producer.send("async_sleep", {"seconds": 60})).pid
    busy = started(ledger, running.ids()[0]).pid
    pids = pool.child_pids()
    (idle,) = set(pids) - {stuck, waits, busy}
    for process in pool.tree():
        for number in (signal.SIGUSR1, signal.SIGHUP):
            os.kill(process.pid, number)
    pool.signal(signal.SIGUSR2)
    until(lambda: pool.log().count("stacks of child") == 4, 5, pool.describe)
    shown = {stuck: "sleep_in_c", waits: "in run_until_complete", busy: "in wait_for_file", idle: "in _wait"}
    for line in pool.log().splitlines():
        if "stacks of child" in line:
            (pid,) = (pid for pid in shown if f"(pid {pid})" in line)
            assert shown.pop(pid) in line
    assert shown == {}
    running.open(running.ids()[0])
    assert len(ledger.starts(running.ids()[0])) == 1
    assert pool.child_pids() == pids
    assert pool.exit_code is None
