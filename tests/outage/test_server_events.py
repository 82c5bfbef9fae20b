"""What an operator can do to a Redis in use: the same processes go on, what was not touched is not lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from dtq_child.retry import RetryPolicy
from dtq_child.task import Status
from tests.conftest import ServerStarter, SupervisorStarter
from tests.outage.stage import AGAIN_S, Orders, Pool, paced, ready, work_again
from tests.support.ledger import Ledger
from tests.support.servers import RedisServer
from tests.support.waiting import until
from tests.support.witness import Witness

SOON = RetryPolicy(base_s=0.1, factor=1.0, cap_s=1.0, jitter=0.0).to_json()
BAND = "dtq:stream:default:p5"
LINES_AT_ONCE = 40
"""What a fault costs in log lines, however short it is: each duty and child tells of its begin and end."""
LINES_A_SECOND = 4


@pytest.fixture
def pool(start_supervisor: SupervisorStarter, fresh_redis: RedisServer) -> Pool:
    return Pool(start_supervisor(server=fresh_redis, procs=3).wait_ready())


class Quiet:
    """Counts the lines that a fault makes the supervisor and its children write."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._begun = pool, time.monotonic()

    def check(self) -> None:
        lines = self._pool.said()
        most = LINES_AT_ONCE + LINES_A_SECOND * (time.monotonic() - self._begun)
        assert len(lines) < most, f"{len(lines)} lines:\n" + "\n".join(lines[:200])


@pytest.fixture
def quiet(pool: Pool) -> Iterator[Quiet]:
    counted = Quiet(pool)
    yield counted
    counted.check()


# -- the data go


@pytest.mark.usefixtures("quiet")
def test_a_restart_that_keeps_the_data_costs_nothing(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    running = orders.send("wait_for_file", path=str(gate))
    orders.started(running)
    delayed = orders.send_many(20, "note", delay_ms=1000)
    fresh_redis.restart(keep=True)
    back = time.monotonic()
    gate.touch()
    orders.wait([running, *delayed], AGAIN_S, Status.SUCCEEDED)
    work_again([pool], orders, tmp_path, back)
    assert len(orders.ledger.starts(running)) == 1
    orders.check()


@pytest.mark.usefixtures("quiet")
def test_flushed_while_all_children_are_idle(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, tmp_path: Path
) -> None:
    for _ in range(3):
        fresh_redis.cli("FLUSHALL")
        work_again([pool], orders, tmp_path, time.monotonic())
    orders.check(ids=orders.accepted[-100:])


@pytest.mark.usefixtures("quiet")
def test_flushed_while_children_are_busy(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, tmp_path: Path
) -> None:
    """What was running ends unheard, and is not begun again."""
    gate = tmp_path / "gate"
    running = orders.send_many(2, "wait_for_file", path=str(gate))
    orders.all_started(running)
    lost = orders.send_many(20, "sleep", seconds=0.5)
    fresh_redis.cli("FLUSHALL")
    flushed = time.monotonic()
    gate.touch()
    orders.accepted.clear()
    work_again([pool], orders, tmp_path, flushed)
    orders.check()
    assert sum(orders.starts(lost).values()) <= 1
    assert list(orders.starts(running).values()) == [1, 1]


# -- under load


@pytest.mark.usefixtures("quiet")
def test_scripts_flushed_again_and_again_under_load(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, witness: Witness, tmp_path: Path
) -> None:
    for _ in paced(0.2, 3.0):
        fresh_redis.cli("SCRIPT", "FLUSH")
        orders.send_many(25, "note")
        orders.send("note", delay_ms=100)
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.wait(orders.accepted, 10.0, Status.SUCCEEDED)
    orders.check(witness)
    assert orders.all_starts(orders.accepted) == {1}


@pytest.mark.usefixtures("quiet")
def test_every_connection_killed_again_and_again_under_load(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, tmp_path: Path
) -> None:
    """A reply may be lost with its connection. Then the task is taken up again, and counts once."""
    for _ in paced(0.3, 3.6):
        fresh_redis.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        orders.send_many(25, "note")
        orders.send("note", delay_ms=100)
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.wait(orders.accepted, 20.0, Status.SUCCEEDED)
    orders.check()


# -- one thing is broken


@pytest.mark.usefixtures("quiet")
def test_a_group_destroyed_under_load_is_made_anew_and_nothing_is_lost(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, witness: Witness, tmp_path: Path
) -> None:
    orders.send_many(300, "sleep", seconds=0.01)
    until(lambda: len(orders.ledger.entries()) > 20, 10)
    for _ in paced(0.3, 0.9):
        fresh_redis.cli("XGROUP", "DESTROY", BAND, "workers")
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.wait(orders.accepted, 10.0, Status.SUCCEEDED)
    orders.check(witness)


@pytest.mark.usefixtures("quiet")
def test_a_group_destroyed_under_long_tasks_ends_each_of_them_once(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, witness: Witness, tmp_path: Path
) -> None:
    """Nobody can tell that they are running but their supervisor: it says so before others look, or they are
    begun once more and only the newer execution counts."""
    ids = orders.send_many(2, "sleep", seconds=1.5)
    orders.all_started(ids)
    fresh_redis.cli("XGROUP", "DESTROY", BAND, "workers")
    more = orders.send_many(10, "note")
    orders.wait([*ids, *more], 20.0, Status.SUCCEEDED)
    orders.check(witness)


@pytest.mark.usefixtures("quiet")
def test_a_band_of_the_wrong_type_holds_up_no_other(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, witness: Witness, tmp_path: Path
) -> None:
    fresh_redis.cli("SET", "dtq:stream:default:p7", "no stream")
    work_again([pool], orders, tmp_path, time.monotonic())
    retried = orders.send("fail_times", n=1, max_attempts=3, retry=SOON)
    crashed = orders.send("crash_once", path=str(tmp_path / "crashed"))
    orders.wait([retried, crashed], 10.0, Status.SUCCEEDED)
    assert any("p7" in line for line in pool.said())
    fresh_redis.cli("DEL", "dtq:stream:default:p7")
    mended = orders.send_many(10, "note", priority=7)
    orders.wait(mended, AGAIN_S, Status.SUCCEEDED)
    orders.check(witness)


@pytest.mark.usefixtures("quiet")
def test_a_waiting_task_whose_record_has_the_wrong_type_is_put_aside_once(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = orders.send_many(3, "wait_for_file", path=str(gate))
    orders.all_started(held)
    broken = orders.send("note")
    fresh_redis.cli("DEL", f"dtq:task:{broken}")
    fresh_redis.cli("SET", f"dtq:task:{broken}", "no hash")
    good = orders.send_many(20, "note")
    gate.touch()
    orders.wait([*held, *good], 10.0, Status.SUCCEEDED)
    letters = buried(orders)
    assert [letter[b"raw:task_id"].decode() for letter in letters] == [broken]
    assert b"cannot be read" in letters[0][b"last_error"]
    assert not orders.ledger.starts(broken)
    assert orders.redis.get(f"dtq:task:{broken}") == b"no hash"
    orders.redis.delete(f"dtq:task:{broken}")
    orders.accepted.remove(broken)
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.check()


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_a_running_task_whose_record_has_the_wrong_type_is_put_aside_once(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    broken = orders.send("wait_for_file", path=str(gate))
    orders.started(broken)
    fresh_redis.cli("DEL", f"dtq:task:{broken}")
    fresh_redis.cli("SET", f"dtq:task:{broken}", "no hash")
    gate.touch()
    letters = until(lambda: buried(orders), 15.0, "still pending")
    assert [letter[b"raw:task_id"].decode() for letter in letters] == [broken]
    assert len(orders.ledger.starts(broken)) == 1
    orders.redis.delete(f"dtq:task:{broken}")
    orders.accepted.remove(broken)
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.check()


def buried(orders: Orders) -> list[dict[bytes, bytes]]:
    found: list[tuple[bytes, dict[bytes, bytes]]] = orders.redis.xrange("dtq:stream:dead-letter")  # type: ignore[assignment]
    return [fields for _, fields in found]


@pytest.mark.usefixtures("quiet")
def test_a_schedule_of_the_wrong_type_is_waited_out(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, witness: Witness, tmp_path: Path
) -> None:
    """A failed task has nowhere to wait for its next attempt: its child keeps the outcome until it has."""
    fresh_redis.cli("SET", "dtq:retry:schedule", "no zset")
    failing = orders.send("fail_times", n=1, max_attempts=3, retry=SOON)
    orders.started(failing)
    others = orders.send_many(20, "note")
    orders.wait(others, 5.0, Status.SUCCEEDED)
    broken = time.monotonic()
    until(lambda: time.monotonic() - broken > 1.5, 5)
    assert orders.record(failing).status == Status.RUNNING
    fresh_redis.cli("DEL", "dtq:retry:schedule")
    mended = time.monotonic()
    orders.wait([failing], AGAIN_S, Status.SUCCEEDED)
    work_again([pool], orders, tmp_path, mended)
    assert orders.result(failing) == 2
    orders.check(witness)


def test_a_redis_that_comes_and_goes(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, tmp_path: Path
) -> None:
    for _ in range(3):
        fresh_redis.restart(keep=True)
    back = time.monotonic()
    work_again([pool], orders, tmp_path, back)
    orders.check()


@pytest.mark.usefixtures("quiet")
def test_keys_of_the_wrong_type_that_are_only_hints_or_lists_of_names_stop_no_work(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, witness: Witness, tmp_path: Path
) -> None:
    names = ("workers", "queues", "task_types", "cancelled", "tasks:recent", "hint", "bell:q:default")
    for name in names:
        fresh_redis.cli("DEL", f"dtq:{name}")
        fresh_redis.cli("SET", f"dtq:{name}", "something else")
    work_again([pool], orders, tmp_path, time.monotonic())
    retried = orders.send("fail_times", n=1, max_attempts=2, retry=SOON)
    orders.wait([retried], AGAIN_S, Status.SUCCEEDED)
    fresh_redis.cli("DEL", *(f"dtq:{name}" for name in names))
    orders.check(witness)


# -- the server itself


def test_a_redis_killed_under_load_goes_on_from_its_file(
    start_supervisor: SupervisorStarter, start_redis: ServerStarter, ledger: Ledger, tmp_path: Path
) -> None:
    server = start_redis(persist=True)
    pool = Pool(start_supervisor(server=server, procs=3).wait_ready())
    with Orders(server, ledger) as orders:
        for _ in range(3):
            orders.send_many(100, "note")
            orders.send_many(10, "note", delay_ms=300)
            orders.all_started(orders.accepted[-110:-90])
            server.kill()
            server.start()
        work_again([pool], orders, tmp_path, time.monotonic())
        orders.wait(orders.accepted, 10.0, Status.SUCCEEDED)
        orders.check()


@pytest.mark.slow
def test_a_redis_that_stands_still_hears_late_what_was_given_up(
    start_supervisor: SupervisorStarter,
    fresh_redis: RedisServer,
    orders: Orders,
    witness: Witness,
    tmp_path: Path,
) -> None:
    """It stood for longer than a lease and longer than anybody waits for a reply. Then it executes what its
    sockets had taken in, claims and outcomes too, whose senders have long asked anew."""
    flags = ["--visibility-timeout", "3", "--heartbeat-interval", "1"]
    supervisors = [start_supervisor(server=fresh_redis, procs=3, flags=flags) for _ in range(2)]
    pools = [Pool(supervisor) for supervisor in ready(*supervisors)]
    long = orders.send_many(2, "sleep", seconds=11.0)
    orders.all_started(long)
    short = orders.send_many(400, "sleep", seconds=0.02)
    orders.all_started(short[:40])
    fresh_redis.pause()
    halted = time.monotonic()
    until(lambda: time.monotonic() - halted > 8.0, 10.0, interval=0.1)
    fresh_redis.resume()
    resumed = time.monotonic()
    until(lambda: orders.statuses(short) == {Status.SUCCEEDED: 400}, 30.0, interval=0.1)
    print(f"all short ones are over {time.monotonic() - resumed:.1f} s after it went on")
    orders.wait(long, 20.0, Status.SUCCEEDED)
    assert list(orders.starts(long).values()) == [1, 1]
    assert {orders.record(task_id).number("crashes") for task_id in orders.accepted} == {0}
    for pool in pools:
        pool.is_the_same()
    orders.check(witness)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("fault", ["maxclients", "requirepass"])
def test_a_redis_that_lets_nobody_in_is_waited_for(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, witness: Witness, tmp_path: Path, fault: str
) -> None:
    """Too many clients, or a password that was set and not told: at the start refused, later waited out."""
    running = orders.send("sleep", seconds=1.0)
    orders.started(running)
    before = fresh_redis.cli("CONFIG", "GET", fault)[1]
    admin = fresh_redis.client()
    admin.ping()
    fresh_redis.cli("CONFIG", "SET", fault, "1")
    admin.client_kill_filter(_type="normal", skipme=True)
    locked = time.monotonic()
    until(lambda: time.monotonic() - locked > 3.0, 5.0)
    admin.config_set(fault, before.decode())
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.wait([running], 5.0, Status.SUCCEEDED)
    orders.check(witness)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_a_redis_busy_with_somebody_elses_script_is_waited_for(
    pool: Pool, fresh_redis: RedisServer, orders: Orders, witness: Witness, tmp_path: Path
) -> None:
    running = orders.send("sleep", seconds=0.5)
    orders.started(running)
    fresh_redis.cli("CONFIG", "SET", "lua-time-limit", "100")
    with pytest.raises(redis.TimeoutError):
        fresh_redis.cli("EVAL", "while true do end", 0, timeout=2.5)
    fresh_redis.cli("SCRIPT", "KILL")
    work_again([pool], orders, tmp_path, time.monotonic())
    orders.wait([running], 5.0, Status.SUCCEEDED)
    orders.check(witness)
