"""From the command line to the exit code: the private Redis, a burst, what is refused and why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dtq_child import App
from dtq_child.broker import Broker
from dtq_child.task import Status
from dtq_supervisor.cli import main
from tests.conftest import SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import Vigil, deaths
from tests.support.ledger import Ledger
from tests.support.servers import RedisServer
from tests.support.snapshot import snapshot
from tests.support.supervisor import ROOT, SupervisorProcess
from tests.support.waiting import until

HANDLERS = "tests.support.handlers:app"
PASSWORD = "hunter2"


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A supervisor that is to end by itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DTQ_")}
    return subprocess.run(
        [sys.executable, "-m", "dtq_supervisor", *arguments],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), "DTQ_METRICS_BIND": "off", **env},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


# --- the private Redis


@contextmanager
def app_at(url: str) -> Iterator[App]:
    """A producer that knows nothing but the URL."""
    app = App(redis_url=url)
    yield app
    assert isinstance(app.broker, Broker)
    app.broker.close()


@pytest.fixture
def embedded(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> SupervisorProcess:
    """A supervisor with a Redis of its own, ready; the server's folder is in `temporary` below its own."""
    (tmp_path / "temporary").mkdir()
    env = {"TMPDIR": str(tmp_path / "temporary")}
    pool = start_supervisor(server=redis_server, flags=["--embedded"], env=env)
    until(lambda: "takes tasks" in pool.log(), 20, pool.describe)
    return pool


def its_redis(pool: SupervisorProcess) -> psutil.Process:
    below = psutil.Process(pool.pid).children()
    (server,) = (process for process in below if "redis" in process.name() or "valkey" in process.name())
    return server


def test_the_printed_url_is_all_that_a_producer_needs_and_the_server_goes_with_the_supervisor(
    embedded: SupervisorProcess, tmp_path: Path
) -> None:
    found = re.search(r"DTQ_REDIS_URL=(redis://127\.0\.0\.1:\d+/0)", embedded.log())
    assert found is not None
    with app_at(found[1]) as app:
        assert app.enqueue("note", {"value": [7]}).result(timeout=10) == [7]
    with Vigil(its_redis(embedded).pid) as server:
        assert embedded.stop(timeout=5) == 0
        deaths([server], 0.1)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_private_redis_dies_with_a_supervisor_that_is_killed(embedded: SupervisorProcess) -> None:
    with Vigil(its_redis(embedded).pid) as server:
        embedded.kill()
        deaths([server], 2)


# --- a burst


def test_a_burst_ends_after_what_is_queued_runs_and_comes_back_but_waits_for_no_schedule(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, ledger: Ledger, tmp_path: Path
) -> None:
    with Producer(redis_server) as producer:
        quick = producer.send_together([("note", {})] * 30)
        slow = producer.send("sleep", {"seconds": 0.5})
        comes_back = producer.send("crash_once", {"path": str(tmp_path / "crashed")})
        later = producer.send("retry_task", {"delay": 3600})
        pool = start_supervisor(server=redis_server, flags=["--burst"])
        assert pool.wait(timeout=20) == 0
        for task_id in [*quick, slow, comes_back]:
            assert producer.status(task_id) == Status.SUCCEEDED
        assert len(ledger.starts(comes_back)) == 2
        assert producer.status(later) == Status.RETRY_SCHEDULED
    places = snapshot(redis_server.client())
    assert (places.depth(), places.pending, set(places.schedule)) == (0, [], {later})


# --- what is told without a start


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line with --check, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run_check(*flags: str, **env: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("DTQ_")]:
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            code = main([HANDLERS, "--check", *flags])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run_check


def test_check_shows_no_password_wherever_it_came_from(
    tmp_path: Path, check: Callable[..., tuple[int, str, str]]
) -> None:
    url = f"redis://me:{PASSWORD}@10.0.0.1:6379/1"
    (tmp_path / "url").write_text(f"{url}\n")
    (tmp_path / "dtq.toml").write_text(f'[dtq]\nredis_url = "{url}"\n')
    ways: list[tuple[list[str], dict[str, str]]] = [
        (["--redis-url", url], {}),
        (["--config", "dtq.toml"], {}),
        ([], {"DTQ_REDIS_URL": url}),
        ([], {"DTQ_REDIS_URL_FILE": "url"}),
    ]
    for flags, env in ways:
        code, out, err = check(*flags, **env)
        assert code == 0, err
        assert "redis://me:***@10.0.0.1:6379/1" in out
        assert PASSWORD not in out + err
        assert ("everybody on this machine" in err) == ("--redis-url" in flags)


def test_check_says_all_that_is_wrong_a_line_each_and_no_password(
    check: Callable[..., tuple[int, str, str]],
) -> None:
    flags = ["--redis-url", f"redis://me:{PASSWORD}@host:port/0", "--procs", "many"]
    env = {"DTQ_VISIBILITY_TIMEOUT_S": "10", "DTQ_HEARTBEAT_INTERVAL_S": "9", "DTQ_TIMEOUTS": "5"}
    code, out, err = check(*flags, **env)
    assert (code, out) == (78, "")
    lines = [line for line in err.splitlines() if "everybody on this machine" not in line]
    for what in ("redis-url", "procs", "heartbeat", "DTQ_TIMEOUTS"):
        assert len([line for line in lines if what in line]) == 1, lines
    assert len(lines) == 4, lines
    assert PASSWORD not in err


# --- what is refused


def test_a_pidfile_is_held_until_its_supervisor_is_gone_however_it_ends(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    path = tmp_path / "dtq.pid"
    flags = ["--redis-url", redis_server.url, "--pidfile", str(path)]
    first = start_supervisor(server=redis_server, flags=flags)
    until(lambda: path.exists() and path.read_text(), 20, first.describe)
    refused = run(tmp_path, HANDLERS, *flags)
    assert refused.returncode == 73
    assert f"pid {first.pid}" in refused.stderr
    first.kill()
    assert path.read_text() == f"{first.pid}\n"
    assert run(tmp_path, "nowhere:app", *flags).returncode == 78
    assert not path.exists()


def test_a_pid_that_is_published_can_be_sent_signals(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    """At once: whoever reads the pidfile need not wait for anything else."""
    for number in range(3):
        path = tmp_path / f"{number}.pid"
        pool = start_supervisor(server=redis_server, procs=1, flags=["--pidfile", str(path)])
        until(lambda path=path: path.exists() and path.read_text(), 20, pool.describe, interval=0.001)  # type: ignore[misc]
        os.kill(pool.pid, signal.SIGUSR2)
        until(lambda pool=pool: "SIGUSR2" in pool.log(), 20, pool.describe)  # type: ignore[misc]
        assert pool.exit_code is None


REFUSED_RIGHTS = {
    "no password": (("CONFIG", "SET", "requirepass", PASSWORD), "Authentication required"),
    "no rights to a key": (("ACL", "SETUSER", "default", "resetkeys", "~other:*"), "to access"),
    "no rights to scripts": (("ACL", "SETUSER", "default", "-@scripting"), "'script"),
}


@pytest.mark.parametrize("why", REFUSED_RIGHTS)
def test_a_redis_that_does_not_let_us_work_is_refused_with_69(
    tmp_path: Path, redis_server: RedisServer, why: str
) -> None:
    command, word = REFUSED_RIGHTS[why]
    redis_server.cli(*command)
    done = run(tmp_path, HANDLERS, "--procs", "1", "--redis-url", redis_server.url)
    assert done.returncode == 69, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if '"refused"' in line)
    assert word in line


def test_an_application_that_enqueues_to_another_redis_is_bad_configuration(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    elsewhere = f"redis://me:{PASSWORD}@10.0.0.1/3"
    (tmp_path / "elsewhere.py").write_text(f"from dtq_child import App\napp = App(redis_url={elsewhere!r})")
    done = run(tmp_path, "elsewhere:app", "--procs", "1", "--redis-url", redis_server.url)
    assert done.returncode == 78, done.stderr
    assert "redis://me:***@10.0.0.1/3" in done.stderr
    assert redis_server.url in done.stderr
    assert PASSWORD not in done.stderr


def test_a_module_that_the_application_needs_and_nobody_has_ends_it_with_4_and_the_traceback(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    (tmp_path / "shop.py").write_text("from dtq_child import App\napp = App(include=['shop_tasks'])\n")
    (tmp_path / "shop_tasks.py").write_text("from shop import app\nimport not_installed\n")
    done = run(tmp_path, "shop:app", "--procs", "1", "--redis-url", redis_server.url)
    assert done.returncode == 4, done.stderr
    assert "No module named 'not_installed'" in done.stderr
    assert 'shop_tasks.py\\", line 2' in done.stderr
    assert "import not_installed" in done.stderr
