"""Processes die: by kill -9 from outside, by their own tasks, one by one and all at once, with Redis and
without it."""

from __future__ import annotations

import math
import os
import signal
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtq_child.task import Status
from tests.conftest import ProxyStarter, SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import (
    PATIENCE_S,
    Tape,
    Vigil,
    of_type,
    refilled,
    sockets,
    started,
)
from tests.support.ledger import Entry, Ledger
from tests.support.processes import descriptors
from tests.support.servers import RedisServer
from tests.support.snapshot import snapshot
from tests.support.supervisor import SupervisorProcess

KILLS = 100
NO_DELAY = '{"base_s":0,"factor":1,"cap_s":0,"jitter":0}'


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


# --- a hundred kills in a row, under load


@dataclass(frozen=True, slots=True)
class Kill:
    """`at`: monotonic nanoseconds."""

    task_id: str
    pid: int
    at: int


@dataclass(slots=True)
class Massacre:
    """A pool whose every slot is always busy while more tasks wait, and what was seen of it. Each task runs
    until its gate is opened."""

    pool: SupervisorProcess
    producer: Producer
    ledger: Ledger
    handler: str
    sent: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    by_task: dict[str, list[Entry]] = field(default_factory=dict)
    descriptors: list[dict[str, int]] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)

    def run(self) -> None:
        with Tape(self.pool.server.client()) as tape:
            # The first one is not counted: with it the last of the supervisor's threads meets Redis.
            self._send()
            self._kill(0)
            self._end(0)
            self.kills.clear()
            self._count()
            self._kill_a_hundred()
            self._count()
            self.events = tape.play()
        self.by_task = self.ledger.by_task()

    def _kill_a_hundred(self) -> None:
        procs = self.pool.procs
        for _ in range(2 * procs):
            self._send()
        for number in range(1, KILLS + 1):
            for task_id in self.sent[number : number + procs]:
                started(self.ledger, task_id)
            self._kill(number)
            self._gate(number).touch()
            self._send()
        for number in range(1, len(self.sent)):
            self._end(number)

    def _gate(self, number: int) -> Path:
        return self.pool.folder / f"gate-{number}"

    def _send(self) -> None:
        self.sent.append(self.producer.send(self.handler, {"path": str(self._gate(len(self.sent)))}))

    def _kill(self, number: int) -> None:
        """Kills whoever executes the task, and waits for the next one that does."""
        pid = started(self.ledger, self.sent[number]).pid
        with Vigil(pid) as vigil:
            self.kills.append(Kill(self.sent[number], pid, vigil.kill()))
        started(self.ledger, self.sent[number], times=2, describe=self._describe)

    def _describe(self) -> str:
        """When each task that may run was started, and what the supervisor says of it."""
        places = snapshot(self.pool.server.client())
        lines = [f"{self.kills[-1]}", *map(str, places.pending), *map(str, places.undelivered)]
        lines += [str(entry) for entry in self.ledger.entries()[-4 * self.pool.procs :]]
        return "\n".join([*lines, self.pool.describe()])

    def _end(self, number: int) -> None:
        self._gate(number).touch()
        self.producer.wait(self.sent[number], Status.SUCCEEDED, PATIENCE_S)

    def _count(self) -> None:
        """How many descriptors everybody has, and Redis clients, with all children idle."""
        pool = self.pool
        refilled(pool, set(), PATIENCE_S)
        everybody = {"supervisor": pool.pid, "template": pool.template().pid}
        everybody |= {f"child {slot}": pid for slot, pid in enumerate(pool.child_pids())}
        self.descriptors.append({who: len(descriptors(pid)) for who, pid in everybody.items()})
        self.clients.append(int(pool.server.info("clients")["connected_clients"]))

    def recoveries(self) -> list[float]:
        """Seconds from each kill to the next start of the same task."""
        seconds = []
        for kill in self.kills:
            starts = [e.monotonic_ns for e in self.by_task[kill.task_id] if e.word == "start"]
            seconds.append((next(moment for moment in starts if moment > kill.at) - kill.at) / 1e9)
        return seconds


@pytest.fixture(
    scope="module",
    params=["wait_for_file", pytest.param("spin_until", marks=pytest.mark.slow)],
    ids=["tasks that sleep", "tasks that burn their cores"],
)
def massacre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Massacre]:
    folder = tmp_path_factory.mktemp("massacre")
    ledger = Ledger(folder / "ledger")
    with (
        RedisServer(shared=True) as server,
        SupervisorProcess(
            "tests.support.handlers:app", server=server, folder=folder, procs=4, ledger=ledger, shared=True
        ) as pool,
        Producer(server) as producer,
    ):
        found = Massacre(pool.wait_ready(), producer, ledger, request.param)
        found.run()
        yield found


def test_after_kill_9_of_a_busy_child_the_same_task_runs_again_within_a_second(massacre: Massacre) -> None:
    recoveries = sorted(massacre.recoveries())
    p99 = recoveries[math.ceil(0.99 * KILLS) - 1]
    print(f"median {statistics.median(recoveries):.3f} s, p99 {p99:.3f} s, max {recoveries[-1]:.3f} s")
    assert p99 <= 1.0, recoveries[-5:]


def test_nothing_is_lost_and_nothing_is_settled_twice(massacre: Massacre) -> None:
    succeeded = Counter(of_type(massacre.events, "TASK_SUCCEEDED"))
    assert succeeded == Counter(massacre.sent)
    for task_id in massacre.sent:
        assert massacre.producer.status(task_id) == Status.SUCCEEDED
    assert snapshot(massacre.pool.server.client()).at_rest()


def test_the_killed_tasks_start_twice_and_the_others_once(massacre: Massacre) -> None:
    killed = {massacre.sent[0], *(kill.task_id for kill in massacre.kills)}
    for task_id in massacre.sent:
        words = Counter(entry.word for entry in massacre.by_task[task_id])
        assert words == {"start": 2 if task_id in killed else 1, "end": 1}
        assert massacre.producer.record(task_id).number("crashes") == int(task_id in killed)


def test_each_death_stands_in_the_record_with_its_cause(massacre: Massacre) -> None:
    for kill in massacre.kills:
        record = massacre.producer.record(kill.task_id)
        first, second = record.executions()
        assert first["outcome"] == "crashed"
        assert first["pid"] == kill.pid
        assert first["cause"]["signal"] == "SIGKILL"
        assert first["cause"]["killed_by"] == "unknown sender"
        assert first["cause"]["phase"] == "executing"
        assert first["duration_ms"] > 0
        assert second["outcome"] == "succeeded"
        assert (record.number("crashes"), record.number("attempt")) == (1, 1)


def test_each_death_is_told_once_in_the_log_with_pid_and_task(massacre: Massacre) -> None:
    lines = massacre.pool.log().splitlines()
    for kill in massacre.kills:
        told = [line for line in lines if f"(pid {kill.pid}) died" in line]
        assert len(told) == 1, told
        assert kill.task_id in told[0]


def test_no_descriptor_and_no_connection_is_left_of_the_dead(massacre: Massacre) -> None:
    before, after = massacre.descriptors
    assert before.keys() == after.keys()
    for who, count in after.items():
        assert abs(count - before[who]) <= 2, (who, before, after)
    assert abs(massacre.clients[1] - massacre.clients[0]) <= 2, massacre.clients


def test_no_socket_is_open_in_two_processes(massacre: Massacre) -> None:
    pool = massacre.pool
    pids = [pool.pid, pool.template().pid, *pool.child_pids()]
    owners = Counter(inode for pid in pids for inode in sockets(pid))
    assert owners
    assert [inode for inode, count in owners.items() if count > 1] == []


def test_no_zombie_is_left_of_the_dead(massacre: Massacre) -> None:
    below = massacre.pool.tree()
    assert [p for p in below if p.status == psutil.STATUS_ZOMBIE] == []
    assert len(below) == 2 + massacre.pool.procs


# --- all at once, and without Redis


def test_all_busy_children_killed_at_once_are_replaced_and_their_tasks_run_again(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=redis_server, procs=4).wait_ready()
    gate = tmp_path / "gate"
    ids = [producer.send("wait_for_file", {"path": str(gate)}) for _ in range(4)]
    pids = {started(ledger, task_id).pid for task_id in ids}
    kill_together(pids)
    refilled(pool, pids, timeout=2.0)
    for task_id in ids:
        started(ledger, task_id, times=2)
    gate.touch()
    for task_id in ids:
        record = producer.wait(task_id, Status.SUCCEEDED)
        assert (record.number("attempt"), record.number("crashes")) == (1, 1)
        assert len(ledger.starts(task_id)) == 2


def test_children_that_die_while_redis_is_away_are_replaced_and_settled_when_it_answers(
    start_supervisor: SupervisorStarter, fresh_redis: RedisServer, ledger: Ledger, tmp_path: Path
) -> None:
    pool = start_supervisor(server=fresh_redis, procs=3).wait_ready()
    gate = tmp_path / "gate"
    with Producer(fresh_redis) as producer:
        ids = [producer.send("wait_for_file", {"path": str(gate)}) for _ in range(3)]
        first = {started(ledger, task_id).pid for task_id in ids}
        fresh_redis.pause()
        kill_together(first)
        second = set(refilled(pool, first, timeout=2.0))
        # Their successors, too: what is settled is the row as it was at the first death.
        kill_together(second)
        refilled(pool, first | second, timeout=2.0)
        assert [len(ledger.starts(task_id)) for task_id in ids] == [1, 1, 1]
        fresh_redis.resume()
        for task_id in ids:
            started(ledger, task_id, times=2)
        gate.touch()
        for task_id in ids:
            record = producer.wait(task_id, Status.SUCCEEDED)
            assert (record.number("attempt"), record.number("crashes")) == (1, 1)
            assert record.executions()[0]["cause"]["signal"] == "SIGKILL"
            assert len(ledger.starts(task_id)) == 2
    assert pool.exit_code is None


def kill_together(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_the_task_of_the_dead_goes_before_new_work_even_if_its_settling_takes_time(
    start_supervisor: SupervisorStarter,
    start_proxy: ProxyStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    """Else a successor that boots faster would take up new work, and no child would be left for that task."""
    proxy = start_proxy(redis_server.port)
    start_supervisor(server=redis_server, url=proxy.url, procs=1).wait_ready()
    gate = tmp_path / "gate"
    first, second = producer.send_together([("wait_for_file", {"path": str(gate)})] * 2)
    pid = started(ledger, first).pid
    lost = proxy.drop_request(is_settling_of_a_crash, count=3)
    kill_together({pid})
    started(ledger, first, times=2)
    assert lost.fired == 3
    assert ledger.starts(second) == []
    gate.touch()
    producer.wait(second, Status.SUCCEEDED, timeout=PATIENCE_S)


def is_settling_of_a_crash(words: list[bytes]) -> bool:
    return b"crash" in words


# --- tasks that kill their processes

POISONS: dict[str, tuple[str, dict[str, Any], str, object]] = {
    "segfault": ("segfault", {}, "signal", "SIGSEGV"),
    "os._exit(1)": ("os_exit", {"code": 1}, "exit_code", 1),
    "os._exit(0)": ("os_exit", {"code": 0}, "exit_code", 0),
    "kill -9 of itself": ("kill_self", {}, "signal", "SIGKILL"),
}


def test_a_task_that_always_kills_its_process_is_put_aside_with_the_cause_and_disturbs_nobody(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, procs=2).wait_ready()
    neighbours = producer.send_together([("sleep", {"seconds": 0.005})] * 150)
    poison = {
        what: producer.send(name, arguments, max_crashes=3)
        for what, (name, arguments, _, _) in POISONS.items()
    }
    neighbours += producer.send_together([("sleep", {"seconds": 0.005})] * 150)
    for what, task_id in poison.items():
        producer.wait(task_id, Status.DEAD_LETTERED, timeout=PATIENCE_S)
        check_poison(producer, redis_server, ledger, task_id, *POISONS[what][2:])
    for task_id in neighbours:
        producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
    by_task = ledger.by_task()
    assert {sum(e.word == "start" for e in by_task[task_id]) for task_id in neighbours} == {1}
    assert pool.exit_code is None


def check_poison(
    producer: Producer, server: RedisServer, ledger: Ledger, task_id: str, fact: str, value: object
) -> None:
    record = producer.record(task_id)
    assert record.get("last_error_class") == "PoisonTask"
    assert (record.number("crashes"), record.number("attempt")) == (3, 1)
    assert [e.facts["crashes"] for e in ledger.starts(task_id)] == [0, 1, 2]
    executions = record.executions()
    assert [e["outcome"] for e in executions] == ["crashed"] * 3
    assert [e["cause"][fact] for e in executions] == [value] * 3
    assert [e["pid"] for e in executions] == [e.pid for e in ledger.starts(task_id)]
    letters: Any = server.client(decode_responses=True).xrange("dtq:stream:dead-letter")
    (letter,) = (fields for _, fields in letters if fields["task_id"] == task_id)
    assert letter["last_error_class"] == "PoisonTask"
    assert f'"{fact}":' in letter["cause"]
    assert letter["attempts_made"] == "0"


EXITS: dict[str, tuple[str, dict[str, Any]]] = {
    "SystemExit": ("sys_exit", {"code": 0}),
    "KeyboardInterrupt": ("raise_base", {"name": "KeyboardInterrupt"}),
    "GeneratorExit": ("raise_base", {"name": "GeneratorExit"}),
}


def test_exits_raised_in_a_handler_are_failures_like_any_other(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, procs=2).wait_ready()
    pids = pool.child_pids()
    sent = {
        error: producer.send(name, arguments, max_attempts=2, retry=NO_DELAY)
        for error, (name, arguments) in EXITS.items()
    }
    for error, task_id in sent.items():
        record = producer.wait(task_id, Status.DEAD_LETTERED, timeout=PATIENCE_S)
        assert record.get("last_error_class") == error
        assert record.number("crashes") == 0
        assert [e.facts["attempt"] for e in ledger.starts(task_id)] == [1, 2]
    assert pool.child_pids() == pids
