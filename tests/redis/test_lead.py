"""One leads; others wait for the end of its term; nobody ends or extends a term that is not its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtq_child.connection import ServerReply
from dtq_supervisor.leader import lead, resign
from dtq_supervisor.term import LOCK_MS
from tests.redis.scene import THEM, US, Scene
from tests.support.servers import RedisServer
from tests.support.waiting import until


@pytest.fixture
def scene(every_redis: RedisServer) -> Iterator[Scene]:
    with Scene(every_redis) as scene:
        yield scene


def test_the_first_wins_and_the_second_waits(scene: Scene) -> None:
    assert lead(scene.line()) == "won"
    assert lead(scene.line(THEM)) == "held"
    assert scene.redis.get(scene.keys.lock) == US
    assert 0 < scene.redis.pttl(scene.keys.lock) <= LOCK_MS


def test_the_holder_renews_and_only_the_holder(scene: Scene) -> None:
    lead(scene.line())
    scene.redis.pexpire(scene.keys.lock, 3000)
    assert lead(scene.line(THEM)) == "held"
    assert scene.redis.pttl(scene.keys.lock) <= 3000
    assert lead(scene.line()) == "renewed"
    assert scene.redis.pttl(scene.keys.lock) > 3000


def test_after_the_end_of_a_term_another_wins_and_the_former_holder_cannot_interfere(scene: Scene) -> None:
    lead(scene.line())
    scene.redis.pexpire(scene.keys.lock, 1)
    until(lambda: lead(scene.line(THEM)) == "won", 5)
    assert lead(scene.line()) == "held"
    assert resign(scene.line()) is False
    assert scene.redis.get(scene.keys.lock) == THEM


def test_who_resigns_is_followed_at_once(scene: Scene) -> None:
    lead(scene.line())
    assert resign(scene.line()) is True
    assert resign(scene.line()) is False
    assert lead(scene.line(THEM)) == "won"


def test_a_lock_without_an_end_is_given_one(scene: Scene) -> None:
    scene.redis.set(scene.keys.lock, "somebody")
    assert lead(scene.line()) == "held"
    assert 0 < scene.redis.pttl(scene.keys.lock) <= LOCK_MS


def test_a_lock_of_the_wrong_type_is_an_error_that_says_so(scene: Scene) -> None:
    scene.redis.rpush(scene.keys.lock, "x")
    with pytest.raises(ServerReply, match="WRONGTYPE"):
        lead(scene.line())
    assert resign(scene.line()) is False


def test_a_full_redis_has_a_leader(scene: Scene) -> None:
    scene.fill_memory()
    assert (lead(scene.line()), lead(scene.line())) == ("won", "renewed")
    assert resign(scene.line()) is True
