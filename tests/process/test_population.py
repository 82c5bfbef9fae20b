"""Who is there: one template, a child for every slot, nobody else; whatever signals come and however children
fail to boot."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
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
from tests.support.supervisor import PROGRAM, ROOT, SupervisorProcess
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


BOOTS_AS_TOLD = """
import os, time
from tests.support.handlers import app

@app.on_child_start
def boot() -> None:
    with open("births", "a") as births:
        births.write(f"{time.monotonic()}\\n")
    while os.path.exists("hang"):
        time.sleep(0.01)
    if os.path.exists("fail"):
        os._exit(3)
"""


BootsAsTold = Callable[..., SupervisorProcess]


@pytest.fixture
def told(tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer) -> BootsAsTold:
    (tmp_path / "told.py").write_text(BOOTS_AS_TOLD)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def start(*how: str, procs: int, flags: Sequence[str] = ()) -> SupervisorProcess:
        program = ("sh", "-c", f'touch {" ".join(how)}; exec "$@"', "sh", *PROGRAM)
        return start_supervisor(
            "told:app", server=redis_server, procs=procs, flags=flags, env=env, program=program
        )

    return start


def births(pool: SupervisorProcess) -> list[float]:
    """The monotonic second of each."""
    try:
        return [float(line) for line in (pool.folder / "births").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.mark.slow
def test_children_that_never_boot_are_few_from_the_first_start_on(
    told: BootsAsTold, producer: Producer
) -> None:
    """Each slot tries after 0, 0.5, 1.5, 3.5, 7.5 and 15.5 s. No fork is wasted, none comes early."""
    pool = told("fail", procs=4)
    first = until(lambda: births(pool), PATIENCE_S, pool.describe)[0]
    until(lambda: time.monotonic() - first > 13.0, PATIENCE_S)
    in_time = [birth - first for birth in births(pool) if birth - first < 12.0]
    assert len(in_time) <= 4 * 5
    assert len([at for at in in_time if at < 3.4]) <= 4 * 3
    assert len(in_time) >= 4 * 4
    assert pool.exit_code is None
    (pool.folder / "fail").unlink()
    refilled(pool, set(), timeout=PATIENCE_S)
    producer.wait(producer.send("note"), Status.SUCCEEDED)
    assert pool.stop() == 0


@pytest.mark.slow
def test_children_that_hang_at_the_first_start_are_killed_and_tried_again_until_they_boot(
    told: BootsAsTold, producer: Producer
) -> None:
    pool = told("hang", procs=2, flags=["--boot-timeout", "1"])
    until(lambda: len(pauses(pool)) >= 4, PATIENCE_S, pool.describe)
    assert pool.log().count("is killed: it was not ready within the boot timeout") >= 4
    assert len(births(pool)) <= 2 * 3
    assert pool.exit_code is None
    (pool.folder / "hang").unlink()
    refilled(pool, set(), timeout=PATIENCE_S)
    producer.wait(producer.send("note"), Status.SUCCEEDED)
    assert pool.stop() == 0


def test_children_that_are_slow_to_boot_are_waited_for(told: BootsAsTold, producer: Producer) -> None:
    pool = told("hang", procs=2)
    until(lambda: len(births(pool)) == 2, PATIENCE_S, pool.describe)
    slow_since = time.monotonic()
    until(lambda: time.monotonic() - slow_since > 1.0, 5)
    (pool.folder / "hang").unlink()
    pool.wait_ready()
    producer.wait(producer.send("note"), Status.SUCCEEDED)
    assert (len(births(pool)), pauses(pool)) == (2, [])
    assert pool.stop() == 0


def pauses(pool: SupervisorProcess) -> list[tuple[str, float]]:
    """(slot, seconds) of each boot that failed, as the log tells it."""
    found = re.findall(r"child (\d) did not start: .*?; the next one in ([\d.]+) s", pool.log())
    return [(slot, float(seconds)) for slot, seconds in found]
