"""A supervisor under a service manager: what the manager hears, in which order, and what nobody else does."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from dtq_child.task import Status
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import PATIENCE_S
from tests.support.processes import stopped
from tests.support.servers import RedisServer
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until

NAMES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
APP = """
import os
from dtq_child import App

app = App()
at_import = {name: os.environ.get(name) for name in NAMES}

@app.task(name="environment")
def environment() -> list:
    return [at_import, {name: os.environ.get(name) for name in NAMES}]
""".replace("NAMES", repr(NAMES))
WATCHDOG_S = 1.0


class Manager:
    """A service manager's end of NOTIFY_SOCKET. Keeps what it hears, and when."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self.address)
        self._heard: list[tuple[float, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def lines(self) -> list[str]:
        """All so far, but for the watchdog's."""
        return [line for _, line in self._all() if line != "WATCHDOG=1"]

    def feedings(self) -> list[float]:
        """When the watchdog was fed, as we took note of it."""
        return [at for at, line in self._all() if line == "WATCHDOG=1"]

    def said(self, line: str) -> bool:
        return line in self.lines()

    def _all(self) -> list[tuple[float, str]]:
        try:
            while True:
                words = self._socket.recv(4096).decode()
                self._heard += [(time.monotonic(), line) for line in words.splitlines()]
        except BlockingIOError:
            return self._heard


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(tmp_path) as made:
        yield made


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


def under(manager: Manager, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.address, **more}


def test_the_manager_hears_of_a_whole_life_in_its_order(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, manager: Manager
) -> None:
    pool = start_supervisor(server=redis_server, env=under(manager)).wait_ready()
    until(lambda: manager.said("STATUS=2 of 2 children at work"), PATIENCE_S, lambda: str(manager.lines()))
    pool.signal(signal.SIGHUP)
    until(lambda: manager.lines().count("READY=1") == 2, PATIENCE_S, lambda: str(manager.lines()))
    assert pool.stop() == 0
    lines = manager.lines()
    marks = [line for line in lines if not line.startswith("STATUS=")]
    moment = marks[2]
    reloaded = ["READY=1", "RELOADING=1", moment, "READY=1"]
    assert marks == [*reloaded, "STOPPING=1", "EXTEND_TIMEOUT_USEC=30000000"]
    assert moment.startswith("MONOTONIC_USEC=")
    assert lines[0] == "STATUS=the application is being imported"
    assert lines[lines.index("READY=1") + 1] in (
        "STATUS=1 of 2 children at work",
        "STATUS=2 of 2 children at work",
    )
    assert lines[lines.index("STOPPING=1") + 2] == "STATUS=stopping: 2 children to end"
    assert manager.feedings() == []  # nobody asked for them


def test_it_is_ready_when_redis_has_answered_and_says_while_it_waits(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, manager: Manager
) -> None:
    fresh_redis.stop()
    pool = start_supervisor(server=fresh_redis, env=under(manager))
    waiting, at_work = "STATUS=waiting for Redis; 2 of 2 children up", "STATUS=2 of 2 children at work"
    until(lambda: manager.said(waiting), PATIENCE_S, pool.describe)
    assert not manager.said("READY=1")
    fresh_redis.start()
    until(lambda: manager.said(at_work), PATIENCE_S, pool.describe)
    assert manager.said("READY=1")
    before = len(manager.lines())
    fresh_redis.stop()
    until(lambda: waiting in manager.lines()[before:], PATIENCE_S, pool.describe)
    fresh_redis.start()
    until(lambda: manager.lines()[-1] == at_work, PATIENCE_S, pool.describe)
    assert manager.lines().count("READY=1") == 1


def test_the_watchdog_is_fed_while_the_main_loop_runs_and_only_then(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, manager: Manager
) -> None:
    env = under(manager, WATCHDOG_USEC=str(round(WATCHDOG_S * 1e6)))
    pool = start_supervisor(server=redis_server, env=env).wait_ready()
    fed = keep_watch(manager, 2.5 * WATCHDOG_S)
    assert max(b - a for a, b in itertools.pairwise(fed)) < WATCHDOG_S
    pool.signal(signal.SIGSTOP)
    until(lambda: stopped(pool.pid), 5)
    # What it sent has arrived: a local datagram is queued by the one who sends it.
    manager.feedings()
    assert len(keep_watch(manager, 1.5 * WATCHDOG_S)) == 0
    pool.signal(signal.SIGCONT)
    assert len(keep_watch(manager, 2 * WATCHDOG_S)) >= 2
    assert pool.stop() == 0


def keep_watch(manager: Manager, seconds: float) -> list[float]:
    """The feedings of that time."""
    begun, before = time.monotonic(), len(manager.feedings())
    until(lambda: manager.feedings() and time.monotonic() - begun > seconds, seconds + 5, interval=0.005)
    return manager.feedings()[before:]


def test_a_watchdog_of_somebody_else_is_not_fed(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, manager: Manager
) -> None:
    env = under(manager, WATCHDOG_USEC="200000", WATCHDOG_PID=str(os.getpid()))
    pool = start_supervisor(server=redis_server, env=env).wait_ready()
    until(lambda: manager.said("STATUS=2 of 2 children at work"), PATIENCE_S, pool.describe)
    assert pool.stop() == 0
    assert manager.feedings() == []


def test_neither_the_import_nor_a_task_sees_the_managers_names(
    tmp_path: Path,
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    manager: Manager,
) -> None:
    (tmp_path / "looks.py").write_text(APP)
    env = under(manager, WATCHDOG_USEC="60000000", PYTHONPATH=f"{tmp_path}:{ROOT}")
    start_supervisor("looks:app", server=redis_server, env=env).wait_ready()
    task_id = producer.send("environment")
    producer.wait(task_id, Status.SUCCEEDED, PATIENCE_S)
    nothing = "{" + ",".join(f'"{name}":null' for name in NAMES) + "}"
    assert redis_server.cli("GET", f"dtq:result:{task_id}").decode() == f"[{nothing},{nothing}]"


@pytest.mark.parametrize("how", ["nobody listens", "nobody reads"])
def test_a_manager_that_does_not_take_what_is_said_changes_nothing(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    manager: Manager,
    how: str,
) -> None:
    if how == "nobody listens":
        os.unlink(manager.address)
    else:
        stuff(manager.address)
    env = under(manager, WATCHDOG_USEC="100000")
    pool = start_supervisor(server=redis_server, env=env).wait_ready()
    producer.wait(producer.send("noop"), Status.SUCCEEDED, PATIENCE_S)
    until(lambda: "cannot be told how things stand" in pool.log(), PATIENCE_S, pool.describe)
    assert pool.stop(timeout=5) == 0
    assert pool.log().count("cannot be told how things stand") == 1
    assert "took" not in slow_rounds(pool)


def stuff(address: str) -> None:
    """Fills the manager's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as busy:
        try:
            while True:
                busy.sendto(b"x", address)
        except BlockingIOError:
            return


def slow_rounds(pool: SupervisorProcess) -> str:
    return "\n".join(line for line in pool.log().splitlines() if "slow_tick" in line)


def test_an_import_that_fails_never_is_ready(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer, manager: Manager
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    env = under(manager, PYTHONPATH=f"{tmp_path}:{ROOT}")
    pool = start_supervisor("broken:app", server=redis_server, env=env)
    assert pool.wait(PATIENCE_S) == 4
    assert manager.lines() == [
        "STATUS=the application is being imported",
        "STOPPING=1",
        "EXTEND_TIMEOUT_USEC=5000000",
        "STATUS=the application cannot be imported; the log says why",
    ]
