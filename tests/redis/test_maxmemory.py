"""Redis is full and evicts nothing: producers and operators are refused whole, children go on (R13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dtq_child.errors import RedisOutOfMemory
from dtq_child.payload import Result
from dtq_child.turns import Want
from tests.redis.desk import (
    OPERATOR,
    Desk,
    at_park,
    buried,
    call,
    claim,
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


def fill(desk: Desk) -> None:
    """From here on every write that may be refused is."""
    desk.server.cli("CONFIG", "SET", "maxmemory", 1)


REFUSED: dict[str, Callable[[Desk], object]] = {
    "enqueue": lambda desk: desk.enqueue("t1"),
    "enqueue later": lambda desk: desk.enqueue("t1", delay_ms=60_000),
    "enqueue many": lambda desk: desk.broker.enqueue(
        [call("t0"), *(call(f"n{n}", idempotency_key=f"k{n}", delay_ms=n % 2) for n in range(20))]
    ),
    "pause": lambda desk: desk.broker.pause("default", OPERATOR),
    "resume": lambda desk: desk.broker.resume("paused", OPERATOR),
    "requeue": lambda desk: desk.broker.requeue("dead", OPERATOR),
    "discard": lambda desk: desk.broker.discard("dead", OPERATOR),
}


@pytest.mark.parametrize("verb", REFUSED)
def test_what_adds_is_refused_whole_and_may_be_tried_again(desk: Desk, verb: str) -> None:
    desk.enqueue("t0")
    desk.dead("dead", priority=9, idempotency_key="k")
    desk.broker.pause("paused", OPERATOR)
    desk.events()
    fill(desk)
    before = desk.everything()
    for _ in range(2):
        with pytest.raises(RedisOutOfMemory):
            REFUSED[verb](desk)
    assert desk.everything() == before
    assert desk.events() == []
    desk.server.cli("CONFIG", "SET", "maxmemory", 0)
    REFUSED[verb](desk)
    assert desk.everything() != before


def test_a_known_task_is_answered_without_a_write(desk: Desk) -> None:
    desk.enqueue("t1", idempotency_key="k")
    fill(desk)
    assert not desk.enqueue("t1")[0].new
    assert desk.enqueue("t2", idempotency_key="k")[0].deduplicated


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (retried, "retry_scheduled"),
        (buried, "dead_lettered"),
        (handed_back, "queued"),
        (succeeded, "succeeded"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_children_settle_and_claim_on(
    desk: Desk, end: Callable[..., object], status: str, alone: bool
) -> None:
    child = desk.child(0, "default", "other")
    delivery = desk.began(child, "t1", idempotency_key="k")
    desk.enqueue("t2", queue="other")
    fill(desk)
    outcome = end(delivery)
    reply = child.turn(outcome, Want(claim=not alone, woken=True))  # type: ignore[arg-type]
    assert reply.settled == "settled"
    assert desk.status("t1") == status
    assert desk.places().where("t1") != set()
    if not alone:
        assert reply.claimed is not None
        assert reply.claimed.token.task_id == "t2"
        assert desk.status("t2") == "running"
    assert child.settle(outcome) == "already"  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["k", ""])
@pytest.mark.parametrize("claims", [False, True])
def test_a_result_that_is_refused_does_not_fail_its_task(desk: Desk, claims: bool, key: str) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1", idempotency_key=key)
    fill(desk)
    outcome = succeeded(delivery, Result(b'"kept?"', 7, truncated=False))
    assert child.turn(outcome, Want(claim=claims)).settled == "settled"
    record = desk.record("t1")
    assert (record["status"], record["result_size"]) == ("succeeded", "")
    why = record["result_unavailable"]
    assert why.startswith("Redis refused to store it: ")
    assert "OOM command not allowed" in why
    assert why == why.strip()
    assert desk.broker.result("t1") is None
    if key:
        held = desk.idempotency("k")
        assert held is not None
        assert held["state"] == "completed"


def test_a_success_without_a_result_and_the_next_claim_are_one_turn(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    desk.enqueue("t2")
    fill(desk)
    reply = child.turn(succeeded(delivery, None), Want())
    assert reply.settled == "settled"
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "t2"


def test_claims_of_every_kind_go_on(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("gone", "expired", "cancelled", "good", idempotency_key="")
    desk.add_entry({"nonsense": "1"})
    child.release([desk.began(child, "parked", priority=9).token])
    desk.redis.delete(desk.keys.task("gone"))
    desk.edit("expired", expires_at_ms=1)
    desk.redis.sadd(desk.keys.cancelled, "cancelled")
    fill(desk)
    found = []
    outcome = None
    while (reply := child.turn(outcome, Want(own=True, park=True, woken=True))).claimed is not None:
        found.append(reply.claimed.token.task_id)
        outcome = succeeded(reply.claimed)
    assert found == ["parked", "gone", "good"]
    assert (desk.status("expired"), desk.status("cancelled")) == ("expired", "cancelled")
    assert desk.letters()[0][1]["raw:nonsense"] == "1"
    assert desk.places().at_rest()


@pytest.mark.parametrize("record", ["there", "gone"])
def test_a_claim_that_was_lost_begins_again(desk: Desk, record: str) -> None:
    child = desk.child()
    desk.began(child, "t1")  # its reply was lost, say: nothing is read anew, the record is the first write
    if record == "gone":
        desk.redis.delete(desk.keys.task("t1"))
    fill(desk)
    assert claim(child, own=True).token.delivery == (2 if record == "there" else 1)


def test_a_group_is_made_and_a_missing_record_settled(desk: Desk) -> None:
    desk.enqueue("t1", priority=4)
    fill(desk)
    child = desk.child()
    reply = child.turn(None, Want())
    assert reply.counts == {"groups_made": 1}
    assert reply.claimed is not None
    desk.redis.delete(desk.keys.task("t1"))
    assert child.settle(succeeded(reply.claimed)) == "rebuilt"


def test_entries_are_handed_back(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    desk.enqueue("t2")
    held = desk.hold(child, "t2")
    fill(desk)
    assert child.release([delivery.token], [held]) == 2
    assert {desk.owner(*pair(delivery)), desk.owner(*held)} == {at_park(child)}
    assert claim(child, park=True).token.task_id == "t1"


def test_cancels_and_their_audit_are_written(desk: Desk) -> None:
    child = desk.child()
    desk.began(child, "running")
    desk.enqueue("queued")
    desk.enqueue("scheduled", delay_ms=60_000)
    fill(desk)
    assert desk.broker.cancel("running", OPERATOR) == "stopping"
    assert desk.broker.cancel("queued", OPERATOR) == "cancelled"
    assert desk.broker.cancel("scheduled", OPERATOR) == "cancelled"
    assert desk.broker.cancel("never seen", OPERATOR) == "unknown"
    assert len(desk.audit()) == 4
    assert desk.places().at_rest()


def test_bells_are_only_hints(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("t1")
    assert child.wait(["default"], 1) == "default"
    fill(desk)
    child.ring_back("default")
    assert desk.rings() == 0
    assert claim(child).token.task_id == "t1"
