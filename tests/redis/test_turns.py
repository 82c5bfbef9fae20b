"""A child claims: by strict priority, what came back first, all in one round trip (R10, R14, R22, R23)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dtq_child.errors import BrokerUnavailable
from dtq_child.keys import GROUP
from dtq_child.task import Token
from dtq_child.turns import Delivery, Want
from tests.conftest import ProxyStarter
from tests.redis.desk import (
    OPERATOR,
    Desk,
    at_park,
    call,
    claim,
    drain,
    handed_back,
    pair,
    retried,
    succeeded,
)
from tests.support.servers import RedisServer


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis) as desk:
        yield desk


# -- what a delivery is


def test_a_claim_hands_out_what_the_producer_gave(desk: Desk) -> None:
    given: dict[str, Any] = {
        "payload": b'{"n": 1.50}',
        "priority": 3,
        "timeout_ms": 1500,
        "soft_timeout_ms": 900,
        "max_attempts": 4,
        "max_crashes": 2,
        "retry": '{"base":1}',
        "metadata": '{"who":"ada"}',
        "trace": "00-ab",
        "idempotency_key": "ü",
        "store_result": False,
    }
    desk.enqueue("t1", queue="images", task_type="shop.größe", **given)
    child = desk.child(2, "default", "images", life=7)
    delivery = claim(child)
    entry_id = desk.entries("images", 3)[0][0]
    assert 0 <= delivery.waited_ms < 60_000
    assert delivery == Delivery(
        token=Token("t1", desk.stream("images", 3), entry_id, 1, "w1:2.7"),
        queue="images",
        priority=3,
        task_type="shop.größe",
        payload=b'{"n": 1.50}',
        attempt=1,
        max_attempts=4,
        crashes=0,
        max_crashes=2,
        timeout_ms=1500,
        soft_timeout_ms=900,
        retry=b'{"base":1}',
        metadata=b'{"who":"ada"}',
        trace="00-ab",
        first_unknown_ms=None,
        redelivered=False,
        idempotency_key="ü",
        store_result=False,
        waited_ms=delivery.waited_ms,
    )
    record = desk.record("t1")
    assert (record["status"], record["delivery"], record["consumer"]) == ("running", "1", "w1:2.7")
    assert (record["worker_id"], record["lease_ms"]) == ("w1", "30000")
    assert int(record["created_at_ms"]) <= int(record["started_at_ms"]) <= desk.now_ms()
    assert desk.owner(*pair(delivery)) == "w1:2.7"
    assert [(e["type"], e["worker_id"]) for e in desk.events()] == [
        ("TASK_QUEUED", ""),
        ("TASK_STARTED", "w1"),
    ]


def test_what_the_producer_left_open_is_left_open(desk: Desk) -> None:
    delivery = desk.began(desk.child(), "t1")
    left = (delivery.max_attempts, delivery.max_crashes, delivery.timeout_ms, delivery.soft_timeout_ms)
    assert left == (None, None, None, None)
    assert (delivery.retry, delivery.metadata, delivery.trace, delivery.idempotency_key) == (b"", b"", "", "")
    assert delivery.store_result


def test_the_record_decides_not_the_entry(desk: Desk) -> None:
    desk.enqueue("t1", payload=b'{"from":"entry"}')
    desk.edit("t1", payload='{"from":"record"}', attempt=3, task_type="new.name")
    delivery = claim(desk.child())
    assert (delivery.payload, delivery.attempt) == (b'{"from":"record"}', 3)
    assert delivery.task_type == "new.name"


# -- where to look


def test_strict_priority_and_queues_in_turn_within_a_band(desk: Desk) -> None:
    queues = ("a", "b", "c")
    for priority in (0, 5, 9):
        for number in (1, 2, 3):
            desk.broker.enqueue([call(f"{q}{priority}{number}", queue=q, priority=priority) for q in queues])
    ids = drain(desk.child(0, *queues))
    assert [task_id[1] for task_id in ids] == ["9"] * 9 + ["5"] * 9 + ["0"] * 9
    for at in range(0, 27, 3):
        assert {task_id[0] for task_id in ids[at : at + 3]} == set(queues), "each queue once a round"
    assert [i for i in ids if i[0] == "a"] == [f"a{band}{n}" for band in (9, 5, 0) for n in (1, 2, 3)]


def test_a_paused_queue_is_skipped_and_named_and_keeps_its_tasks(desk: Desk) -> None:
    child = desk.child(0, "a", "b")
    desk.enqueue("t1", queue="a", priority=9)
    desk.enqueue("t2", queue="b", priority=0)
    desk.broker.pause("a", OPERATOR)
    reply = child.turn(None, Want())
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "t2"
    assert reply.paused == {"a"}
    reply = child.turn(succeeded(reply.claimed), Want(own=True, park=True, woken=True, everywhere=True))
    assert (reply.settled, reply.claimed) == ("settled", None)
    assert reply.paused == {"a"}
    assert desk.places().where("t1") == {"undelivered"}
    assert desk.rings("a") == 1, "a paused queue's bell is left alone"
    desk.broker.pause("b", OPERATOR)
    assert child.turn(None, Want()).paused == {"a", "b"}
    desk.broker.resume("a", OPERATOR)
    assert claim(child).token.task_id == "t1"


def test_a_missing_group_is_made_in_place_from_the_beginning(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("t1", "t2")
    reply = child.turn(None, Want())
    assert reply.counts == {"groups_made": 1}
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "t1"
    desk.redis.xgroup_destroy(desk.stream(), GROUP)
    reply = child.turn(succeeded(reply.claimed), Want())
    assert (reply.settled, reply.counts) == ("settled", {"groups_made": 1})
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "t2"


def test_a_band_of_the_wrong_type_is_reported_and_hides_nothing(desk: Desk) -> None:
    child = desk.child(0, "a", "b")
    delivery = desk.began(child, "t0", queue="b")
    for band in (9, 2):
        desk.redis.set(desk.stream("a", band), "something else")
    desk.enqueue("t1", queue="b", priority=5)
    reply = child.turn(succeeded(delivery), Want(own=True, park=True, woken=True))
    assert reply.settled == "settled"
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "t1"
    [problem] = reply.problems
    assert desk.stream("a", 9) in problem
    assert "WRONGTYPE" in problem
    assert len(child.turn(succeeded(reply.claimed), Want()).problems) == 2


def test_consumers_exist_only_where_entries_were_read(desk: Desk) -> None:
    child = desk.child(0, "a", "b")
    desk.enqueue("t1", queue="a", priority=4)
    drain(child, own=True, park=True)
    assert [key for key in desk.redis.keys("*") if desk.redis.type(key) == "stream"] == [desk.stream("a", 4)]


def test_a_long_run_of_dead_wood_is_passed_in_pieces(desk: Desk) -> None:
    desk.enqueue(*(f"x{n}" for n in range(70)), priority=9, expires_ms=1)
    for number in range(70):
        desk.edit(f"x{number}", expires_at_ms=1)
    desk.enqueue("good", priority=0)
    child = desk.child()
    reply = child.turn(None, Want())
    assert (reply.claimed, reply.more, reply.counts["expired"]) == (None, True, 64)
    assert desk.rings() == 64, "no bell is silenced before all was seen"
    assert claim(child).token.task_id == "good"


# -- what came back


def test_a_claim_whose_reply_was_lost_is_found_under_the_own_name(
    every_redis: RedisServer, start_proxy: ProxyStarter
) -> None:
    proxy = start_proxy(every_redis.port)
    with Desk(every_redis, proxy.url) as desk:
        child = desk.child()
        child.turn(None, Want())
        desk.enqueue("t1", "t2")
        lost = proxy.drop_reply(b"w1:0.1")
        with pytest.raises(BrokerUnavailable):
            child.turn(None, Want())
        assert lost.fired == 1
        delivery = claim(child, own=True)
        assert (delivery.token.task_id, delivery.token.delivery) == ("t1", 2)
        assert (delivery.redelivered, delivery.attempt, delivery.crashes) == (True, 1, 0)
        started = [event for event in desk.events() if event["type"] == "TASK_STARTED"]
        assert [event.get("metadata") for event in started] == [None, {"delivery": 2}]


def test_own_entries_that_are_in_our_hands_are_skipped(desk: Desk) -> None:
    desk.enqueue("t1", "t2", "t3")
    child = desk.child()
    first, second = desk.hold(child, "t1"), desk.hold(child, "t2")
    reply = child.turn(None, Want(own=True), [first])
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "t2"
    assert reply.held == (first,)
    reply = child.turn(None, Want(own=True), [first, second])
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, reply.held) == ("t1", (second,))


def test_several_own_entries_are_held_beside_those_already_held(desk: Desk) -> None:
    desk.enqueue("t1", "t2", "t3", "t4")
    child = desk.child()
    pairs = [desk.hold(child, f"t{n}") for n in (1, 2, 3, 4)]
    reply = child.turn(None, Want(own=True), [pairs[3]])
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "t1"
    assert set(reply.held) == set(pairs[1:])


def test_the_park_is_looked_at_first_but_only_when_asked(desk: Desk) -> None:
    child = desk.child()
    parked = desk.began(child, "parked", priority=1)
    assert child.release([parked.token], to_anyone=False) == 1
    desk.enqueue("new", priority=9)
    delivery = claim(child)
    assert delivery.token.task_id == "new"
    delivery = claim(child, park=True)
    assert (delivery.token.task_id, delivery.token.delivery) == ("parked", 2)
    assert desk.owner(*pair(delivery)) == child.consumer
    assert child.turn(None, Want(park=True)).claimed is None


def test_the_park_of_a_paused_queue_is_skipped(desk: Desk) -> None:
    child = desk.child(0, "a", "b")
    for queue in ("a", "b"):
        child.release([desk.began(child, queue, queue=queue).token])
    desk.broker.pause("a", OPERATOR)
    assert claim(child, park=True).token.task_id == "b"
    assert child.turn(None, Want(park=True)).claimed is None
    assert desk.owner(desk.record("a")["stream"], desk.record("a")["entry_id"]) == at_park(child)


def test_a_park_that_holds_more_says_so_and_wakes_the_next_child(desk: Desk) -> None:
    child = desk.child()
    child.release([desk.began(child, f"t{n}").token for n in range(3)])
    desk.redis.delete(desk.keys.bell_worker("w1"))
    reply = child.turn(None, Want(park=True))
    assert reply.park_left
    assert desk.worker_rings() == 0, "it was not woken, so it wakes nobody"
    assert child.turn(None, Want(park=True, woken=True)).park_left
    assert desk.worker_rings() == 1
    reply = child.turn(None, Want(park=True, woken=True))
    assert reply.claimed is not None
    assert not reply.park_left


def test_bodies_that_were_deleted_are_let_go(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("own", "parked", "left")
    own, parked = desk.hold(child, "own"), desk.hold(child, "parked")
    child.release([], [parked])
    for stream, entry_id in (own, parked):
        desk.redis.xdel(stream, entry_id)
    reply = child.turn(None, Want(own=True, park=True))
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "left"
    assert reply.counts["bodies_gone"] == 2
    assert desk.owner(*own) is None
    assert desk.owner(*parked) is None


NEXT: dict[str, Callable[[Desk], object]] = {
    "as usual": lambda desk: desk.enqueue("t2", task_type='say "ça"'),
    "with a key": lambda desk: (
        desk.enqueue("t2", idempotency_key="k")
        and desk.redis.expire(desk.keys.idempotency("default", "k"), 500)
    ),
    "meant elsewhere": lambda desk: (
        desk.enqueue("t2") and desk.redis.hset(desk.keys.task("t2"), "entry_id", "1-1")
    ),
    "of another band": lambda desk: (
        desk.enqueue("t2") and desk.redis.hset(desk.keys.task("t2"), "stream", desk.stream("b", 9))
    ),
    "delivered before": lambda desk: (
        desk.enqueue("t2") and desk.redis.hset(desk.keys.task("t2"), "delivery", 11)
    ),
    "of another type": lambda desk: desk.enqueue("t2", task_type="other:one-2.x", queue="b", priority=9),
    "unreadable": lambda desk: desk.add_entry({"nonsense": "1"}),
    "expired": lambda desk: desk.enqueue("t2") and desk.redis.hset(desk.keys.task("t2"), "expires_at_ms", 1),
    "cancelled": lambda desk: desk.enqueue("t2") and desk.redis.sadd(desk.keys.cancelled, "t2"),
    "without a record": lambda desk: desk.enqueue("t2") and desk.redis.delete(desk.keys.task("t2")),
    "of a paused queue": lambda desk: desk.enqueue("t2") and desk.broker.pause("default", OPERATOR),
    "in a broken band": lambda desk: desk.redis.set(desk.stream("b", 9), "something else"),
    "nothing": lambda desk: None,
}


@pytest.mark.parametrize("next_up", NEXT)
def test_the_short_way_through_a_turn_leaves_what_the_long_one_does(desk: Desk, next_up: str) -> None:
    """A usual success is written out without functions. Whatever is not usual goes the long way."""
    left = []
    for short in (True, False):
        desk.redis.flushall()
        child = desk.child(0, "default", "b")
        delivery = desk.began(child, "t1")
        NEXT[next_up](desk)
        desk.events()
        outcome = succeeded(delivery if short else delivery.token)
        reply = child.turn(outcome, Want())
        records = [sorted(desk.record(task_id).items()) for task_id in ("t1", "t2")]
        events = desk.events()
        assert len({event["event_id"] for event in events}) == len(events)
        assert {event["event_id"][:24] for event in events} == {events[0]["event_id"][:24]}
        keys = [(key, round(desk.redis.ttl(key), -2)) for key in sorted(desk.redis.keys("*"))]
        seen = (reply, records, events, desk.letters(), desk.entries(), desk.places().pending, keys)
        left.append(re.sub(r"\d{13}(-\d+)?|[0-9a-f]{32}|T\d\d:\S+Z|(idle_ms|waited_ms)=\d+", "#", repr(seen)))
    assert left[0] == left[1]
    assert "settled='settled'" in left[0]


def test_a_success_may_ask_for_more_than_the_next_task(desk: Desk) -> None:
    child = desk.child()
    reply = child.turn(succeeded(desk.began(child, "t1")), Want(claim=False))
    assert (reply.settled, reply.claimed) == ("settled", None)
    delivery = desk.began(child, "t2")
    desk.enqueue("new", "newer")
    assert child.turn(succeeded(delivery), Want(claim=False)).claimed is None
    assert desk.places().where("new") == {"undelivered"}
    delivery = desk.began(child, "t3", priority=9)
    held = desk.hold(child, "new")
    reply = child.turn(succeeded(delivery), Want(), [held])
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, reply.held) == ("new", ())
    lost = desk.hold(child, "newer")
    desk.enqueue("newest")
    reply = child.turn(succeeded(reply.claimed), Want(own=True))
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "newer"
    child.release([], [lost])
    assert child.release([reply.claimed.token]) == 0, "it was begun, so it was handed back by the line above"
    reply = child.turn(succeeded(desk.began(child, "t4", priority=9)), Want(park=True))
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "newer"
    desk.enqueue("last")
    desk.redis.delete(desk.keys.bell_queue("default"))
    reply = child.turn(succeeded(reply.claimed), Want(woken=True))
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, desk.rings()) == ("newest", 1)


def test_the_turn_of_a_task_settles_and_claims_in_one_command(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue(*(f"t{n}" for n in range(20)))
    delivery = claim(child)
    desk.redis.config_resetstat()
    for _ in range(10):
        reply = child.turn(succeeded(delivery), Want())
        assert reply.settled == "settled"
        assert reply.claimed is not None
        delivery = reply.claimed
    stats = {name.removeprefix("cmdstat_"): n["calls"] for name, n in desk.redis.info("commandstats").items()}
    assert (stats["evalsha"], stats["xreadgroup"]) == (10, 10)
    inside = {"time", "del", "hmget", "set", "hset", "expire", "xack", "xdel", "publish", "get", "xlen"}
    inside |= {"xreadgroup", "sismember"}
    assert set(stats) - inside <= {"evalsha", "info", "config", "config|resetstat"}


def test_claim_false_only_settles(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    desk.enqueue("t2")
    reply = child.turn(handed_back(delivery), Want(claim=False, own=True, park=True, woken=True))
    assert (reply.settled, reply.claimed) == ("settled", None)
    assert desk.places().where("t2") == {"undelivered"}
    assert child.turn(None, Want(claim=False)).settled == "none"


def test_another_prefix_is_another_world(every_redis: RedisServer) -> None:
    with Desk(every_redis) as desk, Desk(every_redis, key_prefix="shop-2.{x}:@/+") as other:
        desk.enqueue("t1")
        child = other.child()
        assert child.turn(None, Want(own=True, park=True, woken=True)).claimed is None
        delivery = other.began(child, "t2", idempotency_key="k")
        assert child.settle(retried(delivery, 60_000)) == "settled"
        other.enqueue("t3")
        other.broker.cancel("t3")
        other.broker.pause("default", OPERATOR)
        strangers = [key for key in desk.redis.keys("*") if not key.startswith(other.keys.prefix)]
        assert all(key.startswith("dtq:") for key in strangers)
        assert claim(desk.child()).token.task_id == "t1"
