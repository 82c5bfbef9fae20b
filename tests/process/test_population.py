"""Who is there: one template, a child for every slot, nobody else; whatever signals come and however children
fail to boot."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dtq_child.signals import DUMP_SIGNAL, OPERATOR_SIGNALS, PARENT_DIED_SIGNAL, SOFT_SIGNAL
from dtq_child.task import Status
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import PATIENCE_S, refilled, started
from tests.support.ledger import Ledger
from tests.support.processes import alive, looks
from tests.support.servers import RedisServer
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until

dice = random.Random(20)
TITLE = re.compile(r"dtq-child\[(\d)\] g1: \S+")


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


# --- at rest and after the end


def test_eight_children_and_one_template_and_after_the_stop_nobody(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, procs=8).wait_ready()
    master = psutil.Process(pool.pid)
    titles = sorted(process.title for process in looks(child.pid for child in master.children()))
    slots = [found[1] for title in titles if (found := TITLE.match(title))]
    assert slots == list("01234567")
    assert len(titles) == 9
    assert [title for title in titles if not TITLE.match(title)] == ["dtq-supervisor: template g1"]
    for child in looks(pool.child_pids()):
        assert (child.ppid, child.pgid) == (pool.pid, child.pid)
    helpers = {start_helpers(producer, ledger, name) for name in ("grandchild", "grandchild_own_session")}
    everybody = {pool.pid, *(process.pid for process in pool.tree()), *helpers}
    assert pool.stop() == 0
    assert [pid for pid in everybody if alive(pid)] == []


def start_helpers(producer: Producer, ledger: Ledger, name: str) -> int:
    """Has a task leave a program running that outlives it. Returns its pid."""
    task_id = producer.send(name, {"seconds": 3600})
    producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
    (note,) = ledger.notes(task_id, "helper")
    assert alive(note.facts["helper"])
    return int(note.facts["helper"])


# --- signals

STRAYS = (signal.SIGALRM, signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD, signal.SIGRTMIN, signal.SIGRTMAX)
OURS = (SOFT_SIGNAL, DUMP_SIGNAL, PARENT_DIED_SIGNAL)


def test_signals_to_children_and_template_end_no_task_and_are_not_the_supervisors(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    """Those that people send; to children also those of the supervisor, and some that nobody means."""
    pool = start_supervisor(server=redis_server, procs=3).wait_ready()
    gate = tmp_path / "gate"
    ids = [producer.send("wait_for_file", {"path": str(gate)}) for _ in range(2)]  # and one stays idle
    for task_id in ids:
        started(ledger, task_id)
    children, template = pool.child_pids(), pool.template().pid
    for _ in range(5):
        for number in dice.sample(OPERATOR_SIGNALS, len(OPERATOR_SIGNALS)):
            os.kill(template, number)
        for number in dice.sample(some := (*OPERATOR_SIGNALS, *STRAYS, *OURS), len(some)):
            for pid in children:
                os.kill(pid, number)
    gate.touch()
    for task_id in ids:
        producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
        assert [entry.word for entry in ledger.notes(task_id)] == ["start", "end"]
    after = producer.send("note")
    producer.wait(after, Status.SUCCEEDED, timeout=PATIENCE_S)
    assert (pool.child_pids(), pool.template().pid) == (children, template)
    assert pool.exit_code is None
    assert "signal SIG" not in pool.log()


def test_two_hundred_terms_to_children_under_load_change_nothing(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    pool = start_supervisor(server=redis_server, procs=3).wait_ready()
    pids = pool.child_pids()
    ids = producer.send_together([("sleep", {"seconds": 0.01}), ("spin", {"seconds": 0.01})] * 100)
    for number in range(200):
        # One for each task that has begun, so that they fall on starts, ends and turns alike.
        until(lambda n=number: len(ledger.entries()) > n, PATIENCE_S, pool.describe, interval=0.001)  # type: ignore[misc]
        os.kill(dice.choice(pids), signal.SIGTERM)
    for task_id in ids:
        producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
    by_task = ledger.by_task()
    assert {tuple(entry.word for entry in by_task[task_id]) for task_id in ids} == {("start", "end")}
    assert pool.child_pids() == pids
    assert "stopping" not in pool.log()
    assert pool.exit_code is None


# --- boots

COUNTS_MODULES = """
import sys
from dtq_child import App, current_task
from tests.support.ledger import Ledger

app = App()

@app.task(name="count")
def count() -> None:
    Ledger.from_environment().note(current_task().id, "imported", names=sorted(set(sys.modules) - known))

known = set(sys.modules)
"""


def test_a_child_imports_nothing_before_its_first_task_that_its_template_could_have(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    """Else each birth costs several times as much, and the task of a killed child waits for it."""
    (tmp_path / "frugal.py").write_text(COUNTS_MODULES)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    start_supervisor("frugal:app", server=redis_server, procs=1, env=env)
    task_id = producer.send("count")
    producer.wait(task_id, Status.SUCCEEDED, timeout=PATIENCE_S)
    (note,) = ledger.notes(task_id, "imported")
    assert note.facts["names"] == []


# --- boots that fail

DIES_IN_A_HOOK = """
import os
from tests.support.handlers import app

@app.on_child_start
def boot() -> None:
    if not os.path.exists("mended"):
        os._exit(3)
"""
DIES_IN_ITS_IMPORT = """
import ctypes, os
from tests.support.handlers import app

if not os.path.exists("mended"):
    ctypes.string_at(0)
"""


@pytest.mark.parametrize(
    ("source", "flags"),
    [(DIES_IN_A_HOOK, []), (DIES_IN_ITS_IMPORT, ["--no-preload"])],
    ids=["hook", "import"],
)
def test_children_that_die_at_boot_are_backed_off_and_the_supervisor_outlives_it(
    start_supervisor: SupervisorStarter,
    redis_server: RedisServer,
    producer: Producer,
    tmp_path: Path,
    source: str,
    flags: list[str],
) -> None:
    (tmp_path / "unwell.py").write_text(source)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    pool = start_supervisor("unwell:app", server=redis_server, flags=flags, env=env)
    until(lambda: len(pauses(pool)) >= 6, PATIENCE_S, pool.describe)
    for slot in "01":
        assert [pause for number, pause in pauses(pool) if number == slot][:3] == [0.5, 1.0, 2.0]
    assert pool.exit_code is None
    (pool.folder / "mended").touch()
    refilled(pool, set(), timeout=PATIENCE_S)
    producer.wait(producer.send("note"), Status.SUCCEEDED, timeout=PATIENCE_S)
    assert pool.stop() == 0


def pauses(pool: SupervisorProcess) -> list[tuple[str, float]]:
    """(slot, seconds) of each boot that failed, as the log tells it."""
    found = re.findall(r"child (\d) did not start: .*?; the next one in ([\d.]+) s", pool.log())
    return [(slot, float(seconds)) for slot, seconds in found]
