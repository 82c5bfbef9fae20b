"""A child has died: what was pending for it is ended, handed back or blamed, and its name is forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dtq_child.outcome import Facts as OutcomeFacts
from dtq_child.outcome import Returned, decide
from dtq_child.retry import DEFAULT_RETRY
from dtq_child.row import Counters, Execution, Phase, Row
from dtq_child.task import Token
from dtq_child.turns import Delivery, Outcome
from dtq_supervisor.events import Verdict, VerdictKind
from dtq_supervisor.judgement import Death
from dtq_supervisor.settler import Settled, settle_dead
from tests.redis.scene import THEM, US, Scene, at_park
from tests.support.servers import RedisServer

SEQ = 7
CAUSE = {"signal": "SIGKILL", "killed_by": "unknown sender", "max_rss_bytes": 1000}
FACTS = OutcomeFacts(1, 3, 0, 3, DEFAULT_RETRY, 0)


@pytest.fixture
def scene(every_redis: RedisServer) -> Iterator[Scene]:
    with Scene(every_redis) as scene:
        yield scene


def execution_of(began: Delivery, **changed: Any) -> Execution:
    token = began.token
    facts: dict[str, Any] = {
        "seq": SEQ,
        "task_id": token.task_id,
        "task_type": began.task_type,
        "stream": token.stream,
        "entry_id": token.entry_id,
        "delivery": token.delivery,
        "attempt": began.attempt,
        "max_attempts": 3,
        "crashes": began.crashes,
        "max_crashes": 3,
        "timeout_ms": 1500,
        "started": 100.0,
        "soft_deadline": 0.0,
        "hard_deadline": 101.5,
        "policy": DEFAULT_RETRY,
        "claim_sent": 99.9,
    }
    return Execution(**{**facts, **changed})


def row_of(execution: Execution | None, phase: Phase = Phase.EXECUTING) -> Row:
    return Row(
        life=1,
        pid=4711,
        phase=phase,
        seq=execution.seq if execution else 0,
        execution=execution,
        held=(),
        settling_since=0.0,
        counters=Counters(),
        idle_since=0.0,
        redis_ok_since=1.0,
        last_claim=99.9,
        stop=False,
        may_claim=True,
        renewed=0.0,
        order_kind=0,
        order_seq=0,
    )


def death(
    began: Delivery | None = None,
    verdict: VerdictKind | None = None,
    *,
    seq: int = SEQ,
    torn: bool = False,
    phase: Phase = Phase.EXECUTING,
    code: int | None = None,
    **changed: Any,
) -> Death:
    """Of child 0.1 of US, which was executing what it `began`."""
    execution = execution_of(began, **changed) if began else None
    return Death(
        slot=0,
        life=1,
        consumer=f"{US}:0.1",
        row=None if torn else row_of(execution, phase if execution else Phase.READY),
        verdict=Verdict(verdict, seq) if verdict else None,
        cause=CAUSE,
        stack="in spin()",
        exit_code=code,
        signal=None if code is not None else 9,
        at=103.0,
    )


def settle(scene: Scene, of: Death, to_anyone: bool = False) -> Settled:
    return settle_dead(scene.line(), of, to_anyone, 0.5)


def test_a_first_crash_goes_to_the_park_and_the_supervisors_bell_rings(scene: Scene) -> None:
    delivery = scene.started(US)
    scene.events()
    settled = settle(scene, death(delivery))
    token = delivery.token
    assert settled.told == [(token.task_id, "parked")]
    assert scene.owner(token) == at_park(US)
    record = scene.record(token.task_id)
    assert (record["status"], record["consumer"], record["crashes"], record["attempt"]) == (
        "queued",
        "",
        "1",
        "1",
    )
    assert record["last_error_class"] == "ChildDied"
    assert record["last_error"] == (
        "child 0 (pid 4711) was killed by SIGKILL (unknown sender) while executing"
    )
    assert record["traceback"] == "in spin()"
    told = scene.execution(token.task_id, 1)
    assert (told["outcome"], told["cause"], told["pid"], told["duration_ms"]) == (
        "crashed",
        CAUSE,
        4711,
        3000,
    )
    assert scene.rings(scene.keys.bell_worker(US)) == 1
    assert scene.consumers(token.stream) == {at_park(US)}
    assert scene.events() == [("TASK_QUEUED", token.task_id)]


def test_after_it_the_next_child_takes_it_first_and_knows_that_it_comes_again(scene: Scene) -> None:
    delivery = scene.started(US)
    scene.enqueue(priority=9)
    settle(scene, death(delivery))
    again = scene.claim(US, life=2, park=True)
    assert again.token.task_id == delivery.token.task_id
    assert (again.crashes, again.attempt, again.token.delivery, again.redelivered) == (1, 1, 2, True)


def test_a_second_crash_waits_in_the_schedule_and_spends_no_attempt(scene: Scene) -> None:
    delivery = scene.started(US)
    settle(scene, death(delivery))
    again = scene.claim(US, park=True)
    settled = settle(scene, death(again))
    task_id = delivery.token.task_id
    assert settled.told == [(task_id, "scheduled")]
    record = scene.record(task_id)
    assert (record["status"], record["crashes"], record["attempt"]) == ("retry_scheduled", "2", "1")
    assert int(record["due_at_ms"]) - scene.now_ms() == pytest.approx(1000, abs=900)
    assert scene.places().where(task_id) == {"schedule"}


def test_the_third_crash_is_poison(scene: Scene) -> None:
    delivery = scene.started(US, max_crashes=3)
    task_id = delivery.token.task_id
    scene.redis.hset(scene.keys.task(task_id), "crashes", 2)
    settled = settle(scene, death(delivery))
    assert settled.told == [(task_id, "dead")]
    record = scene.record(task_id)
    assert (record["status"], record["last_error_class"]) == ("dead_lettered", "PoisonTask")
    letter = scene.redis.xrange(scene.keys.dead_letter)[0][1]
    assert json.loads(letter["cause"]) == CAUSE
    assert (letter["task_id"], letter["attempts_made"]) == (task_id, "0")
    assert scene.places().where(task_id) == {"terminal"}


def test_the_bound_that_the_child_resolved_counts_when_the_record_names_none(scene: Scene) -> None:
    delivery = scene.started(US)
    settled = settle(scene, death(delivery, max_crashes=1))
    assert settled.told == [(delivery.token.task_id, "dead")]


def test_a_timeout_with_attempts_left_is_tried_again_later(scene: Scene) -> None:
    delivery = scene.started(US)
    scene.events()
    settled = settle(scene, death(delivery, "timeout"))
    task_id = delivery.token.task_id
    assert settled.told == [(task_id, "retry")]
    record = scene.record(task_id)
    assert (record["status"], record["attempt"], record["crashes"]) == ("retry_scheduled", "2", "0")
    assert record["last_error_class"] == "TaskTimeout"
    assert "1.5 s" in record["last_error"]
    assert record["traceback"] == "in spin()"
    assert scene.execution(task_id, 1)["outcome"] == "timeout"
    assert [kind for kind, _ in scene.events()] == ["TASK_FAILED", "TASK_RETRY_SCHEDULED"]


def test_a_timeout_of_the_last_attempt_is_dead_lettered(scene: Scene) -> None:
    delivery = scene.started(US)
    settle(scene, death(delivery, "timeout", max_attempts=1))
    record = scene.record(delivery.token.task_id)
    assert (record["status"], record["last_error_class"], record["max_attempts"]) == (
        "dead_lettered",
        "TaskTimeout",
        "1",
    )
    assert len(scene.redis.xrange(scene.keys.dead_letter)) == 1


def test_a_timeouts_record_that_is_missing_is_rebuilt_and_then_ended(scene: Scene) -> None:
    delivery = scene.started(US)
    task_id = delivery.token.task_id
    scene.redis.delete(scene.keys.task(task_id))
    settle(scene, death(delivery, "timeout"))
    record = scene.record(task_id)
    assert (record["status"], record["attempt"]) == ("retry_scheduled", "2")
    assert json.loads(record["metadata"]) == {"rebuilt": True}


def test_a_crash_without_its_record_is_rebuilt_and_blamed(scene: Scene) -> None:
    delivery = scene.started(US)
    scene.redis.delete(scene.keys.task(delivery.token.task_id))
    settled = settle(scene, death(delivery))
    assert settled.told == [(delivery.token.task_id, "parked")]
    assert scene.record(delivery.token.task_id)["crashes"] == "1"


@pytest.mark.parametrize("kind", ["superseded", "cancelled", "grace", "immediate", "boot"])
def test_what_we_killed_for_another_reason_is_released_and_spends_nothing(
    scene: Scene, kind: VerdictKind
) -> None:
    delivery = scene.started(US)
    settled = settle(scene, death(delivery, kind))
    token = delivery.token
    assert settled.told == [(token.task_id, "released")]
    record = scene.record(token.task_id)
    assert (record["status"], record["crashes"], record["attempt"]) == ("queued", "0", "1")
    assert scene.execution(token.task_id, 1)["outcome"] == "released"
    owner, idle = scene.pending(token) or ("", 0)
    assert owner == at_park(US)
    assert idle > 1_000_000_000
    assert scene.rings(scene.keys.bell_queue("default")) >= 1


def test_only_the_execution_that_the_verdict_names_is_blamed(scene: Scene) -> None:
    delivery = scene.started(US)
    settled = settle(scene, death(delivery, "timeout", seq=SEQ + 1))
    assert settled.told == [(delivery.token.task_id, "released")]
    assert scene.record(delivery.token.task_id)["attempt"] == "1"


def test_a_child_stuck_in_settling_is_a_crash(scene: Scene) -> None:
    delivery = scene.started(US)
    settled = settle(scene, death(delivery, "stuck", phase=Phase.SETTLING))
    assert settled.told == [(delivery.token.task_id, "parked")]
    assert scene.record(delivery.token.task_id)["crashes"] == "1"


def test_a_torn_row_blames_what_runs(scene: Scene) -> None:
    delivery = scene.started(US)
    settled = settle(scene, death(delivery, "timeout", torn=True))
    assert settled.told == [(delivery.token.task_id, "parked")]
    assert scene.record(delivery.token.task_id)["crashes"] == "1"


def test_a_handler_that_exits_with_code_0_is_blamed_and_a_child_that_ends_is_not(scene: Scene) -> None:
    busy = scene.started(US)
    assert settle(scene, death(busy, code=0)).told == [(busy.token.task_id, "parked")]
    assert scene.record(busy.token.task_id)["last_error"].endswith("exited with code 0 while executing")
    parked = scene.claim(US, park=True)  # its claim's reply was lost: the row knows nothing of it
    assert settle(scene, death(code=0)).told == [(parked.token.task_id, "released")]
    assert scene.record(parked.token.task_id)["crashes"] == "1"


def test_what_was_held_is_handed_back_unblamed(scene: Scene) -> None:
    task_id = scene.enqueue()[0]
    token = scene.hold(US, task_id)
    assert settle(scene, death()).told == [(task_id, "parked")]
    owner, idle = scene.pending(token) or ("", 10**9)
    assert owner == at_park(US)
    assert idle < 60_000
    assert scene.record(task_id).get("crashes") == "0"


def test_while_none_of_ours_may_claim_everything_goes_to_others(scene: Scene) -> None:
    running = scene.started(US)
    held = scene.hold(US, scene.enqueue()[0])
    settled = settle(scene, death(running), to_anyone=True)
    assert sorted(what for _, what in settled.told) == ["parked", "released"]
    for token in (running.token, held):
        owner, idle = scene.pending(token) or ("", 0)
        assert owner == at_park(US)
        assert idle > 1_000_000_000, "released: anybody may take it at once"
    assert scene.record(running.token.task_id)["crashes"] == "1", "a crash it was all the same"
    assert scene.rings(scene.keys.bell_queue("default")) >= 1


def test_what_the_record_no_longer_means_is_absorbed(scene: Scene) -> None:
    cancelled = scene.hold(US, scene.enqueue()[0])
    other = scene.hold(US, scene.enqueue()[0])
    scene.redis.hset(scene.keys.task(cancelled.task_id), "status", "cancelled")
    scene.redis.hset(scene.keys.task(other.task_id), "entry_id", "9-9")
    settled = settle(scene, death())
    assert settled.counts["absorbed"] == 2
    assert scene.redis.xlen(cancelled.stream) == 0
    assert scene.record(cancelled.task_id)["status"] == "cancelled"


def test_a_cancelled_task_stays_cancelled(scene: Scene) -> None:
    delivery = scene.started(US)
    assert scene.broker.cancel(delivery.token.task_id) == "stopping"
    assert settle(scene, death(delivery, "cancelled")).told == []
    assert scene.record(delivery.token.task_id)["status"] == "cancelled"
    assert scene.consumers(delivery.token.stream) == set()


def test_bodies_that_are_gone_and_entries_that_are_no_tasks(scene: Scene) -> None:
    gone = scene.hold(US, scene.enqueue()[0])
    scene.redis.xdel(gone.stream, gone.entry_id)
    scene.redis.xadd(gone.stream, {"task_id": "x", "nonsense": "1"})
    scene.child(US)  # a name
    scene.server.cli("XREADGROUP", "GROUP", "workers", f"{US}:0.1", "STREAMS", gone.stream, ">")
    settled = settle(scene, death())
    assert (settled.counts["bodies_gone"], settled.counts["unreadable"]) == (1, 1)
    assert scene.places().at_rest() is True
    assert scene.redis.xrange(scene.keys.dead_letter)[0][1]["raw:nonsense"] == "1"


def test_a_held_entry_that_runs_elsewhere_is_given_back_to_its_runner(scene: Scene) -> None:
    theirs = scene.started(THEM)
    scene.server.cli(
        "XCLAIM", theirs.token.stream, "workers", f"{US}:0.1", 0, theirs.token.entry_id, "JUSTID"
    )
    settle(scene, death())
    assert scene.owner(theirs.token) == f"{THEM}:0.1"
    assert scene.record(theirs.token.task_id)["status"] == "running"


def test_a_settle_whose_reply_the_child_never_read_stands(scene: Scene) -> None:
    delivery = scene.started(US)
    decision = decide(Returned(), FACTS, 0.5)
    outcome = Outcome(delivery.token, delivery.queue, decision, None, {}, 3)
    assert scene.child(US).settle(outcome) == "settled"
    assert settle(scene, death(delivery, phase=Phase.SETTLING)).told == []
    assert scene.record(delivery.token.task_id)["status"] == "succeeded"


def test_nothing_of_others_is_touched(scene: Scene) -> None:
    sibling = scene.started(US, slot=1)
    theirs = scene.started(THEM)
    settle(scene, death())
    assert scene.owner(sibling.token) == f"{US}:1.1"
    assert scene.owner(theirs.token) == f"{THEM}:0.1"


def test_a_clean_end_leaves_no_name_behind(scene: Scene) -> None:
    delivery = scene.started(US)
    decision = decide(Returned(), FACTS, 0.5)
    scene.child(US).settle(Outcome(delivery.token, delivery.queue, decision, None, {}, 3))
    assert scene.consumers(delivery.token.stream) == {f"{US}:0.1"}
    assert settle(scene, death(code=0)).told == []
    assert scene.consumers(delivery.token.stream) == set()


def test_more_than_one_call_holds_is_ended_all_the_same(scene: Scene) -> None:
    scene.hold_all(US, scene.enqueue(300))
    settled = settle(scene, death())
    assert settled.counts["parked"] == 300
    assert scene.consumers(scene.keys.stream("default", 5)) == {at_park(US)}
    assert scene.rings(scene.keys.bell_worker(US)) == 64


@pytest.mark.parametrize("verdict", [None, "timeout", "grace"])
def test_twice_is_once(scene: Scene, verdict: VerdictKind | None) -> None:
    delivery = scene.started(US)
    held = scene.hold(US, scene.enqueue()[0])
    of = death(delivery, verdict)
    settle(scene, of)
    scene.events()
    before = [scene.record(token.task_id) for token in (delivery.token, held)]
    assert settle(scene, of).told == []
    assert [scene.record(token.task_id) for token in (delivery.token, held)] == before
    assert scene.events() == []


@pytest.mark.parametrize(
    ("verdict", "crashes"), [(None, 0), (None, 1), (None, 2), ("timeout", 0), ("grace", 0)]
)
def test_a_full_redis_changes_nothing_about_it(
    scene: Scene, verdict: VerdictKind | None, crashes: int
) -> None:
    delivery = scene.started(US)
    scene.redis.hset(scene.keys.task(delivery.token.task_id), "crashes", crashes)
    scene.fill_memory()
    settled = settle(scene, death(delivery, verdict))
    what = {0: "parked", 1: "scheduled", 2: "dead"}[crashes]
    expected = {"timeout": "retry", "grace": "released", None: what}[verdict]
    assert settled.told == [(delivery.token.task_id, expected)]


def test_the_late_settle_of_a_child_that_was_taken_for_dead_is_refused(scene: Scene) -> None:
    delivery = scene.started(US)
    settle(scene, death(delivery))
    decision = decide(Returned(), FACTS, 0.5)
    outcome = Outcome(delivery.token, delivery.queue, decision, None, {}, 3)
    assert scene.child(US).settle(outcome) == "fenced"
    assert scene.record(delivery.token.task_id)["status"] == "queued"


def test_tokens_are_whole(scene: Scene) -> None:
    """The row speaks of an older delivery of the same entry: it is not what runs now."""
    delivery = scene.started(US)
    settled = settle(scene, death(delivery, "timeout", delivery=9))
    assert settled.told == [(delivery.token.task_id, "released")]
    assert isinstance(delivery.token, Token)
