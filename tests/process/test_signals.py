"""What people ask of a supervisor by signals beside the stop: another number of children (TTIN, TTOU), no
claims for a while (TSTP, CONT). Whatever comes, how often and to whom: each task runs once."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtq_child.signals import OPERATOR_SIGNALS
from dtq_child.task import Status
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import PATIENCE_S, started
from tests.support.ledger import Ledger
from tests.support.processes import alive, stopped
from tests.support.servers import RedisServer
from tests.support.snapshot import snapshot
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until

dice = random.Random(22)
DAY_MS = 86_400_000


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


def booted(pool: SupervisorProcess) -> list[int]:
    """The pids of children that have booted, by slot."""
    return [child.pid for child in pool.children() if "starting" not in " ".join(child.cmdline())]


def comes_to(pool: SupervisorProcess, number: int) -> list[int]:
    """Waits until there are so many children, and the worker's record says so. Returns their pids."""

    def there() -> bool:
        return len(booted(pool)) == number and pool.worker().get("concurrency") == str(number)

    until(there, PATIENCE_S, pool.describe)
    return booted(pool)


def sizes(pool: SupervisorProcess) -> list[tuple[int, int]]:
    """(before, after) of each change, as the log tells it."""
    found = re.findall(r"SIGTT(?:IN|OU): (\d+) child(?:ren)? from now on, (\d+) before", pool.log())
    return [(int(before), int(after)) for after, before in found]


def claims(pool: SupervisorProcess, say: str) -> None:
    """Waits until the worker's record says so: `quiet`, `running`."""
    until(lambda: pool.worker().get("status") == say, 5, pool.describe)


# --- more and fewer


def test_each_ttin_is_one_child_more_up_to_the_bound_and_each_ttou_one_fewer_down_to_one(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer
) -> None:
    pool = start_supervisor(server=redis_server, procs=2).wait_ready()
    for number in (3, 4):
        pool.signal(signal.SIGTTIN)
        comes_to(pool, number)
    for _ in range(2):
        pool.signal(signal.SIGTTIN)
        until(lambda: "SIGTTIN: there is room for 4 children and no more" in pool.log(), 5, pool.describe)
    for number in (3, 2, 1):
        before = booted(pool)
        pool.signal(signal.SIGTTOU)
        assert comes_to(pool, number) == before[:number], "the highest number goes first"
    pool.signal(signal.SIGTTOU)
    until(lambda: "SIGTTOU: the last child stays" in pool.log(), 5, pool.describe)
    pool.signal(signal.SIGTTIN)
    comes_to(pool, 2)
    assert sizes(pool) == [(2, 3), (3, 4), (4, 3), (3, 2), (2, 1), (1, 2)]
    assert pool.log().count("there is room for") == 1
    producer.wait(producer.send("note"), Status.SUCCEEDED)
    assert pool.stop() == 0


def test_one_fewer_takes_an_idle_child_and_if_there_is_none_waits_for_the_end_of_a_task(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=redis_server, procs=3).wait_ready()
    gates = [tmp_path / f"gate-{n}" for n in range(2)]
    ids = [producer.send("wait_for_file", {"path": str(gate)}) for gate in gates]
    busy = [started(ledger, task_id).pid for task_id in ids]
    pool.signal(signal.SIGTTOU)
    until(lambda: sorted(pool.child_pids()) == sorted(busy), 5, pool.describe)
    pool.signal(signal.SIGTTOU)
    until(lambda: sizes(pool) == [(3, 2), (2, 1)], 5, pool.describe)
    waiting = [producer.send("note") for _ in range(4)]
    slot_of = {pid: number for number, pid in enumerate(pool.child_pids())}
    going, staying = sorted(range(2), key=lambda n: slot_of[busy[n]], reverse=True)
    assert producer.status(ids[going]) == Status.RUNNING
    gates[going].touch()
    producer.wait(ids[going], Status.SUCCEEDED)
    until(lambda: pool.child_pids() == [busy[staying]], 5, pool.describe)
    # The one that went took nothing new with it, and nobody came in its place.
    assert all(ledger.notes(task_id) == [] for task_id in waiting)
    gates[staying].touch()
    for task_id in [*ids, *waiting]:
        producer.wait(task_id, Status.SUCCEEDED)
        assert [entry.word for entry in ledger.notes(task_id)] == ["start", "end"]
    assert {ledger.starts(task_id)[0].pid for task_id in waiting} == {busy[staying]}


HANGS_ON_DEMAND = """
import os, time
from tests.support.handlers import app

@app.on_child_start
def boot() -> None:
    while os.path.exists("hang"):
        time.sleep(0.01)
"""


def test_a_child_that_boots_goes_first_and_at_once(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(HANGS_ON_DEMAND)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    pool = start_supervisor("slow:app", server=redis_server, env=env).wait_ready()
    old = pool.child_pids()
    hang = pool.folder / "hang"
    hang.touch()
    pool.signal(signal.SIGTTIN)
    until(lambda: len(pool.child_pids()) == 3, 5, pool.describe)
    pool.signal(signal.SIGTTOU)
    until(lambda: pool.child_pids() == old, 5, pool.describe)
    assert "is killed: one child fewer was asked for while it booted" in pool.log()
    hang.unlink()
    pool.signal(signal.SIGTTIN)
    assert comes_to(pool, 3)[:2] == old
    assert pool.stop() == 0


def test_a_signal_to_the_group_is_one_signal(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    pool = start_supervisor(server=redis_server, procs=2).wait_ready()
    os.killpg(os.getpgid(pool.pid), signal.SIGTTIN)
    comes_to(pool, 3)
    os.killpg(os.getpgid(pool.pid), signal.SIGTTOU)
    comes_to(pool, 2)
    os.killpg(os.getpgid(pool.pid), signal.SIGTSTP)
    claims(pool, "quiet")
    os.killpg(os.getpgid(pool.pid), signal.SIGCONT)
    claims(pool, "running")
    assert sizes(pool) == [(2, 3), (3, 2)]
    assert pool.stop() == 0


# --- held claims


def test_while_claims_are_held_what_runs_is_finished_and_nothing_starts_until_cont(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=redis_server, procs=2).wait_ready()
    gate = tmp_path / "gate"
    running = producer.send("wait_for_file", {"path": str(gate)})
    started(ledger, running)
    pool.signal(signal.SIGTSTP)
    claims(pool, "quiet")
    assert not stopped(pool.pid), "it is caught: the supervisor goes on"
    pool.signal(signal.SIGTSTP)
    waiting = [producer.send("note") for _ in range(5)]
    delayed = producer.send("note", delay_ms=100)
    gate.touch()
    producer.wait(running, Status.SUCCEEDED)
    until(lambda: producer.status(delayed) == Status.QUEUED, 5, pool.describe)  # it leads on for a while
    held_since = time.monotonic()
    until(lambda: time.monotonic() - held_since > 1.5, 5)
    assert all(ledger.notes(task_id) == [] for task_id in [*waiting, delayed])
    assert len(snapshot(redis_server.client()).undelivered) == 6
    pool.signal(signal.SIGCONT)
    resumed = time.monotonic()
    for task_id in [*waiting, delayed]:
        producer.wait(task_id, Status.SUCCEEDED)
        assert len(ledger.starts(task_id)) == 1
    assert time.monotonic() - resumed < 2.0
    claims(pool, "running")
    assert pool.log().count("nothing is claimed any more, what runs is finished") == 1


def opened(server: RedisServer, ids: list[str]) -> bool:
    """Just these are pending, in a park, and idle past every timeout: any reaper takes them at once."""
    pending = snapshot(server.client()).pending
    anybodys = all(p.consumer.endswith(":park") and p.idle_ms > DAY_MS for p in pending)
    return {p.task_id for p in pending} == set(ids) and anybodys


def test_what_a_child_held_and_has_not_begun_goes_to_others_at_once(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    first = start_supervisor(server=redis_server, procs=1, flags=["--prefetch", "4"]).wait_ready()
    running, *held = producer.send_together([("sleep", {"seconds": 1.0}), ("note", {}), ("note", {})])
    started(ledger, running)
    first.signal(signal.SIGTSTP)
    producer.wait(running, Status.SUCCEEDED)
    until(lambda: opened(redis_server, held), 5, first.describe)
    second = start_supervisor(server=redis_server, procs=1).wait_ready()
    for task_id in held:
        producer.wait(task_id, Status.SUCCEEDED)
        assert [entry.pid for entry in ledger.starts(task_id)] == second.child_pids()


def test_the_task_of_a_child_that_dies_meanwhile_goes_to_others_at_once(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    first = start_supervisor(server=redis_server, procs=1).wait_ready()
    task_id = producer.send("hang_first", {"seconds": 60})
    victim = started(ledger, task_id).pid
    first.signal(signal.SIGTSTP)
    claims(first, "quiet")
    os.kill(victim, signal.SIGKILL)
    until(lambda: opened(redis_server, [task_id]), 5, first.describe)
    second = start_supervisor(server=redis_server, procs=1).wait_ready()
    again = started(ledger, task_id, times=2, timeout=5, describe=second.describe)
    assert again.pid in second.child_pids()
    assert producer.wait(task_id, Status.SUCCEEDED).number("crashes") == 1


@pytest.mark.slow
def test_a_held_leader_makes_room_for_one_that_can_start_tasks(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    first = start_supervisor(server=redis_server, procs=1).wait_ready()
    until(lambda: "this worker leads" in first.log(), 10, first.describe)
    second = start_supervisor(server=redis_server, procs=1).wait_ready()
    first.signal(signal.SIGTSTP)
    until(lambda: "this worker leads" in second.log(), 20, second.describe)
    assert "leads no more (it claims nothing)" in first.log()
    assert second.stop() == 0
    first.signal(signal.SIGCONT)
    until(lambda: first.log().count("this worker leads:") == 2, 10, first.describe)


def test_a_stop_while_claims_are_held_is_like_any_other(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    pool = start_supervisor(server=redis_server, procs=2).wait_ready()
    gate = tmp_path / "gate"
    running = producer.send("wait_for_file", {"path": str(gate)})
    started(ledger, running)
    pool.signal(signal.SIGTSTP)
    claims(pool, "quiet")
    waiting = producer.send("note")
    pool.signal(signal.SIGTERM)
    claims(pool, "stopping")
    pool.signal(signal.SIGCONT)  # as systemd does after TERM: that is no news
    for number in (signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP):
        pool.signal(number)
        line = f"{number.name} changes nothing any more: the supervisor is stopping"
        until(lambda line=line: line in pool.log(), 5, pool.describe)  # type: ignore[misc]
    assert "SIGCONT changes" not in pool.log()
    gate.touch()
    assert pool.wait(timeout=5) == 0
    assert producer.status(running) == Status.SUCCEEDED
    assert (producer.status(waiting), ledger.notes(waiting)) == (Status.QUEUED, [])


def test_a_supervisor_that_was_stopped_and_continued_claims_as_before(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer
) -> None:
    pool = start_supervisor(server=redis_server, procs=1).wait_ready()
    pool.signal(signal.SIGSTOP)
    until(lambda: stopped(pool.pid), 5)
    pool.signal(signal.SIGCONT)
    until(lambda: "SIGCONT: claims were not held" in pool.log(), 5, pool.describe)
    producer.wait(producer.send("note"), Status.SUCCEEDED)
    pool.signal(signal.SIGTSTP)
    claims(pool, "quiet")
    # While it is stopped the order of the two cannot be lost: the later one takes the earlier away.
    pool.signal(signal.SIGSTOP)
    until(lambda: stopped(pool.pid), 5)
    pool.signal(signal.SIGTSTP)
    pool.signal(signal.SIGCONT)
    claims(pool, "running")
    producer.wait(producer.send("note"), Status.SUCCEEDED)


# --- from a terminal

IN_THE_BACKGROUND = """
import fcntl, os, pty, signal, sys, termios

master, slave = pty.openpty()
fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
how = termios.tcgetattr(slave)
how[3] |= termios.TOSTOP
termios.tcsetattr(slave, termios.TCSANOW, how)
reader = os.fork()
if reader == 0:
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    os.tcsetpgrp(slave, os.getpid())
    os.close(slave)
    while True:
        os.write(2, os.read(master, 65536))
while os.tcgetpgrp(slave) != reader:
    pass
os.dup2(slave, 2)
os.execv(sys.executable, [sys.executable, "-m", "dtq_supervisor", *sys.argv[1:]])
"""
SAYS_SOMETHING = """
from tests.support.handlers import app

@app.on_child_start
def boot() -> None:
    raise RuntimeError("something")
"""


def test_a_terminal_that_stops_those_that_write_in_the_background_takes_no_child_away(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, tmp_path: Path
) -> None:
    """`stty tostop`: it sends TTOU, and whoever has a handler for that would try again for ever."""
    (tmp_path / "says.py").write_text(SAYS_SOMETHING)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    program = (sys.executable, "-c", IN_THE_BACKGROUND)
    pool = start_supervisor("says:app", server=redis_server, env=env, program=program).wait_ready()
    until(lambda: pool.log().count("RuntimeError: something") == 2, 5, pool.describe)
    assert "ready: child" in pool.log(), "nor does it hide what the supervisor says"
    producer.wait(producer.send("note"), Status.SUCCEEDED)
    assert len(pool.child_pids()) == 2
    assert "SIGTTOU" not in pool.log()
    assert pool.stop(timeout=5) == 0


# --- to children, to the newborn, all at once

TO_ANYBODY = (*OPERATOR_SIGNALS, signal.SIGCONT)


def test_a_newborn_is_not_moved_by_signals_and_neither_is_its_supervisor(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer
) -> None:
    """They come from the first moment at which a child can be seen, for as long as it boots."""
    pool = start_supervisor(server=redis_server, procs=2).wait_ready()
    stays, victim = pool.child_pids()
    for _ in range(5):
        known = {stays, victim, pool.template().pid}
        os.kill(victim, signal.SIGKILL)
        born = until(lambda known=known: newborn(pool, known), 5, pool.describe, interval=0.0)  # type: ignore[misc]
        assert born is not None
        for _ in range(20):
            for number in TO_ANYBODY:
                os.kill(born, number)
        until(lambda born=born: born in booted(pool), 5, pool.describe)  # type: ignore[misc]
        victim = born
    assert pool.child_pids() == [stays, victim]
    for _ in range(4):
        producer.wait(producer.send("note"), Status.SUCCEEDED)
    assert "SIGT" not in pool.log()
    assert pool.stop() == 0


def newborn(pool: SupervisorProcess, known: set[int]) -> int | None:
    """A child of the supervisor that was not there before, whatever it is called so far."""
    with open(f"/proc/{pool.pid}/task/{pool.pid}/children") as children:
        found = {int(pid) for pid in children.read().split()} - known
    return next((pid for pid in sorted(found) if alive(pid)), None)


@pytest.mark.slow
def test_a_storm_of_signals_to_all_loses_no_task_runs_none_twice_and_leaves_as_many_children_as_it_says(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, procs=3).wait_ready()
    template = pool.template().pid
    ids = producer.send_together([("sleep", {"seconds": 0.01}), ("spin", {"seconds": 0.01})] * 200)
    asks = (signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1, signal.SIGCHLD)
    sent = 0
    until_then = time.monotonic() + PATIENCE_S
    while len(ledger.entries()) < 2 * len(ids):
        assert time.monotonic() < until_then, pool.describe()
        for _ in range(dice.randrange(1, 40)):
            pool.signal(dice.choice(asks)) if dice.random() < 0.5 else os.kill(pool.pid, dice.choice(asks))
            sent += 1
        for pid in [*pool.child_pids(), template]:
            try:
                os.kill(pid, dice.choice(TO_ANYBODY))
            except ProcessLookupError:
                continue  # it was one too many
        os.kill(pool.pid, signal.SIGCONT)
        moment = time.monotonic() + dice.uniform(0.0, 0.1)
        until(lambda moment=moment: time.monotonic() >= moment, 1, interval=0.002)  # type: ignore[misc]
    for task_id in ids:
        producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
    assert {tuple(e.word for e in entries) for entries in ledger.by_task().values()} == {("start", "end")}
    claims(pool, "running")
    until(lambda: pool.worker().get("concurrency") == str(sizes(pool)[-1][1]), 5, pool.describe)
    changes = sizes(pool)
    assert [before for before, _ in changes] == [3, *(after for _, after in changes[:-1])]
    assert all(1 <= after <= 6 and after != before for before, after in changes)
    number = changes[-1][1]
    comes_to(pool, number)
    assert pool.template().pid == template
    until(lambda: len(json.loads(pool.worker()["children"])) == number, 5, pool.describe)
    places = snapshot(redis_server.client())
    assert places.at_rest()
    assert sent > 100
    assert pool.stop() == 0
