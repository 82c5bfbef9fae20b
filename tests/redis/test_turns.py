"""A child claims: by strict priority, only what it may begin, and never two (R9, R11, R14, R22, R24, R25)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dtq_child.broker import payload_hash
from dtq_child.errors import BrokerUnavailable
from dtq_child.keys import GROUP
from dtq_child.task import Token
from dtq_child.turns import Delivery, Turns, Want
from tests.conftest import ProxyStarter
from tests.redis.desk import (
    OPERATOR,
    Desk,
    at_park,
    call,
    claim,
    handed_back,
    pair,
    retried,
    succeeded,
    unknown,
)
from tests.support.servers import RedisServer

EVERYWHERE = Want(everywhere=True)


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis) as desk:
        yield desk


def drain(child: Turns, **want: bool) -> list[str]:
    """Claims and settles until nothing comes; the ids in their order."""
    ids: list[str] = []
    outcome = None
    while True:
        reply = child.turn(outcome, Want(**want))
        if reply.claimed is None and not reply.more:
            return ids
        outcome = None
        if reply.claimed is not None:
            ids.append(reply.claimed.token.task_id)
            outcome = succeeded(reply.claimed)


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
        for number in (1, 2):
            desk.broker.enqueue([call(f"{q}{priority}{number}", queue=q, priority=priority) for q in queues])
    ids = drain(desk.child(0, *queues))
    assert [task_id[1] for task_id in ids] == ["9"] * 6 + ["5"] * 6 + ["0"] * 6
    for at in range(0, 18, 3):
        assert {task_id[0] for task_id in ids[at : at + 3]} == set(queues), "each queue once a round"
    assert [i for i in ids if i[0] == "a"] == ["a91", "a92", "a51", "a52", "a01", "a02"]


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
    desk.edit("t1", updated_at_ms=1)
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
    claimed = child.turn(None, EVERYWHERE).claimed
    assert claimed is not None
    assert claimed.token.task_id == "t1"
    child.release([claimed.token])
    assert claim(child, park=True).token.task_id == "t1", "the park needs no hint"


def test_a_broken_hint_index_costs_no_task(desk: Desk) -> None:
    child = many(desk)
    desk.redis.set(desk.keys.hint, "something else")
    desk.enqueue("t1", queue="q3")
    assert child.turn(None, Want()).claimed is None
    assert child.turn(None, EVERYWHERE).claimed is not None


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


def test_a_held_entry_that_was_begun_unheard_is_queued_again(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue("t1")
    held = desk.hold(child, "t1")
    child.turn(None, Want(), [held])  # its reply was lost, say
    assert child.release([], [held]) == 1
    assert (desk.status("t1"), desk.record("t1")["consumer"]) == ("queued", "")
    assert desk.owner(*held) == at_park(child)


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
