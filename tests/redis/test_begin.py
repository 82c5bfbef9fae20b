"""What a child reads is begun only if it may be: it is readable, its record means it, it is still wanted
(R9, R11, R18, R21, R25)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dtq_child.broker import payload_hash
from dtq_child.keys import GROUP
from dtq_child.turns import Want
from tests.redis.desk import (
    Desk,
    claim,
    drain,
    pair,
    succeeded,
    unknown,
)
from tests.support.servers import RedisServer


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis) as desk:
        yield desk


# -- what may not begin


def test_a_task_that_expired_before_its_first_start_ends(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("t1", expires_ms=1000, idempotency_key="k")
    desk.enqueue("t2", expires_ms=60_000)
    desk.edit("t1", expires_at_ms=desk.now_ms() - 1)
    delivery = claim(child)
    assert delivery.token.task_id == "t2"
    record = desk.record("t1")
    assert (record["status"], record["delivery"]) == ("expired", "0")
    assert record["finished_at_ms"]
    assert desk.idempotency("k") is None
    assert [entry["task_id"] for _, entry in desk.entries()] == ["t2"]
    assert ("TASK_EXPIRED", "t1") in desk.told()
    child.release([delivery.token])
    desk.edit("t2", expires_at_ms=desk.now_ms() - 1)
    assert claim(child, park=True).token.task_id == "t2", "it has started once"


def test_an_id_in_the_cancelled_set_never_starts(desk: Desk) -> None:
    desk.redis.sadd(desk.keys.cancelled, "t1", "other")
    desk.enqueue("t1", idempotency_key="k")
    reply = desk.child().turn(None, Want())
    assert (reply.claimed, reply.counts["cancelled"]) == (None, 1)
    assert desk.status("t1") == "cancelled"
    assert desk.redis.smembers(desk.keys.cancelled) == {"other"}
    assert (desk.entries(), desk.idempotency("k")) == ([], None)
    assert desk.told() == [("TASK_QUEUED", "t1"), ("TASK_CANCELLED", "t1")]


Fields = dict[str, str | bytes]
GOOD: Fields = {
    "task_id": "t1",
    "queue": "default",
    "task_type": "probe",
    "payload": "{}",
    "attempt": "1",
    "priority": "5",
}
NONE_OF_THEM: dict[str, str | bytes | None] = dict.fromkeys(GOOD)
UNREADABLE: list[tuple[str, dict[str, str | bytes | None]]] = [
    ("task_id", {"task_id": None}),
    ("task_id", {"task_id": ""}),
    ("task_id", {"task_id": "a b"}),
    ("task_id", {"task_id": b"\xff\xfe"}),
    ("task_id", {"task_id": "x" * 65}),
    ("queue", {"queue": None}),
    ("queue", {"queue": "other"}),
    ("queue", {"queue": b"\xff"}),
    ("task_type", {"task_type": None}),
    ("task_type", {"task_type": ""}),
    ("task_type", {"task_type": "x" * 201}),
    ("task_type", {"task_type": "line\nbreak"}),
    ("task_type", {"task_type": "caf\u00e9".encode("latin-1")}),
    ("task_type", {"task_type": b"\xed\xa0\x80"}),
    ("task_type", {"task_type": b"\xc0\xaf"}),
    ("task_type", {"task_type": b"\xc3"}),
    ("payload", {"payload": None}),
    ("attempt", {"attempt": None}),
    ("attempt", {"attempt": "abc"}),
    ("attempt", {"attempt": "0"}),
    ("attempt", {"attempt": "-1"}),
    ("attempt", {"attempt": "1.5"}),
    ("attempt", {"attempt": "1e3"}),
    ("attempt", {"attempt": "9" * 400}),
    ("max_attempts", {"max_attempts": "many"}),
    ("timeout_ms", {"timeout_ms": "0"}),
    ("timeout_ms", {"timeout_ms": "604800001"}),
    ("priority", {"priority": None}),
    ("priority", {"priority": "4"}),
    ("priority", {"priority": "five"}),
    ("idempotency_key", {"idempotency_key": "k" * 257}),
    ("idempotency_key", {"idempotency_key": b"\xff"}),
    ("task_id", {**NONE_OF_THEM, "f\udcff": b"\xfe"}),
    ("task_id", {**NONE_OF_THEM, **{f"f{n}": "v" for n in range(300)}}),
]


def test_unreadable_entries_go_to_the_dead_letters_once_and_disturb_nobody(desk: Desk) -> None:
    good = 0
    kept: list[dict[bytes, bytes]] = []
    for _, changes in UNREADABLE:
        fields = {
            name.encode(errors="surrogateescape"): value.encode() if isinstance(value, str) else value
            for name, value in {**GOOD, **changes}.items()
            if value is not None
        }
        desk.add_entry(fields)
        desk.enqueue(f"good{good}")
        good += 1
        kept.append(fields)
    child = desk.child()
    assert drain(child) == [f"good{n}" for n in range(good)]
    assert drain(child, own=True, park=True) == []
    letters: Any = desk.server.client().xrange(desk.keys.dead_letter)
    assert len(letters) == len(UNREADABLE)
    for (_, letter), (reason, _), fields in zip(letters, UNREADABLE, kept, strict=True):
        raw = {n.removeprefix(b"raw:"): v for n, v in letter.items() if n.startswith(b"raw:")}
        assert raw == fields
        assert letter[b"last_error_class"] == b"UnreadableEntry"
        assert letter[b"last_error"].decode().startswith(reason)
        assert (letter[b"task_id"], letter[b"retryable"], letter[b"priority"]) == (b"", b"0", b"5")
        assert (letter[b"queue"], letter[b"original_queue"]) == (b"default", b"default")
        assert reason in letter[b"cause"].decode()
    assert desk.redis.xlen(desk.stream()) == 0
    assert desk.redis.xpending(desk.stream(), GROUP)["pending"] == 0
    assert desk.redis.exists(desk.keys.task("t1")) == 0
    told = [event["type"] for event in desk.events()]
    assert told.count("TASK_DEAD_LETTERED") == len(UNREADABLE)


def test_a_payload_is_not_judged_here(desk: Desk) -> None:
    desk.add_entry({**GOOD, "payload": b"\xff{"})
    assert claim(desk.child()).payload == b"\xff{"


def test_a_record_that_cannot_be_read_is_buried_with_its_entry(desk: Desk) -> None:
    desk.enqueue("t1", "t2")
    desk.redis.delete(desk.keys.task("t1"))
    desk.redis.set(desk.keys.task("t1"), "something else")
    reply = desk.child().turn(None, Want())
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, reply.counts["unreadable"]) == ("t2", 1)
    [(_, letter)] = desk.letters()
    assert "WRONGTYPE" in letter["last_error"]
    assert letter["raw:task_id"] == "t1"


def test_what_cannot_be_buried_is_not_thrown_away(desk: Desk) -> None:
    desk.redis.set(desk.keys.dead_letter, "something else")
    entry_id = desk.add_entry({"nonsense": "1"})
    desk.enqueue("good")
    child = desk.child()
    reply = child.turn(None, Want())
    assert reply.claimed is not None
    assert (reply.claimed.token.task_id, reply.counts["unburied"]) == ("good", 1)
    assert desk.owner(desk.stream(), entry_id) == child.consumer
    desk.redis.delete(desk.keys.dead_letter)
    assert child.turn(None, Want(own=True), [pair(reply.claimed)]).counts == {"unreadable": 1}
    assert desk.letters()[0][1]["raw:nonsense"] == "1"


# -- what the record says


def test_a_missing_record_is_rebuilt_from_the_entry(desk: Desk) -> None:
    desk.enqueue("t1", payload=b'{"a":1}', max_attempts=2, timeout_ms=900, idempotency_key="k", priority=8)
    desk.redis.delete(desk.keys.task("t1"), desk.keys.idempotency("default", "k"))
    child = desk.child()
    reply = child.turn(None, Want())
    assert reply.counts["rebuilt"] == 1
    delivery = reply.claimed
    assert delivery is not None
    assert (delivery.payload, delivery.max_attempts, delivery.timeout_ms) == (b'{"a":1}', 2, 900)
    assert (delivery.token.delivery, delivery.priority, delivery.metadata) == (1, 8, b'{"rebuilt":true}')
    held = desk.idempotency("k")
    assert held is not None
    assert (held["task_id"], held["state"]) == ("t1", "processing")
    assert held["payload_hash"] == payload_hash(b'{"a":1}')
    assert desk.redis.ttl(desk.keys.task("t1")) > 0
    assert child.settle(succeeded(delivery)) == "settled"


def test_a_rebuilt_task_does_not_take_a_key_that_is_held(desk: Desk) -> None:
    desk.enqueue("t1", idempotency_key="k")
    desk.redis.delete(desk.keys.task("t1"))
    desk.enqueue("t2", idempotency_key="k", priority=0)
    child = desk.child()
    assert claim(child).token.task_id == "t1"
    held = desk.idempotency("k")
    assert held is not None
    assert held["task_id"] == "t2"
    child.settle(succeeded(claim(child, own=True)))
    assert desk.idempotency("k") == held, "its end touches only a key of its own"


def test_scraps_of_a_record_are_no_record(desk: Desk) -> None:
    desk.enqueue("t1")
    desk.redis.delete(desk.keys.task("t1"))
    desk.edit("t1", due_at_ms=1, updated_at_ms=1)
    reply = desk.child().turn(None, Want())
    assert reply.claimed is not None
    assert reply.counts["rebuilt"] == 1


def test_a_record_of_another_program_is_completed_from_its_entry(desk: Desk) -> None:
    desk.edit("t1", status="queued")
    desk.add_entry({**GOOD, "payload": '{"x":1}', "timeout_ms": "700"})
    delivery = claim(desk.child())
    assert (delivery.task_type, delivery.payload, delivery.timeout_ms) == ("probe", b'{"x":1}', 700)
    record = desk.record("t1")
    assert (record["queue"], record["task_type"], record["payload"]) == ("default", "probe", '{"x":1}')
    assert (record["status"], record["entry_id"]) == ("running", delivery.token.entry_id)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "succeeded"},
        {"status": "dead_lettered"},
        {"status": "cancelled"},
        {"status": "expired"},
        {"status": "scheduled", "entry_id": ""},
        {"status": "retry_scheduled", "entry_id": ""},
        {"entry_id": "1-1"},
        {"stream": "elsewhere"},
        {"status": "running", "entry_id": "1-1"},
    ],
    ids=str,
)
def test_an_entry_that_its_record_does_not_mean_is_absorbed(desk: Desk, changes: dict[str, str]) -> None:
    desk.enqueue("t1")
    desk.edit("t1", **changes)
    before = desk.record("t1")
    desk.events()
    reply = desk.child().turn(None, Want())
    assert (reply.claimed, reply.counts["absorbed"]) == (None, 1)
    assert desk.record("t1") == before
    assert desk.entries() == []
    assert desk.redis.xpending(desk.stream(), GROUP)["pending"] == 0
    [event] = desk.events()
    assert (event["type"], event["task_id"]) == ("TASK_DUPLICATE_ABSORBED", "t1")
    assert event["metadata"]["why"] in (changes.get("status"), "another_entry")


def test_an_entry_without_an_id_in_its_record_is_adopted(desk: Desk) -> None:
    desk.enqueue("t1")
    entry_id = desk.record("t1")["entry_id"]
    desk.edit("t1", entry_id="")
    assert claim(desk.child()).token.entry_id == entry_id
    assert desk.record("t1")["entry_id"] == entry_id


def test_an_entry_running_under_another_name_is_taken_over_with_the_next_delivery(desk: Desk) -> None:
    ours, theirs = desk.child(), desk.child(worker="w2")
    old = desk.began(theirs, "t1")
    desk.redis.xclaim(*(old.token.stream, GROUP, ours.consumer, 0, [old.token.entry_id]), idle=0)
    new = claim(ours, own=True)
    assert (new.token.task_id, new.token.delivery) == ("t1", 2)
    assert desk.record("t1")["consumer"] == ours.consumer
    assert theirs.settle(succeeded(old)) == "fenced"
    assert ours.settle(succeeded(new)) == "settled"


def test_a_held_entry_that_was_taken_from_us_is_forgotten_untouched(desk: Desk) -> None:
    ours, theirs = desk.child(), desk.child(worker="w2")
    desk.enqueue("t1")
    held = desk.hold(ours, "t1")
    desk.redis.xclaim(held[0], GROUP, theirs.consumer, 0, [held[1]], idle=0)
    before = desk.record("t1")
    reply = ours.turn(None, Want(own=True, park=True), [held])
    assert (reply.claimed, reply.held) == (None, ())
    assert desk.record("t1") == before
    assert desk.owner(*held) == theirs.consumer
    assert claim(theirs, own=True).token.task_id == "t1"


def test_a_due_task_is_taken_out_of_the_schedule_when_it_begins(desk: Desk) -> None:
    """As after a promotion whose second half did not see its end."""
    desk.enqueue("t1")
    desk.edit("t1", due_at_ms=desk.now_ms())
    desk.redis.zadd(desk.keys.schedule, {"t1": 1})
    desk.redis.zadd(desk.keys.claimed, {"t1": 1})
    claim(desk.child())
    assert desk.places().where("t1") == {"pending"}


def test_an_unknown_type_is_told_how_long_it_has_been_unknown(desk: Desk) -> None:
    child = desk.child()
    child.settle(unknown(desk.began(child, "t1"), 0))
    assert int(desk.record("t1")["first_unknown_at_ms"]) <= desk.now_ms()
    desk.edit("t1", first_unknown_at_ms=desk.now_ms() - 5000, status="queued", entry_id="")
    desk.add_entry(GOOD)
    delivery = claim(child)
    assert delivery.first_unknown_ms is not None
    assert 5000 <= delivery.first_unknown_ms < 60_000
    assert delivery.attempt == 1
