"""No handler outlives its timeout, whatever it does and whether Redis is there or not; and nobody else is
blamed for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from dtq_child.task import Record, Status
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import PATIENCE_S, Vigil, deaths, refilled, started
from tests.support.ledger import Entry, Ledger
from tests.support.processes import alive
from tests.support.servers import RedisServer
from tests.support.snapshot import snapshot
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until

LATE_S = 0.5
HOUR_S = 3600.0
NO_DELAY = '{"base_s":0,"factor":1,"cap_s":0,"jitter":0}'


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


@pytest.fixture
def pool(start_supervisor: SupervisorStarter, redis_server: RedisServer) -> SupervisorProcess:
    """Two children, ready."""
    return start_supervisor(server=redis_server).wait_ready()


def deadline(entry: Entry) -> float:
    """Of the execution that noted its start, in monotonic seconds."""
    return float(entry.facts["deadline"])


def lateness(starts: Sequence[Entry]) -> list[float]:
    """Waits for the deaths of the processes that noted these starts: how many seconds after its deadline each
    came."""
    with ExitStack() as stack:
        moments = deaths([stack.enter_context(Vigil(start.pid)) for start in starts])
        return [moments[start.pid] - deadline(start) for start in starts]


def check_timed_out(record: Record, where: str) -> None:
    """As the only attempt, with the stack of where it hung."""
    assert record.get("last_error_class") == "TaskTimeout"
    assert (record.number("attempt"), record.number("crashes")) == (1, 0)
    assert where in record.get("traceback")
    (execution,) = record.executions()
    assert execution["cause"]["verdict"] == "timeout"
    assert execution["cause"]["killed_by"] == "dtq: hard timeout"


# --- hard


@pytest.mark.parametrize("redis_is", ["there", "away"])
def test_handlers_stuck_in_c_code_are_killed_in_time_with_their_helpers_and_their_stacks_are_kept(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, ledger: Ledger, redis_is: str
) -> None:
    """All children of the pool at the same time, each holding the GIL."""
    pool = start_supervisor(server=fresh_redis, procs=3).wait_ready()
    with Producer(fresh_redis) as producer:
        stuck = {"seconds": HOUR_S, "stuck": HOUR_S}
        ids = [producer.send("grandchild", stuck, timeout=2.0, max_attempts=1) for _ in range(3)]
        starts = [started(ledger, task_id) for task_id in ids]
        helpers = [helper_of(ledger, task_id) for task_id in ids]
        if redis_is == "away":
            fresh_redis.pause()
        late = lateness(starts)
        assert all(0.0 <= seconds <= LATE_S for seconds in late), late
        until(lambda: not any(map(alive, helpers)), 1.0, "helpers of the killed live on")
        refilled(pool, {start.pid for start in starts}, timeout=2.0)
        fresh_redis.resume()
        for task_id in ids:
            record = producer.wait(task_id, Status.DEAD_LETTERED, timeout=PATIENCE_S)
            check_timed_out(record, "sleep_in_c")
            assert len(ledger.starts(task_id)) == 1


def helper_of(ledger: Ledger, task_id: str) -> int:
    (entry,) = until(lambda: ledger.notes(task_id, "helper"), PATIENCE_S, "no helper was started")
    return int(entry.facts["helper"])


def test_no_way_of_not_listening_outlives_the_timeout(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, procs=3).wait_ready()
    fifo = pool.folder / "fifo"
    os.mkfifo(fifo)
    options: dict[str, Any] = {"timeout": 1.5, "max_attempts": 1}
    swallows = {"kind": "BaseException", "seconds": HOUR_S}
    ids = {
        "swallow": producer.send("swallow", swallows, soft_timeout_ms=500, **options),
        "ignore_term": producer.send("ignore_term", {"seconds": HOUR_S}, **options),
        "read_fifo": producer.send("read_fifo", {"path": str(fifo)}, **options),
    }
    late = lateness([started(ledger, task_id) for task_id in ids.values()])
    assert all(0.0 <= seconds <= LATE_S for seconds in late), late
    for name, task_id in ids.items():
        check_timed_out(producer.wait(task_id, Status.DEAD_LETTERED, timeout=PATIENCE_S), name)
    assert [e.facts["error"] for e in ledger.notes(ids["swallow"], "swallowed")] == ["SoftTimeout"]


@pytest.mark.parametrize("again", [False, True])
def test_a_wait_in_c_code_that_the_stack_dump_ends_is_no_success(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger, again: bool
) -> None:
    """The handler goes on because its stacks were asked for, and may even return."""
    task_id = producer.send(
        "light_sleep_in_c", {"seconds": HOUR_S, "again": again}, timeout=1.0, max_attempts=1
    )
    (start,) = [started(ledger, task_id)]
    (late,) = lateness([start])
    assert 0.0 <= late <= LATE_S
    check_timed_out(producer.wait(task_id, Status.DEAD_LETTERED, timeout=PATIENCE_S), "light_sleep_in_c")
    refilled(pool, {start.pid}, timeout=2.0)


def test_a_timeout_spends_an_attempt_and_the_task_is_tried_again(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger
) -> None:
    task_id = producer.send("gil_sleep", {"seconds": HOUR_S}, timeout=0.3, max_attempts=2, retry=NO_DELAY)
    record = producer.wait(task_id, Status.DEAD_LETTERED, timeout=PATIENCE_S)
    assert record.get("last_error_class") == "TaskTimeout"
    assert record.number("crashes") == 0
    assert [e.facts["attempt"] for e in ledger.starts(task_id)] == [1, 2]
    assert [e["cause"]["verdict"] for e in record.executions()] == ["timeout", "timeout"]
    first, second = ledger.starts(task_id)
    assert first.pid != second.pid


def test_a_handler_that_ends_just_before_its_deadline_while_redis_is_away_is_neither_killed_nor_blamed(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, ledger: Ledger
) -> None:
    start_supervisor(server=fresh_redis).wait_ready()
    with Producer(fresh_redis) as producer:
        task_id = producer.send("sleep", {"seconds": 1.4}, timeout=1.6, max_attempts=1)
        start = started(ledger, task_id)
        fresh_redis.pause()
        (end,) = until(lambda: ledger.ends(task_id), PATIENCE_S, "it never ended")
        assert end.monotonic_ns / 1e9 < deadline(start), "this machine was too slow for the story"
        until(lambda: time.monotonic() > deadline(start) + 2 * LATE_S, PATIENCE_S)
        assert alive(start.pid)
        fresh_redis.resume()
        record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
    assert (record.number("attempt"), record.number("crashes")) == (1, 0)
    assert [e["outcome"] for e in record.executions()] == ["succeeded"]
    assert len(ledger.starts(task_id)) == 1
    assert alive(start.pid)


# --- soft


def test_a_handler_may_take_its_soft_timeout_for_an_advice_and_end_well(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger
) -> None:
    task_id = producer.send("tidy", {"seconds": HOUR_S}, timeout=30, soft_timeout_ms=300, max_attempts=1)
    record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
    assert len(ledger.notes(task_id, "told")) == 1
    (start,) = ledger.starts(task_id)
    (execution,) = record.executions()
    assert execution["duration_ms"] >= 300
    assert alive(start.pid)


@pytest.mark.parametrize("name", ["swallow", "async_sleep"])
def test_a_soft_timeout_is_not_caught_by_except_exception_and_fails_the_attempt(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger, name: str
) -> None:
    arguments: dict[str, Any] = {"seconds": HOUR_S} | ({"kind": "Exception"} if name == "swallow" else {})
    task_id = producer.send(name, arguments, timeout=30, soft_timeout_ms=300, max_attempts=2, retry=NO_DELAY)
    record = producer.wait(task_id, Status.DEAD_LETTERED, timeout=PATIENCE_S)
    assert record.get("last_error_class").endswith("SoftTimeout")
    assert record.number("crashes") == 0
    starts = ledger.starts(task_id)
    assert [start.facts["attempt"] for start in starts] == [1, 2]
    assert ledger.notes(task_id, "swallowed") == []
    assert all(alive(start.pid) for start in starts)


# --- who is to blame


def test_only_the_task_that_timed_out_is_blamed_and_the_held_ones_run_elsewhere(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    start_supervisor(server=redis_server, flags=["--prefetch", "4"]).wait_ready()
    hang, *held = producer.send_together(
        [("gil_sleep", {"seconds": HOUR_S}), *[("note", {})] * 3], timeout=1.5, max_attempts=1
    )
    start = started(ledger, hang)
    consumer = producer.record(hang).get("consumer")
    assert len(snapshot(redis_server.client()).held_by(consumer)) == 4
    (late,) = lateness([start])
    assert 0.0 <= late <= LATE_S
    check_timed_out(producer.wait(hang, Status.DEAD_LETTERED, timeout=PATIENCE_S), "sleep_in_c")
    for task_id in held:
        record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
        assert (record.number("attempt"), record.number("crashes")) == (1, 0)
        (again,) = ledger.starts(task_id)
        assert again.pid != start.pid
        assert again.monotonic_ns / 1e9 > deadline(start)
