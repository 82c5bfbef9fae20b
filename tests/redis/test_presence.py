"""A supervisor makes itself known, is known while it beats, and takes its leave."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtq_supervisor.presence import announce, say_farewell
from dtq_supervisor.seat import Seat
from tests.redis.scene import THEM, US, Scene, at_park
from tests.support.servers import RedisServer
from tests.support.waiting import until

TYPES = {"shop.resize": {"queue": "images"}}


@pytest.fixture
def scene(every_redis: RedisServer) -> Iterator[Scene]:
    with Scene(every_redis) as scene:
        yield scene


def beat(scene: Scene, worker: str = US, ttl_ms: int = 30_000, **fields: Any) -> bool:
    seat = cast(Seat, SimpleNamespace(task_types=TYPES, started_at=1.0))
    return announce(scene.line(worker, ["images", "mail"]), ttl_ms, seat, {"status": "running", **fields})


def test_it_is_known_with_all_that_it_works_on(scene: Scene) -> None:
    assert beat(scene, pid=17) is True
    told = scene.redis.hgetall(scene.keys.worker(US))
    assert (told["worker_id"], told["status"], told["pid"]) == (US, "running", "17")
    assert abs(scene.now_ms() - int(told["last_heartbeat"])) < 5000
    assert int(told["started_at"]) < scene.now_ms()
    assert 0 < scene.redis.pttl(scene.keys.worker(US)) <= 30_000
    assert scene.redis.smembers(scene.keys.workers) == {US}
    assert scene.redis.smembers(scene.keys.queues) == {"images", "mail"}
    assert scene.redis.hgetall(scene.keys.task_types) == {"shop.resize": '{"queue":"images"}'}
    assert scene.events() == [("WORKER_STARTED", US)]


def test_a_later_beat_is_no_new_start(scene: Scene) -> None:
    beat(scene)
    started = scene.redis.hget(scene.keys.worker(US), "started_at")
    assert beat(scene, status="stopping") is False
    told = scene.redis.hgetall(scene.keys.worker(US))
    assert (told["status"], told["started_at"]) == ("stopping", started)
    assert scene.events() == [("WORKER_STARTED", US)]


def test_without_a_beat_it_is_forgotten_with_its_bell(scene: Scene) -> None:
    scene.redis.rpush(scene.keys.bell_worker(US), "1")
    beat(scene, ttl_ms=50)
    until(lambda: not scene.redis.exists(scene.keys.worker(US), scene.keys.bell_worker(US)), 5)


def test_a_farewell_takes_its_names_and_nothing_that_is_pending(scene: Scene) -> None:
    beat(scene)
    beat(scene, THEM)
    scene.redis.rpush(scene.keys.bell_worker(US), "1")
    idle = scene.started(US, slot=1, queue="images")
    held = scene.hold(US, scene.enqueue(queue="images")[0])
    theirs = scene.started(THEM, queue="images")
    for token in (idle.token, theirs.token):
        scene.server.cli("XACK", token.stream, "workers", token.entry_id)
    scene.events()
    assert say_farewell(scene.line(US, ["images"])) == 1
    assert scene.consumers(held.stream) == {held.consumer, theirs.token.consumer}
    assert scene.owner(held) == held.consumer
    assert scene.redis.smembers(scene.keys.workers) == {THEM}
    assert not scene.redis.exists(scene.keys.worker(US), scene.keys.bell_worker(US))
    assert scene.redis.exists(scene.keys.worker(THEM))
    assert scene.events() == [("WORKER_STOPPED", US)]
    assert say_farewell(scene.line(US, ["images"])) == 0
    assert scene.events() == []


def test_what_lies_in_the_park_stays_there_and_is_anybodys_at_once(scene: Scene) -> None:
    tokens = scene.hold_all(US, scene.enqueue(130))
    for token in tokens:
        scene.redis.xclaim(token.stream, "workers", at_park(US), 0, [token.entry_id], justid=True)
    say_farewell(scene.line())
    pending = scene.places().pending
    assert {each.consumer for each in pending} == {at_park(US)}
    assert min(each.idle_ms for each in pending) > 1_000_000_000
    assert len(pending) == 130


def test_a_full_redis_knows_its_workers(scene: Scene) -> None:
    scene.fill_memory()
    assert beat(scene) is True
    assert scene.redis.exists(scene.keys.worker(US))
    say_farewell(scene.line())
    assert not scene.redis.exists(scene.keys.worker(US))


def test_the_end_of_a_reload_is_told_once(scene: Scene) -> None:
    beat(scene, reload="")
    for _ in range(2):
        beat(scene, reload='{"number":1,"outcome":"failed"}')
    beat(scene, reload='{"number":2,"outcome":"done"}')
    assert [kind for kind, _ in scene.events()] == ["WORKER_STARTED", "WORKER_RELOADED", "WORKER_RELOADED"]
    assert scene.redis.hget(scene.keys.worker(US), "reload") == '{"number":2,"outcome":"done"}'
