"""Whatever producers, children and operators do, and in whatever order: every task goes only along the edges
of its life, is always in exactly one place, and only its living delivery settles it (R9, R11, R21)."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dtq_child.errors import IdempotencyConflict
from dtq_child.task import EDGES, TERMINAL, WAITING, Record, Status, Token
from dtq_child.turns import Pair, Want
from tests.redis.desk import OPERATOR, Desk, buried, call, handed_back, retried, succeeded, unknown
from tests.support.servers import RedisServer

IDS = st.sampled_from([f"t{n}" for n in range(5)])
CHILDREN = st.integers(0, 1)
ENDINGS = st.sampled_from([succeeded, retried, unknown, buried, handed_back])
OUTCOMES: dict[Any, str] = {
    succeeded: "succeeded",
    retried: "raised",
    unknown: "unknown",
    buried: "attempts_exhausted",
    handed_back: "released",
}


class Life(RuleBasedStateMachine):
    """Two children of one worker, two queues, five tasks, two idempotency keys."""

    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk
        self.children = [desk.child(slot, "a", "b") for slot in range(2)]
        self.tokens: list[Token] = []
        self.held: list[tuple[Pair, ...]] = [(), ()]
        self.accepted: set[str] = set()
        self.before: dict[str, dict[str, str]] = {}
        self.requeued: set[str] = set()

    @initialize()
    def start_empty(self) -> None:
        self.desk.redis.flushall()

    # -- what may happen

    @rule(
        task_id=IDS,
        queue=st.sampled_from(["a", "b"]),
        priority=st.sampled_from([2, 7]),
        delay_ms=st.sampled_from([None, None, 60_000]),
        key=st.sampled_from(["", "", "k0", "k1"]),
    )
    def enqueue(self, task_id: str, queue: str, priority: int, delay_ms: int | None, key: str) -> None:
        known = self.desk.status(task_id)
        given = {"queue": queue, "priority": priority, "delay_ms": delay_ms, "idempotency_key": key}
        [accepted] = self.desk.broker.enqueue([call(task_id, **given)])
        assert accepted.new == (known is None and accepted.task_id == task_id)
        assert accepted.task_id == task_id or (accepted.deduplicated and accepted.task_id in self.accepted)
        if accepted.new:
            self.accepted.add(task_id)

    @rule(child=CHILDREN, own=st.booleans(), park=st.booleans(), heard=st.booleans())
    def claim(self, child: int, own: bool, park: bool, heard: bool) -> None:
        paused = {queue for queue in ("a", "b") if self.desk.broker.paused(queue)}
        reply = self.children[child].turn(None, Want(own=own, park=park, woken=own), self.held[child])
        assert reply.paused == paused
        assert reply.problems == ()
        if reply.claimed is not None:
            assert reply.claimed.queue not in paused
        if heard:
            self.held[child] = reply.held
            if reply.claimed is not None:
                self.tokens.append(reply.claimed.token)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), ending=ENDINGS, then_claim=st.booleans())
    def settle(self, data: st.DataObject, ending: Any, then_claim: bool) -> None:
        token = data.draw(st.sampled_from(self.tokens[-6:]))
        child = int(token.consumer.rpartition(":")[2].partition(".")[0])
        record = self.desk.record(token.task_id)
        ours = (record["status"], record["stream"], record["entry_id"]) == (
            *("running", token.stream),
            token.entry_id,
        ) and (record["delivery"], record.get("consumer")) == (str(token.delivery), token.consumer)
        told = f'"outcome":"{OUTCOMES[ending]}"'
        ended = record.get(f"execution:{token.delivery}", "")
        already = told in ended and f'"consumer":"{token.consumer}"' in ended
        reply = self.children[child].turn(ending(token), Want(claim=then_claim), self.held[child])
        assert reply.settled == ("settled" if ours else "already" if already else "fenced")
        if then_claim:
            self.held[child] = reply.held
            if reply.claimed is not None:
                self.tokens.append(reply.claimed.token)

    @rule(child=CHILDREN, data=st.data(), to_anyone=st.booleans())
    def release(self, child: int, data: st.DataObject, to_anyone: bool) -> None:
        mine = [token for token in self.tokens[-6:] if token.consumer == self.children[child].consumer]
        tokens = data.draw(st.lists(st.sampled_from(mine), max_size=2, unique=True)) if mine else []
        self.children[child].release(tokens, self.held[child], to_anyone)
        self.held[child] = ()

    @rule(task_id=IDS)
    def cancel(self, task_id: str) -> None:
        status = self.desk.status(task_id)
        answer = self.desk.broker.cancel(task_id, OPERATOR)
        if status is None:
            assert answer == "unknown"
        elif status in (Status.SUCCEEDED, Status.DEAD_LETTERED, Status.EXPIRED):
            assert answer == "too_late"
        elif status != Status.CANCELLED:
            assert answer == ("stopping" if status == Status.RUNNING else "cancelled")

    @rule(task_id=IDS)
    def requeue(self, task_id: str) -> None:
        status = self.desk.status(task_id)
        with contextlib.suppress(IdempotencyConflict):
            answer, found = self.desk.broker.requeue(task_id, OPERATOR)
            assert (answer == "requeued") == (status == Status.DEAD_LETTERED)
            assert found == ("" if answer != "not_dead" else status)
            self.requeued.add(task_id)

    @rule(task_id=IDS)
    def discard(self, task_id: str) -> None:
        self.desk.broker.discard(task_id, OPERATOR)

    @rule(queue=st.sampled_from(["a", "b"]), pause=st.booleans())
    def pause_or_resume(self, queue: str, pause: bool) -> None:
        (self.desk.broker.pause if pause else self.desk.broker.resume)(queue, OPERATOR)

    @rule(task_id=IDS)
    def let_expire(self, task_id: str) -> None:
        if self.desk.status(task_id) in (Status.QUEUED, Status.SCHEDULED):
            self.desk.edit(task_id, expires_at_ms=1)

    @rule()
    def promote(self) -> None:
        """All that is scheduled is due, and the leader does its work."""
        keys, scripts, link = self.desk.keys, self.desk.scripts, self.children[0].link
        for task_id in self.desk.redis.zrange(keys.schedule, 0, -1):
            self.desk.edit(task_id, due_at_ms=1)
            self.desk.redis.zadd(keys.schedule, {task_id: 1})
        self.desk.redis.set(keys.lock, "w1")
        scripts.run(link, "promote_claim", [keys.lock, keys.schedule, keys.claimed], ["w1", 100])
        names = [keys.lock, keys.claimed, keys.schedule, keys.cancelled, keys.queues]
        scripts.run(link, "promote_add", names, ["w1", 100])

    # -- what must hold

    @invariant()
    def all_is_well(self) -> None:
        pipe = self.desk.redis.pipeline(transaction=False)
        for task_id in sorted(self.accepted):
            pipe.hgetall(self.desk.keys.task(task_id))
        now = dict(zip(sorted(self.accepted), pipe.execute(), strict=True))
        self.each_is_in_exactly_one_place(now)
        for task_id, record in now.items():
            self.it_went_along_an_edge(task_id, self.before.get(task_id, {}), record)
        self.no_two_unfinished_tasks_share_a_key(now)
        self.before, self.requeued = now, set()

    def each_is_in_exactly_one_place(self, now: dict[str, dict[str, str]]) -> None:
        places = self.desk.places()
        assert places.strays == []
        owners = {(pending.stream, pending.entry_id): pending.consumer for pending in places.pending}
        for task_id, record in now.items():
            assert len(places.where(task_id)) == 1, f"{task_id}: {places.where(task_id)}"
            owner = owners.get((record["stream"], record["entry_id"]))
            if record["status"] == Status.RUNNING:
                assert owner == record["consumer"], task_id
            elif record["status"] != Status.QUEUED:
                assert owner is None, task_id

    def it_went_along_an_edge(self, task_id: str, before: dict[str, str], now: dict[str, str]) -> None:
        was, status = Status(before["status"]) if before else None, Status(now["status"])
        if was is not status:
            assert status in EDGES[was], f"{task_id}: {was} → {status}"
            assert was is not Status.DEAD_LETTERED or task_id in self.requeued
        elif was in TERMINAL:
            same = set(now) - {"metadata", "updated_at_ms"}
            assert {name: now[name] for name in same} == {name: before.get(name) for name in same}
        assert 0 <= int(now["delivery"]) - int(before.get("delivery", 0)) <= 1
        if status in WAITING:
            assert now.get("consumer", "") == ""
        history = Record({name: value.encode() for name, value in now.items()}).executions()
        assert len(history) <= min(20, int(now["delivery"]))

    def no_two_unfinished_tasks_share_a_key(self, now: dict[str, dict[str, str]]) -> None:
        keys = [
            (record["queue"], record["idempotency_key"])
            for record in now.values()
            if record.get("idempotency_key") and record["status"] not in TERMINAL
        ]
        assert len(keys) == len(set(keys))

    def teardown(self) -> None:
        self.desk.redis.flushall()


def test_any_order_of_anything(any_redis: RedisServer) -> None:
    with Desk(any_redis, prefetch=2) as desk:

        class LifeHere(Life):
            def __init__(self) -> None:
                super().__init__(desk)

        run_state_machine_as_test(
            LifeHere,
            settings=settings(
                max_examples=25,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
