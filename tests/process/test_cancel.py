"""A cancel is answered at once and truly, wherever the task is; and it hits that task and no other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from dtq_child.task import TERMINAL, Status
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import PATIENCE_S, Vigil, refilled, started
from tests.support.ledger import Entry, Ledger
from tests.support.servers import RedisServer
from tests.support.snapshot import snapshot
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until

HOUR_S = 3600.0
CANCELS = 300
PRODUCERS = 6
GRACE_S = 1.0
NEVER_AGAIN = '{"base_s":3600,"factor":1,"cap_s":3600,"jitter":0}'


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


@pytest.fixture
def pool(start_supervisor: SupervisorStarter, redis_server: RedisServer) -> SupervisorProcess:
    """One child, ready; who does not listen to a cancel is killed after a second."""
    env = {"DTQ_CANCEL_GRACE_S": str(GRACE_S)}
    return start_supervisor(server=redis_server, procs=1, env=env).wait_ready()


def raised(ledger: Ledger, task_id: str) -> list[str]:
    return [entry.facts["error"] for entry in ledger.notes(task_id, "raised")]


# --- while it runs


def test_a_running_handler_is_told_within_two_seconds_and_its_child_goes_on(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger
) -> None:
    task_id = producer.send("sleep", {"seconds": HOUR_S})
    successor = producer.send("note")
    pid = started(ledger, task_id).pid
    asked = time.monotonic()
    assert producer.cancel(task_id) == "stopping"
    assert producer.status(task_id) == Status.CANCELLED
    (told,) = until(lambda: ledger.notes(task_id, "raised"), PATIENCE_S, "never told")
    assert told.facts["error"] == "TaskCancelled"
    assert told.monotonic_ns / 1e9 - asked <= 2.0
    producer.wait(successor, Status.SUCCEEDED, timeout=PATIENCE_S)
    assert ledger.starts(successor)[0].pid == pid
    assert producer.status(task_id) == Status.CANCELLED
    assert producer.cancel(task_id) == "stopping"  # asked again: answered as before
    assert len(ledger.starts(task_id)) == 1
    assert snapshot(pool.server.client()).at_rest()


@pytest.mark.parametrize("deaf", ["swallow", "gil_sleep"])
def test_a_handler_that_does_not_listen_is_killed_after_the_grace_and_stays_cancelled(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger, deaf: str
) -> None:
    arguments: dict[str, object] = {"seconds": HOUR_S}
    if deaf == "swallow":
        arguments["kind"] = "BaseException"
    task_id = producer.send(deaf, arguments)
    pid = started(ledger, task_id).pid
    with Vigil(pid) as vigil:
        asked = time.monotonic()
        assert producer.cancel(task_id) == "stopping"
        died = vigil.wait() - asked
    assert GRACE_S <= died <= 2.0 + GRACE_S + 0.5
    refilled(pool, {pid}, timeout=2.0)
    successor = producer.send("note")
    producer.wait(successor, Status.SUCCEEDED, timeout=PATIENCE_S)
    record = producer.record(task_id)
    assert record.status == Status.CANCELLED
    assert record.number("crashes") == 0
    assert len(ledger.starts(task_id)) == 1
    swallowed = [entry.facts["error"] for entry in ledger.notes(task_id, "swallowed")]
    assert swallowed == (["TaskCancelled"] if deaf == "swallow" else [])
    assert snapshot(pool.server.client()).at_rest()


# --- before and after


def test_a_task_cancelled_before_it_starts_never_starts(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger
) -> None:
    busy = producer.send("sleep", {"seconds": HOUR_S})
    started(ledger, busy)
    queued, delayed = producer.send("note"), producer.send("note", delay_ms=300)
    assert [producer.cancel(task_id) for task_id in (queued, delayed)] == ["cancelled"] * 2
    assert [producer.cancel(task_id) for task_id in (queued, delayed)] == ["cancelled"] * 2
    later = producer.send("note", delay_ms=600)
    producer.cancel(busy)
    producer.wait(later, Status.SUCCEEDED, timeout=PATIENCE_S)
    for task_id in (queued, delayed):
        assert producer.status(task_id) == Status.CANCELLED
        assert ledger.starts(task_id) == []
    assert snapshot(pool.server.client()).at_rest()


def test_a_task_that_waits_for_its_retry_is_not_tried_again(
    pool: SupervisorProcess, producer: Producer, ledger: Ledger
) -> None:
    task_id = producer.send("fail", max_attempts=5, retry=NEVER_AGAIN)
    producer.wait(task_id, Status.RETRY_SCHEDULED, timeout=PATIENCE_S)
    assert producer.cancel(task_id) == "cancelled"
    assert producer.status(task_id) == Status.CANCELLED
    assert len(ledger.starts(task_id)) == 1
    assert snapshot(pool.server.client()).at_rest()


def test_what_has_ended_stays_what_it_is(pool: SupervisorProcess, producer: Producer, ledger: Ledger) -> None:
    good, bad = producer.send("note"), producer.send("fail", max_attempts=1)
    producer.wait(good, Status.SUCCEEDED, timeout=PATIENCE_S)
    producer.wait(bad, Status.DEAD_LETTERED, timeout=PATIENCE_S)
    assert [producer.cancel(task_id) for task_id in (good, bad)] == ["too_late"] * 2
    assert producer.status(good) == Status.SUCCEEDED
    assert producer.status(bad) == Status.DEAD_LETTERED
    assert producer.cancel("no-such-task") == "unknown"


# --- at any instant


@dataclass(frozen=True, slots=True)
class Cancelled:
    task_id: str
    reply: str
    neighbour: str


def cancel_some(producer: Producer, seed: int, count: int) -> list[Cancelled]:
    """Sends pairs of tasks and cancels the first of each at a random instant around its start and its end."""
    dice, never = random.Random(seed), threading.Event()
    done = []
    for _ in range(count):
        seconds = dice.choice((0.0, 0.01, 0.03, 0.4))
        task_id = producer.send("sleep", {"seconds": seconds})
        neighbour = producer.send("sleep", {"seconds": dice.choice((0.0, 0.02, 0.3))})
        # Not a wait for something to happen: the instant is what the story is about.
        never.wait(dice.uniform(0.0, 0.05) if dice.random() < 0.5 else dice.uniform(0.0, seconds + 0.3))
        done.append(Cancelled(task_id, producer.cancel(task_id), neighbour))
    return done


def test_three_hundred_cancels_at_random_instants_agree_with_what_really_ran(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    """Each reply says how it was: before the start, while it ran, or after its end. No neighbour is hit."""
    pool = start_supervisor(server=redis_server, procs=6).wait_ready()
    pids = pool.child_pids()
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    with ThreadPoolExecutor(PRODUCERS) as threads:
        share = CANCELS // PRODUCERS
        parts = [threads.submit(cancel_some, producer, seed + n, share) for n in range(PRODUCERS)]
        cancelled = [one for part in parts for one in part.result()]
    tasks = [task_id for one in cancelled for task_id in (one.task_id, one.neighbour)]
    until(lambda: all(producer.status(task_id) in TERMINAL for task_id in tasks), 60, pool.describe)
    until(lambda: snapshot(redis_server.client()).at_rest(), PATIENCE_S)
    by_task = ledger.by_task()
    for one in cancelled:
        check_reply(producer, one, by_task.get(one.task_id, []))
        assert words(by_task[one.neighbour]) == ["start", "end"]
        assert producer.status(one.neighbour) == Status.SUCCEEDED
    assert {one.reply for one in cancelled} == {"cancelled", "stopping", "too_late"}
    assert pool.child_pids() == pids


def check_reply(producer: Producer, one: Cancelled, entries: list[Entry]) -> None:
    record = producer.record(one.task_id)
    if one.reply == "too_late":
        assert record.status == Status.SUCCEEDED
        assert words(entries) == ["start", "end"]
        return
    assert record.status == Status.CANCELLED
    if one.reply == "cancelled":
        assert entries == []
    else:
        # It may come while the handler notes its start or its end.
        told = "raised TaskCancelled"
        assert words(entries) in (["start", "end"], ["start", told], [told], ["start", "end", told])


def words(entries: list[Entry]) -> list[str]:
    return [" ".join([entry.word, *filter(None, [entry.facts.get("error")])]) for entry in entries]
