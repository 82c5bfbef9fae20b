"""What an operator reads: where the supervisor works, whether it does, and why it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ProxyStarter, ServerStarter, SupervisorStarter
from tests.support.servers import RedisServer
from tests.support.supervisor import PROGRAM, ROOT, SupervisorProcess, log_says_ready
from tests.support.waiting import until


def facts(pool: SupervisorProcess) -> list[dict[str, Any]]:
    """The lines of the supervisor itself."""
    lines = [json.loads(line) for line in pool.log().splitlines() if line.startswith("{")]
    return [line for line in lines if "fact" in line]


def told(pool: SupervisorProcess, *names: str) -> list[str]:
    """Of these facts, in their order."""
    return [line["fact"] for line in facts(pool) if line["fact"] in names]


def messages(pool: SupervisorProcess, name: str) -> list[str]:
    return [line["message"] for line in facts(pool) if line["fact"] == name]


def test_the_first_lines_say_where_it_works_without_the_password(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    redis_server.cli("ACL", "SETUSER", "nightshift", "on", ">hushhush", "~*", "&*", "+@all")
    url = redis_server.url.replace("redis://", "redis://nightshift:hushhush@")
    pool = start_supervisor(server=redis_server, url=url, flags=["-Q", "mail,images"]).wait_ready()
    (place,) = messages(pool, "place")
    assert "redis://nightshift:***@127.0.0.1" in place
    assert "queues mail, images, key prefix dtq:" in place
    assert "hushhush" not in pool.log()
    assert [line["fact"] for line in facts(pool)[:2]] == ["starting", "place"]


def test_an_outage_is_told_once_and_its_end_when_redis_answers(
    start_supervisor: SupervisorStarter, start_proxy: ProxyStarter, redis_server: RedisServer
) -> None:
    """In a few lines, however many duties fail; and none says that it is over before it is."""
    names = ("redis_away", "redis_still_away", "redis_back", "redis_refuses")
    proxy = start_proxy(redis_server.port)
    pool = start_supervisor(server=redis_server, url=proxy.url, procs=1).wait_ready()
    until(lambda: "leading" in told(pool, "leading"), 10, pool.describe)
    proxy.refuse()
    proxy.cut()
    begun = time.monotonic()
    # The leader's term has ended by then, so its duties have nothing to ask.
    until(lambda: time.monotonic() - begun > 12.0, 15)
    assert told(pool, *names) == ["redis_away", "redis_still_away"]
    proxy.heal()
    until(lambda: told(pool, "redis_back"), 5, pool.describe)
    assert told(pool, *names) == ["redis_away", "redis_still_away", "redis_back"]
    (back,) = [line for line in facts(pool) if line["fact"] == "redis_back"]
    assert 11.0 < back["seconds"] < 18.0


def test_no_child_takes_tasks_before_redis_has_answered(
    start_supervisor: SupervisorStarter, start_redis: ServerStarter
) -> None:
    server = start_redis()
    server.stop()
    pool = start_supervisor(server=server, procs=1).wait_ready(ready=log_says_ready)
    (up,) = messages(pool, "ready_no_redis")
    assert "Redis has not answered yet" in up
    assert told(pool, "ready") == []
    server.start()
    until(lambda: told(pool, "ready"), 10, pool.describe)
    assert "takes tasks" in messages(pool, "ready")[0]


def test_a_key_of_the_wrong_type_is_named(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    redis_server.cli("LPUSH", "dtq:retry:schedule", "no sorted set")
    pool = start_supervisor(server=redis_server, procs=1).wait_ready()
    until(lambda: told(pool, "redis_refuses"), 10, pool.describe)
    refused = messages(pool, "redis_refuses")[0]
    assert "WRONGTYPE" in refused
    assert "dtq:retry:schedule" in refused


def test_a_signal_without_a_meaning_is_told_and_changes_nothing(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    pool = start_supervisor(server=redis_server, procs=1).wait_ready()
    pool.signal(signal.SIGUSR1)
    until(lambda: told(pool, "signal_ignored"), 5, pool.describe)
    assert [line.split()[1] for line in messages(pool, "signal_ignored")] == ["SIGUSR1"]
    assert pool.stop(timeout=5) == 0


def test_burst_says_why_it_ends(start_supervisor: SupervisorStarter, redis_server: RedisServer) -> None:
    pool = start_supervisor(server=redis_server, procs=1, flags=["--burst"])
    assert pool.wait(timeout=20) == 0
    assert told(pool, "burst_over", "stopping", "stopped") == ["burst_over", "stopping", "stopped"]
    assert "--burst" in messages(pool, "burst_over")[0]


def test_an_application_without_tasks_is_warned_about(
    tmp_path: Path, start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    (tmp_path / "bare.py").write_text("from dtq_child import App\napp = App()\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    pool = start_supervisor("bare:app", server=redis_server, env=env).wait_ready()
    (warning,) = [line for line in facts(pool) if line["fact"] == "no_task_types"]
    assert warning["level"] == "warning"
    assert "App(include=" in warning["message"]


@pytest.mark.parametrize("given", ["", "3"])
def test_check_says_how_many_children_there_would_be(given: str) -> None:
    flags = ["--check", *(["--procs", given] if given else [])]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DTQ_")}
    told = subprocess.run([*PROGRAM, "a:b", *flags], capture_output=True, text=True, env=env, check=True)
    (line,) = [line for line in told.stdout.splitlines() if line.startswith("procs ")]
    assert line.split()[1] == given or (line.split()[1].isdigit() and "default: " in line)


def test_too_few_descriptors_are_named_with_the_fix_and_no_traceback(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    words = [*PROGRAM, "tests.support.handlers:app", "--procs", "64", "--redis-url", redis_server.url]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = ["sh", "-c", 'ulimit -n 48 && exec "$@"', "sh", *words]
    done = subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 78, done.stderr
    assert "LimitNOFILE" in done.stderr
    assert "Traceback" not in done.stderr
