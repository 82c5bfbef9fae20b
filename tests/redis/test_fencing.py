"""Only the whole token settles, and only once; a late settle changes nothing (R10, R11)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dtq_child.errors import BrokerUnavailable
from dtq_child.keys import GROUP
from dtq_child.payload import Result
from dtq_child.turns import Want
from tests.conftest import ProxyStarter
from tests.redis.desk import (
    KINDS,
    Desk,
    claim,
    handed_back,
    pair,
    succeeded,
)
from tests.support.servers import RedisServer

EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis) as desk:
        yield desk


# -- fencing


def test_a_settle_counts_only_under_the_whole_token(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("bystander", priority=0)
    delivery = desk.began(child, "t1", idempotency_key="k")
    right = desk.record("t1")
    wrong = {
        "status": [
            "queued",
            "scheduled",
            "retry_scheduled",
            "succeeded",
            "dead_lettered",
            "cancelled",
            "expired",
        ],
        "stream": [desk.stream("default", 6)],
        "entry_id": ["1-1", ""],
        "delivery": ["2", "11", "0"],
        "consumer": ["w1:0.2", "w2:0.1", ""],
    }
    one_wrong = [{name: value} for name in wrong for value in wrong[name] for _ in KINDS]
    two_wrong = [{a: wrong[a][0], b: wrong[b][0]} for a, b in itertools.combinations(wrong, 2)]
    endings = itertools.cycle(KINDS.values())
    for changes in [*one_wrong, *two_wrong]:
        desk.edit("t1", **changes)
        before = desk.everything()
        desk.events()
        reply = child.turn(next(endings)[0](delivery), Want(claim=False))
        assert (reply.settled, reply.counts) == ("fenced", {"fenced": 1}), changes
        assert desk.everything() == before, changes
        [event] = desk.events()
        assert (event["type"], event["task_id"]) == ("TASK_DUPLICATE_ABSORBED", "t1")
        assert event["metadata"] == {"why": "fenced", "delivery": 1}
        desk.edit("t1", **right)
    assert desk.owner(*pair(delivery)) == child.consumer
    assert child.settle(succeeded(delivery)) == "settled"


def test_a_late_success_that_also_claims_is_refused_all_the_same(desk: Desk) -> None:
    """A success with a usual claim goes a shorter way through the script."""
    child = desk.child()
    delivery = desk.began(child, "t1")
    right = desk.record("t1")
    for changes in (
        *({"status": status} for status in ("queued", "succeeded", "cancelled")),
        *({"stream": desk.stream("default", 6)}, {"entry_id": "1-1"}, {"delivery": "2"}),
        *({"consumer": "w1:0.2"}, {"consumer": ""}),
    ):
        desk.edit("t1", **changes)
        before = desk.record("t1")
        reply = child.turn(succeeded(delivery), Want())
        assert (reply.settled, reply.claimed, reply.counts) == ("fenced", None, {"fenced": 1}), changes
        assert desk.record("t1") == before, changes
        assert desk.broker.result("t1") is None
        assert desk.owner(*pair(delivery)) == child.consumer
        desk.edit("t1", **right)
    assert child.turn(succeeded(delivery), Want()).settled == "settled"
    assert child.turn(succeeded(delivery), Want()).settled == "already"


def test_the_living_delivery_keeps_its_entry_when_a_late_one_settles(desk: Desk) -> None:
    late, living = desk.child(), desk.child(worker="w2")
    old = desk.began(late, "t1")
    desk.redis.xclaim(old.token.stream, GROUP, living.consumer, 0, [old.token.entry_id], idle=0)
    new = claim(living, own=True)
    for ending, _ in KINDS.values():
        reply = late.turn(ending(old), Want())
        assert (reply.settled, reply.claimed) == ("fenced", None)
    assert desk.owner(*pair(new)) == living.consumer
    assert living.settle(succeeded(new, Result(b'"new"', 5, truncated=False))) == "settled"
    assert late.settle(succeeded(old)) == "fenced"
    assert desk.broker.result("t1") == b'"new"'


def test_success_after_a_cancel_is_refused(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    assert desk.broker.cancel("t1") == "stopping"
    before = desk.everything()
    assert child.settle(succeeded(delivery)) == "fenced"
    assert desk.everything() == before


# -- resends


@EACH_KIND
def test_a_settle_that_is_sent_again_is_answered_already(desk: Desk, kind: str) -> None:
    ending, status = KINDS[kind]
    child = desk.child()
    delivery = desk.began(child, "t1", idempotency_key="k")
    outcome = ending(delivery)
    assert child.settle(outcome) == "settled"
    assert desk.status("t1") == status
    before = desk.everything()
    desk.events()
    for _ in range(2):
        reply = child.turn(outcome, Want(claim=False))
        assert (reply.settled, reply.counts) == ("already", {})
    assert desk.everything() == before
    assert desk.events() == []
    for other, (another, _) in KINDS.items():
        if other != kind:
            assert child.settle(another(delivery)) == "fenced", "it ended in another way"
    assert desk.everything() == before


@EACH_KIND
def test_a_settle_whose_reply_was_lost_is_sent_again(
    every_redis: RedisServer, start_proxy: ProxyStarter, kind: str
) -> None:
    ending, status = KINDS[kind]
    proxy = start_proxy(every_redis.port)
    with Desk(every_redis, proxy.url) as desk:
        child = desk.child()
        delivery = desk.began(child, "t1")
        desk.enqueue("t2")
        lost = proxy.drop_reply(b"w1:0.1")
        with pytest.raises(BrokerUnavailable):
            child.turn(ending(delivery), Want())
        assert lost.fired == 1
        assert child.settle(ending(delivery)) == "already"
        assert desk.status("t1") == status
        assert claim(child, own=True).token.task_id == "t2"


def test_already_is_answered_after_the_task_went_on(desk: Desk) -> None:
    child, other = desk.child(), desk.child(worker="w2")
    delivery = desk.began(child, "t1")
    child.settle(handed_back(delivery))
    desk.redis.xclaim(delivery.token.stream, GROUP, other.consumer, 0, [delivery.token.entry_id], idle=0)
    newer = claim(other, own=True)
    before = desk.everything()
    assert child.settle(handed_back(delivery)) == "already"
    assert desk.everything() == before
    assert other.settle(succeeded(newer)) == "settled"
    assert child.settle(handed_back(delivery)) == "already"


# -- the record is missing


@EACH_KIND
def test_a_missing_record_is_rebuilt_if_the_entry_is_ours(desk: Desk, kind: str) -> None:
    ending, status = KINDS[kind]
    child = desk.child()
    delivery = desk.began(child, "t1", payload=b'{"a":1}')
    delivery = replace(delivery, token=replace(delivery.token, delivery=4))
    desk.redis.delete(desk.keys.task("t1"))
    reply = child.turn(ending(delivery), Want(claim=False))
    assert (reply.settled, reply.counts["rebuilt"]) == ("rebuilt", 1)
    record = desk.record("t1")
    assert (record["status"], record["payload"], record["delivery"]) == (status, '{"a":1}', "4")
    assert json.loads(record["metadata"]) == {"rebuilt": True}
    assert desk.redis.ttl(desk.keys.task("t1")) > 0
    assert len(desk.places().where("t1")) == 1
    assert child.settle(ending(delivery)) == "already"


@pytest.mark.parametrize("kind", ["succeed", "dead"])
@pytest.mark.parametrize(
    "entry", ["another's", "nobody's", "without a body", "gone", "unreadable", "another task's"]
)
def test_a_missing_record_is_not_rebuilt_if_the_entry_is_not_ours(desk: Desk, entry: str, kind: str) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    stream, entry_id = pair(delivery)
    if entry == "another's":
        desk.redis.xclaim(stream, GROUP, "w2:0.1", 0, [entry_id], idle=0)
    if entry in ("nobody's", "gone"):
        desk.redis.xack(stream, GROUP, entry_id)
    if entry in ("without a body", "gone"):
        desk.redis.xdel(stream, entry_id)
    token = delivery.token
    if entry in ("unreadable", "another task's"):
        odd = desk.add_entry({"nonsense": "1"})
        if entry != "unreadable":
            desk.enqueue("t2")
            odd = desk.record("t2")["entry_id"]
        desk.redis.xreadgroup(GROUP, child.consumer, {stream: ">"})
        token = replace(token, entry_id=odd)
    desk.redis.delete(desk.keys.task("t1"))
    before = desk.everything()
    desk.events()
    assert child.settle(KINDS[kind][0](replace(delivery, token=token))) == "fenced"
    assert desk.everything() == before
    assert desk.told() == [("TASK_DUPLICATE_ABSORBED", "t1")]


def test_a_record_that_cannot_be_read_settles_nothing_and_blocks_nobody(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    desk.enqueue("t2")
    desk.redis.delete(desk.keys.task("t1"))
    desk.redis.set(desk.keys.task("t1"), "something else")
    reply = child.turn(succeeded(delivery), Want())
    assert reply.settled == "fenced"
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "t2"
    assert desk.owner(*pair(delivery)) == child.consumer, "buried when it is met again"
