"""The look for entries that nobody was given: what waits is found, what is handed out, paused or gone is not;
and what the duty that looks tells the main loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dtq_child.errors import BrokerError
from dtq_supervisor import idlers
from dtq_supervisor.events import StayedIdle
from dtq_supervisor.idlers import Idlers, look
from dtq_supervisor.slot import State
from dtq_supervisor.snapshot import SlotView, Snapshot
from tests.redis.post import Post
from tests.redis.scene import US, Scene
from tests.support.servers import RedisServer
from tests.support.waiting import until


@pytest.fixture
def scene(every_redis: RedisServer) -> Iterator[Scene]:
    with Scene(every_redis) as scene:
        yield scene


def test_nothing_waits_in_empty_queues(scene: Scene) -> None:
    assert look(scene.line()) == ("", -1, ())


def test_what_was_enqueued_waits_until_it_is_handed_out(scene: Scene) -> None:
    (first, second) = scene.enqueue(2, queue="images", priority=3)
    band = scene.keys.stream("images", 3)
    waiting = look(scene.line())
    assert (waiting.band, waiting.paused) == (band, ())
    assert 0 <= waiting.age_ms < 5000
    token = scene.claim(US).token
    assert token.task_id == first
    assert look(scene.line()).band == band
    scene.hold(US, second, slot=1)
    assert look(scene.line()) == ("", -1, ())


def test_of_several_bands_the_one_with_the_oldest_is_told(scene: Scene) -> None:
    stream = scene.keys.stream("default", 1)
    scene.enqueue(queue="default", priority=9)
    scene.server.cli("XADD", stream, f"{scene.now_ms() - 60_000}-0", "task_id", "t")
    waiting = look(scene.line())
    assert waiting.band == stream
    assert 60_000 <= waiting.age_ms < 70_000


def test_paused_queues_are_named_and_what_is_in_them_does_not_wait(scene: Scene) -> None:
    scene.enqueue(queue="images")
    scene.redis.set(scene.keys.paused("images"), "1")
    assert look(scene.line()) == ("", -1, ("images",))
    scene.redis.set(scene.keys.paused("default"), "1")
    assert look(scene.line()).paused == ("default", "images")
    scene.redis.delete(scene.keys.paused("images"))
    assert look(scene.line()).band == scene.keys.stream("images", 5)


def test_a_band_that_is_no_stream_or_lost_its_group_hides_no_other(scene: Scene) -> None:
    scene.redis.set(scene.keys.stream("default", 9), "x")
    scene.enqueue(queue="images")
    band = scene.keys.stream("images", 5)
    scene.claim(US)
    assert look(scene.line()).band == ""
    scene.redis.xgroup_destroy(band, "workers")
    assert look(scene.line()).band == band


def test_looking_changes_nothing_even_in_a_full_server(scene: Scene) -> None:
    scene.enqueue(queue="images")
    before = scene.places()
    scene.fill_memory()
    assert look(scene.line()).band
    assert replace(scene.places(), time_ms=before.time_ms) == before


# -- the duty


@pytest.fixture
def post(redis_server: RedisServer) -> Iterator[Post]:
    with Post(redis_server.url) as post:
        yield post


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idlers, "EVERY_S", 0.05)


def publish(post: Post) -> None:
    """A child that has been idle for long."""
    post.child(0)
    row = post.board.read_row(0)
    assert row is not None
    idle = replace(row, idle_since=1.0, redis_ok_since=1.0)
    post.seat.published.snapshot = Snapshot(
        slots=(SlotView(0, State.READY, 1, 1, 4711, idle),), contact=True, claiming=True
    )


@pytest.mark.usefixtures("_quick")
def test_an_idle_child_is_told_to_the_main_loop(
    redis_server: RedisServer, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Scene(redis_server) as scene:
        monkeypatch.setattr(idlers, "IDLE_MOST_S", 0.5)
        monkeypatch.setattr("dtq_supervisor.idleness.SECOND_LOOK_S", 0.0)
        stream = scene.keys.stream("default", 5)
        scene.server.cli("XADD", stream, f"{scene.now_ms() - 60_000}-0", "task_id", "t")
        publish(post)
        begun = time.monotonic()
        duty = Idlers(post.seat)
        post.start(duty)
        told = until(post.seat.inbox.take, 10, "the main loop is told nothing")
        assert told[0] == StayedIdle(0, 1, 0)
        assert time.monotonic() - begun >= 0.5
        assert [idler.band for idler in duty.found] == [stream]
        scene.redis.delete(stream)
        until(lambda: not duty.found, 5)
        assert duty.paused == ()


@pytest.mark.usefixtures("_quick")
def test_while_redis_is_away_nothing_is_known(redis_server: RedisServer, post: Post) -> None:
    duty = Idlers(post.seat)
    duty.beat()
    assert duty.paused == ()
    duty.troubled(BrokerError("away"))
    assert duty.paused is None
    assert duty.found == ()
    duty.line.link.close()
