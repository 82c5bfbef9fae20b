"""What the stories of outages share: orders for probe tasks, and questions about what became of them."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from dtq_child.broker import MAX_CALLS, Broker
from dtq_child.settings import defaults
from dtq_child.task import Call, Record, Status
from tests.support.ledger import Entry, Ledger
from tests.support.servers import RedisServer
from tests.support.snapshot import TERMINAL, Places, snapshot
from tests.support.supervisor import SupervisorProcess
from tests.support.waiting import until
from tests.support.witness import Witness

AGAIN_S = 5.0
"""Within so long after a fault has ended, everybody works again."""


def seconds(entry: Entry) -> float:
    """When it was noted, by time.monotonic()."""
    return entry.monotonic_ns / 1e9


class Orders:
    """Enqueues probe tasks and remembers which were accepted. It asks `server` itself about them; it enqueues
    by `url`, the server's own unless a proxy's is given."""

    def __init__(
        self, server: RedisServer, ledger: Ledger, *, url: str | None = None, **settings: Any
    ) -> None:
        self.server, self.ledger = server, ledger
        self.accepted: list[str] = []
        self.redis = server.client()
        self.broker = Broker(defaults(redis_url=url or server.url, **settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.broker.close()

    # -- ordering

    def send(self, name: str, *, timeout: float = 300.0, **order: Any) -> str:
        """One task, accepted. `order`: its arguments; those of Call by their names."""
        return self.send_all(name, [order], timeout=timeout)[0]

    def send_all(self, name: str, orders: Sequence[dict[str, Any]], timeout: float = 300.0) -> list[str]:
        """One task for each, in as few calls as may be."""
        calls = [_call(name, order, timeout) for order in orders]
        for at in range(0, len(calls), MAX_CALLS):
            self.broker.enqueue(calls[at : at + MAX_CALLS])
            self.accepted += [call.task_id for call in calls[at : at + MAX_CALLS]]
        return [call.task_id for call in calls]

    def send_many(self, number: int, name: str, **order: Any) -> list[str]:
        return self.send_all(name, [order] * number)

    # -- asking

    def record(self, task_id: str) -> Record:
        found: Any = self.redis.hgetall(f"dtq:task:{task_id}")
        assert found, f"no record of {task_id}"
        return Record({name.decode(): value for name, value in found.items()})

    def result(self, task_id: str) -> Any:
        found: Any = self.redis.get(f"dtq:result:{task_id}")
        return None if found is None else json.loads(found)

    def places(self, ids: Iterable[str] = ()) -> Places:
        return snapshot(self.redis, task_ids=ids)

    def statuses(self, ids: Iterable[str]) -> Counter[str | None]:
        # Not by a snapshot: that holds up the server for long with many tasks.
        with self.redis.pipeline(transaction=False) as pipe:
            for task_id in ids:
                pipe.hget(f"dtq:task:{task_id}", "status")
            return Counter(None if status is None else status.decode() for status in pipe.execute())

    def wait(self, ids: Sequence[str], timeout: float, status: str | None = None) -> None:
        """Until all are over, or until all have that status."""

        def reached() -> bool:
            found = self.statuses(ids)
            return set(found) <= ({status} if status else TERMINAL)

        until(reached, timeout, lambda: f"they are: {dict(self.statuses(ids))}", interval=0.05)

    def started(self, task_id: str, times: int = 1, timeout: float = 10.0) -> Entry:
        """Waits until it has started so often; the note of that start."""
        until(
            lambda: len(self.ledger.starts(task_id)) >= times,
            timeout,
            lambda: f"{task_id} has not started {times} times: {self.record(task_id).as_dict()}",
        )
        return self.ledger.starts(task_id)[times - 1]

    def all_started(self, ids: Sequence[str], times: int = 1, timeout: float = 10.0) -> None:
        def fewer() -> dict[str, int]:
            return {task_id: number for task_id, number in self.starts(ids).items() if number < times}

        until(lambda: not fewer(), timeout, lambda: f"not started {times} times: {fewer()}", interval=0.02)

    def starts(self, ids: Sequence[str]) -> dict[str, int]:
        """How often each of them was started. One look into the ledger, which may be long."""
        found = Counter(entry.task_id for entry in self.ledger.entries() if entry.word == "start")
        return {task_id: found[task_id] for task_id in ids}

    def all_starts(self, ids: Sequence[str]) -> set[int]:
        """How often they were started: one number, if all are alike."""
        return set(self.starts(ids).values())

    # -- judging

    def check(self, witness: Witness | None = None, *, ids: Sequence[str] | None = None) -> None:
        """Oracle O: each accepted task was started, and is over, once; and nothing is left anywhere."""
        wanted = self.accepted if ids is None else list(ids)
        until(
            lambda: self.places(wanted).at_rest(),
            5.0,
            lambda: f"something is left: {self.places(wanted)}",
            interval=0.1,
        )
        places = self.places(wanted)
        assert not places.strays
        assert {task_id for task_id in wanted if places.where(task_id) != {"terminal"}} == set()
        started = {entry.task_id for entry in self.ledger.entries() if entry.word == "start"}
        assert set(wanted) - started == set(), "accepted, and never started"
        if witness is not None:
            endings = witness.endings()
            assert {task_id: endings[task_id] for task_id in wanted if endings[task_id] != 1} == {}


def _call(name: str, order: dict[str, Any], timeout: float) -> Call:
    of_call = {key: value for key, value in order.items() if key in Call.__dataclass_fields__}
    arguments = {key: value for key, value in order.items() if key not in of_call}
    given = {"queue": "default", "timeout_ms": round(timeout * 1000), **of_call}
    return Call(uuid.uuid4().hex, task_type=name, payload=orjson.dumps(arguments), **given)


def paced(period: float, for_s: float) -> Iterator[int]:
    """The rounds of a fault that comes back every `period` seconds, for so many seconds."""
    begun = time.monotonic()
    for number in range(round(for_s / period)):
        yield number
        due = begun + (number + 1) * period
        until(lambda due=due: time.monotonic() >= due, period + 1.0)  # type: ignore[misc]


def ready(*supervisors: SupervisorProcess) -> list[SupervisorProcess]:
    """Waits until all of them stand: they boot side by side."""
    return [supervisor.wait_ready(60.0) for supervisor in supervisors]


class Pool:
    """A supervisor that a fault is about to meet: who was there before, and what it has said since."""

    def __init__(self, supervisor: SupervisorProcess) -> None:
        self.supervisor = supervisor
        self.before = self.pids()
        self._said = len(supervisor.log())

    def pids(self) -> tuple[int, ...]:
        """Supervisor, template, children."""
        supervisor = self.supervisor
        return (supervisor.pid, *(t.pid for t in supervisor.templates()), *supervisor.child_pids())

    def said(self) -> list[str]:
        return self.supervisor.log()[self._said :].splitlines()

    def is_the_same(self) -> None:
        """Nobody has died or was replaced."""
        assert self.supervisor.exit_code is None, self.supervisor.tail()
        assert self.pids() == self.before, self.supervisor.tail()


def work_again(
    pools: Sequence[Pool], orders: Orders, folder: Path, since: float, within: float = AGAIN_S
) -> float:
    """Every child of the pools takes a task, and the leader promotes one, within so many seconds of `since`;
    then 100 more are run, by the same processes as before. Returns the seconds that the first part took."""
    gate = folder / f"gate-{os.urandom(4).hex()}"
    children = {pid for pool in pools for pid in pool.supervisor.child_pids()}
    held = orders.send_many(len(children), "wait_for_file", path=str(gate))
    late = orders.send("note", delay_ms=100)

    def everybody() -> bool:
        pids = {entry.pid for entry in orders.ledger.entries() if entry.task_id in held}
        return pids == children and orders.record(late).status == Status.QUEUED

    patience = max(0.0, since + within - time.monotonic())
    until(
        everybody,
        patience,
        lambda: f"{_missing(held, late, children, orders)}\n{_logs(pools)}",
        interval=0.02,
    )
    took = time.monotonic() - since
    gate.touch()
    hundred = orders.send_many(100, "note")
    orders.wait([late, *held, *hundred], 10.0, Status.SUCCEEDED)
    for pool in pools:
        pool.is_the_same()
    return took


def _missing(held: Sequence[str], late: str, children: set[int], orders: Orders) -> str:
    busy = {entry.pid for entry in orders.ledger.entries() if entry.task_id in held}
    return f"without a task: {children - busy}; the delayed one is {orders.record(late).status}"


def _logs(pools: Sequence[Pool]) -> str:
    return "\n".join(pool.supervisor.tail() for pool in pools)
