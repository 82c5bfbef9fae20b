"""A Redis at maxmemory: producers are refused, and what was accepted before ends as ever (R13)."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtq_child.errors import RedisOutOfMemory
from dtq_child.retry import RetryPolicy
from dtq_child.task import Status
from tests.conftest import SupervisorStarter
from tests.outage.stage import Orders, Pool, work_again
from tests.support.servers import RedisServer
from tests.support.waiting import until
from tests.support.witness import Witness

SOON = RetryPolicy(base_s=0.1, factor=1.0, cap_s=1.0, jitter=0.0).to_json()
LIMIT_S = 20.0


def fill(server: RedisServer) -> None:
    """From now on every write that may be refused is."""
    server.cli("CONFIG", "SET", "maxmemory", "1")


def relieve(server: RedisServer) -> None:
    server.cli("CONFIG", "SET", "maxmemory", "0")


@dataclass(frozen=True, slots=True)
class Mixed:
    """Tasks of every kind."""

    good: list[str]
    retried: list[str]
    failed: list[str]
    delayed: list[str]
    poison: list[str]
    crashed: str

    @classmethod
    def of(cls, orders: Orders, folder: Path) -> Mixed:
        return cls(
            good=orders.send_many(40, "note", value="kept or not"),
            retried=orders.send_many(10, "fail_times", n=1, max_attempts=2, retry=SOON),
            failed=orders.send_many(5, "fail", max_attempts=1),
            delayed=orders.send_many(20, "note", delay_ms=1500),
            poison=orders.send_many(2, "kill_self", max_crashes=2),
            crashed=orders.send("crash_once", path=str(folder / "crashed")),
        )

    def end_as_ever(self, orders: Orders) -> None:
        succeeded = [*self.good, *self.retried, *self.delayed, self.crashed]
        orders.wait(succeeded, LIMIT_S, Status.SUCCEEDED)
        orders.wait([*self.failed, *self.poison], LIMIT_S, Status.DEAD_LETTERED)
        starts = orders.starts(orders.accepted)
        once = [*self.good, *self.failed, *self.delayed]
        assert {starts[task_id] for task_id in once} == {1}
        assert {starts[task_id] for task_id in [*self.retried, *self.poison, self.crashed]} == {2}
        classes = {orders.record(task_id).get("last_error_class") for task_id in self.poison}
        assert classes == {"PoisonTask"}
        assert len(orders.places().dead_letters) == len(self.failed) + len(self.poison)


def test_while_redis_is_full_producers_are_refused_and_everything_accepted_ends_as_ever(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    supervisor = start_supervisor(server=fresh_redis, procs=3).wait_ready()
    gate = tmp_path / "gate"
    held = orders.send_many(3, "wait_for_file", path=str(gate))
    orders.all_started(held)
    mixed = Mixed.of(orders, tmp_path)
    fill(fresh_redis)
    for name in ("note", "sleep"):
        with pytest.raises(RedisOutOfMemory):
            orders.send(name)
    with pytest.raises(RedisOutOfMemory):
        orders.send("note", delay_ms=1000)
    gate.touch()
    orders.wait(held, 10.0, Status.SUCCEEDED)
    mixed.end_as_ever(orders)
    assert "refused to store it" in orders.record(mixed.good[0]).get("result_unavailable")
    orders.check(witness)

    relieve(fresh_redis)
    work_again([Pool(supervisor)], orders, tmp_path, time.monotonic())
    stored = orders.send("note", value=7)
    orders.wait([stored], 5.0, Status.SUCCEEDED)
    assert orders.result(stored) == 7
    orders.check(witness)


def test_a_supervisor_that_starts_on_a_full_redis_drains_it(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    """No group was made yet, no worker is known, no lock held: nothing of that is refused."""
    mixed = Mixed.of(orders, tmp_path)
    fill(fresh_redis)
    supervisor = start_supervisor(server=fresh_redis, procs=3).wait_ready()
    mixed.end_as_ever(orders)
    orders.check(witness)
    assert supervisor.stop() == 0


def test_what_a_dead_supervisor_had_is_taken_over_while_redis_is_full(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
) -> None:
    flags = ["--visibility-timeout", "1.5", "--heartbeat-interval", "0.5"]
    dies = start_supervisor(server=fresh_redis, procs=2, flags=flags).wait_ready()
    ids = orders.send_many(2, "hang_first", seconds=60.0)
    orders.all_started(ids)
    fill(fresh_redis)
    dies.kill()
    start_supervisor(server=fresh_redis, procs=2, flags=flags).wait_ready()
    orders.wait(ids, LIMIT_S, Status.SUCCEEDED)
    assert {orders.record(task_id).number("crashes") for task_id in ids} == {1}
    orders.check(witness)


def test_a_running_and_a_waiting_task_can_be_cancelled_while_redis_is_full(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
) -> None:
    supervisor = start_supervisor(server=fresh_redis, procs=1).wait_ready()
    running, waiting = orders.send("sleep", seconds=60.0), orders.send("note")
    child = orders.started(running).pid
    fill(fresh_redis)
    assert [orders.broker.cancel(task_id) for task_id in (running, waiting)] == ["stopping", "cancelled"]
    until(lambda: orders.ledger.notes(running, "raised"), 5.0)
    assert orders.statuses([running, waiting]) == {Status.CANCELLED: 2}
    assert supervisor.child_pids() == [child]
    assert not orders.ledger.starts(waiting)
    assert witness.endings() == {running: 1, waiting: 1}
    os.kill(child, signal.SIGKILL)
    until(lambda: supervisor.child_pids() not in ([], [child]), 5.0)
    relieve(fresh_redis)
    work_again([Pool(supervisor.wait_ready())], orders, Path(orders.ledger.path.parent), time.monotonic())
