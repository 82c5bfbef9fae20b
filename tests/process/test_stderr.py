"""What stands behind 0, 1 and 2 changes no outcome: a pipe that nobody reads, or nothing at all. And what
whoever reads it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtq_child.task import Status
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.support.ledger import VARIABLE as LEDGER
from tests.support.ledger import Ledger
from tests.support.processes import descriptors, tree
from tests.support.servers import RedisServer
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


@contextmanager
def pool_that_writes_to(
    fd: int, folder: Path, server: RedisServer, ledger: Ledger
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "dtq_supervisor", "tests.support.handlers:app", "--procs", "1"]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DTQ_METRICS_BIND": "off",
        "DTQ_REDIS_URL": server.url,
        LEDGER: str(ledger.path),
    }
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=fd
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def fill(writer: int) -> None:
    os.set_blocking(writer, False)
    try:
        for size in (4096, 1):
            try:
                while True:
                    os.write(writer, b"z" * size)
            except BlockingIOError:
                continue
    finally:
        os.set_blocking(writer, True)


def lines_in(reader: int) -> list[str]:
    """All that was written, without what filled the pipe. The other ends are closed."""
    with os.fdopen(reader, "rb", closefd=False) as file:
        return file.read().replace(b"z", b"").decode(errors="replace").splitlines()


def test_tasks_that_fail_settle_at_once_while_nobody_reads_the_log(
    tmp_path: Path, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    reader, writer = os.pipe()
    try:
        with pool_that_writes_to(writer, tmp_path, redis_server, ledger) as pool:
            producer.wait(producer.send("noop", {}), Status.SUCCEEDED, timeout=15)
            fill(writer)
            bad = [producer.send("fail", {"message": "no"}, max_attempts=1) for _ in range(5)]
            good = [producer.send("noop", {}) for _ in range(5)]
            for task_id in bad:
                producer.wait(task_id, Status.DEAD_LETTERED, timeout=3)
            for task_id in good:
                producer.wait(task_id, Status.SUCCEEDED, timeout=3)
            assert {producer.record(task_id).number("crashes") for task_id in bad + good} == {0}
            # Read again, the log says what it has missed.
            os.read(reader, 1 << 20)
            last = producer.send("fail", {"message": "heard"}, max_attempts=1)
            producer.wait(last, Status.DEAD_LETTERED, timeout=3)
            pool.terminate()
            assert pool.wait(10) == 0
        os.close(writer)
        heard = [line for line in lines_in(reader) if line.startswith("{")]
        assert any("5 log lines were dropped" in line for line in heard), heard
        (told,) = (json.loads(line) for line in heard if last in line)
        assert (told["task_type"], told["queue"], told["attempt"]) == ("fail", "default", 1)
    finally:
        os.close(reader)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_a_supervisor_started_without_some_of_them_works(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, closed: str
) -> None:
    program = ("sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", "dtq_supervisor")
    pool = start_supervisor(server=redis_server, program=program).wait_ready()
    producer.wait(producer.send("fail", {"message": "no"}, max_attempts=1), Status.DEAD_LETTERED)
    producer.wait(producer.send("noop", {}), Status.SUCCEEDED)
    for process in tree(pool.pid):
        opened = descriptors(process.pid)
        for fd, sign in ((1, ">&-"), (2, "2>&-")):
            if sign in closed.split():
                assert opened[fd] == os.devnull, (process, opened)
    assert pool.stop(timeout=10) == 0


def test_without_a_stderr_bad_configuration_still_has_its_exit_code(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m dtq_supervisor nothing.here:app --procs nonsense <&- >&- 2>&-"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DTQ_METRICS_BIND": "off"}
    ran = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, timeout=20, check=False)
    assert ran.returncode == 78


def lines_of(pool: SupervisorProcess, words: str) -> list[dict[str, Any]]:
    found = (line for line in pool.log().splitlines() if words in line)
    return [json.loads(line) for line in found]


def test_entries_that_are_no_tasks_do_not_go_without_a_word(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer
) -> None:
    pool = start_supervisor(server=redis_server, procs=1).wait_ready()
    for stream in ("p5", "p9"):
        redis_server.cli("XADD", f"dtq:stream:default:{stream}", "*", "what", "is this")
    # A state that this version does not know.
    redis_server.cli("HSET", "dtq:task:odd", "task_id", "odd", "status", "bogus")
    fields = {"task_id": "odd", "queue": "default", "task_type": "noop", "payload": "{}", "attempt": "1"}
    fields |= {"max_attempts": "", "priority": "5", "timeout_ms": "", "idempotency_key": ""}
    redis_server.cli(
        "XADD", "dtq:stream:default:p5", "*", *(word for pair in fields.items() for word in pair)
    )
    producer.wait(producer.send("noop", {}), Status.SUCCEEDED)
    assert pool.stop(timeout=10) == 0
    assert lines_of(pool, "read as")
    assert lines_of(pool, "removed unexecuted")


def test_the_log_names_the_task_of_a_dead_child_and_what_became_of_it(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer
) -> None:
    pool = start_supervisor(server=redis_server, procs=1).wait_ready()
    task_id = producer.send("os_exit", {"code": 3}, max_crashes=2)
    producer.wait(task_id, Status.DEAD_LETTERED)
    until(lambda: len(lines_of(pool, "is settled")) == 2, 5, pool.describe)
    first, second = lines_of(pool, "is settled")
    assert first["message"].endswith(f"task {task_id} (os_exit) runs again at once, crash 1 of 2")
    assert second["message"].endswith(f"task {task_id} (os_exit) is dead-lettered: PoisonTask, crash 2 of 2")
    told = {name: second[name] for name in ("task_type", "queue", "attempt", "slot", "task_id")}
    assert told == {"task_type": "os_exit", "queue": "default", "attempt": 1, "slot": 0, "task_id": task_id}
    assert first["pid"] in {line["pid"] for line in lines_of(pool, "died")}
    assert {set(line) >= {"ts", "level", "worker", "pid"} for line in lines_of(pool, "{")} == {True}
    assert all(line["ts"].endswith("Z") for line in lines_of(pool, "{"))
