"""What is due goes from the schedule to its band: by the leader, in two steps, once, and never early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtq_supervisor.leader import lead
from dtq_supervisor.line import Line
from dtq_supervisor.scheduler import Added, Due, add_claimed, claim_due
from tests.redis.scene import THEM, US, Scene
from tests.support.servers import RedisServer

HOUR_MS = 3_600_000


@pytest.fixture
def scene(every_redis: RedisServer) -> Iterator[Scene]:
    with Scene(every_redis) as scene:
        assert lead(scene.line()) == "won"
        yield scene


@pytest.fixture
def line(scene: Scene) -> Line:
    return scene.line()


def scheduled(scene: Scene, n: int = 1, *, due: bool = True, **options: object) -> list[str]:
    ids = scene.enqueue(n, delay_ms=HOUR_MS, **options)
    for task_id in ids if due else ():
        scene.make_due(task_id)
    scene.events()
    return ids


def promote(line: Line) -> Added:
    assert claim_due(line) is not None
    added = add_claimed(line)
    assert added is not None
    return added


def test_a_due_task_is_queued_and_children_are_woken(scene: Scene, line: Line) -> None:
    task_id = scheduled(scene, priority=7)[0]
    assert claim_due(line) == Due(moved=1, wait_ms=None, claimed=1)
    assert scene.places().where(task_id) == {"claimed"}
    added = add_claimed(line)
    assert added == Added(1, 1, 0, [], {"promoted": 1})
    assert scene.places().where(task_id) == {"undelivered"}
    record = scene.record(task_id)
    assert (record["status"], record["stream"]) == ("queued", scene.keys.stream("default", 7))
    assert scene.redis.xrange(record["stream"])[0][0] == record["entry_id"]
    assert scene.rings(scene.keys.bell_queue("default")) == 1
    assert scene.events() == [("TASK_QUEUED", task_id)]
    assert scene.claim(US).token.task_id == task_id


def test_a_due_retry_carries_the_attempt_of_its_record(scene: Scene, line: Line) -> None:
    task_id = scheduled(scene)[0]
    scene.redis.hset(
        scene.keys.task(task_id), mapping={"status": "retry_scheduled", "attempt": 3, "delivery": 2}
    )
    promote(line)
    assert scene.events() == [("TASK_RETRIED", task_id)]
    delivery = scene.claim(US)
    assert (delivery.attempt, delivery.token.delivery) == (3, 3)


def test_nothing_is_early(scene: Scene, line: Line) -> None:
    later = scheduled(scene, due=False)[0]
    due = claim_due(line)
    assert due is not None
    assert (due.moved, due.claimed) == (0, 0)
    assert due.wait_ms == pytest.approx(HOUR_MS, abs=10_000)
    scene.redis.zadd(scene.keys.schedule, {later: 1})  # a wrong score; the record knows better
    added = promote(line)
    assert (added.promoted, added.counts) == (0, {"not_due": 1})
    assert scene.places().where(later) == {"schedule"}
    assert scene.redis.zscore(scene.keys.schedule, later) == float(scene.record(later)["due_at_ms"])


def test_whoever_leads_goes_on_with_what_another_had_claimed(scene: Scene, line: Line) -> None:
    task_id = scheduled(scene)[0]
    claim_due(line)
    scene.redis.delete(scene.keys.lock)
    theirs = scene.line(THEM)
    assert lead(theirs) == "won"
    assert (claim_due(line), add_claimed(line)) == (None, None), "not by one who leads no more"
    assert scene.places().where(task_id) == {"claimed"}
    assert promote(theirs).promoted == 1


def test_batches_are_bounded_and_the_rest_follows(scene: Scene, line: Line) -> None:
    ids = scheduled(scene, 50)
    first = claim_due(line, most=30)
    assert first is not None
    assert (first.moved, first.claimed, first.wait_ms) == (30, 30, 0)
    second = claim_due(line, most=30)
    assert second is not None
    assert (second.moved, second.claimed) == (20, 50)
    left = add_claimed(line, most=30)
    assert left is not None
    assert (left.promoted, left.claimed) == (30, 20)
    promote(line)
    assert all(scene.places().where(task_id) == {"undelivered"} for task_id in ids)
    assert scene.rings(scene.keys.bell_queue("default")) == 50


def test_what_is_not_wanted_any_more_never_starts(scene: Scene, line: Line) -> None:
    cancelled, expired, over, forgotten = scheduled(scene, 4)
    scene.redis.sadd(scene.keys.cancelled, cancelled)
    scene.redis.hset(scene.keys.task(expired), "expires_at_ms", scene.now_ms() - 1)
    scene.redis.hset(scene.keys.task(over), "status", "succeeded")
    scene.redis.delete(scene.keys.task(forgotten))
    added = promote(line)
    assert added.counts == {"cancelled": 1, "expired": 1, "not_due": 1, "recordless": 1}
    assert [scene.record(task_id)["status"] for task_id in (cancelled, expired, over)] == [
        "cancelled",
        "expired",
        "succeeded",
    ]
    assert scene.places().at_rest() is True
    assert scene.redis.scard(scene.keys.cancelled) == 0
    assert sorted(scene.events()) == [("TASK_CANCELLED", cancelled), ("TASK_EXPIRED", expired)]


def test_what_has_started_once_does_not_expire(scene: Scene, line: Line) -> None:
    task_id = scheduled(scene)[0]
    fields = {"status": "retry_scheduled", "delivery": 1, "attempt": 2, "expires_at_ms": scene.now_ms() - 1}
    scene.redis.hset(scene.keys.task(task_id), mapping=fields)
    assert promote(line).promoted == 1


def test_an_ended_tasks_idempotency_key_is_free(scene: Scene, line: Line) -> None:
    task_id = scheduled(scene, idempotency_key="k")[0]
    scene.redis.hset(scene.keys.task(task_id), "expires_at_ms", scene.now_ms() - 1)
    promote(line)
    assert not scene.redis.exists(scene.keys.idempotency("default", "k"))


def test_a_bad_member_blocks_nobody(scene: Scene, line: Line) -> None:
    bad_band, bad_record, bad_queue, good = scheduled(scene, 4)
    scene.redis.set(scene.keys.stream("default", 2), "no stream")
    scene.redis.hset(scene.keys.task(bad_band), "priority", 2)
    scene.redis.delete(scene.keys.task(bad_record))
    scene.redis.set(scene.keys.task(bad_record), "no hash")
    scene.redis.hset(scene.keys.task(bad_queue), "queue", "no queue")
    added = promote(line)
    assert (added.promoted, added.claimed) == (1, 0)
    assert scene.record(good)["status"] == "queued"
    assert [problem.partition(":")[0] for problem in added.problems] == [bad_band, bad_record, bad_queue]
    for task_id in (bad_band, bad_record, bad_queue):
        score = scene.redis.zscore(scene.keys.schedule, task_id)
        assert score - scene.now_ms() == pytest.approx(60_000, abs=10_000)


def test_twice_is_once(scene: Scene, line: Line) -> None:
    """The reply was lost; the same ids are claimed and added again."""
    task_id = scheduled(scene)[0]
    promote(line)
    scene.redis.zadd(scene.keys.claimed, {task_id: 1})
    scene.redis.zadd(scene.keys.schedule, {task_id: 1})
    added = promote(line)
    assert (added.promoted, added.counts) == (0, {"not_due": 1})
    assert scene.places().where(task_id) == {"undelivered"}
    assert scene.redis.xlen(scene.record(task_id)["stream"]) == 1


def test_a_full_redis_promotes(scene: Scene, line: Line) -> None:
    task_id = scheduled(scene)[0]
    scene.fill_memory()
    assert promote(line).promoted == 1
    assert scene.record(task_id)["status"] == "queued"
