"""Stranded work is found and given a place; what the dead left behind goes; living work is left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtq_child.task import Token
from dtq_supervisor import reconcile
from dtq_supervisor.leader import lead
from dtq_supervisor.line import Line
from tests.redis.scene import THEM, US, Scene, at_park
from tests.support.servers import RedisServer

BAND = "dtq:stream:default:p5"
LONG_AGO = 120_000


@pytest.fixture
def scene(every_redis: RedisServer) -> Iterator[Scene]:
    with Scene(every_redis) as scene:
        assert lead(scene.line()) == "won"
        yield scene


@pytest.fixture
def line(scene: Scene) -> Line:
    return scene.line()


def strand(scene: Scene, token: Token) -> None:
    """Its entry is pending for nobody: its consumer was deleted with it."""
    scene.server.cli("XACK", token.stream, "workers", token.entry_id)


def lose_entry(scene: Scene, task_id: str) -> None:
    """Record and entry were parted: a restored backup, a trimmed stream."""
    record = scene.record(task_id)
    scene.server.cli("XACK", record["stream"], "workers", record["entry_id"])
    scene.redis.xdel(record["stream"], record["entry_id"])


def round_of_records(scene: Scene, line: Line) -> list[str]:
    done, problems = reconcile.requeue_placeless(line, reconcile.find_placeless(line))
    assert problems == []
    return done


# -- bands


def test_an_entry_that_was_handed_out_and_is_pending_for_nobody_is_released(scene: Scene, line: Line) -> None:
    tokens = scene.hold_all(THEM, scene.enqueue(7))
    scene.enqueue(3)  # not handed out yet
    strays = [tokens[0], tokens[3], tokens[4], tokens[6]]
    for token in strays:
        strand(scene, token)
    assert reconcile.release_strays(line, BAND) == 4
    for token in strays:
        owner, idle = scene.pending(token) or ("", 0)
        assert owner == at_park(US)
        assert idle > 1_000_000_000
    assert scene.owner(tokens[1]) == f"{THEM}:0.1"
    assert len(scene.places().undelivered) == 3
    assert scene.places().strays == []
    assert scene.rings(scene.keys.bell_worker(US)) == 4
    assert scene.claim(US, park=True).token.task_id == tokens[0].task_id
    assert reconcile.release_strays(line, BAND) == 0


def test_what_the_record_calls_running_keeps_its_runner_and_a_fresh_lease(scene: Scene, line: Line) -> None:
    token = scene.started(THEM).token
    strand(scene, token)
    assert reconcile.release_strays(line, BAND) == 1
    owner, idle = scene.pending(token) or ("", 10**9)
    assert owner == token.consumer
    assert idle < 5000


def test_every_page_is_searched(scene: Scene, line: Line) -> None:
    tokens = scene.hold_all(THEM, scene.enqueue(450))
    strays = [tokens[0], *tokens[190:230], tokens[399], tokens[400], tokens[449]]
    for token in strays:
        strand(scene, token)
    assert reconcile.release_strays(line, BAND) == len(strays)
    assert scene.places().strays == []


def test_a_lease_restored_beyond_the_last_delivered_makes_strays_of_none_before_it(
    scene: Scene, line: Line
) -> None:
    """The group was made anew from the start, a heartbeat restored one lease: the others are new again."""
    tokens = scene.hold_all(THEM, scene.enqueue(3))
    scene.server.cli("XGROUP", "DESTROY", BAND, "workers")
    scene.server.cli("XGROUP", "CREATE", BAND, "workers", "0")
    last = tokens[2]
    scene.server.cli("XCLAIM", BAND, "workers", last.consumer, 0, last.entry_id, "FORCE", "JUSTID")
    assert reconcile.release_strays(line, BAND) == 0
    assert len(scene.places().undelivered) == 3


@pytest.mark.parametrize("kind", ["none", "no group", "empty", "wrong type"])
def test_odd_bands_are_passed_by(scene: Scene, line: Line, kind: str) -> None:
    if kind == "wrong type":
        scene.redis.set(BAND, "x")
    elif kind == "no group":
        scene.enqueue()
    elif kind == "empty":
        lose_entry(scene, scene.started(THEM).token.task_id)
    assert reconcile.release_strays(line, BAND) == 0
    assert reconcile.sweep_consumers(line, BAND) == (1 if kind == "empty" else 0)


# -- records


@pytest.mark.parametrize("running", [False, True])
def test_a_waiting_or_running_task_that_is_nowhere_is_queued_again(
    scene: Scene, line: Line, running: bool
) -> None:
    task_id = scene.started(THEM).token.task_id if running else scene.enqueue()[0]
    lose_entry(scene, task_id)
    scene.touch(task_id, LONG_AGO)
    scene.events()
    assert round_of_records(scene, line) == [task_id]
    record = scene.record(task_id)
    assert (record["status"], record["consumer"], record["attempt"], record["crashes"]) == (
        "queued",
        "",
        "1",
        "0",
    )
    assert scene.places().where(task_id) == {"undelivered"}
    assert scene.rings(scene.keys.bell_queue("default")) >= 1
    assert scene.events() == [("TASK_QUEUED", task_id)]
    assert scene.claim(US).token.task_id == task_id


@pytest.mark.parametrize("status", ["scheduled", "retry_scheduled"])
def test_a_scheduled_task_that_is_nowhere_is_scheduled_again(scene: Scene, line: Line, status: str) -> None:
    task_id = scene.enqueue(delay_ms=3_600_000)[0]
    scene.redis.hset(scene.keys.task(task_id), "status", status)
    scene.redis.zrem(scene.keys.schedule, task_id)
    scene.touch(task_id, LONG_AGO)
    assert round_of_records(scene, line) == [task_id]
    due = scene.record(task_id)["due_at_ms"]
    assert scene.redis.zscore(scene.keys.schedule, task_id) == float(due)


def test_whatever_has_a_place_or_was_touched_lately_is_left_alone(scene: Scene, line: Line) -> None:
    running, held = scene.started(THEM).token.task_id, scene.hold(THEM, scene.enqueue()[0]).task_id
    waiting, later, claimed, fresh, over = [
        scene.enqueue()[0],
        *scene.enqueue(2, delay_ms=3_600_000),
        *scene.enqueue(2),
    ]
    scene.redis.zrem(scene.keys.schedule, claimed)
    scene.redis.zadd(scene.keys.claimed, {claimed: 1})
    for task_id in (fresh, over):
        lose_entry(scene, task_id)
    scene.redis.hset(scene.keys.task(over), "status", "succeeded")
    for task_id in (running, held, waiting, later, claimed, over):
        scene.touch(task_id, LONG_AGO)
    assert reconcile.find_placeless(line) == {}
    assert fresh not in reconcile.find_placeless(line)


def test_a_running_task_whose_entry_is_lost_has_the_time_of_its_lease(scene: Scene, line: Line) -> None:
    task_id = scene.started(THEM).token.task_id
    lose_entry(scene, task_id)
    scene.touch(task_id, LONG_AGO)
    scene.redis.hset(scene.keys.task(task_id), "lease_ms", 2 * LONG_AGO)
    assert reconcile.find_placeless(line) == {}


def test_what_moved_between_the_rounds_is_left_alone(scene: Scene, line: Line) -> None:
    moved, back = scene.enqueue(2)
    for task_id in (moved, back):
        lose_entry(scene, task_id)
        scene.touch(task_id, LONG_AGO)
    seen = reconcile.find_placeless(line)
    assert set(seen) == {moved, back}
    scene.touch(moved, LONG_AGO - 1000)
    scene.redis.hset(scene.keys.task(back), "status", "cancelled")
    assert reconcile.requeue_placeless(line, seen) == ([], [])


def test_all_of_the_newest_are_looked_at(scene: Scene, line: Line) -> None:
    ids = [task_id for _ in range(5) for task_id in scene.enqueue(100)]
    lost = {ids[0], ids[250], ids[499]}
    for task_id in lost:
        lose_entry(scene, task_id)
        scene.touch(task_id, LONG_AGO)
    assert set(reconcile.find_placeless(line)) == lost


def test_large_payloads_end_a_page_early_and_not_the_search(scene: Scene, line: Line) -> None:
    ids = [scene.enqueue(payload=b'{"x":"' + b"x" * 1_000_000 + b'"}')[0] for _ in range(12)]
    lose_entry(scene, ids[0])
    scene.touch(ids[0], LONG_AGO)
    calls = scene.calls.good
    assert set(reconcile.find_placeless(line)) == {ids[0]}
    assert scene.calls.good - calls == 3


def test_one_that_cannot_be_placed_is_told_and_blocks_no_other(scene: Scene, line: Line) -> None:
    bad, good = scene.enqueue(2)
    for task_id in (bad, good):
        lose_entry(scene, task_id)
        scene.touch(task_id, LONG_AGO)
    scene.redis.hset(scene.keys.task(bad), "priority", 17)
    done, problems = reconcile.requeue_placeless(line, reconcile.find_placeless(line))
    assert done == [good]
    assert [problem.partition(":")[0] for problem in problems] == [bad]


# -- what the dead left behind


def test_consumers_of_dead_workers_go_unless_something_is_pending(scene: Scene, line: Line) -> None:
    living, dead = "living-1-aa", "dead-1-bb"
    scene.redis.hset(scene.keys.worker(living), "worker_id", living)
    held = scene.hold(dead, scene.enqueue()[0], slot=4)
    names = [f"{living}:0.1", f"{dead}:0.1", at_park(dead), f"{US}:3.3", "another-program"]
    for name in names:
        scene.server.cli("XGROUP", "CREATECONSUMER", BAND, "workers", name)
    assert reconcile.sweep_consumers(line, BAND) == 2
    assert scene.consumers(BAND) == {held.consumer, f"{living}:0.1", f"{US}:3.3", "another-program"}
    assert scene.owner(held) == held.consumer
    assert reconcile.sweep_consumers(line, BAND) == 0


def test_many_consumers_go_in_batches(scene: Scene, line: Line) -> None:
    scene.started(THEM)
    with scene.redis.pipeline(transaction=False) as pipe:
        for life in range(450):
            pipe.execute_command("XGROUP", "CREATECONSUMER", BAND, "workers", f"dead-1-bb:0.{life}")
        pipe.execute()
    assert reconcile.sweep_consumers(line, BAND) == 450
    assert scene.consumers(BAND) == {f"{THEM}:0.1"}


def test_workers_that_ended_without_a_farewell_are_told_and_forgotten(scene: Scene, line: Line) -> None:
    scene.redis.hset(scene.keys.worker(THEM), "worker_id", THEM)
    scene.redis.sadd(scene.keys.workers, THEM, US, "dead-1-bb")
    scene.redis.rpush(scene.keys.bell_worker("dead-1-bb"), "1")
    scene.events()
    assert reconcile.sweep_workers(line) == ["dead-1-bb"]
    assert scene.redis.smembers(scene.keys.workers) == {THEM, US}
    assert not scene.redis.exists(scene.keys.bell_worker("dead-1-bb"))
    assert scene.events() == [("WORKER_STALE", "dead-1-bb")]
    assert reconcile.sweep_workers(line) == []


def test_cancelled_ids_whose_task_is_over_go_and_so_does_the_excess(
    scene: Scene, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, waiting = scene.enqueue(2)
    scene.broker.cancel(over)
    unknown = [f"unknown-{n}" for n in range(1500)]
    scene.redis.sadd(scene.keys.cancelled, over, waiting, *unknown)
    assert reconcile.sweep_cancelled(line) == 1
    assert scene.redis.scard(scene.keys.cancelled) == 1501
    assert scene.redis.sismember(scene.keys.cancelled, waiting)
    monkeypatch.setattr(reconcile, "CANCELLED_MOST", 100)
    assert reconcile.sweep_cancelled(line) == 1401
    assert scene.redis.scard(scene.keys.cancelled) == 100


# -- robust


def test_only_the_leader_does_any_of_it(scene: Scene) -> None:
    token = scene.hold(THEM, scene.enqueue()[0])
    strand(scene, token)
    lost = scene.enqueue()[0]
    lose_entry(scene, lost)
    scene.touch(lost, LONG_AGO)
    scene.redis.sadd(scene.keys.workers, "dead-1-bb")
    line = scene.line(THEM)
    for ask in (
        lambda: reconcile.release_strays(line, BAND),
        lambda: reconcile.find_placeless(line),
        lambda: reconcile.requeue_placeless(line, {lost: scene.record(lost)["updated_at_ms"]}),
        lambda: reconcile.sweep_consumers(line, BAND),
        lambda: reconcile.sweep_workers(line),
        lambda: reconcile.sweep_cancelled(line),
    ):
        with pytest.raises(reconcile.NotLeading):
            ask()
    assert scene.owner(token) is None
    assert scene.places().where(lost) == set()
    assert scene.redis.smembers(scene.keys.workers) == {"dead-1-bb"}


def test_all_bands_ever_used_are_known(scene: Scene) -> None:
    scene.enqueue(queue="elsewhere")
    streams = reconcile.all_streams(scene.line(US, ["mine"]))
    assert len(streams) == 20
    assert {"dtq:stream:elsewhere:p0", "dtq:stream:mine:p9"} < set(streams)


def test_a_full_redis_is_reconciled(scene: Scene, line: Line) -> None:
    token = scene.hold(THEM, scene.enqueue()[0])
    strand(scene, token)
    queued, delayed = scene.enqueue()[0], scene.enqueue(delay_ms=3_600_000)[0]
    lose_entry(scene, queued)
    scene.redis.zrem(scene.keys.schedule, delayed)
    for task_id in (queued, delayed):
        scene.touch(task_id, LONG_AGO)
    scene.redis.sadd(scene.keys.workers, "dead-1-bb")
    scene.fill_memory()
    assert reconcile.release_strays(line, BAND) == 1
    assert set(round_of_records(scene, line)) == {queued, delayed}
    assert reconcile.sweep_workers(line) == ["dead-1-bb"]
    assert reconcile.sweep_cancelled(line) == 0
    assert scene.places().homeless([token.task_id, queued, delayed]) == set()
