"""What a child holds is begun one by one, parked, or handed back; nothing is spent by it (R22, R24, R36)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtq_child.keys import GROUP
from dtq_child.turns import Want
from tests.redis.desk import (
    OPERATOR,
    Desk,
    at_park,
    claim,
    pair,
    succeeded,
)
from tests.support.servers import RedisServer


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis) as desk:
        yield desk


# -- more than one in hand


@pytest.fixture
def greedy(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis, prefetch=3) as desk:
        yield desk


def test_held_entries_stay_queued_and_are_begun_one_by_one(greedy: Desk) -> None:
    child = greedy.child()
    greedy.enqueue("t1", "t2", "t3", "t4")
    reply = child.turn(None, Want())
    ids = []
    while reply.claimed is not None:
        ids.append(reply.claimed.token.task_id)
        waiting = [f"t{n}" for n in range(len(ids) + 1, 5)]
        assert [greedy.status(task_id) for task_id in waiting] == ["queued"] * len(waiting)
        assert len(reply.held) == {"t1": 2, "t2": 1, "t3": 0, "t4": 0}[ids[-1]]
        assert len(set(reply.held)) == len(reply.held)
        reply = child.turn(succeeded(reply.claimed), Want(), reply.held)
    assert ids == ["t1", "t2", "t3", "t4"]


def test_a_higher_band_overtakes_what_is_held(greedy: Desk) -> None:
    child = greedy.child()
    greedy.enqueue("t1", "t2", "t3")
    reply = child.turn(None, Want())
    assert reply.claimed is not None
    held = reply.held
    greedy.enqueue("first", priority=6)
    greedy.enqueue("second", priority=5)
    reply = child.turn(succeeded(reply.claimed), Want(), held)
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, reply.held) == ("first", held)
    reply = child.turn(succeeded(reply.claimed), Want(), held)
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, reply.held) == ("t2", held[1:])


def test_the_best_held_entry_begins_whatever_the_order_in_hand(greedy: Desk) -> None:
    child = greedy.child()
    greedy.enqueue("low", priority=1)
    greedy.enqueue("high", priority=8)
    low, high = greedy.hold(child, "low"), greedy.hold(child, "high")
    reply = child.turn(None, Want(), [low, high])
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, reply.held) == ("high", (low,))


def test_held_entries_of_a_paused_queue_are_parked_and_the_others_go_on(greedy: Desk) -> None:
    child = greedy.child(0, "a", "b")
    greedy.enqueue("a1", queue="a", priority=9)
    greedy.enqueue("a2", queue="a", priority=1)
    greedy.enqueue("b1", queue="b", priority=5)
    held = [greedy.hold(child, task_id) for task_id in ("a1", "a2", "b1")]
    greedy.broker.pause("a", OPERATOR)
    reply = child.turn(None, Want(), held)
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, reply.held) == ("b1", ())
    assert [greedy.owner(*entry) for entry in held] == [at_park(child), at_park(child), child.consumer]
    assert greedy.status("a1") == "queued"


@pytest.mark.parametrize("paused", [False, True])
def test_a_held_entry_that_somebody_else_has_now_stays_his(desk: Desk, paused: bool) -> None:
    ours, theirs = desk.child(), desk.child(worker="w2")
    desk.enqueue("t1")
    held = desk.hold(ours, "t1")
    desk.redis.xclaim(held[0], GROUP, theirs.consumer, 0, [held[1]], idle=0)
    if paused:
        desk.broker.pause("default", OPERATOR)
    before = desk.record("t1")
    reply = ours.turn(None, Want(park=True), [held])
    assert (reply.claimed, reply.held) == (None, ())
    assert desk.owner(*held) == theirs.consumer
    assert desk.record("t1") == before


def test_what_was_begun_unheard_in_a_paused_queue_is_queued_again_and_spends_nothing(desk: Desk) -> None:
    child = desk.child()
    begun = desk.began(child, "t1")  # its reply was lost, say
    desk.broker.pause("default", OPERATOR)
    desk.events()
    reply = child.turn(None, Want(own=True))
    assert reply.claimed is None
    assert reply.paused == {"default"}
    record = desk.record("t1")
    assert (record["status"], record["consumer"], record["delivery"]) == ("queued", "", "1")
    assert (record["attempt"], record["crashes"]) == ("1", "0")
    assert desk.owner(*pair(begun)) == at_park(child)
    assert desk.told() == [("TASK_QUEUED", "t1")]
    desk.broker.resume("default", OPERATOR)
    assert claim(child, park=True).token.delivery == 2


# -- handing back


@pytest.mark.parametrize("to_anyone", [True, False])
def test_released_entries_are_queued_and_parked_and_spend_nothing(desk: Desk, to_anyone: bool) -> None:
    child = desk.child()
    begun = desk.began(child, "begun", idempotency_key="k")
    desk.enqueue("held")
    held = desk.hold(child, "held")
    desk.redis.delete(desk.keys.bell_queue("default"))
    desk.events()
    assert child.release([begun.token], [held], to_anyone) == 2
    record = desk.record("begun")
    assert (record["status"], record["consumer"], record["delivery"]) == ("queued", "", "1")
    assert (record["attempt"], record["crashes"]) == ("1", "0")
    assert desk.told() == [("TASK_QUEUED", "begun")]
    for entry in (pair(begun), held):
        assert desk.owner(*entry) == at_park(child)
        assert (desk.idle_ms(*entry) > 1_000_000_000) == to_anyone
    assert (desk.rings(), desk.worker_rings()) == (2, 2)
    assert child.release([begun.token], [held], to_anyone) == 0, "a resend changes nothing"
    assert {claim(child, park=True).token.task_id for _ in range(2)} == {"begun", "held"}


def test_what_is_not_ours_any_more_is_not_released(desk: Desk) -> None:
    ours, theirs = desk.child(), desk.child(worker="w2")
    lost, again, settled = (desk.began(ours, task_id) for task_id in ("lost", "again", "settled"))
    ours.settle(succeeded(settled))
    desk.redis.xclaim(lost.token.stream, GROUP, theirs.consumer, 0, [lost.token.entry_id], idle=0)
    claim(theirs, own=True)
    newer = ours.turn(None, Want(own=True)).claimed
    assert newer is not None
    assert newer.token.delivery == 2
    before = desk.everything()
    assert ours.release([lost.token, again.token, settled.token]) == 0
    assert desk.everything() == before
    assert ours.release([newer.token]) == 1


def test_a_held_entry_whose_record_runs_elsewhere_is_handed_back_without_touching_it(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("t1")
    held = desk.hold(child, "t1")
    desk.edit("t1", status="running", consumer="w2:0.1", delivery=1)
    before = desk.record("t1")
    assert child.release([], [held]) == 1
    assert desk.owner(*held) == at_park(child)
    assert desk.record("t1") == before


def test_a_held_entry_that_was_begun_unheard_is_queued_again(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("t1")
    held = desk.hold(child, "t1")
    child.turn(None, Want(), [held])  # its reply was lost, say
    assert child.release([], [held]) == 1
    assert (desk.status("t1"), desk.record("t1")["consumer"]) == ("queued", "")
    assert desk.owner(*held) == at_park(child)
