"""A child settles: what each end of a delivery leaves behind (R9, R16, R19 to R21)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dtq_child.keys import GROUP
from dtq_child.payload import Result
from dtq_child.task import ENTRY_FIELDS
from dtq_child.turns import Want
from tests.redis.desk import (
    KINDS,
    Desk,
    at_park,
    buried,
    claim,
    handed_back,
    pair,
    retried,
    succeeded,
    unknown,
)
from tests.support.servers import RedisServer

YEAR_S = 31536000
DEAD_LETTER_FIELDS = (
    *ENTRY_FIELDS,
    *("failed_at_ms", "attempts_made", "last_error", "last_error_class", "retryable", "worker_id"),
    *("original_queue", "cause"),
)


EACH_WAY = pytest.mark.parametrize("claims", [False, True], ids=["only settles", "claims, too"])


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis, idem_ttl_s=1000.0, result_retention_s=500.0, succeeded_retention_s=2000.0) as desk:
        yield desk


# -- each end of a delivery


def test_success_leaves_record_result_and_history(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    desk.events()
    assert child.settle(succeeded(delivery, Result(b'{"a":1}', 7, truncated=False))) == "settled"
    record = desk.record("t1")
    assert (record["status"], record["result_size"], record["attempt"]) == ("succeeded", "7", "1")
    assert int(record["started_at_ms"]) <= int(record["finished_at_ms"]) == int(record["updated_at_ms"])
    assert desk.broker.result("t1") == b'{"a":1}'
    assert desk.redis.ttl(desk.keys.result("t1")) == pytest.approx(500, abs=5)
    assert desk.redis.ttl(desk.keys.task("t1")) == pytest.approx(2000, abs=5)
    assert desk.execution("t1", 1) == {
        "worker_id": "w1",
        "consumer": "w1:0.1",
        "attempt": 1,
        "started_at_ms": int(record["started_at_ms"]),
        "finished_at_ms": int(record["finished_at_ms"]),
        "outcome": "succeeded",
        "pid": 4711,
        "cpu_ms": 1.5,
    }
    assert desk.places().where("t1") == {"terminal"}
    assert (desk.entries(), desk.redis.xpending(desk.stream(), GROUP)["pending"]) == ([], 0)
    assert desk.told() == [("TASK_SUCCEEDED", "t1")]


@EACH_WAY
@pytest.mark.parametrize(
    ("result", "stored", "fields"),
    [
        (None, None, {"result_size": ""}),
        (Result(b"abc", 900, truncated=True), b"abc", {"result_size": "900", "result_truncated": "1"}),
        (
            Result(b"", 0, truncated=False, unavailable='$: a "set" ü'),
            None,
            {"result_size": "", "result_unavailable": '$: a "set" ü'},
        ),
        (Result(b"\x00\xff", 2, truncated=False), b"\x00\xff", {"result_size": "2"}),
    ],
    ids=["none wanted", "truncated", "unavailable", "any bytes"],
)
def test_what_is_kept_of_a_result(
    desk: Desk, result: Result | None, stored: bytes | None, fields: dict[str, str], claims: bool
) -> None:
    child = desk.child()
    outcome = succeeded(desk.began(child, "t1"), result)
    assert child.turn(outcome, Want(claim=claims)).settled == "settled"
    record = desk.record("t1")
    assert record["status"] == "succeeded"
    assert {name: value for name, value in record.items() if name.startswith("result_")} == fields
    assert desk.broker.result("t1") == stored


def test_a_retry_is_in_the_schedule_and_spends_an_attempt(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    desk.events()
    now = desk.now_ms()
    assert child.settle(retried(delivery, 60_000)) == "settled"
    record = desk.record("t1")
    assert (record["status"], record["attempt"], record["crashes"]) == ("retry_scheduled", "2", "0")
    assert (record["consumer"], record["entry_id"], record["max_attempts"]) == ("", "", "3")
    assert now + 60_000 <= int(record["due_at_ms"]) <= desk.now_ms() + 60_000
    assert desk.redis.zscore(desk.keys.schedule, "t1") == float(record["due_at_ms"])
    last = (record["last_error_class"], record["last_error"], record["traceback"])
    assert last == ("ValueError", "no such thing", "Traceback: here")
    execution = desk.execution("t1", 1)
    assert (execution["outcome"], execution["error"], execution["attempt"]) == ("raised", "ValueError", 1)
    assert desk.places().where("t1") == {"schedule"}
    assert desk.entries() == []
    failed, scheduled = desk.events()
    assert (failed["type"], failed["attempt"]) == ("TASK_FAILED", 1)
    assert failed["metadata"] == {"error_class": "ValueError"}
    assert (scheduled["type"], scheduled["attempt"]) == ("TASK_RETRY_SCHEDULED", 2)
    assert scheduled["metadata"] == {"due_at_ms": int(record["due_at_ms"]), "outcome": "raised"}


def test_a_retry_may_spend_nothing(desk: Desk) -> None:
    child = desk.child()
    child.settle(retried(desk.began(child, "t1"), 60_000, spend=False))
    assert desk.record("t1")["attempt"] == "1"


def test_an_unknown_type_waits_and_remembers_since_when(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    desk.events()
    child.settle(unknown(delivery))
    first = desk.record("t1")["first_unknown_at_ms"]
    assert desk.told() == [("TASK_RETRY_SCHEDULED", "t1")]
    assert desk.execution("t1", 1)["outcome"] == "unknown"
    desk.edit("t1", status="running", entry_id="9-9", consumer=child.consumer, first_unknown_at_ms=first)
    again = replace(delivery.token, entry_id="9-9")
    desk.edit("t1", delivery=2)
    assert child.settle(unknown(replace(again, delivery=2))) == "settled"
    record = desk.record("t1")
    assert (record["first_unknown_at_ms"], record["attempt"]) == (first, "1")


def test_a_dead_letter_has_all_it_takes_to_run_again(desk: Desk) -> None:
    child = desk.child()
    given: dict[str, Any] = {"payload": b'{"a":[]}', "priority": 7, "timeout_ms": 900, "idempotency_key": "k"}
    delivery = desk.began(child, "t1", **given)
    desk.events()
    assert child.settle(buried(delivery)) == "settled"
    [(letter_id, letter)] = desk.letters()
    assert tuple(letter) == DEAD_LETTER_FIELDS
    record = desk.record("t1")
    assert letter == {
        "task_id": "t1",
        "queue": "default",
        "task_type": "probe",
        "payload": '{"a":[]}',
        "attempt": "1",
        "max_attempts": "3",
        "priority": "7",
        "timeout_ms": "900",
        "idempotency_key": "k",
        "failed_at_ms": record["finished_at_ms"],
        "attempts_made": "1",
        "last_error": 'it said "no"',
        "last_error_class": "ValueError",
        "retryable": "0",
        "worker_id": "w1",
        "original_queue": "default",
        "cause": '{"signal":"SIGSEGV"}',
    }
    assert (record["status"], record["dead_letter_id"]) == ("dead_lettered", letter_id)
    assert (record["last_error"], record["traceback"]) == ('it said "no"', "Traceback: there")
    execution = desk.execution("t1", 1)
    assert (execution["outcome"], execution["cause"]) == ("attempts_exhausted", {"signal": "SIGSEGV"})
    assert desk.redis.ttl(desk.keys.task("t1")) == pytest.approx(604800, abs=5)
    assert desk.places().where("t1") == {"terminal"}
    assert desk.broker.dead_letter(letter_id) == {n: v.encode() for n, v in letter.items()}
    failed, dead = desk.events()
    assert (failed["type"], failed["metadata"]) == ("TASK_FAILED", {"error_class": "ValueError"})
    assert dead["type"] == "TASK_DEAD_LETTERED"
    assert dead["metadata"] == {"error_class": "ValueError", "dead_letter_id": letter_id}


def test_a_death_that_spends_no_attempt_says_so(desk: Desk) -> None:
    child = desk.child()
    child.settle(buried(desk.began(child, "t1"), spend=False))
    assert desk.letters()[0][1]["attempts_made"] == "0"


def test_dead_letters_are_trimmed_and_the_trimmed_ones_counted(every_redis: RedisServer) -> None:
    every_redis.cli("CONFIG", "SET", "stream-node-max-entries", 2)
    with Desk(every_redis, dlq_maxlen=5) as desk:
        child, trimmed = desk.child(), 0
        for number in range(12):
            reply = child.turn(buried(desk.began(child, f"t{number}")), Want(claim=False))
            trimmed += reply.counts.get("dead_letters_trimmed", 0)
        left = len(desk.letters())
        assert 5 <= left <= 7
        assert trimmed == 12 - left


def test_error_texts_of_any_kind_arrive(desk: Desk) -> None:
    child = desk.child()
    outcome = buried(desk.began(child, "t1"))
    nasty = 'quote " backslash \\ newline \n nul \x00 ü 🎉 lone \udc80'
    decision = replace(outcome.decision, error_class='We"ird\n', error_message=nasty, traceback=nasty)
    desk.events()
    assert child.settle(replace(outcome, decision=decision)) == "settled"
    kept = nasty.replace("\udc80", "\\udc80")
    assert (desk.record("t1")["last_error"], desk.letters()[0][1]["last_error"]) == (kept, kept)
    assert [event["metadata"]["error_class"] for event in desk.events()] == ['We"ird\n'] * 2


def test_a_release_is_parked_for_anyone_and_spends_nothing(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    assert child.settle(handed_back(delivery)) == "settled"
    record = desk.record("t1")
    assert (record["status"], record["consumer"]) == ("queued", "")
    assert (record["attempt"], record["crashes"]) == ("1", "0")
    assert desk.execution("t1", 1)["outcome"] == "released"
    assert desk.owner(*pair(delivery)) == at_park(child)
    assert desk.idle_ms(*pair(delivery)) > 1_000_000_000


def test_a_cancelled_delivery_has_nothing_to_settle(desk: Desk) -> None:
    child = desk.child()
    outcome = succeeded(desk.began(child, "t1"))
    desk.broker.cancel("t1")
    before = desk.everything()
    assert child.settle(replace(outcome, decision=replace(outcome.decision, kind="cancelled"))) == "none"
    assert desk.everything() == before


# -- history


@EACH_WAY
def test_the_newest_twenty_executions_are_kept(desk: Desk, claims: bool) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    for _ in range(23):
        child.settle(handed_back(delivery))
        delivery = claim(child, park=True)
    assert child.turn(succeeded(delivery), Want(claim=claims)).settled == "settled"
    record = desk.broker.record("t1")
    assert record is not None
    assert [execution["delivery"] for execution in record.executions()] == list(range(5, 25))


def test_deliveries_that_left_no_trace_do_not_let_the_history_grow(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    for number in range(60):
        if number % 3:
            child.settle(handed_back(delivery))
            delivery = claim(child, park=True)
        else:
            delivery = claim(child, own=True)  # a lost reply: the next delivery, without an end of this one
    child.settle(retried(delivery, 60_000))
    record = desk.broker.record("t1")
    assert record is not None
    kept = [execution["delivery"] for execution in record.executions()]
    assert len(kept) == 20
    assert kept[-1] == 61
    assert kept[0] > 30


# -- idempotency keys at the end


@pytest.mark.parametrize(
    ("kind", "state"),
    [("succeed", "completed"), ("dead", "failed"), ("retry", "processing"), ("release", "processing")],
)
@EACH_WAY
def test_how_a_key_ends(desk: Desk, kind: str, state: str, claims: bool) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1", idempotency_key="k")
    desk.edit("t1", created_at_ms=desk.now_ms() - 300_000)
    assert child.turn(KINDS[kind][0](delivery), Want(claim=claims)).settled == "settled"
    held = desk.idempotency("k")
    assert held is not None
    assert (held["task_id"], held["state"]) == ("t1", state)
    left = desk.redis.ttl(desk.keys.idempotency("default", "k"))
    if state == "processing":
        assert left >= desk.redis.ttl(desk.keys.task("t1"))
    else:
        assert left == pytest.approx(700, abs=5), "what remains since it was enqueued"
        assert held["payload_hash"]


def test_the_remaining_time_of_a_key_counts_from_the_due_time(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1", idempotency_key="k")
    now = desk.now_ms()
    desk.edit("t1", created_at_ms=now - 5_000_000, due_at_ms=now - 400_000)
    child.settle(succeeded(delivery))
    assert desk.redis.ttl(desk.keys.idempotency("default", "k")) == pytest.approx(600, abs=5)


def test_a_key_lasts_at_least_a_second(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1", idempotency_key="k")
    desk.edit("t1", created_at_ms=1)
    child.settle(succeeded(delivery))
    assert 0 < desk.redis.pttl(desk.keys.idempotency("default", "k")) <= 1000


@pytest.mark.parametrize("kind", ["succeed", "dead", "cancel", "expire"])
def test_a_key_that_names_another_task_is_left_alone(desk: Desk, kind: str) -> None:
    child = desk.child()
    desk.enqueue("t1", idempotency_key="k")
    key = desk.keys.idempotency("default", "k")
    desk.redis.set(key, '{"task_id":"other","state":"processing"}', ex=77)
    if kind == "cancel":
        desk.broker.cancel("t1")
    elif kind == "expire":
        desk.edit("t1", expires_at_ms=1)
        assert child.turn(None, Want()).counts["expired"] == 1
    else:
        child.settle(KINDS[kind][0](claim(child)))
    assert desk.idempotency("k") == {"task_id": "other", "state": "processing"}
    assert 0 < desk.redis.ttl(key) <= 77


def test_records_of_what_waits_long_are_kept_until_then_and_their_keys_too(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1", idempotency_key="k")
    desk.redis.expire(desk.keys.task("t1"), 100)
    desk.redis.expire(desk.keys.idempotency("default", "k"), 50)
    child.settle(retried(delivery, 30 * 86_400_000))
    left = desk.redis.ttl(desk.keys.task("t1"))
    assert left == pytest.approx(YEAR_S + 30 * 86400, abs=5)
    assert desk.redis.ttl(desk.keys.idempotency("default", "k")) >= left


@pytest.mark.parametrize("key", ["k", ""])
def test_a_start_keeps_record_and_key_alive(desk: Desk, key: str) -> None:
    child = desk.child()
    before = desk.began(child, "t0")
    desk.enqueue("t1", idempotency_key=key)
    held = desk.keys.idempotency("default", key) if key else desk.keys.task("t1")
    desk.redis.expire(desk.keys.task("t1"), 100)
    desk.redis.expire(held, 50)
    assert child.turn(succeeded(before), Want()).claimed is not None
    assert desk.redis.ttl(desk.keys.task("t1")) == pytest.approx(YEAR_S, abs=5)
    assert desk.redis.ttl(held) >= desk.redis.ttl(desk.keys.task("t1"))
