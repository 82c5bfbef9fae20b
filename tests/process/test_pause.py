"""Pause is exact: once it is acknowledged nothing of the queue starts until it is resumed (R24), whoever
waits, whatever comes back; and the other queues flow."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtq_child import App, Handle
from dtq_child.broker import Actor, Broker
from dtq_child.task import Status
from tests.process.witness import Tape, started
from tests.support.ledger import Ledger
from tests.support.processes import alive
from tests.support.servers import RedisServer
from tests.support.snapshot import Places, snapshot
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until

OPERATOR = Actor("ann", via="cli:1000@host", request_id="req-1", detail="mail is down")
QUEUES = ("default", "mail")


class Office:
    """A pool of four children, all idle when a test begins, for the queues `default` and `mail`."""

    def __init__(self, pool: SupervisorProcess, app: App, ledger: Ledger) -> None:
        assert isinstance(app.broker, Broker)
        self.pool, self.app, self.ledger, self.broker = pool, app, ledger, app.broker
        self.server = pool.server

    def send(self, queue: str, number: int, band: int = 5) -> list[Handle]:
        calls = [self.app.call("note", {"value": n}, queue=queue, priority=band) for n in range(number)]
        return self.app.enqueue_many(calls)

    def places(self) -> Places:
        return snapshot(self.server.client())

    def starts(self, handles: list[Handle]) -> list[float]:
        """The monotonic second of each, in their order."""
        ids = {handle.id for handle in handles}
        return [e.monotonic_ns / 1e9 for e in self.ledger.entries() if e.word == "start" and e.task_id in ids]

    def done(self, handles: list[Handle]) -> None:
        until(lambda: all(h.status() == Status.SUCCEEDED for h in handles), 15, self.pool.describe)

    def resumed(self, queue: str) -> float:
        """The monotonic second just before."""
        moment = time.monotonic()
        assert self.broker.resume(queue, OPERATOR)
        return moment


@pytest.fixture(scope="module")
def office_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    folder = tmp_path_factory.mktemp("pause")
    ledger = Ledger(folder / "ledger")
    with (
        RedisServer(shared=True) as server,
        SupervisorProcess(
            "tests.support.handlers:app",
            server=server,
            folder=folder,
            procs=4,
            flags=["--queues", ",".join(QUEUES)],
            ledger=ledger,
            shared=True,
        ) as pool,
    ):
        office = Office(pool.wait_ready(), App(redis_url=server.url), ledger)
        yield office
        office.broker.close()


@pytest.fixture
def office(office_of_all: Office) -> Iterator[Office]:
    yield office_of_all
    office_of_all.broker.resume("mail", OPERATOR)
    until(lambda: office_of_all.places().at_rest(), 15, office_of_all.pool.describe)


def test_what_is_paused_stays_in_its_bands_beside_idle_children_and_starts_within_a_second_of_resume(
    office: Office,
) -> None:
    assert office.broker.pause("mail", OPERATOR)
    waiting = [handle for band in (9, 5, 0) for handle in office.send("mail", 5, band)]
    delayed = office.app.enqueue("note", queue="mail", delay=0.1)
    # Each of these is claimed by a child that looks at all its queues; meanwhile the delayed one is promoted.
    for _ in range(10):
        office.done(office.send("default", 8))
    until(lambda: delayed.status() == Status.QUEUED, 5, office.pool.describe)
    office.done(office.send("default", 8))
    places = office.places()
    streams = Counter(waiting.stream for waiting in places.undelivered)
    assert streams == {"dtq:stream:mail:p9": 5, "dtq:stream:mail:p5": 6, "dtq:stream:mail:p0": 5}
    assert {w.task_id for w in places.undelivered} == {handle.id for handle in [*waiting, delayed]}
    assert places.pending == []
    assert office.starts([*waiting, delayed]) == []
    resumed = office.resumed("mail")
    office.done([*waiting, delayed])
    starts = office.starts([*waiting, delayed])
    assert len(starts) == 16
    assert 0 < min(starts) - resumed < 1.0


def test_no_child_that_waits_at_the_bell_is_woken_into_a_paused_queue(office: Office) -> None:
    """The pause comes while all wait, and the task right behind it."""
    for _ in range(5):
        idle(office.pool)
        assert office.broker.pause("mail", OPERATOR)
        (task,) = office.send("mail", 1)
        # Everybody is woken and has looked: each child ran something else.
        gate_keepers(office)
        assert office.starts([task]) == []
        office.resumed("mail")
        office.done([task])


def idle(pool: SupervisorProcess) -> None:
    until(lambda: all(": idle" in p.title for p in pool.tree() if "] g" in p.title), 5, pool.describe)


def gate_keepers(office: Office) -> None:
    """Every child takes a task; they go on when all have."""
    gate = office.pool.folder / f"gate-{time.monotonic_ns()}"
    tasks = [office.app.enqueue("wait_for_file", {"path": str(gate)}) for _ in range(office.pool.procs)]
    for task in tasks:
        started(office.ledger, task.id)
    gate.touch()
    office.done(tasks)


def test_under_load_not_one_task_starts_after_the_pause_was_acknowledged(office: Office) -> None:
    with Tape(office.server.client()) as tape:
        tasks = office.send("mail", 1000)
        until(lambda: len(office.starts(tasks)) >= 20, 10, office.pool.describe)
        assert office.broker.pause("mail", OPERATOR)
        acknowledged = time.monotonic()
        until(lambda: not office.places().pending, 5, office.pool.describe)
        office.done(office.send("default", 20))
        events = tape.play()
    kinds = [(event["type"], event["queue"]) for event in events]
    pause = kinds.index(("CONFIGURATION_CHANGED", "mail"))
    assert ("TASK_STARTED", "mail") in kinds[:pause]
    assert ("TASK_STARTED", "mail") not in kinds[pause:]
    # What was claimed just before may show its first line just after: one a child.
    late = [moment for moment in office.starts(tasks) if moment > acknowledged]
    assert len(late) <= office.pool.procs
    left = [handle for handle in tasks if handle.status() == Status.QUEUED]
    assert left
    assert [w.task_id for w in office.places().undelivered] == [handle.id for handle in left]
    office.resumed("mail")
    office.done(tasks)
    assert len(office.starts(tasks)) == 1000


def test_what_comes_back_from_a_killed_child_waits_for_resume_too(office: Office, tmp_path: Path) -> None:
    task = office.app.enqueue("hang_first", {"seconds": 60}, queue="mail")
    pid = started(office.ledger, task.id).pid
    assert office.broker.pause("mail", OPERATOR)
    os.kill(pid, signal.SIGKILL)
    until(lambda: task.status() == Status.QUEUED, 5, office.pool.describe)
    # Its successor looks at the park before all else, and so does everybody.
    until(lambda: len(office.pool.children()) == 4 and not alive(pid), 5, office.pool.describe)
    gate_keepers(office)
    (parked,) = office.places().pending
    assert parked.consumer.endswith(":park")
    assert len(office.starts([task])) == 1
    resumed = office.resumed("mail")
    assert task.result(timeout=5) == 2
    assert office.starts([task])[1] - resumed < 1.0
    record = task.record()
    assert (record.number("attempt"), record.number("crashes")) == (1, 1)


def test_pause_and_resume_stand_in_the_audit_and_are_told(office: Office) -> None:
    redis = office.server.client(decode_responses=True)
    redis.delete("dtq:stream:audit")
    with Tape(office.server.client()) as tape:
        assert [office.broker.pause("mail", OPERATOR), office.broker.pause("mail", OPERATOR)] == [True, False]
        assert office.broker.paused("mail")
        assert [office.broker.resume("mail", OPERATOR), office.broker.resume("mail", OPERATOR)] == [
            True,
            False,
        ]
        assert not office.broker.paused("mail")
        events: list[dict[str, Any]] = tape.play()
    told = [e["metadata"]["paused"] for e in events if e["type"] == "CONFIGURATION_CHANGED"]
    assert told == [True, True, False, False]
    rows: Any = redis.xrange("dtq:stream:audit")
    assert [fields["action"] for _, fields in rows] == ["pause", "pause", "resume", "resume"]
    now_ms = json.loads(office.server.cli("TIME")[0]) * 1000
    for _, fields in rows:
        assert abs(int(fields.pop("ts")) - now_ms) < 60_000
        del fields["action"]
        assert fields == {
            "actor": "ann",
            "via": "cli:1000@host",
            "request_id": "req-1",
            "detail": "mail is down",
            "queue": "mail",
            "task_id": "",
        }
