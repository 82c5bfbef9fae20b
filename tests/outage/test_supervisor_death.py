"""A supervisor that is killed or stopped: its tasks run again elsewhere, no two executions at a time (R7)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dtq_child.task import Status
from tests.conftest import SupervisorStarter
from tests.outage.stage import Orders, ready, seconds
from tests.support.processes import alive, stopped
from tests.support.servers import RedisServer
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until
from tests.support.witness import Witness

VISIBILITY_S = 3.0
SHORT_LEASES = ["--visibility-timeout", f"{VISIBILITY_S:g}", "--heartbeat-interval", "1"]
PROOF_S = 2.0
"""A supervisor believes its own hearing after a heartbeat interval and a second (R30)."""


def kill(pool: SupervisorProcess) -> float:
    """SIGKILL to the supervisor alone; when it was dead, by time.monotonic()."""
    pool.kill()
    return time.monotonic()


def gone_at(pids: list[int], timeout: float) -> dict[int, float]:
    """Waits until all have ended. When each was seen to have."""
    ends: dict[int, float] = {}

    def all_gone() -> bool:
        ends.update({pid: time.monotonic() for pid in pids if pid not in ends and not alive(pid)})
        return len(ends) == len(pids)

    until(all_gone, timeout, lambda: f"they live on: {set(pids) - set(ends)}", interval=0.02)
    return ends


def test_what_a_killed_supervisor_had_in_flight_runs_again_beside_a_saturated_one(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, orders: Orders, witness: Witness
) -> None:
    """Ten tasks, three of them stuck in C code. None has two executions at any time, each is over once."""
    dies = start_supervisor(server=fresh_redis, procs=10, flags=SHORT_LEASES).wait_ready(30)
    stuck = orders.send_many(3, "hang_first", seconds=60.0, stuck=True)
    lost = stuck + orders.send_many(7, "hang_first", seconds=60.0)
    orders.all_started(lost)
    other = start_supervisor(server=fresh_redis, procs=8, flags=SHORT_LEASES).wait_ready(30)
    shortest = 0.6
    backlog = orders.send_many(11 * 8, "sleep", seconds=shortest)
    ready = time.monotonic()
    until(lambda: time.monotonic() - ready > PROOF_S, 5)
    children = dies.child_pids()

    died = kill(dies)
    ended = gone_at(children, VISIBILITY_S + 1.0)
    orders.all_started(lost, times=2, timeout=VISIBILITY_S + 10.0)
    for task_id in lost:
        first, again = orders.ledger.starts(task_id)
        assert first.pid in children
        # A death is seen up to a look of this test later than it was.
        assert seconds(again) > ended[first.pid] - 0.5, "begun while the first execution still lived"
        assert seconds(again) - died < VISIBILITY_S + 2.0 + shortest
    orders.wait(lost, 10.0, Status.SUCCEEDED)
    assert {orders.result(task_id) for task_id in lost} == {2}
    assert {orders.record(task_id).number("crashes") for task_id in lost} == {1}
    orders.wait(backlog, 30.0, Status.SUCCEEDED)
    orders.check(witness)
    assert other.exit_code is None


def test_its_idle_children_end_at_once_and_its_busy_ones_after_their_task(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=fresh_redis, procs=3).wait_ready()
    gate = tmp_path / "gate"
    running = orders.send("wait_for_file", path=str(gate))
    busy = orders.started(running).pid
    idle = [pid for pid in pool.child_pids() if pid != busy]

    died = kill(pool)
    assert max(gone_at(idle, 3.0).values()) - died < 1.0
    assert alive(busy)
    waiting = orders.send_many(5, "note")
    gate.touch()
    gone_at([busy], 3.0)
    assert orders.record(running).status == Status.SUCCEEDED
    assert orders.statuses(waiting) == {Status.QUEUED: 5}
    assert {found.task_id for found in orders.places().undelivered} == set(waiting)
    assert witness.endings() == {running: 1}


@pytest.mark.parametrize(
    "template_too", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "with its template"]
)
def test_nothing_new_is_begun_after_its_death(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, orders: Orders, template_too: bool
) -> None:
    """Under load, when each child claims many times a second: what came back too late was not begun."""
    pool = start_supervisor(server=fresh_redis, procs=4, flags=SHORT_LEASES).wait_ready()
    backlog = orders.send_many(300, "sleep", seconds=0.02)
    until(lambda: len(orders.ledger.entries()) > 50, 10)
    children, template = pool.child_pids(), pool.template().pid

    if template_too:
        os.kill(template, signal.SIGKILL)
    died = kill(pool)
    gone_at([*children, template], VISIBILITY_S + 1.0)
    late = [entry.pid for entry in orders.ledger.entries() if entry.word == "start" and seconds(entry) > died]
    assert len(late) == len(set(late)), "a child begins at most the task whose claim had already come back"
    places = orders.places(backlog)
    assert set(places.where(backlog[-1])) == {"undelivered"}
    assert places.homeless(backlog) == set()

    # What they had claimed and not begun comes back with its lease.
    start_supervisor(server=fresh_redis, procs=4, flags=SHORT_LEASES).wait_ready()
    orders.wait(backlog, VISIBILITY_S + PROOF_S + 20.0, Status.SUCCEEDED)
    orders.check()


def test_killed_with_its_template_its_children_end_by_themselves_and_settle_what_they_had(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=fresh_redis, procs=3).wait_ready()
    gate = tmp_path / "gate"
    running = orders.send("wait_for_file", path=str(gate))
    busy = orders.started(running).pid
    children = pool.child_pids()

    pool.template().kill()
    died = kill(pool)
    idle = [pid for pid in children if pid != busy]
    assert max(gone_at(idle, 3.0).values()) - died < 1.0
    waiting = orders.send_many(3, "note")
    gate.touch()
    gone_at([busy], 3.0)
    assert orders.record(running).status == Status.SUCCEEDED
    assert not any(alive(pid) for pid in children)
    assert {found.task_id for found in orders.places().undelivered} == set(waiting)
    assert witness.endings() == {running: 1}


# -- stopped, not dead


class Frozen:
    """A supervisor and all below it, stopped as a suspended machine is."""

    def __init__(self, pool: SupervisorProcess) -> None:
        self.pids = [process.pid for process in pool.tree()]
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(stopped(pid) for pid in self.pids), 5)

    def thaw(self) -> None:
        for pid in reversed(self.pids):
            os.kill(pid, signal.SIGCONT)


def test_a_machine_that_stood_still_as_a_whole_goes_on_where_it_was(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, orders: Orders, witness: Witness
) -> None:
    """Two supervisors and their Redis, suspended together for longer than a lease: the first to wake up must
    not take the other one for dead."""
    first, second = ready(
        *[start_supervisor(server=fresh_redis, procs=2, flags=SHORT_LEASES) for _ in range(2)]
    )
    pids = [first.child_pids(), second.child_pids()]
    ids = orders.send_many(4, "sleep", seconds=VISIBILITY_S + 3.0)
    orders.all_started(ids)
    proven = time.monotonic()
    until(lambda: time.monotonic() - proven > PROOF_S, 5)
    frozen = [Frozen(first), Frozen(second)]
    fresh_redis.pause()
    halted = time.monotonic()
    until(lambda: time.monotonic() - halted > VISIBILITY_S + 0.5, 10)
    fresh_redis.resume()
    for machine in frozen:
        machine.thaw()
    orders.wait(ids, 15.0, Status.SUCCEEDED)
    assert orders.all_starts(ids) == {1}
    records = [orders.record(task_id) for task_id in ids]
    assert {(record.number("crashes"), record.number("delivery")) for record in records} == {(0, 1)}
    assert [first.child_pids(), second.child_pids()] == pids
    orders.check(witness)


def test_an_outcome_that_wakes_up_after_its_lease_is_refused(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    """The whole machine stood still. Another one has begun the tasks again; one of them it has ended, too."""
    sleeper = start_supervisor(server=fresh_redis, procs=2, flags=SHORT_LEASES).wait_ready()
    gate = tmp_path / "gate"
    over = orders.send("hang_first", seconds=1.0)
    running = orders.send("hang_first", seconds=1.0, then=str(gate))
    orders.all_started([over, running])
    frozen = Frozen(sleeper)
    other = start_supervisor(server=fresh_redis, procs=2, flags=SHORT_LEASES).wait_ready()
    orders.all_started([over, running], times=2, timeout=VISIBILITY_S + PROOF_S + 5.0)
    orders.wait([over], 5.0, Status.SUCCEEDED)
    (held,) = orders.places().pending

    frozen.thaw()
    until(lambda: witness.refusals() == {over: 1, running: 1}, 10.0, lambda: f"refused: {witness.refusals()}")
    thawed = orders.places().time_ms
    until(lambda: int(sleeper.worker().get("last_heartbeat", 0)) > thawed, 5.0, "no beat after it woke up")
    (still,) = orders.places().pending
    assert (still.entry_id, still.consumer) == (held.entry_id, held.consumer), "taken back from the newer one"
    assert orders.record(running).status == Status.RUNNING
    gate.touch()
    orders.wait([over, running], 5.0, Status.SUCCEEDED)
    assert [orders.result(task_id) for task_id in (over, running)] == [2, 2]
    assert [orders.record(task_id).number("delivery") for task_id in (over, running)] == [2, 2]
    orders.check(witness)
    told = [line for line in sleeper.log().splitlines() if "dtq.child" in line and "warning" in line]
    assert [sum(task_id in line for line in told) for task_id in (over, running)] == [1, 1]
    assert (sleeper.exit_code, other.exit_code) == (None, None)


def test_a_handler_that_wakes_up_after_its_lease_is_ended_and_its_task_left_alone(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    sleeper = start_supervisor(server=fresh_redis, procs=1, flags=SHORT_LEASES).wait_ready()
    gate = tmp_path / "gate"
    task_id = orders.send("hang_first", seconds=60.0, then=str(gate))
    first = orders.started(task_id).pid
    frozen = Frozen(sleeper)
    start_supervisor(server=fresh_redis, procs=1, flags=SHORT_LEASES).wait_ready()
    orders.started(task_id, times=2, timeout=VISIBILITY_S + PROOF_S + 5.0)
    (held,) = orders.places().pending

    frozen.thaw()
    until(lambda: not alive(first), 5.0, "two execute it")
    until(lambda: sleeper.child_pids() not in ([], [first]), 5.0)
    (still,) = orders.places().pending
    assert (still.entry_id, still.consumer) == (held.entry_id, held.consumer)
    gate.touch()
    orders.wait([task_id], 5.0, Status.SUCCEEDED)
    record = orders.record(task_id)
    assert (orders.result(task_id), record.number("delivery"), record.number("crashes")) == (2, 2, 1)
    orders.check(witness)


@pytest.mark.slow
def test_while_the_supervisor_is_stopped_its_children_finish_and_begin_nothing(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, orders: Orders, witness: Witness
) -> None:
    """Nobody would enforce a timeout: so nobody begins anything 5 s after its main loop ticked last."""
    pool = start_supervisor(server=fresh_redis, procs=2).wait_ready()
    pids = [pool.pid, *pool.child_pids()]
    backlog = orders.send_many(80, "sleep", seconds=0.2)
    until(lambda: len(orders.ledger.entries()) > 3, 10)

    halted = time.monotonic()
    pool.signal(signal.SIGSTOP)
    until(lambda: time.monotonic() - halted > 7.0, 10.0)
    starts = [seconds(entry) for entry in orders.ledger.entries() if entry.word == "start"]
    assert 3.0 < max(starts) - halted < 5.5
    ended = {entry.task_id for entry in orders.ledger.entries() if entry.word == "end"}
    assert len(starts) == len(ended)
    assert orders.statuses(ended) == {Status.SUCCEEDED: len(ended)}
    assert orders.places().pending == []
    assert orders.places(backlog).homeless(backlog) == set()

    pool.signal(signal.SIGCONT)
    orders.wait(backlog, 20.0, Status.SUCCEEDED)
    orders.check(witness)
    assert [pool.pid, *pool.child_pids()] == pids
