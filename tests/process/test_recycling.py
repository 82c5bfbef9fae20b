"""Children are replaced between tasks, by count and by size; what grows too fast is killed, by us or by the
kernel; and nothing is left of the replaced."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtq_child.memory import resident_bytes
from dtq_child.task import Record, Status
from dtq_supervisor.recycling import LEAVE_MOST_S
from tests.conftest import ProxyStarter, SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import PATIENCE_S, refilled, sockets, started
from tests.support.ledger import Ledger
from tests.support.processes import alive, descriptors, looks
from tests.support.servers import RedisServer
from tests.support.snapshot import snapshot
from tests.support.supervisor import PROGRAM, ROOT, SupervisorProcess
from tests.support.waiting import until

GROUPS = Path("/sys/fs/cgroup/memory")
MB = 1 << 20


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


def replaced(pool: SupervisorProcess) -> dict[str, int]:
    """What the worker's record says about replacements."""
    found: dict[str, int] = json.loads(pool.worker().get("replaced", "{}"))
    return found


def told(pool: SupervisorProcess, counts: dict[str, int]) -> None:
    until(lambda: replaced(pool) == counts, PATIENCE_S, lambda: f"{replaced(pool)}\n{pool.describe()}")


def crash_of(record: Record) -> dict[str, object]:
    """The cause that stands in the record of a task that was executed once."""
    (execution,) = record.executions()
    cause: dict[str, object] = execution["cause"]
    return cause


# --- by count


def test_with_a_limit_of_one_every_task_has_a_process_of_its_own(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, flags=["--max-tasks-per-child", "1"]).wait_ready()
    ids = producer.send_together([("note", {})] * 30)
    for task_id in ids:
        record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
        assert (record.number("crashes"), record.number("attempt")) == (0, 1)
    starts = [entry for entry in ledger.entries() if entry.word == "start"]
    assert len(starts) == len({entry.pid for entry in starts}) == 30
    told(pool, {"tasks": 30})
    refilled(pool, {entry.pid for entry in starts}, PATIENCE_S)
    assert snapshot(redis_server.client()).at_rest()
    assert pool.stop() == 0
    assert " died" not in pool.log()


def test_a_child_executes_as_many_as_it_may_and_what_it_holds_goes_to_the_next(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    """Short tasks, of which it has claimed several at once: far more than the supervisor could count."""
    flags = ["--max-tasks-per-child", "5", "--prefetch", "4"]
    ids = producer.send_together([("note", {})] * 23)
    pool = start_supervisor(server=redis_server, procs=1, flags=flags)
    for task_id in ids:
        record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
        assert (record.number("crashes"), record.number("attempt")) == (0, 1)
    by_pid = Counter(entry.pid for entry in ledger.entries() if entry.word == "start")
    assert sorted(by_pid.values()) == [3, 5, 5, 5, 5]
    told(pool, {"tasks": 4})


def test_replacements_and_deaths_side_by_side_leave_every_slot_at_work(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    flags = ["--max-tasks-per-child", "2", "--max-tasks-jitter", "2"]
    pool = start_supervisor(server=redis_server, procs=3, flags=flags).wait_ready()
    notes = producer.send_together([("note", {})] * 60)
    poison = producer.send_together([("kill_self", {}), ("segfault", {}), ("os_exit", {"code": 0})] * 4)
    more = producer.send_together([("note", {})] * 60)
    for task_id in [*notes, *more]:
        record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
        assert (record.number("crashes"), len(ledger.starts(task_id))) == (0, 1)
    for task_id in poison:
        until(lambda t=task_id: producer.record(t).number("crashes") == 3, 60, pool.describe)  # type: ignore[misc]
    producer.wait(poison[-1], Status.DEAD_LETTERED, timeout=PATIENCE_S)
    until(lambda: replaced(pool).get("crash") == 3 * len(poison), PATIENCE_S, pool.describe)
    assert replaced(pool).keys() == {"tasks", "crash"}
    refilled(pool, set(), PATIENCE_S)
    assert snapshot(redis_server.client()).at_rest()
    assert [process for process in pool.tree() if process.status == "zombie"] == []


def test_replacements_kills_and_a_reload_at_once_leave_no_slot_idle(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, flags=["--max-tasks-per-child", "1"]).wait_ready()
    ids = producer.send_together([("sleep", {"seconds": 0.01})] * 80)
    for done in range(20, 100, 10):
        until(lambda n=done: len(ledger.entries()) >= n, PATIENCE_S, pool.describe)  # type: ignore[misc]
        if done == 40:
            pool.signal(signal.SIGHUP)
        for child in pool.child_pids()[:1]:
            with contextlib.suppress(ProcessLookupError):  # it may have gone by itself
                os.kill(child, signal.SIGKILL)
    for task_id in ids:
        producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
    starts = [entry for entry in ledger.entries() if entry.word == "start"]
    assert len(starts) == len({entry.pid for entry in starts}), "one task a process, of both generations"
    assert max(b.monotonic_ns - a.monotonic_ns for a, b in itertools.pairwise(starts)) < 2e9
    until(lambda: all("] g2" in child.title for child in looks(pool.child_pids())), PATIENCE_S, pool.describe)
    refilled(pool, set(), PATIENCE_S)
    assert snapshot(redis_server.client()).at_rest()


def test_a_child_whose_last_task_ends_while_redis_is_away_settles_it_before_it_goes(
    start_supervisor: SupervisorStarter,
    start_proxy: ProxyStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    proxy = start_proxy(redis_server.port)
    flags = ["--max-tasks-per-child", "1"]
    pool = start_supervisor(server=redis_server, url=proxy.url, procs=1, flags=flags).wait_ready()
    gate = tmp_path / "gate"
    first = producer.send("wait_for_file", {"path": str(gate)})
    pid = started(ledger, first).pid
    second = producer.send("note")
    proxy.refuse()
    proxy.cut()
    gate.touch()
    until(lambda: "Redis did not do it" in pool.log(), PATIENCE_S, pool.describe)
    assert pool.child_pids() == [pid]
    proxy.heal()
    for task_id in (first, second):
        record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
        assert (record.number("crashes"), record.number("attempt")) == (0, 1)
        assert len(ledger.starts(task_id)) == 1
    assert started(ledger, second).pid != pid
    told(pool, {"tasks": 2})


HANGS_AT_ITS_END = """
import time
from tests.support.handlers import app

@app.on_child_stop
def hang() -> None:
    time.sleep(3600)
"""


@pytest.mark.slow
def test_a_child_that_hangs_in_its_stop_hook_does_not_cost_the_slot(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    (tmp_path / "clinging.py").write_text(HANGS_AT_ITS_END)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    flags = ["--max-tasks-per-child", "1"]
    pool = start_supervisor("clinging:app", server=redis_server, procs=1, flags=flags, env=env)
    first, second = (producer.send("note") for _ in range(2))
    for task_id in (first, second):
        record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
        assert record.number("crashes") == 0
    gap_s = (started(ledger, second).monotonic_ns - started(ledger, first).monotonic_ns) / 1e9
    assert LEAVE_MOST_S <= gap_s < LEAVE_MOST_S + 2
    told(pool, {"leaving": 1})


# --- by size


def test_a_child_that_grows_is_replaced_between_its_tasks(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer
) -> None:
    flags = ["--max-memory-per-child", "200M"]
    pool = start_supervisor(server=redis_server, procs=1, flags=flags).wait_ready()
    pids: list[int] = []
    while len(set(pids)) < 3:
        assert len(pids) < 30, pids
        task_id = producer.send("hoard", {"mb": 60})
        record = producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
        assert (record.number("crashes"), record.number("attempt")) == (0, 1)
        pid = int(record.executions()[-1]["pid"])
        pids.append(pid)
        if pids.count(pid) == 3:
            # It may be gone before anybody could look at its size.
            until(lambda pid=pid: not alive(pid), 5, f"{pid} lives on")  # type: ignore[misc]
    by_pid = Counter(pids)
    assert set(list(by_pid.values())[:-1]) == {3}, "the third task of 60 MiB is too much"
    told(pool, {"memory": 2})
    assert "above its limit of 200M" in pool.log()


def test_a_task_that_eats_memory_is_killed_at_once_and_its_dead_letter_says_how_much_it_had(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=redis_server, flags=["--hard-memory-per-child", "200M"]).wait_ready()
    gate = tmp_path / "gate"
    neighbour = producer.send("wait_for_file", {"path": str(gate)})
    kept = started(ledger, neighbour).pid
    greedy = producer.send("eat_memory", {"mb": 500, "until": str(tmp_path / "never")}, max_crashes=1)
    record = producer.wait(greedy, Status.DEAD_LETTERED, timeout=PATIENCE_S)
    cause = crash_of(record)
    assert (cause["killed_by"], cause["certainty"]) == ("dtq: hard memory limit", "certain")
    assert (cause["verdict"], cause["limit_bytes"]) == ("memory", 200 * MB)
    assert int(str(cause["resident_bytes"])) > 200 * MB
    assert "--hard-memory-per-child" in record.as_dict()["last_error"]
    (letter,) = redis_server.client().xrange("dtq:stream:dead-letter")
    assert json.loads(letter[1][b"cause"])["verdict"] == "memory"
    gate.touch()
    producer.wait(neighbour, Status.SUCCEEDED, timeout=PATIENCE_S)
    assert [entry.pid for entry in ledger.starts(neighbour)] == [kept]
    told(pool, {"hard_memory": 1})


@pytest.mark.parametrize("flag", ["--max-memory-per-child", "--hard-memory-per-child"])
def test_a_limit_below_the_size_of_a_new_child_is_refused(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, flag: str
) -> None:
    pool = start_supervisor(server=redis_server, flags=[flag, "8M"])
    assert pool.wait(PATIENCE_S) == 78
    (line,) = [line for line in pool.log().splitlines() if f"{flag} 8M cannot work" in line]
    assert "give at least " in line


# --- by the kernel


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of our own (v1) with 400 MiB; the supervisor moves into it by itself."""
    group = GROUPS / f"dtq-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(400 * MB))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (GROUPS / "cgroup.procs").write_text(pid)
    until(lambda: not (group / "cgroup.procs").read_text(), PATIENCE_S)
    group.rmdir()


def test_what_the_kernel_kills_for_want_of_memory_is_known_for_certain_and_alone(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
    memory_group: Path,
) -> None:
    moves_in = ["sh", "-c", f'echo $$ > {memory_group}/cgroup.procs && exec "$@"', "sh", *PROGRAM]
    pool = start_supervisor(server=redis_server, procs=4, program=moves_in).wait_ready()
    gate = tmp_path / "gate"
    neighbours = [producer.send("wait_for_file", {"path": str(gate)}) for _ in range(3)]
    pids = [started(ledger, neighbour).pid for neighbour in neighbours]
    greedy = producer.send("eat_memory", {"mb": 1000}, max_crashes=1)
    record = producer.wait(greedy, Status.DEAD_LETTERED, timeout=PATIENCE_S)
    cause = crash_of(record)
    assert (cause["killed_by"], cause["certainty"]) == ("kernel: out of memory (certain)", "certain")
    assert cause["out_of_memory"] == {
        "kills": 1,
        "source": f"{memory_group}/memory.oom_control",
        "certainty": "certain",
    }
    assert "out of memory" in record.as_dict()["last_error"]
    gate.touch()
    for neighbour in neighbours:
        producer.wait(neighbour, Status.SUCCEEDED, timeout=PATIENCE_S)
    assert [e.pid for neighbour in neighbours for e in ledger.starts(neighbour)] == pids
    told(pool, {"crash": 1})
    assert pool.stop() == 0


# --- two thousand replacements

RECYCLES, PART = 2000, 500


@pytest.mark.soak
def test_after_two_thousand_replacements_nothing_has_grown(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    # The sizes are looked at all the while, also of children that go in that moment.
    flags = ["--max-tasks-per-child", "1", "--max-memory-per-child", "500M"]
    pool = start_supervisor(server=redis_server, flags=flags).wait_ready()
    producer.wait(producer.send("note"), Status.SUCCEEDED, PATIENCE_S)  # every thread has met Redis
    refilled(pool, set(), PATIENCE_S)
    figures = [figures_of(pool, 0)]
    for done in range(PART, RECYCLES + 1, PART):
        ids = producer.send_together([("note", {})] * PART)
        until(lambda: producer.depth() == 0, 120, pool.describe, interval=0.1)
        assert {producer.status(task_id) for task_id in ids} == {Status.SUCCEEDED}
        refilled(pool, set(), PATIENCE_S)
        figures.append(figures_of(pool, done))
    starts = [entry for entry in ledger.entries() if entry.word == "start"]
    assert len(starts) == len({entry.task_id for entry in starts}) == RECYCLES + 1
    told(pool, {"tasks": RECYCLES + 1})
    gaps = sorted((b.monotonic_ns - a.monotonic_ns) / 1e9 for a, b in itertools.pairwise(starts[1:]))
    longest = gaps[-(RECYCLES // PART)]  # those between two parts are longer
    print(f"longest time without a start within a part: {longest:.3f} s")
    assert longest <= 2
    for line in figures:
        print(", ".join(f"{name} {value}" for name, value in line.items()))
    first, second, last = figures[0], figures[1], figures[-1]
    for name in ("descriptors", "template's", "threads", "clients"):
        assert abs(last[name] - first[name]) <= 2, figures
    # The first ones fill what is bounded: caches, the memory of strangers, the arenas of malloc.
    assert last["resident KiB"] - second["resident KiB"] <= 1024, figures
    assert last["template's KiB"] - second["template's KiB"] <= 1024, figures
    everybody = [pool.pid, pool.template().pid, *pool.child_pids()]
    for one, other in itertools.combinations(everybody, 2):
        assert not sockets(one) & sockets(other)
    assert snapshot(redis_server.client()).at_rest()


def figures_of(pool: SupervisorProcess, recycles: int) -> dict[str, int]:
    template = pool.template()
    return {
        "recycles": recycles,
        "descriptors": len(descriptors(pool.pid)),
        "threads": len(os.listdir(f"/proc/{pool.pid}/task")),
        "resident KiB": resident_bytes(pool.pid) // 1024,
        "template's": len(descriptors(template.pid)),
        "template's KiB": resident_bytes(template.pid) // 1024,
        "clients": int(pool.server.info("clients")["connected_clients"]),
    }
