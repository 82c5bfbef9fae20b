"""A producer enqueues: all of one call is accepted, or none of it (R10, R13, R18, R21)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from dtq_child.broker import Accepted, payload_hash
from dtq_child.connection import ServerReply
from dtq_child.errors import IdempotencyConflict, QueueFull
from dtq_child.task import ENTRY_FIELDS
from dtq_child.turns import Delivery, Outcome, Want
from tests.conftest import ProxyStarter
from tests.redis.desk import Desk, buried, call, claim, handed_back, retried, succeeded
from tests.support.servers import RedisServer

YEAR_S = 31536000
DAY_MS = 86_400_000
RECORD_FIELDS = {
    *("task_id", "queue", "task_type", "payload", "priority", "status", "attempt", "max_attempts", "crashes"),
    *("max_crashes", "timeout_ms", "soft_timeout_ms", "retry", "idempotency_key", "created_at_ms"),
    *("updated_at_ms", "due_at_ms", "expires_at_ms", "queued_at_ms", "stream", "entry_id", "delivery"),
    *("metadata", "trace", "store_result"),
}


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis, queue_max_depth=600, recent_max=1000) as desk:
        yield desk


def test_a_task_is_a_record_an_entry_a_ring_and_an_event(desk: Desk) -> None:
    before = desk.now_ms()
    given: dict[str, Any] = {
        "payload": b'{"a":[1,2.50,{}]}',
        "priority": 7,
        "timeout_ms": 1500,
        "soft_timeout_ms": 900,
        "max_attempts": 4,
        "max_crashes": 2,
        "retry": '{"base":1}',
        "metadata": '{"who":"ada"}',
        "trace": "00-ab-cd-01",
        "expires_ms": 5000,
    }
    assert desk.enqueue("t1", queue="images", **given) == [Accepted("t1", True, False, "queued")]
    record = desk.record("t1")
    [(entry_id, entry)] = desk.entries("images", 7)
    assert tuple(entry) == ENTRY_FIELDS
    assert entry == {
        "task_id": "t1",
        "queue": "images",
        "task_type": "probe",
        "payload": '{"a":[1,2.50,{}]}',
        "attempt": "1",
        "max_attempts": "4",
        "priority": "7",
        "timeout_ms": "1500",
        "idempotency_key": "",
    }
    assert set(record) <= RECORD_FIELDS
    assert {name: record[name] for name in ENTRY_FIELDS if name != "idempotency_key"} == {
        name: value for name, value in entry.items() if name != "idempotency_key"
    }
    assert (record["status"], record["delivery"], record["crashes"]) == ("queued", "0", "0")
    assert (record["stream"], record["entry_id"]) == (desk.stream("images", 7), entry_id)
    assert (record["soft_timeout_ms"], record["max_crashes"]) == ("900", "2")
    assert (record["retry"], record["metadata"], record["trace"]) == (
        given["retry"],
        given["metadata"],
        given["trace"],
    )
    assert before <= int(record["created_at_ms"]) <= desk.now_ms()
    assert int(record["expires_at_ms"]) == int(record["created_at_ms"]) + 5000
    assert desk.rings("images") == 1
    assert desk.redis.smembers(desk.keys.queues) == {"images"}
    assert desk.redis.zscore(desk.keys.recent, "t1") == float(record["created_at_ms"])
    assert desk.told() == [("TASK_QUEUED", "t1")]


def test_five_hundred_tasks_are_one_call_and_keep_their_order(desk: Desk) -> None:
    ids = [f"t{n}" for n in range(500)]
    assert desk.enqueue(*ids) == [Accepted(task_id, True, False, "queued") for task_id in ids]
    assert [entry["task_id"] for _, entry in desk.entries()] == ids
    assert desk.rings() == 64
    assert len({event["event_id"] for event in desk.events()}) == 500
    assert desk.redis.zcard(desk.keys.recent) == 500


def test_events_are_json_with_a_date_and_an_id_of_their_own(desk: Desk) -> None:
    desk.enqueue("t1", task_type='say "ça"\\')
    desk.enqueue("t2", delay_ms=60_000)
    first, second = desk.events()
    assert len(first["event_id"]) == 32
    assert set(first["event_id"]) <= set("0123456789abcdef")
    assert first["event_id"] != second["event_id"]
    now = datetime.fromtimestamp(desk.now_ms() / 1000, UTC)
    assert first["ts"].endswith("Z")
    assert abs((datetime.fromisoformat(first["ts"]) - now).total_seconds()) < 5
    assert first["task_type"] == 'say "ça"\\'
    assert (first["queue"], first["attempt"], first["worker_id"]) == ("default", 1, "")
    assert second["metadata"] == {"due_at_ms": int(desk.record("t2")["due_at_ms"])}


def test_a_delayed_task_is_in_the_schedule_and_nowhere_else(desk: Desk) -> None:
    desk.enqueue("soon", delay_ms=DAY_MS)
    eta = desk.now_ms() + 2 * DAY_MS
    assert desk.enqueue("later", eta_ms=eta)[0].status == "scheduled"
    record = desk.record("later")
    assert (record["status"], record["entry_id"], record["due_at_ms"]) == ("scheduled", "", str(eta))
    soon = float(desk.record("soon")["created_at_ms"]) + DAY_MS
    assert desk.redis.zrange(desk.keys.schedule, 0, -1, withscores=True) == [("soon", soon), ("later", eta)]
    assert desk.entries() == []
    assert desk.rings() == 0
    assert desk.redis.smembers(desk.keys.queues) == {"default"}


def test_a_time_in_the_past_is_now(desk: Desk) -> None:
    assert [a.status for a in desk.enqueue("t1", eta_ms=desk.now_ms() - 1000)] == ["queued"]
    assert [a.status for a in desk.enqueue("t2", delay_ms=0)] == ["queued"]
    assert [entry["task_id"] for _, entry in desk.entries()] == ["t1", "t2"]
    assert "due_at_ms" not in desk.record("t1")


# -- resends


@pytest.mark.parametrize(
    "state", ["queued", "scheduled", "running", "retry_scheduled", "succeeded", "cancelled"]
)
def test_a_known_id_answers_with_its_task_and_writes_nothing(desk: Desk, state: str) -> None:
    child = desk.child()
    if state == "scheduled":
        desk.enqueue("t1", delay_ms=DAY_MS)
    elif state in ("queued", "cancelled"):
        desk.enqueue("t1")
        if state == "cancelled":
            desk.broker.cancel("t1")
    else:
        delivery = desk.began(child, "t1")
        if state == "retry_scheduled":
            child.settle(retried(delivery, 60_000))
        if state == "succeeded":
            child.settle(succeeded(delivery))
    before = desk.everything()
    desk.events()
    assert desk.enqueue("t1", payload=b'{"other":1}', queue="other") == [Accepted("t1", False, False, state)]
    assert desk.everything() == before
    assert desk.events() == []


def test_the_same_id_twice_in_a_call_is_one_task(desk: Desk) -> None:
    accepted = desk.broker.enqueue([call("t1"), call("t2"), call("t1", priority=9)])
    assert [(a.task_id, a.new) for a in accepted] == [("t1", True), ("t2", True), ("t1", False)]
    assert desk.redis.xlen(desk.stream()) == 2
    assert desk.redis.exists(desk.stream("default", 9)) == 0


def test_a_lost_reply_is_asked_for_again_and_nothing_is_doubled(
    every_redis: RedisServer, start_proxy: ProxyStarter
) -> None:
    proxy = start_proxy(every_redis.port)
    with Desk(every_redis, proxy.url) as desk:
        desk.enqueue("warm")
        lost = proxy.drop_reply(b"t1")
        accepted = desk.broker.enqueue([call("t1", idempotency_key="k"), call("t2", delay_ms=DAY_MS)])
        assert lost.fired == 1
        assert accepted == [Accepted("t1", False, False, "queued"), Accepted("t2", False, False, "scheduled")]
        assert [entry["task_id"] for _, entry in desk.entries()] == ["warm", "t1"]
        assert desk.redis.zcard(desk.keys.schedule) == 1


# -- depth


def test_a_full_queue_refuses_what_is_immediate(desk: Desk) -> None:
    child = desk.child()
    desk.enqueue(*(f"t{n}" for n in range(300)), priority=9)
    desk.enqueue(*(f"u{n}" for n in range(298)), priority=0)
    claim(child)  # in flight, and counted
    before = desk.everything()
    with pytest.raises(QueueFull) as refused:
        desk.broker.enqueue([call("v1"), call("v2"), call("v3", delay_ms=1000), call("v4", priority=1)])
    assert (refused.value.queue, refused.value.depth, refused.value.limit) == ("default", 598, 600)
    assert desk.everything() == before
    assert desk.enqueue("w1", "w2")[1].new
    with pytest.raises(QueueFull):
        desk.enqueue("w3")
    assert not desk.enqueue("t0")[0].new, "a known one is no new one"
    assert desk.enqueue("w3", queue="other")[0].new
    assert desk.enqueue("w4", delay_ms=1000)[0].new


def test_a_full_schedule_refuses_what_is_delayed(every_redis: RedisServer) -> None:
    with Desk(every_redis, queue_max_depth=3) as desk:
        desk.enqueue("t1", "t2", delay_ms=1000)
        before = desk.everything()
        with pytest.raises(QueueFull, match="the schedule holds 2 tasks"):
            desk.broker.enqueue([call("t3", delay_ms=1), call("t4", delay_ms=1, queue="other"), call("t5")])
        assert desk.everything() == before
        assert desk.enqueue("t6", "t7", "t8")[2].new
        assert desk.enqueue("t9", delay_ms=1000)[0].new


# -- idempotency


def in_state(desk: Desk, state: str) -> None:
    """A task `first` with the key `k` in that state."""
    child = desk.child()
    if state in ("scheduled", "expired"):
        desk.enqueue(
            "first", idempotency_key="k", delay_ms=DAY_MS if state == "scheduled" else 0, expires_ms=1
        )
    elif state == "queued":
        desk.enqueue("first", idempotency_key="k")
    if state == "expired":
        desk.edit("first", expires_at_ms=desk.now_ms() - 1)
        assert child.turn(None, Want()).counts["expired"] == 1
    if state in ("scheduled", "queued", "expired"):
        return
    delivery = desk.began(child, "first", idempotency_key="k")
    outcomes: dict[str, Callable[[Delivery], Outcome]] = {
        "succeeded": succeeded,
        "dead_lettered": buried,
        "retry_scheduled": retried,
        "parked": handed_back,
    }
    if state in outcomes:
        assert child.settle(outcomes[state](delivery)) == "settled"
    if state == "cancelled":
        desk.broker.cancel("first")
    if state == "record gone":
        desk.redis.delete(desk.keys.task("first"))
    if state == "no JSON":
        desk.redis.set(desk.keys.idempotency("default", "k"), "{")


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        ("queued", "queued"),
        ("scheduled", "scheduled"),
        ("running", "running"),
        ("parked", "queued"),
        ("retry_scheduled", "retry_scheduled"),
        ("succeeded", "succeeded"),
        ("dead_lettered", None),
        ("cancelled", None),
        ("expired", None),
        ("record gone", None),
        ("no JSON", None),
    ],
)
def test_who_holds_a_key_decides(desk: Desk, state: str, answer: str | None) -> None:
    in_state(desk, state)
    [accepted] = desk.enqueue("second", idempotency_key="k")
    if answer is None:
        assert accepted == Accepted("second", True, False, "queued")
        held = desk.idempotency("k")
        assert held is not None
        assert (held["task_id"], held["state"]) == ("second", "processing")
        assert held["payload_hash"] == payload_hash(b"{}")
        assert not desk.enqueue("third", idempotency_key="k")[0].new
    else:
        assert accepted == Accepted("first", False, True, answer)
        assert desk.record("second") == {}


def test_another_payload_under_a_held_key_is_a_conflict_and_refuses_the_whole_call(desk: Desk) -> None:
    desk.enqueue("first", idempotency_key="k")
    before = desk.everything()
    with pytest.raises(IdempotencyConflict) as refused:
        desk.broker.enqueue([call("a"), call("b", idempotency_key="k", payload=b'{"x":1}'), call("c")])
    assert (refused.value.queue, refused.value.key, refused.value.task_id) == ("default", "k", "first")
    assert desk.everything() == before
    assert desk.enqueue("d", idempotency_key="k", queue="other")[0].new, "keys belong to their queue"


def test_a_key_twice_in_a_call(desk: Desk) -> None:
    twice = [call("a", idempotency_key="k"), call("b", idempotency_key="k")]
    assert desk.broker.enqueue(twice) == [
        Accepted("a", True, False, "queued"),
        Accepted("a", False, True, "queued"),
    ]
    before = desk.everything()
    with pytest.raises(IdempotencyConflict):
        desk.broker.enqueue([call("c", idempotency_key="l"), call("d", idempotency_key="l", payload=b"[]")])
    assert desk.everything() == before


def test_a_holder_of_another_program_without_a_hash_deduplicates(desk: Desk) -> None:
    desk.enqueue("first")
    for value in ('{"task_id":"first","state":"processing"}', '{"task_id":"first","payload_hash":null}'):
        desk.redis.set(desk.keys.idempotency("default", "k"), value)
        assert desk.enqueue("second", idempotency_key="k") == [Accepted("first", False, True, "queued")]


# -- how long things are kept


def test_records_and_keys_outlive_the_task(every_redis: RedisServer) -> None:
    with Desk(every_redis, task_retention_s=60.0, idem_ttl_s=30.0) as desk:
        desk.enqueue("t1", idempotency_key="a")
        desk.enqueue("t2", idempotency_key="b", delay_ms=3 * DAY_MS)
        now, then = desk.redis.ttl(desk.keys.task("t1")), desk.redis.ttl(desk.keys.task("t2"))
        assert now == pytest.approx(YEAR_S, abs=5)
        assert then == pytest.approx(YEAR_S + 3 * 86400, abs=5)
        assert desk.redis.ttl(desk.keys.idempotency("default", "a")) >= now
        assert desk.redis.ttl(desk.keys.idempotency("default", "b")) >= then


def test_a_retention_beyond_a_year_counts(every_redis: RedisServer) -> None:
    with Desk(every_redis, task_retention_s=2.0 * YEAR_S, idem_ttl_s=3.0 * YEAR_S) as desk:
        desk.enqueue("t1", idempotency_key="a")
        assert desk.redis.ttl(desk.keys.task("t1")) == pytest.approx(2 * YEAR_S, abs=5)
        assert desk.redis.ttl(desk.keys.idempotency("default", "a")) == pytest.approx(3 * YEAR_S, abs=5)


def test_the_list_of_recent_tasks_is_trimmed(every_redis: RedisServer) -> None:
    with Desk(every_redis, recent_max=100) as desk:
        desk.enqueue("old")
        desk.redis.zadd(desk.keys.recent, {"old": 1})
        desk.enqueue(*(f"t{n}" for n in range(100)))
        assert desk.redis.zcard(desk.keys.recent) == 100
        assert desk.redis.zscore(desk.keys.recent, "old") is None


# -- what lies in the way


@pytest.mark.parametrize("where", ["band", "schedule", "record"])
def test_a_key_of_the_wrong_type_is_refused_before_any_write(desk: Desk, where: str) -> None:
    key = {"band": desk.stream(), "schedule": desk.keys.schedule, "record": desk.keys.task("t2")}[where]
    desk.redis.set(key, "something else")
    before = desk.everything()
    delay = 1000 if where == "schedule" else None
    with pytest.raises(ServerReply, match="WRONGTYPE"):
        desk.broker.enqueue([call("t1", priority=6), call("t2", delay_ms=delay)])
    assert desk.everything() == before
    assert desk.events() == []


def test_what_only_helps_may_be_broken(desk: Desk) -> None:
    for key in (desk.keys.recent, desk.keys.queues, desk.keys.bell_queue("default"), desk.keys.hint):
        desk.redis.set(key, "something else") if key != desk.keys.recent else desk.redis.rpush(key, "x")
    assert desk.enqueue("t1")[0].new
    assert claim(desk.child()).token.task_id == "t1"


# -- bells and hints


def test_bells_hold_at_most_64_tokens(desk: Desk) -> None:
    for number in range(70):
        desk.enqueue(f"t{number}")
    assert desk.rings() == 64
    desk.enqueue(*(f"u{n}" for n in range(10)))
    assert desk.rings() == 64
    desk.redis.ltrim(desk.keys.bell_queue("default"), 0, 59)
    desk.enqueue(*(f"v{n}" for n in range(10)))
    assert desk.rings() == 64


def test_above_ten_queues_the_bands_are_hinted_at(desk: Desk) -> None:
    for number in range(10):
        desk.enqueue(f"t{number}", queue=f"q{number}")
    assert desk.redis.exists(desk.keys.hint) == 0
    desk.enqueue("t10", queue="q10", priority=9)
    desk.enqueue("t11", queue="q0", priority=0)
    desk.enqueue("t12", queue="q1", delay_ms=1000)
    assert desk.redis.zrange(desk.keys.hint, 0, -1, withscores=True) == [("q10:p9", 0.0), ("q0:p0", 9.0)]


def test_eleven_queues_in_one_call_are_hinted_at(desk: Desk) -> None:
    desk.broker.enqueue([call(f"t{n}", queue=f"q{n}") for n in range(11)])
    assert desk.redis.zcard(desk.keys.hint) == 11


def test_the_value_of_a_key_is_what_other_programs_read(desk: Desk) -> None:
    desk.enqueue("t1", idempotency_key="a key: ü", payload=b'{"n":1}')
    value = json.loads(desk.redis.get(desk.keys.idempotency("default", "a key: ü")))
    assert set(value) == {"task_id", "state", "updated_at", "payload_hash"}
    assert value["updated_at"] == int(desk.record("t1")["created_at_ms"])
    assert desk.entries()[0][1]["idempotency_key"] == "a key: ü"
