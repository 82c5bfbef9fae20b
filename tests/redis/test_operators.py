"""Operators act: cancel, pause, resume, requeue, discard; the answer is what happened, and the audit says who
did it (R9, R13, R21, R24, R33)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from dtq_child.broker import Actor, payload_hash
from dtq_child.connection import ServerReply
from dtq_child.errors import IdempotencyConflict
from dtq_child.turns import Want
from tests.conftest import ProxyStarter
from tests.redis.desk import OPERATOR, Desk, at_park, buried, claim, handed_back, pair, retried, succeeded
from tests.support.servers import RedisServer

AUDIT_FIELDS = ("actor", "action", "task_id", "ts", "request_id", "queue", "via", "detail")


@pytest.fixture
def desk(every_redis: RedisServer) -> Iterator[Desk]:
    with Desk(every_redis) as desk:
        yield desk


# -- cancel


def held(desk: Desk) -> None:
    desk.enqueue("t1", idempotency_key="k")
    desk.hold(desk.child(), "t1")


def parked(desk: Desk) -> None:
    child = desk.child()
    child.settle(handed_back(desk.began(child, "t1", idempotency_key="k")))


def being_promoted(desk: Desk) -> None:
    desk.enqueue("t1", delay_ms=60_000, idempotency_key="k")
    desk.redis.zadd(desk.keys.claimed, {"t1": desk.now_ms()})
    desk.redis.zrem(desk.keys.schedule, "t1")


def waiting_for_a_retry(desk: Desk) -> None:
    child = desk.child()
    child.settle(retried(desk.began(child, "t1", idempotency_key="k"), 60_000))


WAITING: dict[str, Callable[[Desk], object]] = {
    "queued": lambda desk: desk.enqueue("t1", idempotency_key="k"),
    "held": held,
    "parked": parked,
    "scheduled": lambda desk: desk.enqueue("t1", delay_ms=60_000, idempotency_key="k"),
    "being promoted": being_promoted,
    "retry_scheduled": waiting_for_a_retry,
}


@pytest.mark.parametrize("state", WAITING)
def test_a_waiting_task_is_cancelled_and_never_starts(desk: Desk, state: str) -> None:
    WAITING[state](desk)
    desk.events()
    assert desk.broker.cancel("t1", OPERATOR) == "cancelled"
    record = desk.record("t1")
    assert (record["status"], record["consumer"]) == ("cancelled", "")
    assert record["finished_at_ms"] == record["updated_at_ms"]
    assert desk.places().where("t1") == {"terminal"}
    assert desk.entries() == []
    assert desk.idempotency("k") is None
    assert desk.redis.ttl(desk.keys.task("t1")) == pytest.approx(604800, abs=5)
    assert desk.told() == [("TASK_CANCELLED", "t1")]
    assert desk.audit()[0]["detail"] == "because cancelled"
    before = desk.everything()
    assert desk.broker.cancel("t1", OPERATOR) == "cancelled"
    assert desk.everything() == before, "twice is once"
    assert desk.child().turn(None, Want(own=True, park=True, everywhere=True)).claimed is None


def test_a_running_task_is_over_at_once_and_its_process_is_to_be_told(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1", idempotency_key="k")
    desk.events()
    assert desk.broker.cancel("t1") == "stopping"
    record = desk.record("t1")
    assert (record["status"], record["consumer"], record["delivery"]) == ("cancelled", child.consumer, "1")
    execution = desk.execution("t1", 1)
    assert (execution["outcome"], execution["consumer"]) == ("cancelled", child.consumer)
    assert (desk.entries(), desk.owner(*pair(delivery)), desk.idempotency("k")) == ([], None, None)
    [event] = desk.events()
    assert (event["type"], event["worker_id"]) == ("TASK_CANCELLED", "w1")
    assert desk.broker.cancel("t1") == "stopping", "the same answer again"
    assert child.settle(succeeded(delivery)) == "fenced"
    assert desk.broker.result("t1") is None


def test_a_cancel_keeps_to_twenty_executions(desk: Desk) -> None:
    child = desk.child()
    delivery = desk.began(child, "t1")
    for _ in range(22):
        child.settle(handed_back(delivery))
        delivery = claim(child, park=True)
    desk.broker.cancel("t1")
    record = desk.broker.record("t1")
    assert record is not None
    assert [execution["delivery"] for execution in record.executions()] == list(range(4, 24))


@pytest.mark.parametrize("state", ["succeeded", "dead_lettered", "expired"])
def test_a_finished_task_stays_what_it_is(desk: Desk, state: str) -> None:
    child = desk.child()
    desk.enqueue("t1")
    if state == "expired":
        desk.edit("t1", expires_at_ms=1)
        child.turn(None, Want())
    else:
        child.settle((succeeded if state == "succeeded" else buried)(claim(child)))
    before = desk.everything()
    desk.events()
    assert desk.broker.cancel("t1") == "too_late"
    assert desk.everything() == before
    assert desk.events() == []
    assert desk.broker.cancel("t1", OPERATOR) == "too_late"
    assert desk.audit()[0]["detail"] == "because too_late"


def test_an_unknown_id_will_not_start_if_it_turns_up(desk: Desk) -> None:
    assert desk.broker.cancel("t1", OPERATOR) == "unknown"
    assert desk.broker.cancel("t1") == "unknown"
    assert desk.redis.smembers(desk.keys.cancelled) == {"t1"}
    assert [entry["detail"] for entry in desk.audit()] == ["because unknown"]
    desk.enqueue("t1")
    assert desk.child().turn(None, Want()).counts["cancelled"] == 1
    assert desk.status("t1") == "cancelled"


@pytest.mark.parametrize("running", [True, False])
def test_a_cancel_whose_reply_was_lost_is_answered_as_it_was(
    every_redis: RedisServer, start_proxy: ProxyStarter, running: bool
) -> None:
    proxy = start_proxy(every_redis.port)
    with Desk(every_redis, proxy.url) as desk:
        desk.broker.cancel("warm")
        child = desk.child()
        desk.began(child, "t1") if running else desk.enqueue("t1")
        lost = proxy.drop_reply(b"dtq:task:t1")
        assert desk.broker.cancel("t1") == ("stopping" if running else "cancelled")
        assert lost.fired == 1


# -- pause and resume


def test_from_the_answer_on_nothing_of_a_paused_queue_starts(desk: Desk) -> None:
    child = desk.child(0, "a", "b")
    assert child.turn(None, Want()).claimed is None
    assert desk.broker.pause("a", OPERATOR)
    assert not desk.broker.pause("a", OPERATOR)
    assert (desk.broker.paused("a"), desk.broker.paused("b")) == (True, False)
    desk.enqueue(*(f"a{n}" for n in range(10)), queue="a")
    desk.enqueue("b1", queue="b")
    assert child.wait(["a", "b"], 1) == "a", "it was waiting before it heard of the pause"
    reply = child.turn(None, Want(woken=True))
    assert reply.claimed is not None
    assert reply.claimed.token.task_id == "b1"
    assert reply.paused == {"a"}
    assert child.turn(succeeded(reply.claimed), Want(own=True, park=True)).claimed is None
    assert len(desk.places().undelivered) == 10


def test_resume_rings_and_loses_nothing(desk: Desk) -> None:
    child = desk.child()
    desk.broker.pause("default", OPERATOR)
    desk.enqueue("t1")
    desk.redis.delete(desk.keys.bell_queue("default"))
    assert desk.broker.resume("default", OPERATOR)
    assert not desk.broker.resume("default", OPERATOR)
    assert (desk.broker.paused("default"), desk.rings()) == (False, 64)
    assert claim(child, woken=True).token.task_id == "t1"


def test_pause_and_resume_are_told_and_audited(desk: Desk) -> None:
    desk.broker.pause("a", OPERATOR)
    desk.broker.resume("a", Actor("bob", "http:ci@10.0.0.1", "r2", 'said "go" ü'))
    assert [(event["type"], event["queue"], event["metadata"]) for event in desk.events()] == [
        ("CONFIGURATION_CHANGED", "a", {"paused": True}),
        ("CONFIGURATION_CHANGED", "a", {"paused": False}),
    ]
    paused, resumed = desk.audit()
    assert tuple(paused) == AUDIT_FIELDS
    assert abs(int(paused.pop("ts")) - desk.now_ms()) < 60_000
    assert paused == {
        "actor": "ada",
        "action": "pause",
        "task_id": "",
        "request_id": "r1",
        "queue": "a",
        "via": "test",
        "detail": "because",
    }
    assert (resumed["actor"], resumed["action"], resumed["detail"]) == ("bob", "resume", 'said "go" ü')


def test_the_audit_is_trimmed(every_redis: RedisServer) -> None:
    every_redis.cli("CONFIG", "SET", "stream-node-max-entries", 2)
    with Desk(every_redis, audit_maxlen=5) as desk:
        for _ in range(12):
            desk.broker.pause("a", OPERATOR)
        assert 5 <= len(desk.audit()) <= 7


# -- requeue


def test_a_dead_task_is_put_back_as_new(desk: Desk) -> None:
    desk.dead(
        "t1", payload=b'{"n": 1.50}', idempotency_key="k", expires_ms=60_000, priority=2, max_attempts=7
    )
    desk.edit("t1", crashes=2, attempt=3, first_unknown_at_ms=5, due_at_ms=5)
    [(_, letter)] = desk.letters()
    desk.redis.delete(desk.keys.bell_queue("default"))
    desk.events()
    assert desk.broker.requeue("t1", OPERATOR) == ("requeued", "")
    record = desk.record("t1")
    assert (record["status"], record["attempt"], record["crashes"]) == ("queued", "1", "0")
    assert (record["delivery"], record["consumer"], record["dead_letter_id"]) == ("1", "", "")
    gone = {"finished_at_ms", "first_unknown_at_ms", "due_at_ms", "expires_at_ms"}
    assert not gone & set(record)
    assert record["last_error"] == letter["last_error"], "what happened stays to be read"
    [(entry_id, entry)] = desk.entries("default", 2)
    assert record["entry_id"] == entry_id
    assert {name: entry[name] for name in entry if name != "attempt"} == {
        name: letter[name] for name in entry if name != "attempt"
    }
    assert (desk.letters(), desk.rings()) == ([], 1)
    assert desk.redis.ttl(desk.keys.task("t1")) > 604800
    key = desk.idempotency("k")
    assert key is not None
    assert (key["task_id"], key["state"]) == ("t1", "processing")
    assert key["payload_hash"] == payload_hash(b'{"n": 1.50}')
    [event] = desk.events()
    assert (event["type"], event["metadata"]) == ("TASK_QUEUED", {"requeued": True})
    [audited] = desk.audit()
    assert (audited["action"], audited["task_id"], audited["queue"]) == ("requeue", "t1", "default")
    assert desk.broker.requeue("t1", OPERATOR) == ("not_dead", "queued")
    delivery = claim(desk.child())
    assert (delivery.token.delivery, delivery.attempt, delivery.payload) == (2, 1, b'{"n": 1.50}')


@pytest.mark.parametrize(
    "status", ["queued", "scheduled", "running", "retry_scheduled", "succeeded", "cancelled"]
)
def test_only_what_is_dead_is_requeued_or_discarded(desk: Desk, status: str) -> None:
    desk.dead("t1")
    desk.edit("t1", status=status)
    before = desk.everything()
    for act in (desk.broker.requeue, desk.broker.discard):
        assert act("t1", OPERATOR) == ("not_dead", status)
    assert desk.everything() == before


def test_what_nobody_knows_is_not_found(desk: Desk) -> None:
    desk.dead("t1")
    letter_id = desk.letters()[0][0]
    desk.add_entry({"nonsense": "1"})
    desk.child().turn(None, Want())
    unreadable = desk.letters()[1][0]
    desk.dead("other")
    before = desk.everything()
    for act in (desk.broker.requeue, desk.broker.discard):
        assert act("t9", OPERATOR) == ("not_found", "")
        assert act("t9", OPERATOR, letter_id) == ("not_found", "")
        assert act("other", OPERATOR, letter_id) == ("not_found", ""), "somebody else's letter"
        assert act("other", OPERATOR, unreadable) == ("not_found", "")
    assert desk.broker.requeue("", OPERATOR, unreadable) == ("not_found", "")
    assert desk.everything() == before


def test_a_record_that_has_expired_is_rebuilt_from_the_dead_letter(desk: Desk) -> None:
    desk.dead("t1", payload=b'{"a":1}', timeout_ms=700, idempotency_key="k")
    letter_id = desk.letters()[0][0]
    desk.redis.delete(desk.keys.task("t1"))
    assert desk.broker.requeue("t1", OPERATOR) == ("not_found", ""), "only the letter knows it now"
    assert desk.broker.requeue("t1", OPERATOR, letter_id) == ("requeued", "")
    record = desk.record("t1")
    assert json.loads(record["metadata"]) == {"rebuilt": True}
    assert (record["status"], record["delivery"], record["created_at_ms"]) == (
        "queued",
        "0",
        record["queued_at_ms"],
    )
    delivery = claim(desk.child())
    assert (delivery.payload, delivery.timeout_ms, delivery.idempotency_key) == (b'{"a":1}', 700, "k")
    assert (delivery.token.delivery, desk.letters()) == (1, [])


@pytest.mark.parametrize("record", ["kept", "expired"])
def test_a_key_that_was_taken_meanwhile_is_a_conflict(desk: Desk, record: str) -> None:
    desk.dead("t1", idempotency_key="k")
    letter_id = desk.letters()[0][0]
    assert desk.enqueue("t2", idempotency_key="k")[0].new
    if record == "expired":
        desk.redis.delete(desk.keys.task("t1"))
    before = desk.everything()
    with pytest.raises(IdempotencyConflict) as refused:
        desk.broker.requeue("t1", OPERATOR, letter_id)
    conflict = refused.value
    assert (conflict.queue, conflict.key, conflict.task_id) == ("default", "k", "t2")
    assert desk.everything() == before
    desk.broker.cancel("t2")
    assert desk.broker.requeue("t1", OPERATOR, letter_id)[0] == "requeued"


def test_a_key_whose_new_holder_is_over_is_no_conflict(desk: Desk) -> None:
    desk.dead("t1", idempotency_key="k")
    desk.dead("t2", idempotency_key="k")
    held = desk.idempotency("k")
    assert held is not None
    assert (held["task_id"], held["state"]) == ("t2", "failed")
    assert desk.broker.requeue("t1", OPERATOR) == ("requeued", "")
    held = desk.idempotency("k")
    assert held is not None
    assert (held["task_id"], held["state"]) == ("t1", "processing")
    with pytest.raises(IdempotencyConflict):
        desk.broker.requeue("t2", OPERATOR)


def test_a_dead_task_whose_letter_was_trimmed_is_requeued_from_its_record(desk: Desk) -> None:
    desk.dead("t1", payload=b'{"a":1}')
    desk.redis.delete(desk.keys.dead_letter)
    assert desk.broker.requeue("t1", OPERATOR) == ("requeued", "")
    assert claim(desk.child()).payload == b'{"a":1}'


def test_a_requeue_into_a_broken_band_changes_nothing(desk: Desk) -> None:
    desk.dead("t1", priority=3)
    desk.redis.delete(desk.stream("default", 3))
    desk.redis.set(desk.stream("default", 3), "something else")
    before = desk.everything()
    with pytest.raises(ServerReply, match="WRONGTYPE"):
        desk.broker.requeue("t1", OPERATOR)
    assert desk.everything() == before


def test_above_ten_queues_a_requeue_is_hinted_at(desk: Desk) -> None:
    desk.dead("t1", queue="q11", priority=4)
    desk.redis.sadd(desk.keys.queues, *(f"q{n}" for n in range(10)))
    desk.redis.delete(desk.keys.hint)
    desk.broker.requeue("t1", OPERATOR)
    assert desk.redis.zrange(desk.keys.hint, 0, -1) == ["q11:p4"]


# -- discard


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '{"discarded":true}'),
        ("{}", '{"discarded":true}'),
        ('{"n":1.50,"empty":[],"big":12345678901234567890}', None),
    ],
)
def test_a_discarded_letter_is_gone_and_its_record_says_so(
    desk: Desk, before: str, after: str | None
) -> None:
    desk.dead("t1", metadata=before)
    record = desk.record("t1")
    desk.events()
    assert desk.broker.discard("t1", OPERATOR) == ("discarded", "")
    now = desk.record("t1")
    assert now["metadata"] == (after or before[:-1] + ',"discarded":true}')
    same = set(record) - {"metadata", "updated_at_ms"}
    assert {name: now[name] for name in same} == {name: record[name] for name in same}
    assert now["status"] == "dead_lettered"
    assert desk.letters() == []
    [audited] = desk.audit()
    assert (audited["actor"], audited["action"], audited["task_id"]) == ("ada", "discard", "t1")
    assert audited["queue"] == "default"
    assert desk.broker.discard("t1", OPERATOR) == ("not_found", "")
    assert len(desk.audit()) == 1
    assert desk.broker.requeue("t1", OPERATOR) == ("requeued", ""), "nothing is silently destroyed"


@pytest.mark.parametrize("before", ["", "{}", '{"a":{"discarded":true}}', '{"a":"x,\\"discarded\\":true}"}'])
def test_a_requeued_task_is_discarded_no_more(desk: Desk, before: str) -> None:
    desk.dead("t1", metadata=before)
    assert desk.broker.discard("t1", OPERATOR) == ("discarded", "")
    assert desk.broker.requeue("t1", OPERATOR)[0] == "requeued"
    assert desk.record("t1")["metadata"] == (before or "{}")


def test_letters_without_a_record_are_discarded_by_their_id(desk: Desk) -> None:
    desk.dead("t1")
    desk.add_entry({"nonsense": "1"})
    desk.child().turn(None, Want())
    desk.redis.delete(desk.keys.task("t1"))
    (expired, _), (unreadable, _) = desk.letters()
    assert desk.broker.discard("t1", OPERATOR, expired) == ("discarded", "")
    assert desk.broker.discard("", OPERATOR, unreadable) == ("discarded", "")
    assert desk.letters() == []
    assert desk.redis.exists(desk.keys.task("t1"), desk.keys.task("")) == 0


# -- looking


def test_what_the_broker_tells_of_a_task_and_a_queue(desk: Desk) -> None:
    child = desk.child()
    assert desk.broker.record("t1") is None
    assert desk.broker.result("t1") is None
    desk.enqueue("t1", "t2", priority=1)
    desk.enqueue("t3", priority=8)
    desk.enqueue("t4", delay_ms=60_000)
    delivery = claim(child)
    assert (desk.broker.depth("default"), desk.broker.depth("other")) == (3, 0)
    child.settle(handed_back(delivery))
    assert desk.broker.depth("default") == 3
    assert desk.owner(*pair(delivery)) == at_park(child)
    assert desk.broker.status("t4") == "scheduled"
    record = desk.broker.record("t3")
    assert record is not None
    assert record.as_dict() == desk.record("t3")
    assert desk.broker.dead_letter("1-1") is None
