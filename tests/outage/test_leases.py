"""Leases, the leader's lock and the schedule, with several supervisors on one Redis (R29 to R31)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from dtq_child.task import Status
from tests.conftest import SupervisorStarter
from tests.outage.stage import Orders, ready, seconds
from tests.support.servers import RedisServer
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until
from tests.support.witness import Witness

LOCK = "dtq:lock:scheduler"
LOCK_S = 10.0
PERIOD_S = 1.0
"""How often a supervisor that does not lead tries to."""


@contextmanager
def watching(question: Any, every: float = 0.02) -> Iterator[list[Any]]:
    """Asks again and again, in a thread, while the block runs; the answers."""
    answers: list[Any] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(every):
            answers.append(question())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def leads(pool: SupervisorProcess) -> bool:
    holder = pool.server.cli("GET", LOCK)
    return holder is not None and pool.worker().get("worker_id") == holder.decode()


def leader_first(pools: Sequence[SupervisorProcess]) -> list[SupervisorProcess]:
    """Waits until one of them leads."""
    until(lambda: any(map(leads, pools)), 10, "nobody leads")
    return sorted(pools, key=leads, reverse=True)


@pytest.mark.parametrize(("lease", "task_s"), [(1.3, 4.0), pytest.param(2.0, 20.0, marks=pytest.mark.slow)])
def test_a_task_many_times_as_long_as_its_lease_is_started_once(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    lease: float,
    task_s: float,
) -> None:
    interval = 0.6
    flags = ["--visibility-timeout", f"{lease:g}", "--heartbeat-interval", f"{interval:g}"]
    ready(*[start_supervisor(server=fresh_redis, procs=2, flags=flags) for _ in range(2)])
    ids = orders.send_many(2, "sleep", seconds=task_s)
    orders.all_started(ids)
    with watching(lambda: [pending.idle_ms for pending in orders.places().pending]) as idle:
        orders.wait(ids, task_s + 10.0, Status.SUCCEEDED)
    assert list(orders.starts(ids).values()) == [1, 1]
    assert [orders.record(task_id).number("delivery") for task_id in ids] == [1, 1]
    longest = max(ms for look in idle for ms in look)
    assert longest < 2200 * interval, f"the lease of a living task had {longest} ms without a renewal"
    print(f"longest idle: {longest} ms at a heartbeat interval of {interval:g} s")
    orders.check(witness)


@pytest.mark.slow
def test_when_the_leader_is_killed_another_leads_within_the_locks_time_and_due_tasks_run(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, orders: Orders, witness: Witness
) -> None:
    pools = ready(*[start_supervisor(server=fresh_redis, procs=1) for _ in range(2)])
    first, second = leader_first(pools)
    delayed = orders.send_many(10, "note", delay_ms=500)
    with watching(lambda: fresh_redis.cli("PTTL", LOCK)) as ttls:
        first.kill()
        died = time.monotonic()
        until(lambda: leads(second), LOCK_S + PERIOD_S + 1.0)
        moved = time.monotonic() - died
        orders.wait(delayed, 5.0, Status.SUCCEEDED)
        ran = time.monotonic() - died
    assert moved < LOCK_S + PERIOD_S
    assert ran < LOCK_S + PERIOD_S + 1.0
    assert all(ttl == -2 or 0 < ttl <= LOCK_S * 1000 for ttl in ttls), "a lock without an end"
    print(f"leads after {moved:.1f} s, due tasks run after {ran:.1f} s")
    orders.check(witness)


@pytest.mark.slow
def test_a_leader_that_stood_still_leaves_the_lock_to_its_successor(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, orders: Orders, witness: Witness
) -> None:
    pools = ready(*[start_supervisor(server=fresh_redis, procs=1) for _ in range(2)])
    first, second = leader_first(pools)
    name = second.worker()["worker_id"].encode()
    halted = time.monotonic()
    first.signal(signal.SIGSTOP)
    until(lambda: time.monotonic() - halted > LOCK_S + 2.0, LOCK_S + 5.0)
    assert fresh_redis.cli("GET", LOCK) == name
    with watching(lambda: (fresh_redis.cli("GET", LOCK), fresh_redis.cli("PTTL", LOCK))) as looks:
        first.signal(signal.SIGCONT)
        beat = orders.places().time_ms
        delayed = orders.send_many(20, "note", delay_ms=300)
        orders.wait(delayed, 5.0, Status.SUCCEEDED)
        until(lambda: int(first.worker().get("last_heartbeat", 0)) > beat, 15)
        assert first.stop() == 0
    assert {holder for holder, _ in looks} == {name}
    assert all(ttl > 0 for _, ttl in looks)
    assert fresh_redis.cli("GET", LOCK) == name, "resigned for another"
    orders.check(witness)


# -- the schedule


def test_delayed_tasks_are_never_early_and_hardly_late(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, orders: Orders, witness: Witness
) -> None:
    """Early and late by the server's clock, which wrote when each was due."""
    pools = ready(*[start_supervisor(server=fresh_redis, procs=2) for _ in range(2)])
    leader_first(pools)
    dice = Random(7)
    ids = orders.send_all("note", [{"delay_ms": dice.randrange(2000)} for _ in range(100)])
    orders.wait(ids, 10.0, Status.SUCCEEDED)
    records = [orders.record(task_id) for task_id in ids]
    promoted = sorted(_after_due(record, "queued_at_ms") for record in records)
    begun = sorted(_after_due(record, "started_at_ms") for record in records)
    assert promoted[0] >= 0, "promoted before it was due"
    assert begun[0] >= 0
    assert begun[-1] < 1000, begun
    print(f"promoted late by p50 {promoted[50]} ms, at most {promoted[-1]}; begun {begun[50]}, {begun[-1]}")
    orders.check(witness)


def _after_due(record: Any, field: str) -> int:
    return int(record.number(field)) - int(record.number("due_at_ms"))


def test_a_delay_of_several_leases_means_one_start(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, orders: Orders, witness: Witness
) -> None:
    flags = ["--visibility-timeout", "1", "--heartbeat-interval", "0.4"]
    pools = ready(*[start_supervisor(server=fresh_redis, procs=2, flags=flags) for _ in range(2)])
    ids = orders.send_many(50, "note", delay_ms=3000)
    sent = time.monotonic()
    orders.wait(ids, 12.0, Status.SUCCEEDED)
    assert orders.all_starts(ids) == {1}
    assert min(seconds(entry) for entry in orders.ledger.entries()) - sent > 2.9
    orders.check(witness)
    assert [pool.exit_code for pool in pools] == [None, None]


# -- many at once


@pytest.mark.parametrize("number", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_supervisors_that_all_start_at_once_on_an_empty_redis_run_each_task_once(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    number: int,
) -> None:
    """The first to come makes the group, from the beginning; that it is there is no error for the others."""
    ids = orders.send_many(100, "sleep", seconds=0.05)
    pools = [start_supervisor(server=fresh_redis, procs=1) for _ in range(number)]
    orders.wait(ids, 60.0, Status.SUCCEEDED)
    ready(*pools)
    assert orders.all_starts(ids) == {1}
    assert [pool.exit_code for pool in pools] == [None] * number
    orders.check(witness)
