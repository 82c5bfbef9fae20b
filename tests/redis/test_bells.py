"""How a child learns where to look: hints above ten queues, and bells; neither is the truth (R22, R24)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtq_child.turns import Turns, Want
from tests.redis.desk import (
    OPERATOR,
    Desk,
    call,
    claim,
    drain,
)
from tests.support.servers import RedisServer


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis) as desk:
        yield desk


# -- more than ten queues


def many(desk: Desk) -> Turns:
    return desk.child(0, *(f"q{n}" for n in range(12)))


def test_above_ten_queues_the_hints_lead(desk: Desk) -> None:
    child = many(desk)
    desk.broker.enqueue([call(f"t{n}", queue=f"q{n}", priority=n % 10) for n in range(12)])
    desk.enqueue("foreign", queue="elsewhere", priority=9)
    desk.broker.pause("q8", OPERATOR)
    ids = drain(child)
    assert ids[:2] == ["t9", "t7"]
    assert len(ids) == 11
    assert "t8" not in ids
    assert desk.redis.zrange(desk.keys.hint, 0, -1) == ["elsewhere:p9", "q8:p8"]


def test_a_wrong_hint_costs_a_look_and_is_taken_back(desk: Desk) -> None:
    child = many(desk)
    desk.enqueue("t1", queue="q3", priority=2)
    desk.redis.zadd(desk.keys.hint, {"q1:p9": 0, "q3:p2": 7, "nonsense": 1, "q2:p": 3})
    assert claim(child).token.task_id == "t1"
    assert desk.redis.zrange(desk.keys.hint, 0, -1) == ["nonsense", "q2:p", "q3:p2"]


def test_a_missing_hint_costs_no_task(desk: Desk) -> None:
    child = many(desk)
    desk.enqueue("t1", queue="q3", priority=2)
    desk.redis.delete(desk.keys.hint)
    assert child.turn(None, Want()).claimed is None
    claimed = child.turn(None, Want(everywhere=True)).claimed
    assert claimed is not None
    assert claimed.token.task_id == "t1"
    child.release([claimed.token])
    assert claim(child, park=True).token.task_id == "t1", "the park needs no hint"


def test_a_broken_hint_index_costs_no_task(desk: Desk) -> None:
    child = many(desk)
    desk.redis.set(desk.keys.hint, "something else")
    desk.enqueue("t1", queue="q3")
    assert child.turn(None, Want()).claimed is None
    assert child.turn(None, Want(everywhere=True)).claimed is not None


# -- bells


def test_a_claim_that_finds_nothing_silences_the_bells_it_may(desk: Desk) -> None:
    child = desk.child(0, "a", "b")
    for bell in (desk.keys.bell_queue("a"), desk.keys.bell_queue("b"), desk.keys.bell_worker("w1")):
        desk.redis.rpush(bell, "1", "1")
    desk.broker.pause("b", OPERATOR)
    child.turn(None, Want())
    assert (desk.rings("a"), desk.rings("b"), desk.worker_rings()) == (0, 2, 2)
    child.turn(None, Want(park=True))
    assert desk.worker_rings() == 0


def test_a_woken_child_that_leaves_something_wakes_the_next(desk: Desk) -> None:
    child = desk.child(0, "a", "b")
    desk.enqueue("a1", "a2", queue="a", priority=3)
    desk.enqueue("b1", queue="b", priority=7)
    for queue in ("a", "b"):
        desk.redis.delete(desk.keys.bell_queue(queue))
    assert claim(child).token.task_id == "b1"
    assert (desk.rings("a"), desk.rings("b")) == (0, 0), "it was not woken, so it wakes nobody"
    assert claim(child, woken=True).token.task_id == "a1"
    assert (desk.rings("a"), desk.rings("b")) == (1, 0)
    desk.redis.delete(desk.keys.bell_queue("a"))
    assert claim(child, woken=True).token.task_id == "a2"
    assert (desk.rings("a"), desk.rings("b")) == (0, 0)


def test_a_woken_child_that_is_served_from_the_park_wakes_another_for_what_is_new(desk: Desk) -> None:
    child = desk.child()
    child.release([desk.began(child, "parked").token])
    desk.enqueue("new", priority=9)
    for bell in (desk.keys.bell_queue("default"), desk.keys.bell_worker("w1")):
        desk.redis.delete(bell)
    assert claim(child, woken=True, park=True).token.task_id == "parked"
    assert (desk.rings(), desk.worker_rings()) == (1, 0)


def test_waiting_at_the_bells(desk: Desk) -> None:
    child = desk.child(0, "a", "b")
    assert child.wait(["a", "b"], 0) is None
    desk.enqueue("t1", queue="b")
    assert child.wait(["a"], 0.01) is None
    assert child.wait(["a", "b"], 1) == "b"
    child.ring_back("b")
    assert desk.rings("b") == 1
    assert child.wait(["a", "b"], 1) == "b"
    child.release([claim(child).token])
    assert child.wait(["a"], 1) == ""
    child.ring_back("")
    assert child.wait([], 1) == ""
