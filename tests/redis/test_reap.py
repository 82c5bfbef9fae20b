"""Entries of supervisors that are not heard of are taken over, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dtq_child.task import Token
from dtq_supervisor import strays
from dtq_supervisor.reaper import Reaped, Terms, reap
from tests.redis.scene import THEM, US, Scene, at_park
from tests.support.servers import RedisServer

VISIBILITY_MS = 30_000
ALWAYS = (0, 2**53)
OVER = VISIBILITY_MS + 5000


@pytest.fixture
def scene(every_redis: RedisServer) -> Iterator[Scene]:
    with Scene(every_redis) as scene:
        yield scene


def look(
    scene: Scene,
    worker: str = US,
    *,
    room: int = 4,
    window: tuple[int, int] | None = ALWAYS,
    visibility_ms: int = VISIBILITY_MS,
    go_on: tuple[int, str] = (1, ""),
) -> Reaped:
    return reap(scene.line(worker), Terms(visibility_ms, room, window, [1000, 4000]), go_on)


def parked_by_them(scene: Scene, ms: int = OVER, **options: Any) -> Token:
    """An entry in their park, not asked for since `ms`."""
    token = scene.hold(THEM, scene.enqueue(**options)[0])
    scene.server.cli("XCLAIM", token.stream, "workers", at_park(THEM), 0, token.entry_id, "JUSTID")
    scene.age(token, ms)
    return token


def running_with_them(scene: Scene, ms: int = OVER, **options: Any) -> Token:
    """Begun by their child, whose lease was last renewed `ms` ago."""
    token = scene.started(THEM, **options).token
    scene.age(token, ms)
    return token


# -- what is taken


def test_what_waits_in_their_park_for_too_long_comes_into_ours(scene: Scene) -> None:
    token = parked_by_them(scene)
    reaped = look(scene)
    assert reaped.told == [(token.task_id, "taken")]
    assert (reaped.startable, reaped.taken, reaped.more, reaped.go_on) == (0, 1, False, None)
    owner, idle = scene.pending(token) or ("", 10**9)
    assert owner == at_park(US)
    assert idle < 5000
    record = scene.record(token.task_id)
    assert (record["status"], record["crashes"]) == ("queued", "0")
    assert scene.rings(scene.keys.bell_worker(US)) == 1


def test_released_entries_are_taken_at_once(scene: Scene) -> None:
    delivery = scene.started(THEM)
    assert scene.child(THEM).release([delivery.token]) == 1
    assert look(scene).told == [(delivery.token.task_id, "taken")]
    again = scene.claim(US, park=True)
    assert (again.token.task_id, again.crashes, again.attempt) == (delivery.token.task_id, 0, 1)


def test_what_their_child_held_and_did_not_begin_is_taken_unblamed(scene: Scene) -> None:
    token = scene.hold(THEM, scene.enqueue()[0])
    scene.age(token, OVER)
    assert look(scene, window=None).told == [(token.task_id, "taken")]


def test_what_ran_with_a_worker_not_heard_of_is_a_crash(scene: Scene) -> None:
    token = running_with_them(scene)
    scene.events()
    reaped = look(scene)
    assert (reaped.told, reaped.taken) == ([(token.task_id, "parked")], 1)
    record = scene.record(token.task_id)
    assert (record["status"], record["crashes"], record["consumer"]) == ("queued", "1", "")
    assert record["last_error_class"] == "ChildDied"
    assert "lease ran out" in record["last_error"]
    told = scene.execution(token.task_id, 1)
    assert (told["worker_id"], told["consumer"], told["outcome"]) == (THEM, f"{THEM}:0.1", "crashed")
    assert (told["cause"]["kind"], told["cause"]["reaped_by"]) == ("lease_expired", US)
    assert told["cause"]["idle_ms"] >= OVER
    assert scene.owner(token) == at_park(US)
    assert scene.events() == [("TASK_QUEUED", token.task_id)]


@pytest.mark.parametrize(
    ("crashes", "what", "status"), [(1, "scheduled", "retry_scheduled"), (2, "dead", "dead_lettered")]
)
def test_later_crashes_wait_and_the_last_is_poison(
    scene: Scene, crashes: int, what: str, status: str
) -> None:
    token = running_with_them(scene)
    scene.redis.hset(scene.keys.task(token.task_id), "crashes", crashes)
    reaped = look(scene)
    assert (reaped.told, reaped.taken) == ([(token.task_id, what)], 0)
    assert scene.record(token.task_id)["status"] == status
    assert scene.redis.xlen(token.stream) == 0


def test_the_bands_are_searched_from_the_top(scene: Scene) -> None:
    low = parked_by_them(scene, priority=1)
    high = parked_by_them(scene, priority=8, queue="images")
    assert [task_id for task_id, _ in look(scene, room=1).told] == [high.task_id]
    assert [task_id for task_id, _ in look(scene, room=2).told] == [low.task_id]


def test_a_missing_record_is_rebuilt(scene: Scene) -> None:
    token = parked_by_them(scene)
    scene.redis.delete(scene.keys.task(token.task_id))
    assert look(scene, window=None).told == [], "perhaps it runs"
    assert look(scene).told == [(token.task_id, "taken")]
    assert json.loads(scene.record(token.task_id)["metadata"]) == {"rebuilt": True}


# -- what is left alone


def test_a_lease_that_is_kept_is_respected(scene: Scene) -> None:
    running = running_with_them(scene, VISIBILITY_MS - 5000)
    parked = parked_by_them(scene, VISIBILITY_MS - 5000)
    assert look(scene).told == []
    assert scene.owner(running) == f"{THEM}:0.1"
    assert scene.owner(parked) == at_park(THEM)


def test_a_running_ones_own_lease_counts_too_where_it_is_longer(scene: Scene) -> None:
    token = running_with_them(scene, 20_000)
    assert scene.record(token.task_id)["lease_ms"] == "30000"
    assert look(scene, visibility_ms=10_000).told == []
    scene.age(token, OVER)
    assert look(scene, visibility_ms=10_000).told == [(token.task_id, "parked")]


def test_nothing_of_our_own_is_taken(scene: Scene) -> None:
    running = scene.started(US).token
    parked = parked_by_them(scene)
    look(scene)
    for token in (running, parked):
        scene.age(token, 10 * OVER)
    reaped = look(scene)
    assert (reaped.told, reaped.startable) == ([], 1)
    assert scene.record(running.task_id)["status"] == "running"


def test_while_our_own_hearing_is_in_doubt_nobody_who_runs_is_judged(scene: Scene) -> None:
    running = running_with_them(scene)
    waiting = parked_by_them(scene)
    now = scene.now_ms()
    for window in (None, (now - 9000, now - 5000), (now + 60_000, now + 70_000)):
        assert [what for _, what in look(scene, window=window).told] in ([], ["taken"])
        assert scene.owner(running) == f"{THEM}:0.1"
    assert scene.owner(waiting) == at_park(US)
    assert look(scene, window=(now - 1000, now + 60_000)).told == [(running.task_id, "parked")]


def test_in_a_paused_queue_only_the_running_are_touched(scene: Scene) -> None:
    running = running_with_them(scene)
    waiting = parked_by_them(scene)
    scene.redis.set(scene.keys.paused("default"), "1")
    reaped = look(scene, room=0)
    assert reaped.told == [(running.task_id, "parked")]
    assert (reaped.startable, reaped.taken, reaped.more) == (0, 0, False)
    assert scene.owner(waiting) == at_park(THEM)
    assert (look(scene).startable, scene.rings(scene.keys.bell_worker(US))) == (0, 0)
    scene.redis.delete(scene.keys.paused("default"))
    assert look(scene).startable == 1


def test_a_full_park_takes_no_more_and_says_that_there_is_more(scene: Scene) -> None:
    for _ in range(5):
        parked_by_them(scene)
    first = look(scene, room=3)
    assert (first.taken, first.more) == (3, True)
    second = look(scene, room=3)
    assert (second.startable, second.taken, second.more) == (3, 0, True)
    scene.claim(US, park=True)
    assert (look(scene, room=3).taken, look(scene, room=5).taken) == (1, 1)
    assert look(scene, room=10).more is False


def test_what_it_may_not_take_does_not_hide_what_it_may(scene: Scene) -> None:
    """Many entries of ours lie before the one that counts: paged past, over several calls."""
    scene.hold_all(US, [task_id for _ in range(11) for task_id in scene.enqueue(100)])
    token = parked_by_them(scene, priority=5)
    scene.server.cli("EVAL", _AGE_ALL, 1, token.stream, "workers", OVER)
    assert scene.owner(token) == at_park(THEM)
    reaped = look(scene)
    told, calls = reaped.told, 1
    while reaped.go_on is not None:
        reaped = look(scene, go_on=reaped.go_on)
        told, calls = told + reaped.told, calls + 1
    assert told == [(token.task_id, "taken")]
    assert calls == 3


_AGE_ALL = """
for _, p in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 10000)) do
  redis.call('XCLAIM', KEYS[1], ARGV[1], p[2], 0, p[1], 'IDLE', ARGV[2], 'JUSTID')
end
"""


# -- leftovers


def test_leftovers_are_cleared_and_counted(scene: Scene) -> None:
    gone, done, elsewhere = (parked_by_them(scene) for _ in range(3))
    nonsense = scene.redis.xadd(gone.stream, {"nonsense": "1"})
    scene.server.cli("XREADGROUP", "GROUP", "workers", at_park(THEM), "STREAMS", gone.stream, ">")
    scene.age(Token("", gone.stream, nonsense, 0, ""), OVER)
    scene.redis.xdel(gone.stream, gone.entry_id)
    scene.redis.hset(scene.keys.task(done.task_id), "status", "succeeded")
    scene.redis.hset(scene.keys.task(elsewhere.task_id), "entry_id", "9-9")
    counts = look(scene).counts
    assert (counts["bodies_gone"], counts["absorbed"], counts["unreadable"]) == (1, 2, 1)
    assert scene.places().depth() == 0
    assert scene.places().pending == []
    assert scene.record(done.task_id)["status"] == "succeeded"


def test_a_band_of_the_wrong_type_is_reported_and_hides_no_other(scene: Scene) -> None:
    scene.redis.set(scene.keys.stream("default", 9), "no stream")
    token = parked_by_them(scene)
    reaped = look(scene)
    assert reaped.told == [(token.task_id, "taken")]
    assert len(reaped.problems) == 1
    assert reaped.problems[0].startswith("dtq:stream:default:p9: WRONGTYPE")


# -- robust


def test_many_reapers_in_one_instant_judge_each_death_once(scene: Scene) -> None:
    tokens = [running_with_them(scene) for _ in range(40)]
    others = [f"reaper-{n}-cc" for n in range(5)]

    def everything(worker: str) -> list[tuple[str, str]]:
        return look(scene, worker, room=100).told

    with ThreadPoolExecutor(5) as pool:
        told = [pair for some in pool.map(everything, others) for pair in some]
    assert sorted(told) == sorted((token.task_id, "parked") for token in tokens)
    assert {scene.record(token.task_id)["crashes"] for token in tokens} == {"1"}


def test_twice_is_once(scene: Scene) -> None:
    token = running_with_them(scene)
    look(scene)
    before = scene.record(token.task_id)
    assert look(scene).told == []
    assert scene.record(token.task_id) == before


def test_a_full_redis_changes_nothing_about_it(scene: Scene) -> None:
    running, waiting = running_with_them(scene), parked_by_them(scene)
    poison = running_with_them(scene)
    scene.redis.hset(scene.keys.task(poison.task_id), "crashes", 2)
    scene.fill_memory()
    assert sorted(look(scene).told) == sorted(
        [(running.task_id, "parked"), (waiting.task_id, "taken"), (poison.task_id, "dead")]
    )


# -- strays of our own


def unnamed(scene: Scene, *named: Token) -> list[strays.Pending]:
    pairs = [(token.stream, token.entry_id) for token in named]
    return [pending for pending, _ in strays.list_unnamed(scene.line(), pairs)]


def test_what_no_row_names_is_listed_once_it_has_been_idle_for_a_while(scene: Scene) -> None:
    named, running, held = (
        scene.started(US).token,
        scene.started(US).token,
        scene.hold(US, scene.enqueue()[0]),
    )
    assert unnamed(scene) == []
    parked = parked_by_them(scene)
    scene.server.cli("XCLAIM", parked.stream, "workers", at_park(US), 0, parked.entry_id, "JUSTID")
    theirs = running_with_them(scene)
    for token in (named, running, held, parked, theirs):
        scene.age(token, 6000)
    assert unnamed(scene, named) == [
        strays.Pending(running.stream, running.entry_id, f"{US}:0.1", running.task_id, "1"),
        strays.Pending(held.stream, held.entry_id, f"{US}:0.1", held.task_id, "0"),
    ]


def test_they_are_released_and_spend_nothing(scene: Scene) -> None:
    running, held = scene.started(US).token, scene.hold(US, scene.enqueue()[0], slot=3)
    for token in (running, held):
        scene.age(token, 6000)
    assert strays.release(scene.line(), unnamed(scene)) == 2
    for token in (running, held):
        record = scene.record(token.task_id)
        assert (record["status"], record["crashes"], record["attempt"]) == ("queued", "0", "1")
        assert scene.owner(token) == at_park(US)
        assert (scene.pending(token) or ("", 0))[1] > 1_000_000_000


def test_what_a_child_begins_between_look_and_release_stays_with_it(scene: Scene) -> None:
    running, held = scene.started(US).token, scene.hold(US, scene.enqueue()[0])
    for token in (running, held):
        scene.age(token, 6000)
    found = unnamed(scene)
    first = scene.claim(US, own=True)
    second = scene.claim(US, own=True)
    assert {first.token.task_id, second.token.task_id} >= {running.task_id}
    released = strays.release(scene.line(), found)
    begun_again = [p for p in found if scene.record(p.task_id)["status"] == "running"]
    assert begun_again
    assert released == len(found) - len(begun_again)
    for pending in begun_again:
        assert scene.record(pending.task_id)["consumer"] == f"{US}:0.1"
