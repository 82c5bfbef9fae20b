"""A real child against a real Redis; the test stands in for the supervisor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtq_child.broker import Actor
from dtq_child.scoreboard import Order, Phase
from dtq_child.turns import Want
from tests.process.pool_stand_in import StandIn
from tests.support.processes import look
from tests.support.proxy import FaultProxy
from tests.support.servers import RedisServer
from tests.support.waiting import until

Starter = Callable[..., StandIn]


@pytest.fixture
def stand_in(any_redis: RedisServer, tmp_path: Path) -> Iterator[Starter]:
    started: list[StandIn] = []

    def start(**options: Any) -> StandIn:
        started.append(StandIn(any_redis, tmp_path, **options))
        return started[-1]

    yield start
    for one in started:
        one.__exit__()


def pending(pool: StandIn, queue: str = "default") -> int:
    """Entries in anybody's hands, over all bands."""
    total = 0
    for stream in pool.keys.bands(queue):
        if pool.server.cli("EXISTS", stream):
            reply = pool.server.cli("XPENDING", stream, "workers")
            total += int(reply[0])
    return total


def until_it_has_looked_around(pool: StandIn) -> None:
    """Each look of a child that waits, at its flags or at a bell, ends in its going to sleep again."""
    child = psutil.Process(pool.row().pid)
    before = child.num_ctx_switches().voluntary
    until(lambda: child.num_ctx_switches().voluntary > before + 8, 10)


def title(pid: int) -> str:
    process = look(pid)
    assert process is not None
    return process.title


# -- working


def test_a_busy_child_needs_one_round_trip_a_task(
    stand_in: Starter, start_proxy: Callable[[int], FaultProxy], any_redis: RedisServer
) -> None:
    proxy = start_proxy(any_redis.port)
    pool = stand_in(url=proxy.url)
    handles = pool.app.enqueue_many([pool.app.call("noop") for _ in range(500)])
    pool.start(wait=False)
    pool.until_ended(handles[-1])
    assert all(handle.status() == "succeeded" for handle in handles)
    assert proxy.round_trips <= 1.1 * len(handles)
    until(lambda: pool.row().phase is Phase.READY, 5)
    counters = pool.row().counters
    assert (counters.processed, counters.failed, counters.retried) == (500, 0, 0)


def test_a_result_a_failure_and_a_dead_letter_are_told_in_their_records(stand_in: Starter) -> None:
    pool = stand_in()
    good, bad = pool.send("note", value={"deep": [1, 2.5, "ü"]}), pool.send("fail", message="told to")
    wrong, unknown = pool.send("note", no_such=1), pool.send("nobody.knows")
    dead = pool.send("reject")
    pool.start()
    pool.until_ended(good)
    assert good.result(timeout=5) == {"deep": [1, 2.5, "ü"]}
    pool.until_ended(bad, "retry_scheduled")
    pool.until_ended(wrong, "dead_lettered")
    pool.until_ended(unknown, "retry_scheduled")
    pool.until_ended(dead, "dead_lettered")
    record = bad.record()
    assert record is not None
    assert record.get("last_error_class") == "tests.support.handlers.ProbeFailure"
    assert "in fail" in record.get("traceback")
    (execution,) = record.executions()
    assert execution["pid"] == pool.row().pid
    assert execution["duration_ms"] >= 0
    until(lambda: pool.row().phase is Phase.READY, 5)
    counters = pool.row().counters
    assert (counters.processed, counters.failed, counters.retried, counters.unknown_types) == (4, 2, 1, 1)
    assert "nobody.knows" in pool.log()


def test_an_idle_child_picks_up_at_once(stand_in: Starter) -> None:
    pool = stand_in(block_ms=5000)
    pool.start()
    waits: list[float] = []
    for _ in range(30):
        until(lambda: pool.row().phase is Phase.READY, 5)
        sent = time.monotonic_ns()
        handle = pool.send("note")
        pool.until_ended(handle)
        (start,) = [e for e in pool.ledger.entries() if (e.task_id, e.word) == (handle.id, "start")]
        waits.append((start.monotonic_ns - sent) / 1e6)
    assert sorted(waits)[15] < 100, waits


def test_an_idle_child_costs_next_to_nothing(stand_in: Starter) -> None:
    pool = stand_in()
    child = pool.start()
    process = psutil.Process(child.pid)
    before, started = process.cpu_times(), time.monotonic()
    asked = pool.row().counters.claims
    until(lambda: pool.row().counters.claims >= asked + 4, 10)
    used = process.cpu_times().user + process.cpu_times().system - before.user - before.system
    assert used < 0.1 * (time.monotonic() - started)


def test_the_title_says_what_the_child_is_doing(stand_in: Starter, tmp_path: Path) -> None:
    pool = stand_in()
    pid = pool.start().pid
    until(lambda: title(pid) == "dtq-child[0] g1: idle", 5, lambda: title(pid))
    handle = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(lambda: title(pid) == f"dtq-child[0] g1: wait_for_file {handle.id[-8:]}", 5, lambda: title(pid))
    (tmp_path / "go").touch()
    until(lambda: title(pid) == "dtq-child[0] g1: idle", 5, lambda: title(pid))


def test_a_paused_queue_is_left_alone_and_taken_up_again_at_resume(stand_in: Starter) -> None:
    pool = stand_in(queues=("default", "other"), block_ms=5000)
    pool.broker.pause("other", Actor("test"))
    pool.start()
    held, free = pool.send("note", queue="other"), pool.send("note")
    pool.until_ended(free)
    assert pool.status(held) == "queued"
    pool.broker.resume("other", Actor("test"))
    pool.until_ended(held, timeout=3)


def test_higher_bands_come_first(stand_in: Starter) -> None:
    pool = stand_in()
    handles = [pool.app.enqueue("note", {}, priority=priority) for priority in (0, 5, 9, 3)]
    pool.start()
    for handle in handles:
        pool.until_ended(handle)
    order = [entry.task_id for entry in pool.ledger.entries() if entry.word == "start"]
    assert order == [handles[at].id for at in (2, 1, 3, 0)]


def test_a_band_of_the_wrong_type_is_passed_over_and_told_once(stand_in: Starter) -> None:
    pool = stand_in(block_ms=20)
    pool.server.cli("SET", pool.keys.stream("default", 9), "no stream")
    pool.start()
    pool.until_ended(pool.send("note"))
    asked = pool.row().counters.claims
    until(lambda: pool.row().counters.claims > asked + 3, 5)
    assert pool.log().count("WRONGTYPE") == 1


# -- the park


class Taken:
    """An entry in the hands of another child of the same supervisor, to be handed back to that supervisor."""

    def __init__(self, pool: StandIn) -> None:
        self.handle = pool.send("note")
        self._turns = pool.turns(7)
        reply = self._turns.turn(None, Want())
        assert reply.claimed is not None
        self._token = reply.claimed.token

    def park(self) -> None:
        self._turns.release([self._token], to_anyone=False)
        self._turns.link.close()


def silence(pool: StandIn) -> None:
    pool.server.cli("DEL", pool.keys.bell_worker(pool.worker_id), pool.keys.bell_queue("default"))


def test_the_park_is_looked_at_when_the_supervisors_bell_rings(stand_in: Starter) -> None:
    pool = stand_in(block_ms=30_000)
    taken = Taken(pool)
    pool.start()
    asked = pool.row().counters.claims
    taken.park()
    pool.until_ended(taken.handle, timeout=3)
    assert pool.row().counters.claims > asked


def test_the_park_is_looked_at_when_the_counter_moves(stand_in: Starter, tmp_path: Path) -> None:
    pool = stand_in(block_ms=30_000)
    taken = Taken(pool)
    pool.start()
    running = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(pool.executing, 5)
    taken.park()
    silence(pool)
    (tmp_path / "go").touch()
    pool.until_ended(running)
    pool.until_ended(pool.send("note"))
    assert pool.status(taken.handle) == "queued"
    pool.board.park_changed()
    pool.until_ended(pool.send("note"))
    pool.until_ended(taken.handle, timeout=3)


def test_the_park_is_looked_at_after_a_wait_in_which_no_bell_rang(stand_in: Starter, tmp_path: Path) -> None:
    pool = stand_in(block_ms=300)
    taken = Taken(pool)
    pool.start()
    running = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(pool.executing, 5)
    taken.park()
    silence(pool)
    (tmp_path / "go").touch()
    pool.until_ended(running)
    pool.until_ended(taken.handle, timeout=3)


# -- not claiming


def test_a_child_that_may_not_claim_starts_nothing_and_gives_its_token_back(stand_in: Starter) -> None:
    pool = stand_in()
    pool.start(may_claim=False)
    handle = pool.send("note")
    until_it_has_looked_around(pool)
    assert pool.status(handle) == "queued"
    assert pool.row().counters.claims == 0
    assert pool.server.cli("LLEN", pool.keys.bell_queue("default")) == 1
    pool.board.allow_claim(0)
    pool.until_ended(handle, timeout=2)


def test_a_child_woken_when_claiming_has_stopped_rings_back(stand_in: Starter) -> None:
    pool = stand_in(block_ms=5000)
    pool.start()
    asked = pool.row().counters.claims
    pool.board.set_claiming(False)
    handle = pool.send("note")
    bell = pool.keys.bell_queue("default")
    until(lambda: pool.server.cli("LLEN", bell) == 1, 5)
    assert pool.row().counters.claims == asked
    assert pool.status(handle) == "queued"
    pool.board.set_claiming(True)
    pool.until_ended(handle, timeout=2)


def test_nothing_is_claimed_while_the_supervisors_stamp_is_old(stand_in: Starter) -> None:
    pool = stand_in()
    pool.start()
    pool.stamping = False
    pool.board.stamp(time.monotonic() - 6)
    handle = pool.send("note")
    until_it_has_looked_around(pool)
    assert pool.status(handle) == "queued"
    pool.stamping = True
    pool.until_ended(handle, timeout=2)


def test_a_claim_that_comes_back_after_the_stop_is_handed_back(
    stand_in: Starter, start_proxy: Callable[[int], FaultProxy], any_redis: RedisServer
) -> None:
    proxy = start_proxy(any_redis.port)
    pool = stand_in(url=proxy.url, block_ms=100)
    pool.start()
    proxy.delay(0.5, "reply")
    handle = pool.send("note")
    until(lambda: pool.status(handle) == "running", 10)
    pool.board.set_claiming(False)
    pool.until_ended(handle, "queued")
    assert pool.noted(handle, "start") == 0
    proxy.heal()
    pool.board.set_claiming(True)
    pool.until_ended(handle)
    record = handle.record()
    assert record is not None
    assert (record.number("attempt"), record.number("crashes")) == (1, 0)


# -- ending


@pytest.mark.parametrize("how", ["row", "header"])
def test_told_to_stop_it_finishes_its_task_and_takes_no_other(
    stand_in: Starter, tmp_path: Path, how: str
) -> None:
    pool = stand_in()
    pool.start()
    running = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(pool.executing, 5)
    waiting = pool.send("note")
    if how == "row":
        pool.board.stop_row(0)
    else:
        pool.board.set_stopping(True)
    (tmp_path / "go").touch()
    assert pool.wait_exit() == 0
    assert pool.status(running) == "succeeded"
    assert pool.status(waiting) == "queued"
    assert pool.row().phase is Phase.EXITING
    assert pending(pool) == 0


def test_an_idle_child_told_to_stop_is_gone_within_a_second(stand_in: Starter) -> None:
    pool = stand_in(block_ms=30_000)
    pool.start()
    started = time.monotonic()
    pool.board.stop_row(0)
    assert pool.wait_exit() == 0
    assert time.monotonic() - started < 1.5


def test_an_orphan_finishes_and_settles_its_task_and_ends(stand_in: Starter, tmp_path: Path) -> None:
    pool = stand_in()
    parent = pool.start_orphan_to_be()
    running = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(pool.executing, 5)
    waiting = pool.send("note")
    child = psutil.Process(pool.row().pid)
    parent.kill()
    parent.wait()
    (tmp_path / "go").touch()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10)
    assert pool.status(running) == "succeeded"
    assert pool.status(waiting) == "queued"


def test_entries_that_are_held_are_listed_and_handed_back_at_the_end(
    stand_in: Starter, tmp_path: Path
) -> None:
    pool = stand_in(prefetch=4)
    path = str(tmp_path / "go")
    handles = [pool.send("wait_for_file", path=path)] + [pool.send("note") for _ in range(3)]
    pool.start(wait=False)
    until(pool.executing, 10)
    assert len(pool.row().held) == 3
    assert all(pool.status(handle) == "queued" for handle in handles[1:])
    pool.board.stop_row(0)
    (tmp_path / "go").touch()
    assert pool.wait_exit() == 0
    assert pool.row().held == ()
    assert [pool.noted(handle, "start") for handle in handles] == [1, 0, 0, 0]
    pool.start(1)
    for handle in handles:
        pool.until_ended(handle)


def test_held_entries_are_begun_one_by_one(stand_in: Starter) -> None:
    pool = stand_in(prefetch=4)
    handles = [pool.send("note") for _ in range(10)]
    pool.start()
    for handle in handles:
        pool.until_ended(handle)
    until(lambda: pool.row().held == (), 5)
    assert [pool.noted(handle, "start") for handle in handles] == [1] * 10


# -- orders and signals


def test_a_soft_timeout_and_a_cancel_reach_the_handler_from_outside(stand_in: Starter) -> None:
    pool = stand_in()
    pool.start()
    slow = pool.send("sleep", seconds=30)
    until(pool.executing, 5)
    pool.order(Order.SOFT_TIMEOUT)
    pool.until_ended(slow, "retry_scheduled")
    record = slow.record()
    assert record is not None
    assert record.get("last_error_class") == "SoftTimeout"
    cancelled = pool.send("async_sleep", seconds=30)
    until(pool.executing, 5)
    assert cancelled.cancel() == "stopping"
    pool.order(Order.CANCELLED)
    pool.until_ended(pool.send("note"))
    assert pool.status(cancelled) == "cancelled"
    assert pool.row().counters.fenced == 0
    shut = pool.send("sleep", seconds=30)
    until(pool.executing, 5)
    pool.order(Order.SHUTDOWN)
    pool.board.set_claiming(False)
    until(lambda: pool.noted(shut, "raised") == 1, 5)
    until(lambda: pool.status(shut) == "queued" or pool.noted(shut, "start") == 2, 5)


def test_signals_meant_for_the_supervisor_do_nothing_to_a_child(stand_in: Starter, tmp_path: Path) -> None:
    pool = stand_in()
    child = pool.start()
    numbers = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGTSTP,
        signal.SIGALRM,
        signal.SIGPROF,
        signal.SIGRTMAX,
    )
    for number in numbers:
        os.kill(child.pid, number)
    running = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(pool.executing, 5)
    for number in numbers:
        os.kill(child.pid, number)
    (tmp_path / "go").touch()
    pool.until_ended(running)
    assert pool.noted(running, "raised") == 0


def test_a_task_type_that_no_title_can_hold_ends_nobody(stand_in: Starter) -> None:
    pool = stand_in()
    pool.start()
    pool.server.cli(
        *("XADD", pool.keys.stream("default", 5), "*"),
        *("task_id", "odd", "queue", "default", "task_type", "odd\0type\n", "payload", "{}"),
        *("attempt", "1", "max_attempts", "", "priority", "5", "timeout_ms", "", "idempotency_key", ""),
    )
    pool.until_ended(pool.send("note"))
    assert pool.children[0].poll() is None


def test_what_a_task_changed_is_put_back_for_the_next(stand_in: Starter) -> None:
    pool = stand_in()
    pool.start()
    pool.until_ended(pool.send("leak_state"))
    shown = pool.send("show_state")
    pool.until_ended(shown)
    state = shown.result(timeout=5)
    assert (state["cwd"], state["ignored"], state["blocked"]) == (str(pool.folder), [], [])


# -- Redis away


def test_an_outcome_waits_for_redis_and_is_settled_once(
    stand_in: Starter, start_redis: Callable[..., RedisServer], tmp_path: Path
) -> None:
    server = start_redis(persist=True, settings={"appendfsync": "always"})
    with StandIn(server, tmp_path) as pool:
        pool.start()
        running = pool.send("wait_for_file", path=str(tmp_path / "go"))
        until(pool.executing, 5)
        server.kill()
        (tmp_path / "go").touch()
        until(lambda: pool.row().counters.redis_errors >= 2, 10)
        assert pool.row().phase is Phase.SETTLING
        assert pool.row().redis_ok_since == 0.0
        server.start()
        pool.until_ended(running)
        until(lambda: pool.row().phase is Phase.READY, 5)
        assert pool.row().redis_ok_since > 0
        assert pool.noted(running, "start") == 1
        assert pool.row().counters.processed == 1
        assert pool.log().count("Redis did not do it") == 1
        pool.until_ended(pool.send("note"))


def test_a_lost_reply_costs_no_task_and_no_second_outcome(
    stand_in: Starter, start_proxy: Callable[[int], FaultProxy], any_redis: RedisServer, tmp_path: Path
) -> None:
    """The reply to a turn that settled one task and began another never comes: the first is `already`
    settled, the other is found under our own name and begins again."""
    proxy = start_proxy(any_redis.port)
    pool = stand_in(url=proxy.url)
    pool.start()
    first = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(pool.executing, 5)
    second = pool.send("note")
    rule = proxy.drop_reply(first.id.encode())
    (tmp_path / "go").touch()
    pool.until_ended(second)
    assert rule.fired == 1
    assert pool.status(first) == "succeeded"
    assert (pool.noted(first, "start"), pool.noted(second, "start")) == (1, 1)
    record = second.record()
    assert record is not None
    assert (record.number("delivery"), record.number("attempt"), record.number("crashes")) == (2, 1, 0)
    until(lambda: pool.row().phase is Phase.READY, 5)
    assert pool.row().counters.processed == 2
    assert pending(pool) == 0


def test_a_lost_request_is_settled_by_the_next_try(
    stand_in: Starter, start_proxy: Callable[[int], FaultProxy], any_redis: RedisServer, tmp_path: Path
) -> None:
    proxy = start_proxy(any_redis.port)
    pool = stand_in(url=proxy.url)
    pool.start()
    first = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(pool.executing, 5)
    rule = proxy.drop_request(first.id.encode(), 2)
    (tmp_path / "go").touch()
    pool.until_ended(first)
    assert rule.fired == 2


def test_told_to_stop_while_redis_is_away_it_still_settles(
    start_redis: Callable[..., RedisServer], tmp_path: Path
) -> None:
    server = start_redis(persist=True, settings={"appendfsync": "always"})
    with StandIn(server, tmp_path) as pool:
        pool.start()
        running = pool.send("wait_for_file", path=str(tmp_path / "go"))
        until(pool.executing, 5)
        server.kill()
        pool.board.set_stopping(True)
        (tmp_path / "go").touch()
        until(lambda: pool.row().counters.redis_errors >= 2, 10)
        assert pool.children[0].poll() is None
        server.start()
        assert pool.wait_exit() == 0
        assert pool.status(running) == "succeeded"


def test_an_idle_child_told_to_stop_while_redis_is_away_ends(
    start_redis: Callable[..., RedisServer], tmp_path: Path
) -> None:
    server = start_redis()
    with StandIn(server, tmp_path) as pool:
        pool.start()
        server.kill()
        until(lambda: pool.row().counters.redis_errors >= 1, 10)
        pool.board.stop_row(0)
        assert pool.wait_exit() == 0


def test_after_a_flush_the_task_in_hand_counts_and_others_are_served(
    stand_in: Starter, tmp_path: Path
) -> None:
    pool = stand_in()
    pool.start()
    running = pool.send("wait_for_file", path=str(tmp_path / "go"))
    until(pool.executing, 5)
    pool.server.cli("FLUSHALL")
    pool.server.cli("SCRIPT", "FLUSH")
    (tmp_path / "go").touch()
    later = pool.send("note")
    pool.until_ended(later)
    assert pool.noted(running, "end") == 1
    assert pool.row().counters.fenced == 1
