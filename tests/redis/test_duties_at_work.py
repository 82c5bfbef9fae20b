"""The duties as threads, against a real server that goes away and comes back: stories about what they do to
tasks, and what they tell the main loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from dtq_child.row import Counters
from dtq_supervisor.cancels import CancelWatch
from dtq_supervisor.events import Event, Revoked
from dtq_supervisor.heartbeat import Heartbeat
from dtq_supervisor.judgement import Death
from dtq_supervisor.leader import Leader
from dtq_supervisor.reaper import Reaper
from dtq_supervisor.reconcile import Reconciler
from dtq_supervisor.scheduler import Scheduler
from dtq_supervisor.settler import Settler
from dtq_supervisor.term import Term
from tests.redis.post import Post
from tests.redis.scene import THEM, US, Scene, at_park
from tests.support.proxy import FaultProxy
from tests.support.servers import RedisServer
from tests.support.waiting import until

ProxyStarter = Callable[[int], FaultProxy]
PATIENCE_S = 10.0


@pytest.fixture
def scene(redis_server: RedisServer) -> Iterator[Scene]:
    with Scene(redis_server) as scene:
        yield scene


@pytest.fixture
def post(redis_server: RedisServer) -> Iterator[Post]:
    with Post(redis_server.url, heartbeat_interval_s=0.2, visibility_timeout_s=2.0) as post:
        yield post


def told(post: Post, seconds: float = PATIENCE_S) -> list[Event]:
    return until(post.seat.inbox.take, seconds, "the main loop is told nothing")


# -- heartbeat


def test_leases_and_presence_are_kept_and_the_row_knows_since_when(scene: Scene, post: Post) -> None:
    token = scene.started(US).token
    scene.age(token, 1500)
    row = post.child()
    post.begin(row, token)
    before = time.monotonic()
    heartbeat = Heartbeat(post.seat)
    post.start(heartbeat)
    until(lambda: heartbeat.last_success > 0, PATIENCE_S)
    renewed = post.board.read_row(0)
    assert renewed is not None
    assert before <= renewed.renewed <= time.monotonic()
    assert (scene.pending(token) or ("", 10**9))[1] < 1500
    assert scene.redis.hget(scene.keys.worker(US), "active_tasks") == "1"
    assert scene.redis.hget(scene.keys.worker(US), "status") == "running"
    first = renewed.renewed
    until(lambda: (post.board.read_row(0) or renewed).renewed > first, PATIENCE_S, "no second beat")


def test_what_was_counted_in_all_lives_is_told(scene: Scene, post: Post) -> None:
    post.seat.published.past = Counters(processed=5, failed=2)
    post.child().count("processed", 3)
    heartbeat = Heartbeat(post.seat)
    post.start(heartbeat)
    until(lambda: heartbeat.last_success > 0, PATIENCE_S)
    told_of = scene.redis.hgetall(scene.keys.worker(US))
    assert (told_of["tasks_processed"], told_of["tasks_failed"], told_of["concurrency"]) == ("8", "2", "2")


def test_it_beats_when_told_to(scene: Scene, redis_server: RedisServer) -> None:
    with Post(redis_server.url, heartbeat_interval_s=15, visibility_timeout_s=30) as post:
        heartbeat = Heartbeat(post.seat)
        post.start(heartbeat)
        first = until(lambda: heartbeat.last_success, PATIENCE_S)
        heartbeat.send_now()
        until(lambda: heartbeat.last_success > first, PATIENCE_S, "the next beat would be due in 15 s")


def test_a_lost_lease_is_told_once_the_row_still_says_so(scene: Scene, post: Post) -> None:
    token = scene.started(US).token
    scene.server.cli("XCLAIM", token.stream, "workers", at_park(THEM), 0, token.entry_id, "JUSTID")
    scene.claim(THEM, park=True)
    row = post.child()
    post.begin(row, token, seq=9)
    heartbeat = Heartbeat(post.seat)
    post.start(heartbeat)
    assert told(post)[0] == Revoked(0, 1, 9, "superseded")
    row.settling(time.monotonic())
    answers = heartbeat.answers["superseded"]
    post.seat.inbox.take()
    until(lambda: heartbeat.answers["superseded"] > answers + 1, PATIENCE_S)
    assert len(post.seat.inbox.take()) <= 1, "one may have been under way when the row changed"


def test_after_an_outage_the_leases_are_renewed_before_another_could_judge(
    scene: Scene, start_proxy: ProxyStarter
) -> None:
    proxy = start_proxy(scene.server.port)
    with Post(proxy.url, heartbeat_interval_s=0.4, visibility_timeout_s=1.0) as post:
        token = scene.started(US).token
        post.begin(post.child(), token)
        heartbeat = Heartbeat(post.seat)
        post.start(heartbeat)
        until(lambda: heartbeat.last_success > 0, PATIENCE_S)
        proxy.black_hole(existing=True, new=True)
        until(lambda: (scene.pending(token) or ("", 0))[1] > 1500, PATIENCE_S)
        proxy.heal()
        healed, seen = time.monotonic(), heartbeat.last_success
        until(lambda: heartbeat.last_success > seen, PATIENCE_S)
        assert heartbeat.last_success - healed < 0.4 + 1.0
        assert scene.owner(token) == token.consumer


def test_while_the_main_loop_hangs_nothing_is_renewed(scene: Scene, post: Post) -> None:
    heartbeat = Heartbeat(post.seat)
    post.start(heartbeat)
    until(lambda: heartbeat.last_success > 0, PATIENCE_S)
    post.well = False
    until(lambda: not scene.redis.exists(scene.keys.worker(US)), PATIENCE_S, "it still says that it lives")
    post.well = True
    until(lambda: scene.redis.exists(scene.keys.worker(US)), PATIENCE_S)


# -- cancels


def test_a_cancel_reaches_the_running_handler_within_a_second(scene: Scene, post: Post) -> None:
    token = scene.started(US, slot=1, life=4).token
    post.begin(post.child(slot=1, life=4), token, seq=2)
    post.start(CancelWatch(post.seat))
    assert scene.broker.cancel(token.task_id) == "stopping"
    begun = time.monotonic()
    assert told(post)[0] == Revoked(1, 4, 2, "cancelled")
    assert time.monotonic() - begun < 1.0


def test_the_next_execution_of_the_same_child_is_not_hit(scene: Scene, post: Post) -> None:
    """It is told nothing about a delivery that its row names no more."""
    token, after = scene.started(US).token, scene.started(US).token
    row = post.child()
    post.begin(row, token)
    scene.broker.cancel(token.task_id)
    post.begin(row, after, seq=2)
    watch = CancelWatch(post.seat)
    post.start(watch)
    calls = watch.line
    until(lambda: calls.received > 0 and calls.sent > calls.received - 1, PATIENCE_S)
    assert post.seat.inbox.take() == []


# -- settler


def death(slot: int, life: int) -> Death:
    return Death(slot, life, f"{US}:{slot}.{life}", None, None, {"signal": "SIGKILL"}, "", None, 9)


def test_deaths_wait_for_redis_and_are_settled_in_order(scene: Scene, start_proxy: ProxyStarter) -> None:
    proxy = start_proxy(scene.server.port)
    with Post(proxy.url) as post:
        post.child(slot=1)
        settler = Settler(post.seat)
        proxy.black_hole(existing=True, new=True)
        tokens = [scene.started(US, life=life).token for life in (1, 2, 3)]
        scene.events()
        post.start(settler)
        for life in (1, 2, 3):
            settler.put(death(0, life))
        assert settler.flush(time.monotonic() + 0.3) is False
        assert (settler.pending(), len(settler.unsettled())) == (3, 3)
        counter = post.board.park_counter
        proxy.heal()
        assert settler.flush(time.monotonic() + 2 * PATIENCE_S) is True
        assert [task for _, task in scene.events()] == [token.task_id for token in tokens]
        assert {scene.owner(token) for token in tokens} == {at_park(US)}
        assert post.board.park_counter >= counter + 3


def test_a_lost_reply_settles_nothing_twice(scene: Scene, start_proxy: ProxyStarter) -> None:
    proxy = start_proxy(scene.server.port)
    with Post(proxy.url) as post:
        post.child(slot=1)
        token = scene.started(US).token
        settler = Settler(post.seat)
        scripts = post.seat.scripts
        sha = scripts.sha("settle_dead").encode()
        scripts.load(settler.line.link, "settle_dead")
        lost = proxy.drop_reply(sha, count=2)
        counter = post.board.park_counter
        post.start(settler)
        settler.put(death(0, 1))
        assert settler.flush(time.monotonic() + PATIENCE_S) is True
        assert lost.fired == 2
        assert scene.record(token.task_id)["crashes"] == "1"
        assert post.board.park_counter >= counter + 3, "raised after the unanswered ones, too"


def test_a_death_that_redis_objects_to_holds_up_no_other(scene: Scene, post: Post) -> None:
    post.child(slot=1)
    bad, good = scene.started(US, life=1).token, scene.started(US, life=2).token
    scene.redis.set(scene.keys.schedule, "no zset")
    scene.redis.hset(scene.keys.task(bad.task_id), "crashes", 1)
    settler = Settler(post.seat)
    post.start(settler)
    settler.put(death(0, 1))
    settler.put(death(0, 2))
    until(lambda: settler.unsettled() == {bad.consumer}, PATIENCE_S)
    assert scene.record(good.task_id)["status"] == "queued"
    scene.redis.delete(scene.keys.schedule)
    assert settler.flush(time.monotonic() + PATIENCE_S) is True
    assert scene.record(bad.task_id)["status"] == "retry_scheduled"


# -- reaper


def nobody() -> set[str]:
    return set()


def test_a_silent_workers_tasks_come_into_the_park_and_the_children_are_called(
    scene: Scene, post: Post
) -> None:
    post.child()
    running, held = scene.started(THEM).token, scene.hold(THEM, scene.enqueue()[0])
    for token in (running, held):
        scene.age(token, 40_000)
    counter = post.board.park_counter
    reaper = Reaper(post.seat, nobody)
    post.start(reaper)
    until(lambda: scene.owner(held) == at_park(US), PATIENCE_S)
    assert scene.record(running.task_id)["status"] == "running", "our own hearing is not proven yet"
    until(lambda: scene.owner(running) == at_park(US), PATIENCE_S)
    assert post.board.park_counter > counter
    assert (reaper.counts["taken"], reaper.counts["parked"]) == (1, 1)


def test_who_starts_nothing_takes_nothing(scene: Scene, post: Post) -> None:
    token = scene.hold(THEM, scene.enqueue()[0])
    scene.age(token, 40_000)
    reaper = Reaper(post.seat, nobody)
    post.start(reaper)
    until(lambda: reaper.line.received > 0, PATIENCE_S)
    assert scene.owner(token) == token.consumer
    post.child()
    post.board.set_claiming(False)
    seen = reaper.line.received
    until(lambda: reaper.line.received > seen, PATIENCE_S)
    assert scene.owner(token) == token.consumer
    post.board.set_claiming(True)
    until(lambda: scene.owner(token) == at_park(US), PATIENCE_S)


def test_who_starts_nothing_for_a_while_opens_what_was_parked_to_others(scene: Scene, post: Post) -> None:
    """SIGTSTP: others need not wait until it has been parked for a visibility timeout."""
    parked, running = scene.hold_all(US, scene.enqueue(2))
    scene.redis.xclaim(parked.stream, "workers", at_park(US), 0, [parked.entry_id], justid=True)
    post.child()
    reaper = Reaper(post.seat, nobody)
    post.start(reaper)
    until(lambda: reaper.line.received > 0, PATIENCE_S)
    post.board.set_claiming(False)
    until(lambda: (scene.pending(parked) or ("", 0))[1] > 1_000_000_000, PATIENCE_S)
    assert scene.owner(parked) == at_park(US)
    assert scene.pending(running) is not None
    assert scene.owner(running) == running.consumer, "what a child has in hand is its own"
    seen = reaper.line.received
    until(lambda: reaper.line.received > seen, PATIENCE_S)
    assert reaper.counts["opened"] == 1
    with Post(scene.server.url, worker=THEM) as other:
        other.child()
        other.start(Reaper(other.seat, nobody))
        until(lambda: scene.owner(parked) == at_park(THEM), PATIENCE_S)


def test_an_outage_of_our_own_reaps_nobody(scene: Scene, start_proxy: ProxyStarter) -> None:
    """We were deaf; so perhaps was the other, whose lease has run out meanwhile. It gets time to speak."""
    proxy = start_proxy(scene.server.port)
    with Post(proxy.url, heartbeat_interval_s=1.5, visibility_timeout_s=3) as post:
        post.child()
        reaper = Reaper(post.seat, nobody)
        post.start(reaper)
        until(lambda: reaper.line.received > 0, PATIENCE_S)
        token = scene.started(THEM).token
        scene.age(token, 1)
        until(lambda: _proven(post, 2.5), PATIENCE_S)
        proxy.cut()
        scene.age(token, 40_000)
        healed = time.monotonic()
        until(lambda: scene.owner(token) == at_park(US), PATIENCE_S)
        assert time.monotonic() - healed >= 1.5 + 1.0


def _proven(post: Post, seconds: float) -> bool:
    since = post.seat.redis_ok.whole_since(time.monotonic())
    return since > 0 and time.monotonic() - since > seconds


def test_a_long_queue_of_the_dead_is_drained_as_fast_as_the_park_is_emptied(scene: Scene, post: Post) -> None:
    post.child()
    tokens = scene.hold_all(THEM, scene.enqueue(40))
    for token in tokens:
        scene.age(token, 40_000)
    reaper = Reaper(post.seat, nobody)
    post.start(reaper)
    begun = time.monotonic()
    done = 0
    while done < 40:
        until(lambda: len(scene.places().held_by(at_park(US))) > 0, PATIENCE_S)
        assert len(scene.places().held_by(at_park(US))) <= 4
        scene.claim(US, park=True)
        done += 1
    assert time.monotonic() - begun < 8.0, "four a second would take ten"


def test_a_claim_that_landed_after_its_child_had_died_is_found(scene: Scene, post: Post) -> None:
    post.child(slot=0, life=2)
    named = scene.started(US, life=2).token
    post.begin(post.board.child_row(0), named)
    lost = scene.started(US, slot=1, life=1).token
    waiting = scene.started(US, slot=1, life=5).token
    for token in (named, lost, waiting):
        scene.age(token, 6000)
    reaper = Reaper(post.seat, lambda: {waiting.consumer})
    post.start(reaper)
    until(lambda: scene.owner(lost) == at_park(US), PATIENCE_S)
    record = scene.record(lost.task_id)
    assert (record["status"], record["crashes"], record["attempt"]) == ("queued", "0", "1")
    assert reaper.counts["strays"] == 1
    assert scene.owner(named) == named.consumer
    assert scene.owner(waiting) == waiting.consumer, "its death is still to be settled"


# -- leader and scheduler


def lead_with(post: Post) -> tuple[Leader, Term]:
    term = Term()
    leader = Leader(post.seat, term)
    post.start(leader)
    return leader, term


def test_one_leads_and_when_it_stops_another_follows_at_once(scene: Scene, redis_server: RedisServer) -> None:
    with Post(redis_server.url, US) as ours, Post(redis_server.url, THEM) as theirs:
        ours.child()
        theirs.child()
        first, term = lead_with(ours)
        until(lambda: term.trusted(time.monotonic()), PATIENCE_S)
        _, other = lead_with(theirs)
        begun = time.monotonic()
        ours.board.set_stopping(True)
        until(lambda: other.trusted(time.monotonic()), PATIENCE_S)
        assert time.monotonic() - begun < 3.0
        assert not term.trusted(time.monotonic())
        assert scene.redis.get(scene.keys.lock) == THEM
        ours.stop(first)
        assert scene.redis.get(scene.keys.lock) == THEM


def test_who_can_start_nothing_does_not_stand_for_it(scene: Scene, post: Post) -> None:
    term = Term()
    leader = Leader(post.seat, term)
    assert leader.attempt() > 0
    post.child()
    post.board.set_stopping(True)
    assert leader.attempt() > 0
    assert not term.trusted(time.monotonic())
    assert scene.redis.get(scene.keys.lock) is None


def test_a_leader_that_loses_the_lock_unnoticed_promotes_nothing(scene: Scene, post: Post) -> None:
    post.child()
    _, term = lead_with(post)
    until(lambda: term.trusted(time.monotonic()), PATIENCE_S)
    scene.redis.set(scene.keys.lock, THEM, px=60_000)
    scheduler = Scheduler(post.seat, term)
    post.start(scheduler)
    task_id = scene.enqueue(delay_ms=50)[0]
    until(lambda: not term.trusted(time.monotonic()), PATIENCE_S, "it did not notice at its next renewal")
    assert scene.record(task_id)["status"] == "scheduled"
    assert scheduler.counts["promoted"] == 0


def test_a_lock_that_is_lost_to_nobody_is_won_again_at_once(scene: Scene, post: Post) -> None:
    """FLUSHALL, or a failover to a server that had not heard of it."""
    post.child()
    _, term = lead_with(post)
    until(lambda: term.trusted(time.monotonic()), PATIENCE_S)
    scheduler = Scheduler(post.seat, term)
    post.start(scheduler)
    scene.redis.delete(scene.keys.lock)
    begun = time.monotonic()
    until(lambda: scene.redis.get(scene.keys.lock) == US, PATIENCE_S)
    assert time.monotonic() - begun < 1.5, "a renewal may be three seconds away"
    until(lambda: term.trusted(time.monotonic()), PATIENCE_S)


def test_delayed_tasks_are_promoted_on_time_and_never_early(scene: Scene, post: Post) -> None:
    post.child()
    _, term = lead_with(post)
    scheduler = Scheduler(post.seat, term)
    post.start(scheduler)
    until(lambda: term.trusted(time.monotonic()), PATIENCE_S)
    ids = [scene.enqueue(delay_ms=300 + 37 * n)[0] for n in range(60)]
    until(lambda: scheduler.counts["promoted"] == 60, PATIENCE_S)
    records = [scene.record(task_id) for task_id in ids]
    late = sorted(int(record["queued_at_ms"]) - int(record["due_at_ms"]) for record in records)
    assert late[0] >= 0
    assert late[30] < 30, late  # asking every 0.2 s would make it a hundred
    assert late[-1] < 250, late


def test_a_huge_backlog_is_moved_in_short_calls_while_the_lock_is_kept(scene: Scene, post: Post) -> None:
    post.child()
    for _ in range(20):
        scene.make_all_due(scene.enqueue(200, delay_ms=3_600_000))
    _, term = lead_with(post)
    scheduler = Scheduler(post.seat, term)
    post.start(scheduler)
    until(lambda: scheduler.counts["promoted"] == 4000, 3 * PATIENCE_S)
    assert term.number == 1
    assert scene.places().depth() == 4000
    slow = [entry for entry in scene.server.cli("SLOWLOG", "GET", 50) if b"EVALSHA" in entry[3][0]]
    assert all(entry[2] < 250_000 for entry in slow), slow


# -- reconcile


def test_what_is_nowhere_has_a_place_after_two_rounds(scene: Scene, post: Post) -> None:
    post.child()
    _, term = lead_with(post)
    until(lambda: term.trusted(time.monotonic()), PATIENCE_S)
    task_id = scene.enqueue()[0]
    record = scene.record(task_id)
    scene.redis.xdel(record["stream"], record["entry_id"])
    scene.touch(task_id, 120_000)
    stray = scene.hold(THEM, scene.enqueue()[0])
    scene.server.cli("XACK", stray.stream, "workers", stray.entry_id)
    scene.redis.sadd(scene.keys.workers, "dead-1-bb")
    reconciler = Reconciler(post.seat, term, every_s=0.2)
    counter = post.board.park_counter
    post.start(reconciler)
    until(lambda: reconciler.counts["requeued"] == 1, PATIENCE_S)
    assert scene.places().where(task_id) == {"undelivered"}
    assert scene.owner(stray) == at_park(US)
    assert post.board.park_counter > counter
    assert (reconciler.counts["strays"], reconciler.counts["workers"]) == (1, 1)
