"""A supervisor as a container has it: process 1, nobody, nothing to write to, no home, no /dev/shm."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtq_child.task import Status
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import PATIENCE_S, Vigil, deaths
from tests.support.binaries import required
from tests.support.ports import free_port
from tests.support.servers import RedisServer
from tests.support.supervisor import ROOT, SupervisorProcess, log_says_ready
from tests.support.waiting import until

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
SCRIPT = ROOT / "tests" / "support" / "container.sh"
UNSHARE = ("unshare", "-pfm", "--mount-proc", "--kill-child")
NOBODY = 65534
AFTER_GRACE_S = 2.3
ORPHANS = 1000
APP = """
import ctypes, os, pathlib, signal, subprocess, tempfile
from dtq_child import App, current_task

app = App()

def tries(act):
    try:
        return act() or "done"
    except (OSError, KeyError) as error:
        return type(error).__name__

@app.task(name="look")
def look() -> dict:
    return {
        "uid": os.getuid(),
        "parent": os.getppid(),
        "names": sorted(os.environ.keys() & {"HOME", "USER", "TMPDIR"}),
        "home": tries(lambda: str(pathlib.Path.home())),
        "temporary": tries(tempfile.gettempdir),
        "shared": tries(lambda: os.open("/dev/shm/x", os.O_CREAT | os.O_RDWR)),
        "here": tries(lambda: pathlib.Path("x").write_text("x")),
        "rights": [line for line in open("/proc/self/status") if line.startswith("CapEff")],
    }

@app.task(name="crash_once")
def crash_once() -> int:
    if not current_task().crashes:
        os.kill(os.getpid(), signal.SIGKILL)
    return current_task().crashes

@app.task(name="stuck")
def stuck() -> None:
    ctypes.PyDLL(None).sleep(60)

@app.task(name="orphans")
def orphans(count: int) -> int:
    # Each is the child of a shell that ends at once.
    one = "n=0; while [ $n -lt %d ]; do (sh -c \\"exit $((n %% 256))\\" &); n=$((n + 1)); done" % count
    return subprocess.run(["sh", "-c", one], check=False).returncode
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Root, and a kernel that lets it make namespaces."""
    missing = [name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None]
    reason = f"not installed: {', '.join(missing)} (apt install util-linux mount)" if missing else ""
    if not reason:
        tried = subprocess.run([*UNSHARE, "mount", "--make-rprivate", "/"], capture_output=True, check=False)
        reason = tried.stderr.decode().strip() if tried.returncode else ""
    if reason and required("namespaces"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


@pytest.fixture
def pool(
    namespaces: None, tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> SupervisorProcess:
    """Two children, with a grace of 1 s. Its own pid is that of `unshare`."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "contained.py").write_text(APP)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    places = (sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT), str(folder))
    program = (*UNSHARE, "sh", str(SCRIPT), *places, version, redis_server.url)
    flags = ["--shutdown-grace", "1", "--metrics-bind", f"127.0.0.1:{free_port()}"]
    started = start_supervisor("contained:app", server=redis_server, program=program, flags=flags)
    return started.wait_ready(ready=log_says_ready)


def process_1(pool: SupervisorProcess) -> psutil.Process:
    """The supervisor as it is seen from outside."""
    (supervisor,) = psutil.Process(pool.pid).children()
    return supervisor


def result(server: RedisServer, task_id: str) -> Any:
    return json.loads(server.cli("GET", f"dtq:result:{task_id}"))


def ends_within(pool: SupervisorProcess, number: int, seconds: float) -> int:
    """Signals process 1. Its exit code, when it and everything below it are gone."""
    supervisor = process_1(pool)
    everybody = [supervisor.pid, *(process.pid for process in supervisor.children(recursive=True))]
    with Vigil(supervisor.pid) as vigil:
        asked = time.monotonic()
        os.kill(supervisor.pid, number)
        assert deaths([vigil], 10)[supervisor.pid] - asked < seconds
    code = pool.wait(5)
    assert not [pid for pid in everybody if psutil.pid_exists(pid)]
    return code


def health_check(pool: SupervisorProcess, path: str = "/healthz") -> int:
    """What the image's HEALTHCHECK would say."""
    (words,) = re.findall(r"HEALTHCHECK .*?CMD (\[.*?\])$", DOCKERFILE.read_text(), re.DOTALL | re.MULTILINE)
    (port,) = re.findall(r"metrics are at http://127\.0\.0\.1:(\d+)", pool.log())
    program = [word.replace("9646", port).replace("/healthz", path) for word in json.loads(words)]
    return subprocess.run([sys.executable, *program[1:]], timeout=10, check=False).returncode


def test_nobody_without_a_place_to_write_executes_kills_and_runs_again(
    pool: SupervisorProcess, redis_server: RedisServer, producer: Producer
) -> None:
    look, crash = producer.send("look"), producer.send("crash_once")
    stuck = producer.send("stuck", timeout=0.5, max_attempts=1)
    producer.wait(look, Status.SUCCEEDED, PATIENCE_S)
    assert result(redis_server, look) == {
        "uid": NOBODY,
        "parent": 1,
        "names": [],
        "home": "/nonexistent",
        "temporary": "FileNotFoundError",
        "shared": "OSError",
        "here": "OSError",
        "rights": ["CapEff:\t0000000000000000\n"],
    }
    producer.wait(crash, Status.SUCCEEDED, PATIENCE_S)
    assert result(redis_server, crash) == 1
    record = producer.wait(stuck, Status.DEAD_LETTERED, PATIENCE_S)
    assert "TaskTimeout" in (record.get("last_error_class") or "")
    assert health_check(pool) == 0
    assert health_check(pool, path="/nothing") == 1
    assert ends_within(pool, signal.SIGTERM, 2.0) == 0


def test_a_task_that_is_stuck_does_not_hold_process_1_up(
    pool: SupervisorProcess, redis_server: RedisServer, producer: Producer
) -> None:
    task_id = producer.send("stuck")
    producer.wait(task_id, Status.RUNNING, PATIENCE_S)
    assert ends_within(pool, signal.SIGTERM, 1.0 + AFTER_GRACE_S) == 1
    assert producer.status(task_id) == Status.QUEUED


def test_orphans_of_all_exit_codes_are_collected_and_mean_nothing(
    pool: SupervisorProcess, producer: Producer
) -> None:
    before = {p.pid for p in process_1(pool).children() if p.cmdline()}
    producer.wait(producer.send("orphans", {"count": ORPHANS}), Status.SUCCEEDED, PATIENCE_S)
    until(lambda: {p.pid for p in process_1(pool).children()} == before, PATIENCE_S, pool.describe)
    assert not [line for line in pool.log().splitlines() if '"level":"error"' in line.replace(" ", "")]
    producer.wait(producer.send("look"), Status.SUCCEEDED, PATIENCE_S)
    assert ends_within(pool, signal.SIGTERM, 2.0) == 0
