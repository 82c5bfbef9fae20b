"""SIGHUP: new code and settings take over and no work is lost, or nothing changes and the log says why."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtq_child import App
from dtq_child.task import Status
from dtq_supervisor import notice
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.support.ledger import Ledger
from tests.support.processes import alive, descriptors
from tests.support.servers import RedisServer
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until

SHOP = """
    import os, time
    from pathlib import Path
    from dtq_child import App
    from tests.support.handlers import note, noted

    VERSION = {version}
    app = App()

    @app.task(name="work")
    @noted
    def work(seconds=0.0):
        note("version", version=VERSION)
        time.sleep(seconds)

    @app.task(name="wait_for")
    @noted
    def wait_for(path):
        note("version", version=VERSION)
        while not Path(path).exists():
            time.sleep(0.01)
"""


class Shop:
    """An application on disk, whose code the test changes, and its supervisor."""

    def __init__(self, folder: Path, start: SupervisorStarter, server: RedisServer) -> None:
        self.folder, self._start, self._server = folder / "shop", start, server
        self.folder.mkdir()
        self.toml = folder / "dtq.toml"
        self.write(1)
        self.pool: SupervisorProcess

    def write(self, version: int, more: str = "") -> None:
        code = textwrap.dedent(SHOP.format(version=version)) + textwrap.dedent(more)
        (self.folder / "shop.py").write_text(code)

    def configure(self, *lines: str) -> None:
        self.toml.write_text("\n".join(["[dtq]", *lines]))

    def open(self, procs: int = 2, *flags: str, path: str = str(ROOT)) -> SupervisorProcess:
        """Without compiled files: by their dates two versions within a second are the same."""
        self.pool = self._start(
            "shop:app",
            server=self._server,
            procs=procs,
            flags=flags,
            env={"PYTHONPATH": f"{path}{os.pathsep}{self.folder}", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return self.pool.wait_ready()

    def reload(self, seconds: float = 20.0, *words: str) -> subprocess.CompletedProcess[str]:
        """`dtq reload --wait`."""
        return dtq("reload", "--pid", str(self.pool.pid), "--wait", str(seconds), *words)

    def reloaded(self) -> None:
        done = self.reload()
        assert done.returncode == 0, done.stderr + self.pool.describe()

    def ended(self) -> list[dict[str, Any]]:
        """What the log says of reloads that have ended."""
        names = ("reloaded", "reloaded_but", "reload_failed")
        facts = [json.loads(line) for line in self.pool.log().splitlines() if line.startswith("{")]
        return [line for line in facts if line.get("fact") in names]


def dtq(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DTQ_")}
    return subprocess.run(
        [sys.executable, "-m", "dtq_supervisor.tools.main", *words],
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def shop(tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer) -> Shop:
    return Shop(tmp_path, start_supervisor, redis_server)


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


def versions(ledger: Ledger, task_ids: list[str]) -> set[int]:
    notes = ledger.by_task()
    return {e.facts["version"] for task_id in task_ids for e in notes[task_id] if e.word == "version"}


def started(ledger: Ledger, task_id: str) -> int:
    """Waits until it runs; the pid that executes it."""
    until(lambda: ledger.starts(task_id), 10, f"{task_id} has not started")
    return ledger.starts(task_id)[0].pid


# --- new code


def test_code_changed_on_disk_takes_over_under_load_and_no_task_is_lost_or_run_twice(
    shop: Shop, producer: Producer, ledger: Ledger
) -> None:
    pool = shop.open(4)
    before, template = set(pool.child_pids()), pool.template()
    load = producer.send_together([("work", {"seconds": 0.02})] * 200)
    shop.write(2)
    pool.signal(signal.SIGHUP)
    while not shop.ended():
        load += producer.send_together([("work", {"seconds": 0.02})] * 10)
        until(lambda: producer.depth() < 100, 10)
    after = producer.send_together([("work", {})] * 25)
    ids = [*load, *after]
    for task_id in ids:
        producer.wait(task_id, Status.SUCCEEDED, 20)
    notes = ledger.by_task()
    assert {len([e for e in notes[task_id] if e.word == "start"]) for task_id in ids} == {1}
    assert versions(ledger, after) == {2}
    assert not before & set(pool.child_pids())
    assert len(pool.child_pids()) == 4
    until(lambda: not template.is_running() or template.status() == psutil.STATUS_ZOMBIE, 5, pool.describe)
    until(lambda: pool.worker().get("generation") == "2", 5, pool.describe)
    assert json.loads(pool.worker()["reload"])["outcome"] == "done"
    assert pool.stop() == 0


def test_without_preload_each_child_of_the_new_generation_imports_the_new_code(
    shop: Shop, producer: Producer, ledger: Ledger
) -> None:
    shop.open(2, "--no-preload")
    shop.write(2)
    shop.reloaded()
    task_id = producer.send("work")
    producer.wait(task_id, Status.SUCCEEDED)
    assert versions(ledger, [task_id]) == {2}


def test_a_long_task_keeps_its_old_child_and_nobody_waits_for_it(
    shop: Shop, producer: Producer, ledger: Ledger, tmp_path: Path
) -> None:
    """Its lease is renewed meanwhile, and its old template is there for as long as it is."""
    pool = shop.open(3, "--visibility-timeout", "1", "--heartbeat-interval", "0.2")
    gate, template = tmp_path / "gate", pool.template()
    long = producer.send("wait_for", {"path": str(gate)})
    old = started(ledger, long)
    shop.write(2)
    shop.reloaded()
    assert alive(old)
    assert template.is_running()
    ids = producer.send_together([("work", {})] * 20)
    for task_id in ids:
        producer.wait(task_id, Status.SUCCEEDED)
    assert versions(ledger, ids) == {2}
    assert "1 older child finishes its task" in pool.log()
    # Its successor stands by, and claims nothing.
    until(lambda: len(pool.child_pids()) == 4, 5, pool.describe)
    since = time.monotonic()
    until(lambda: time.monotonic() - since > 2.5, 5)  # more than two leases
    gate.touch()
    producer.wait(long, Status.SUCCEEDED)
    assert len(ledger.starts(long)) == 1
    until(lambda: not alive(old) and not alive(template.pid), 5, pool.describe)
    assert len(pool.child_pids()) == 3


@pytest.mark.slow
def test_an_old_child_is_timed_out_like_every_other(
    shop: Shop, producer: Producer, ledger: Ledger, tmp_path: Path
) -> None:
    shop.open(2)
    long = producer.send("wait_for", {"path": str(tmp_path / "never")}, timeout=8.0, max_attempts=1)
    old = started(ledger, long)
    shop.write(2)
    shop.reloaded()
    assert alive(old)
    producer.wait(long, Status.DEAD_LETTERED)
    assert "TaskTimeout" in str(producer.record(long).as_dict())
    until(lambda: len(shop.pool.child_pids()) == 2, 5, shop.pool.describe)


@pytest.mark.slow
def test_an_old_child_has_its_old_template_for_an_executioner(
    shop: Shop, producer: Producer, ledger: Ledger, tmp_path: Path
) -> None:
    pool = shop.open(2, "--visibility-timeout", "2", "--heartbeat-interval", "0.5")
    template = pool.template()
    long = producer.send("wait_for", {"path": str(tmp_path / "never")})
    old = started(ledger, long)
    shop.write(2)
    shop.reloaded()
    assert alive(old)
    pool.kill()
    until(lambda: not alive(old) and not alive(template.pid), 5, pool.describe)
    assert re.search(rf"killing child \d, pid {old}, which its supervisor left behind", pool.log())


def test_a_child_that_dies_during_the_reload_is_replaced(shop: Shop, producer: Producer) -> None:
    pool = shop.open(2)
    shop.write(2, "time.sleep(1.5)")
    pool.signal(signal.SIGHUP)
    until(lambda: len(pool.templates()) == 2, 5, pool.describe)
    pids = pool.child_pids()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(pool.child_pids()) == 2 and not set(pids) & set(pool.child_pids()), 1.0, pool.describe)
    producer.wait(producer.send("work"), Status.SUCCEEDED)
    until(lambda: [e["fact"] for e in shop.ended()] == ["reloaded"], 10, pool.describe)


# --- code that is broken


BROKEN = {
    "syntax": ("def", "SyntaxError"),
    "missing": ("import nothing_of_that_name", "nothing_of_that_name"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "segfaults": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "hangs": ("time.sleep(60)", "--boot-timeout"),
    "nothing": ("del app", "has no 'app'"),
    "canary dies": ("app.on_child_start(lambda: os._exit(7))", "exit code 7"),
    "canary hangs": ("app.on_child_start(lambda: time.sleep(60))", "--boot-timeout"),
    "canary killed": ("app.on_child_start(lambda: os.kill(os.getpid(), 9))", "signal 9"),
}


QUICK = ("syntax", "segfaults", "canary dies")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how in QUICK else [pytest.mark.slow]) for how in BROKEN]
)
def test_broken_code_leaves_the_old_generation_at_work_and_the_reason_in_the_log(
    shop: Shop, producer: Producer, ledger: Ledger, how: str
) -> None:
    code, reason = BROKEN[how]
    pool = shop.open(2, "--boot-timeout", "2")
    pids, template = pool.child_pids(), pool.template()
    shop.write(2, code)
    done = shop.reload()
    assert done.returncode == 1
    assert reason in done.stderr
    (line,) = shop.ended()
    assert (line["fact"], line["level"]) == ("reload_failed", "error")
    assert reason in line["reason"]
    until(lambda: [t.pid for t in pool.templates()] == [template.pid], 5, pool.describe)
    until(lambda: pool.child_pids() == pids, 5, pool.describe)
    os.kill(pids[0], signal.SIGKILL)  # its successor is of the old code, which nobody can import any more
    until(lambda: len(pool.child_pids()) == 2, 5, pool.describe)
    ids = producer.send_together([("work", {})] * 10)
    for task_id in ids:
        producer.wait(task_id, Status.SUCCEEDED)
    assert versions(ledger, ids) == {1}
    until(lambda: '"failed"' in pool.worker().get("reload", ""), 5, pool.describe)
    shop.write(3)
    shop.reloaded()
    task_id = producer.send("work")
    producer.wait(task_id, Status.SUCCEEDED)
    assert versions(ledger, [task_id]) == {3}


def test_an_import_that_fails_in_a_child_fails_the_reload(shop: Shop, producer: Producer) -> None:
    pool = shop.open(2, "--no-preload")
    pids = pool.child_pids()
    shop.write(2, "import nothing_of_that_name")
    done = shop.reload()
    assert done.returncode == 1
    assert "exit code 4" in done.stderr
    assert "nothing_of_that_name" in pool.log()
    assert pool.child_pids() == pids
    producer.wait(producer.send("work"), Status.SUCCEEDED)


def test_an_upgraded_installation_asks_for_a_restart(shop: Shop, producer: Producer, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    for package in ("dtq_child", "dtq_supervisor"):
        shutil.copytree(ROOT / package, installed / package, ignore=shutil.ignore_patterns("__pycache__"))
    os.symlink(ROOT / "tests", installed / "tests")
    pool = shop.open(1, path=str(installed))
    pids = pool.child_pids()
    protocol = installed / "dtq_child" / "protocol.py"
    text = protocol.read_text()
    assert "PROTOCOL = 1\n" in text
    protocol.write_text(text.replace("PROTOCOL = 1\n", "PROTOCOL = 2\n"))
    done = shop.reload()
    assert done.returncode == 1
    assert "dtq was upgraded, restart the service" in done.stderr
    assert pool.child_pids() == pids
    producer.wait(producer.send("work"), Status.SUCCEEDED)


# --- settings


def test_bad_settings_are_refused_whole(shop: Shop, redis_server: RedisServer) -> None:
    shop.configure("timeout_s = 30")
    pool = shop.open(1, "--config", str(shop.toml))
    pids = pool.child_pids()
    for lines, reason in [
        (("timeout_s = 0.2", "max_attempts = 0"), "max_attempts"),
        (("timeout_s = 0.2", "what"), "cannot be understood"),
        (("timeout_s = 0.2", "visibility_timeout_s = 99"), "takes a restart"),
    ]:
        shop.configure(*lines)
        done = shop.reload()
        assert done.returncode == 1
        assert reason in done.stderr
    assert pool.child_pids() == pids
    task = App(redis_url=redis_server.url).enqueue("work", {"seconds": 0.5})
    assert task.result(timeout=10) is None
    assert [e["fact"] for e in shop.ended()] == ["reload_failed"] * 3


def test_good_settings_hold_for_all_that_begins_after_the_reload(
    shop: Shop, producer: Producer, redis_server: RedisServer
) -> None:
    shop.configure("timeout_s = 30", 'queues = ["default"]')
    pool = shop.open(2, "--config", str(shop.toml))
    shop.configure(
        "timeout_s = 0.5", "max_attempts = 1", 'queues = ["default", "mail"]', "log_level = 'debug'"
    )
    shop.reloaded()
    app = App(redis_url=redis_server.url)
    slow = app.enqueue("work", {"seconds": 30}, queue="mail").id
    producer.wait(slow, Status.DEAD_LETTERED)
    assert "TaskTimeout" in str(producer.record(slow).as_dict())
    until(lambda: pool.worker().get("queues") == "default,mail", 5, pool.describe)


# --- HUPs, stops


def test_hangups_during_a_reload_are_one_more_reload(shop: Shop) -> None:
    pool = shop.open(2)
    shop.write(2, "time.sleep(1)")
    pool.signal(signal.SIGHUP)
    until(lambda: len(pool.templates()) == 2, 5, pool.describe)
    for _ in range(20):
        pool.signal(signal.SIGHUP)
        time.sleep(0.01)
    until(lambda: [e["fact"] for e in shop.ended()] == ["reloaded", "reloaded"], 20, pool.describe)
    until(lambda: len(pool.templates()) == 1, 5, pool.describe)
    assert pool.log().count('"reloading"') == 2
    assert len(pool.child_pids()) == 2


def test_a_hangup_before_the_first_import_is_through_is_answered_after_it(shop: Shop) -> None:
    shop.write(1, "time.sleep(1)")
    shop.pool = shop._start(
        "shop:app",
        server=shop._server,
        procs=1,
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{shop.folder}", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    until(shop.pool.templates, 5)
    shop.reloaded()


def test_a_stop_during_the_import_of_a_reload_ends_both_generations(shop: Shop) -> None:
    pool = shop.open(2)
    shop.write(2, "time.sleep(60)")
    pool.signal(signal.SIGHUP)
    until(lambda: len(pool.templates()) == 2, 5, pool.describe)
    pids = [p.pid for p in pool.tree()]
    assert pool.stop(timeout=5) == 0
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_stop_while_an_old_child_works_waits_for_its_task(
    shop: Shop, producer: Producer, ledger: Ledger
) -> None:
    pool = shop.open(2)
    long = producer.send("work", {"seconds": 6})
    started(ledger, long)
    shop.write(2)
    shop.reloaded()
    pids = [p.pid for p in pool.tree()]
    assert pool.stop(timeout=10) == 0
    assert producer.status(long) == Status.SUCCEEDED
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_reload_goes_on_while_redis_is_away(shop: Shop, redis_server: RedisServer) -> None:
    pool = shop.open(2)
    before = pool.child_pids()
    shop.write(2)
    redis_server.pause()
    try:
        shop.reloaded()
        # A child that waits for an answer does so for 5 s.
        until(lambda: not set(before) & set(pool.child_pids()), 10, pool.describe)
    finally:
        redis_server.resume()


@pytest.mark.slow
def test_five_thousand_tasks_go_through_a_reload_each_once(
    shop: Shop, producer: Producer, ledger: Ledger
) -> None:
    """And the pool never pauses. `-s` shows the figures."""
    pool = shop.open(4)
    ids = [
        task_id for _ in range(50) for task_id in producer.send_together([("work", {"seconds": 0.004})] * 100)
    ]
    shop.write(2)
    asked = time.monotonic()
    pool.signal(signal.SIGHUP)
    until(lambda: shop.ended() and producer.depth() == 0, 120, pool.describe)
    over = time.monotonic()
    notes = ledger.by_task()
    assert {producer.status(task_id) for task_id in ids} == {Status.SUCCEEDED}
    assert {len([e for e in notes[task_id] if e.word == "start"]) for task_id in ids} == {1}
    starts = sorted(e.monotonic_ns / 1e9 for task_id in ids for e in notes[task_id] if e.word == "start")
    gap = max(b - a for a, b in itertools.pairwise(starts) if asked < b)
    halves = Counter(int((at - starts[0]) * 2) for at in starts)
    rates = sorted(2 * halves[half] for half in range(max(halves)))  # without the last one, which is not full
    print(
        f"{len(ids)} tasks; {over - asked:.1f} s from the signal; longest pause {gap * 1000:.0f} ms; "
        f"starts a second in halves of one: {rates[len(rates) // 2]} median, {rates[0]} least"
    )
    assert versions(ledger, ids) == {1, 2}
    assert gap < 2.0


@pytest.mark.slow
def test_reloads_leak_nothing(shop: Shop, producer: Producer, redis_server: RedisServer) -> None:
    """DTQ_TEST_RELOADS says how many; `-s` shows the figures."""
    pool = shop.open(2)
    supervisor = psutil.Process(pool.pid)

    def held() -> tuple[int, int]:
        """Descriptors of the supervisor, and connections of all."""
        clients = int(redis_server.info("clients")["connected_clients"])
        return len(descriptors(pool.pid)), clients

    def rest() -> tuple[int, int]:
        until(lambda: len(pool.templates()) == 1 and len(pool.child_pids()) == 2, 5, pool.describe)
        return held()

    shop.reloaded()
    before, size = rest(), supervisor.memory_info().rss
    for version in range(int(os.environ.get("DTQ_TEST_RELOADS", "10"))):
        shop.write(version)
        shop.reloaded()
    after = rest()
    print(f"{before} became {after}, {size >> 10} KiB {supervisor.memory_info().rss >> 10} KiB")
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 2
    assert supervisor.memory_info().rss < size + (4 << 20)
    producer.wait(producer.send("work"), Status.SUCCEEDED)


# --- dtq reload


def test_dtq_reload_finds_its_supervisor_by_the_pidfile(shop: Shop, tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    pool = shop.open(1, "--pidfile", str(pidfile))
    told = dtq("reload", "--pidfile", str(pidfile), "--wait", "20", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["generation"] == 2
    assert dtq("reload", "--wait", "20", DTQ_PIDFILE=str(pidfile)).returncode == 0
    assert dtq("reload", DTQ_PIDFILE=str(pidfile)).returncode == 0
    last = lambda: notice.read(pool.pid).last  # noqa: E731
    until(lambda: (found := last()) is not None and found.number == 3, 20, pool.describe)


def test_dtq_reload_says_how_far_it_has_come_when_its_time_is_over(shop: Shop) -> None:
    shop.open(1)
    shop.write(2, "time.sleep(5)")
    done = shop.reload(0.5)
    assert done.returncode == 1
    assert "not done within 0.5 s: template; children: 1 of g1" in done.stderr


def test_dtq_reload_signals_nobody_else(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        done = dtq("reload", "--pid", str(other.pid))
        assert done.returncode == 1
        assert "is no dtq-supervisor" in done.stderr
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert "there is no process" in dtq("reload", "--pid", str(other.pid)).stderr
    assert "which supervisor?" in dtq("reload").stderr
    missing = dtq("reload", "--pidfile", str(tmp_path / "nothing"))
    assert "No such file" in missing.stderr
