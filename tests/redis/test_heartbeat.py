"""Leases are kept for what our children have in hand, and what was taken from them is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dtq_child.error_text import ErrorText
from dtq_child.outcome import Facts, Happening, Raised, Returned, decide
from dtq_child.retry import DEFAULT_RETRY
from dtq_child.task import Token
from dtq_child.turns import Delivery, Outcome
from dtq_supervisor import cancels, heartbeat
from dtq_supervisor.holdings import Holding
from tests.redis.scene import THEM, US, Scene, at_park
from tests.support.servers import RedisServer

FACTS = Facts(1, 3, 0, 3, DEFAULT_RETRY, 0)
RAISED = Raised(ErrorText("ValueError", "no", ""), ("ValueError",))
YEAR_S = 365 * 86400


@pytest.fixture
def scene(every_redis: RedisServer) -> Iterator[Scene]:
    with Scene(every_redis) as scene:
        yield scene


def holding(token: Token, held: bool = False) -> Holding:
    h = Holding(0, 0, 1, token.consumer, token.stream, token.entry_id)
    return h if held else replace(h, seq=1, task_id=token.task_id, delivery=token.delivery, executing=True)


def renew(scene: Scene, *holdings: Holding) -> list[str]:
    return [word for _, word in heartbeat.renew(scene.line(), holdings)]


def look(scene: Scene, *holdings: Holding) -> list[str]:
    return [word for _, word in cancels.look(scene.line(), holdings)]


def settle(scene: Scene, delivery: Delivery, happening: Happening) -> None:
    outcome = Outcome(delivery.token, delivery.queue, decide(happening, FACTS, 0.5), None, {}, 3)
    assert scene.child(US).settle(outcome) == "settled"


def taken_by_them(scene: Scene, token: Token) -> Delivery:
    """The entry lies in their park, and one of their children takes it from there."""
    scene.server.cli("XCLAIM", token.stream, "workers", at_park(THEM), 0, token.entry_id, "JUSTID")
    again = scene.claim(THEM, park=True)
    assert again.token.entry_id == token.entry_id
    return again


def test_what_runs_is_renewed_and_its_record_is_kept(scene: Scene) -> None:
    token = scene.started(US).token
    scene.age(token, 25_000)
    scene.redis.expire(scene.keys.task(token.task_id), 100)
    assert renew(scene, holding(token)) == ["ours"]
    owner, idle = scene.pending(token) or ("", 10**9)
    assert owner == token.consumer
    assert idle < 5000
    assert scene.redis.ttl(scene.keys.task(token.task_id)) >= YEAR_S - 10


def test_renewing_counts_no_delivery(scene: Scene) -> None:
    token = scene.started(US).token
    before = scene.places().pending[0].deliveries
    renew(scene, holding(token))
    renew(scene, holding(token))
    assert scene.places().pending[0].deliveries == before


def test_what_is_held_is_renewed_while_it_is_ours(scene: Scene) -> None:
    token = scene.hold(US, scene.enqueue()[0])
    scene.age(token, 25_000)
    assert renew(scene, holding(token, held=True)) == ["ours"]
    assert (scene.pending(token) or ("", 10**9))[1] < 5000
    scene.server.cli("XCLAIM", token.stream, "workers", at_park(THEM), 0, token.entry_id, "JUSTID")
    assert renew(scene, holding(token, held=True)) == ["gone"]
    assert scene.owner(token) == at_park(THEM)


@pytest.mark.parametrize("happening", [Returned(), RAISED])
def test_what_was_settled_is_told_and_not_called_lost(scene: Scene, happening: Happening) -> None:
    delivery = scene.started(US)
    settle(scene, delivery, happening)
    h = holding(delivery.token)
    assert renew(scene, h) == look(scene, h) == ["settled"]


def test_a_retry_that_runs_elsewhere_by_now_was_settled_by_us_all_the_same(scene: Scene) -> None:
    delivery = scene.started(US)
    settle(scene, delivery, RAISED)
    task_id = delivery.token.task_id
    scene.redis.hset(scene.keys.task(task_id), mapping={"status": "running", "delivery": 2, "consumer": "x"})
    assert look(scene, holding(delivery.token)) == ["settled"]


def test_what_another_worker_runs_is_superseded_and_stays_theirs(scene: Scene) -> None:
    token = scene.started(US).token
    again = taken_by_them(scene, token)
    scene.age(again.token, 9000)
    h = holding(token)
    assert renew(scene, h) == look(scene, h) == ["superseded"]
    owner, idle = scene.pending(token) or ("", 0)
    assert owner == f"{THEM}:0.1"
    assert idle >= 9000


def test_what_a_reaper_judged_is_superseded_though_nobody_runs_it_yet(scene: Scene) -> None:
    token = scene.started(US).token
    execution = f'{{"worker_id":"{US}","consumer":"{token.consumer}","outcome":"crashed"}}'
    fields = {"status": "queued", "consumer": "", "execution:1": execution}
    scene.redis.hset(scene.keys.task(token.task_id), mapping=fields)
    assert look(scene, holding(token)) == ["superseded"]


def test_a_cancelled_one_is_told_apart(scene: Scene) -> None:
    token = scene.started(US).token
    assert scene.broker.cancel(token.task_id) == "stopping"
    h = holding(token)
    assert renew(scene, h) == look(scene, h) == ["cancelled"]


def test_another_programs_cancel_by_the_set_reaches_the_running_one(scene: Scene) -> None:
    token = scene.started(US).token
    scene.redis.sadd(scene.keys.cancelled, token.task_id, "unknown-id")
    scene.events()
    assert look(scene, holding(token)) == ["cancelled"]
    assert scene.record(token.task_id)["status"] == "cancelled"
    assert scene.redis.smembers(scene.keys.cancelled) == {"unknown-id"}
    assert scene.places().at_rest() is True
    assert scene.events() == [("TASK_CANCELLED", token.task_id)]
    assert look(scene, holding(token)) == ["cancelled"]
    assert scene.events() == []


def test_a_successor_is_not_hit_by_the_cancel_set_on_behalf_of_a_former_delivery(scene: Scene) -> None:
    token = scene.started(US).token
    taken_by_them(scene, token)
    scene.redis.sadd(scene.keys.cancelled, token.task_id)
    assert look(scene, holding(token)) == ["superseded"]
    assert scene.record(token.task_id)["status"] == "running"


def test_what_is_pending_for_nobody_and_ours_by_the_record_is_ours_again(scene: Scene) -> None:
    token = scene.started(US).token
    scene.server.cli("XGROUP", "DESTROY", token.stream, "workers")
    assert renew(scene, holding(token)) == ["ours"], "without a group there is nothing to restore"
    scene.server.cli("XGROUP", "CREATE", token.stream, "workers", "$")
    assert scene.owner(token) is None
    assert renew(scene, holding(token)) == ["ours"]
    assert scene.owner(token) == token.consumer


def test_without_its_entry_the_record_is_touched_so_that_nobody_takes_it_for_stranded(scene: Scene) -> None:
    token = scene.started(US).token
    scene.server.cli("XACK", token.stream, "workers", token.entry_id)
    scene.redis.xdel(token.stream, token.entry_id)
    scene.touch(token.task_id, ms_ago=120_000)
    assert renew(scene, holding(token)) == ["ours"]
    assert scene.now_ms() - int(scene.record(token.task_id)["updated_at_ms"]) < 5000


def test_without_its_record_an_entry_that_is_pending_for_us_is_kept(scene: Scene) -> None:
    token = scene.started(US).token
    scene.redis.delete(scene.keys.task(token.task_id))
    scene.age(token, 25_000)
    assert renew(scene, holding(token)) == ["ours"]
    assert (scene.pending(token) or ("", 10**9))[1] < 5000
    scene.server.cli("XACK", token.stream, "workers", token.entry_id)
    assert renew(scene, holding(token)) == ["gone"]


def test_each_of_many_is_answered_in_its_place(scene: Scene) -> None:
    tokens = scene.hold_all(US, scene.enqueue(450))
    scene.server.cli("XACK", tokens[0].stream, "workers", tokens[250].entry_id)
    words = renew(scene, *(holding(token, held=True) for token in tokens))
    assert len(words) == 450
    assert [at for at, word in enumerate(words) if word != "ours"] == [250]


def test_a_full_redis_keeps_leases(scene: Scene) -> None:
    token, without_entry = scene.started(US).token, scene.started(US).token
    scene.redis.xdel(without_entry.stream, without_entry.entry_id)
    scene.server.cli("XACK", without_entry.stream, "workers", without_entry.entry_id)
    scene.age(token, 25_000)
    scene.fill_memory()
    assert renew(scene, holding(without_entry), holding(token)) == ["ours", "ours"]
    assert (scene.pending(token) or ("", 10**9))[1] < 5000
    assert scene.broker.cancel(token.task_id) == "stopping"
    assert look(scene, holding(token)) == ["cancelled"]
