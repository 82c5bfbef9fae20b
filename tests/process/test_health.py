"""What a supervisor says of its health is true, in each state that it can be in (R37)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtq_child.broker import Actor, Broker
from dtq_child.settings import defaults
from dtq_child.task import Status
from tests.conftest import ServerStarter, SupervisorStarter
from tests.process.producer import Producer
from tests.process.witness import refilled, started
from tests.support.http import Place, Reply, ask
from tests.support.ledger import Ledger
from tests.support.ports import free_port
from tests.support.processes import descriptors, stopped
from tests.support.servers import RedisServer
from tests.support.supervisor import PROGRAM, ROOT, SupervisorProcess
from tests.support.waiting import until

TOKEN = "a-token-of-tests"
OPERATOR = Actor("ann", via="test")


@pytest.fixture
def producer(redis_server: RedisServer) -> Iterator[Producer]:
    with Producer(redis_server) as made:
        yield made


class Watched:
    """A supervisor that listens on a unix socket."""

    def __init__(self, pool: SupervisorProcess, place: Place) -> None:
        self.pool, self.place = pool, place

    def ask(self, path: str, method: str = "GET", **headers: str) -> Reply:
        return ask(self.place, path, method, **headers)

    def status(self) -> Any:
        return self.ask("/status").json()

    def well(self) -> bool:
        return (self.ask("/healthz").code, self.ask("/readyz").code) == (200, 200)

    def why_not(self, timeout: float = 10.0) -> str:
        """Waits until it is not ready, and says why; it must be live all the time."""

        def unready() -> str:
            assert self.ask("/healthz").code == 200
            reply = self.ask("/readyz")
            assert reply.code in (200, 503)
            return reply.text if reply.code == 503 else ""

        return until(unready, timeout, lambda: f"still ready\n{self.pool.describe()}", interval=0.05)

    def wait_well(self, timeout: float = 15.0) -> None:
        until(self.well, timeout, lambda: self.ask("/readyz").text + self.pool.describe(), interval=0.05)


Watching = Callable[..., Watched]


@pytest.fixture
def watch(start_supervisor: SupervisorStarter, tmp_path: Path) -> Watching:
    """Starts a supervisor; takes what `start_supervisor` takes."""

    def start(*words: Any, flags: tuple[str, ...] = (), **options: Any) -> Watched:
        path = f"{tmp_path}/endpoint-{time.monotonic_ns()}"
        pool = start_supervisor(*words, flags=("--metrics-bind", f"unix:{path}", *flags), **options)
        until(lambda: os.path.exists(path) or pool.exit_code is not None, 20, pool.tail)
        return Watched(pool, path)

    return start


# -- healthy


def test_idle_busy_and_paused_are_healthy_and_shown(
    watch: Watching, redis_server: RedisServer, producer: Producer, ledger: Ledger, tmp_path: Path
) -> None:
    watched = watch(server=redis_server, procs=2)
    watched.pool.wait_ready()
    watched.wait_well()
    until(lambda: watched.status()["leader"], 5)
    idle = watched.status()
    assert (idle["state"], idle["queues"], idle["pid"]) == ("running", ["default"], watched.pool.pid)
    assert [slot["state"] for slot in idle["slots"]] == ["ready", "ready"]
    assert {slot["pid"] for slot in idle["slots"]} == set(watched.pool.child_pids())
    assert [slot["task"] for slot in idle["slots"]] == [None, None]
    # Both slots are full, and a third task waits.
    gate = tmp_path / "gate"
    tasks = [producer.send("wait_for_file", {"path": str(gate)}) for _ in range(3)]
    running = {started(ledger, task).pid: task for task in tasks[:2]}
    told = until(lambda: [s for s in watched.status()["slots"] if s["task"]], 5)
    until(lambda: len([s for s in watched.status()["slots"] if s["task"]]) == 2, 5)
    told = watched.status()["slots"]
    assert {slot["pid"]: slot["task"]["task_id"] for slot in told} == running
    for slot in told:
        assert (slot["phase"], slot["task"]["task_type"]) == ("executing", "wait_for_file")
        assert 50 < slot["task"]["deadline_s"] <= 60
    assert watched.well()
    gate.touch()
    for task in tasks:
        producer.wait(task, Status.SUCCEEDED)
    broker = Broker(defaults(redis_url=redis_server.url))
    broker.pause("default", OPERATOR)
    producer.send("note")
    until(lambda: watched.status()["paused_queues"] == ["default"], 10)
    assert watched.well()
    broker.close()
    until(lambda: watched.status()["counters"]["processed"] == 3, 5)


@pytest.mark.slow
def test_idle_beside_a_paused_queue_with_entries_and_a_long_task_stay_healthy(
    watch: Watching, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    """For longer than an idle child beside waiting entries is tolerated."""
    watched = watch(server=redis_server, procs=2)
    watched.pool.wait_ready()
    watched.wait_well()
    task = producer.send("sleep", {"seconds": 16})
    started(ledger, task)
    broker = Broker(defaults(redis_url=redis_server.url))
    broker.pause("default", OPERATOR)
    producer.send("note")
    pids = watched.pool.child_pids()
    end = time.monotonic() + 15
    until(lambda: not watched.well() or time.monotonic() > end, 20, interval=0.2)
    assert watched.well(), watched.ask("/readyz").text
    assert watched.pool.child_pids() == pids
    producer.wait(task, Status.SUCCEEDED)
    broker.close()


def test_the_pages_are_these_and_their_methods(watch: Watching, redis_server: RedisServer) -> None:
    watched = watch(server=redis_server, procs=1)
    watched.pool.wait_ready()
    watched.wait_well()
    assert watched.ask("/healthz", "HEAD").text == ""
    metrics = watched.ask("/metrics")
    assert "process_resident_memory_bytes " in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert watched.ask("/").code == 404
    assert watched.ask("/slots/0/kill", "POST").code == 404
    assert (watched.ask("/status", "POST").code, watched.ask("/slots/0/stack").code) == (405, 405)
    assert watched.ask("/slots/7/stack", "POST").code == 404
    times = []
    for _ in range(50):
        begun = time.monotonic()
        assert watched.ask("/metrics").code == 200
        times.append(time.monotonic() - begun)
    print(f"a scrape: {sorted(times)[25] * 1000:.1f} ms, at most {max(times) * 1000:.1f} ms")
    assert sorted(times)[25] < 0.05
    # No child and no template has the listening socket.
    inode = next(
        line.split()[6]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if watched.place in line.split()
    )
    held = f"socket:[{inode}]"
    assert held in descriptors(watched.pool.pid).values()
    for process in watched.pool.tree()[1:]:
        assert held not in descriptors(process.pid).values(), process
    assert watched.pool.stop() == 0
    assert not os.path.exists(str(watched.place))


# -- not healthy


@pytest.mark.slow
def test_children_that_are_all_stopped_make_it_unready_and_are_replaced_and_counted(
    watch: Watching, redis_server: RedisServer, producer: Producer
) -> None:
    watched = watch(server=redis_server, procs=2)
    pids = {child.pid for child in watched.pool.wait_ready().children()}
    watched.wait_well()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(stopped(pid) for pid in pids), 5)
    assert watched.well()  # nobody waits for them
    task = producer.send("note")
    begun = time.monotonic()
    reason = watched.why_not(timeout=20)
    print(f"unready after {time.monotonic() - begun:.1f} s: {reason}")
    assert 9 < time.monotonic() - begun < 15
    assert "has been idle for" in reason
    assert "while dtq:stream:default:p5 holds entries" in reason
    producer.wait(task, Status.SUCCEEDED, timeout=10)
    print(f"executed by a successor after {time.monotonic() - begun:.1f} s")
    assert not set(refilled(watched.pool, pids, 10)) & pids
    watched.wait_well()
    assert watched.status()["replaced"] == {"idle": 2}
    assert "it stayed idle although its queues held entries" in watched.pool.log()
    assert producer.record(task).number("crashes") == 0


def test_a_stopped_supervisor_answers_nobody_and_is_well_again_when_it_goes_on(
    watch: Watching, redis_server: RedisServer
) -> None:
    """A probe sees a timeout, which counts as a failure."""
    watched = watch(server=redis_server, procs=1)
    watched.pool.wait_ready()
    watched.wait_well()
    os.kill(watched.pool.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        ask(watched.place, "/healthz", timeout=1.0)
    os.kill(watched.pool.pid, signal.SIGCONT)
    watched.wait_well()


@pytest.mark.slow
def test_redis_away_is_live_and_not_ready_until_it_is_back(
    watch: Watching, start_redis: ServerStarter
) -> None:
    server = start_redis()
    watched = watch(server=server, procs=2)
    watched.pool.wait_ready()
    watched.wait_well()
    for away, back in ((server.stop, server.start), (server.pause, server.resume)):
        # Every thread has met the new server.
        until(lambda: (watched.status()["redis"]["ok_s"] or 0) > 3, 20, watched.pool.describe)
        away()
        begun = time.monotonic()
        reason = watched.why_not(timeout=10)
        print(f"unready after {time.monotonic() - begun:.1f} s: {reason}")
        # A child may notice first.
        until(lambda: not watched.status()["redis"]["reachable"], 10, watched.pool.describe)
        assert watched.why_not().startswith(("Redis is not available", "Redis has not answered"))
        back()
        begun = time.monotonic()
        watched.wait_well(timeout=10)
        print(f"ready {time.monotonic() - begun:.1f} s after it was back")


def test_a_redis_that_was_never_there_is_not_ready_and_its_children_are_shown(
    watch: Watching, start_redis: ServerStarter
) -> None:
    server = start_redis()
    server.stop()
    watched = watch(server=server, procs=1)
    until(
        lambda: [slot["state"] for slot in watched.status()["slots"]] == ["ready"], 20, watched.pool.describe
    )
    assert watched.why_not() == "Redis has not answered yet\n"
    assert watched.status()["state"] == "starting"
    server.start()
    watched.wait_well()


def test_children_that_cannot_boot_make_it_unready_with_the_cause_and_recover(
    watch: Watching, redis_server: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "fragile.py").write_text(
        "import os\n"
        "from dtq_child import App\n"
        "app = App()\n"
        "@app.task(name='nothing')\n"
        "def nothing(): pass\n"
        f"if os.path.exists({str(tmp_path / 'broken')!r}): raise RuntimeError('broken for now')\n"
    )
    path = f"{tmp_path}:{ROOT}"
    watched = watch(
        "fragile:app", server=redis_server, procs=1, flags=("--no-preload",), env={"PYTHONPATH": path}
    )
    watched.pool.wait_ready()
    watched.wait_well()
    (tmp_path / "broken").touch()
    os.kill(watched.pool.child_pids()[0], signal.SIGKILL)
    until(lambda: "exit code 4" in watched.ask("/readyz").text, 10, watched.pool.describe)
    reason = watched.why_not()
    assert reason.startswith("no child is ready: child 0: pid ")
    assert watched.status()["slots"][0]["trouble"] in reason
    (tmp_path / "broken").unlink()
    watched.wait_well(timeout=20)
    assert watched.status()["slots"][0]["trouble"] is None


def test_a_supervisor_that_stops_is_not_ready_while_its_last_tasks_run(
    watch: Watching, redis_server: RedisServer, producer: Producer, ledger: Ledger, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    watched = watch(server=redis_server, procs=1)
    watched.pool.wait_ready()
    watched.wait_well()
    started(ledger, producer.send("wait_for_file", {"path": str(gate)}))
    watched.pool.signal(signal.SIGTERM)
    assert watched.why_not() == "it is stopping\n"
    assert watched.status()["state"] == "stopping"
    gate.touch()
    assert watched.pool.wait(20) == 0


# -- verbs


def test_the_stack_of_a_running_task_is_shown_and_logged(
    watch: Watching, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    watched = watch(server=redis_server, procs=1)
    watched.pool.wait_ready()
    task = producer.send("gil_sleep", {"seconds": 3})
    started(ledger, task)
    reply = watched.ask("/slots/0/stack", "POST")
    assert reply.code == 200
    assert "in sleep_in_c" in reply.text
    until(lambda: "in sleep_in_c" in watched.pool.log(), 5)
    producer.wait(task, Status.SUCCEEDED)
    pid = watched.pool.child_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    reply = watched.ask("/slots/0/stack", "POST")
    assert (reply.code, reply.text) == (503, f"child 0 (pid {pid}) did not show its stacks\n")
    os.kill(pid, signal.SIGCONT)


def test_a_cancel_ends_the_task_of_that_slot_and_stands_in_the_audit(
    watch: Watching, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    watched = watch(server=redis_server, procs=1)
    watched.pool.wait_ready()
    watched.wait_well()
    assert watched.ask("/slots/0/cancel", "POST").code == 409
    task = producer.send("sleep", {"seconds": 50})
    started(ledger, task)
    until(lambda: watched.status()["slots"][0]["task"], 5)
    assert watched.ask("/slots/0/cancel?task_id=another", "POST").code == 409
    reply = watched.ask("/slots/0/cancel", "POST", X_Actor="ann", X_Request_ID="r-1")
    assert (reply.code, reply.json()) == (200, {"task_id": task, "task_type": "sleep", "answer": "stopping"})
    producer.wait(task, Status.CANCELLED)
    until(lambda: any(entry.word == "raised" for entry in ledger.entries()), 5)
    rows: Any = redis_server.client(decode_responses=True).xrange("dtq:stream:audit")
    (audit,) = [fields for _, fields in rows]
    audit.pop("ts")
    assert audit == {
        "actor": "ann",
        "action": "cancel",
        "task_id": task,
        "request_id": "r-1",
        "queue": "default",
        "via": f"unix:{os.getuid()}@{socket.gethostname()}",
        "detail": "slot 0 stopping",
    }


def test_over_tcp_acting_needs_the_token_and_another_host_name_gets_nothing(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    port = free_port()
    pool = start_supervisor(
        server=redis_server,
        procs=1,
        flags=("--metrics-bind", f"127.0.0.1:{port}"),
        env={"DTQ_METRICS_TOKEN": TOKEN},
    ).wait_ready()
    place = ("127.0.0.1", port)
    until(lambda: ask(place, "/readyz").code == 200, 5)
    assert f"health, status and metrics are at http://127.0.0.1:{port}" in pool.log()
    assert TOKEN not in pool.log()
    for path in ("/healthz", "/status", "/metrics", "/slots/0/stack"):
        assert ask(place, path, Host="evil.example").code == 403
    assert ask(place, "/healthz", Host="").code == 200
    assert ask(place, "/slots/0/stack", "POST").code == 403
    assert ask(place, "/slots/0/stack", "POST", Authorization="Bearer wrong").code == 403
    assert ask(place, "/slots/0/stack", "POST", Authorization=f"Bearer {TOKEN}").code == 200


# -- the place is taken


def test_a_port_that_was_asked_for_and_is_taken_ends_the_start_with_69(redis_server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        words = [
            *PROGRAM,
            "tests.support.handlers:app",
            "--redis-url",
            redis_server.url,
            "--metrics-bind",
            bind,
        ]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    assert done.returncode == 69
    assert done.stderr.splitlines()[-1] == f"dtq-supervisor: cannot listen on {bind}: it is taken"


def test_the_default_port_taken_is_one_warning_and_all_goes_on(
    start_supervisor: SupervisorStarter, redis_server: RedisServer
) -> None:
    """Two supervisors on one machine, neither told anything: the second works without an endpoint."""
    default = str(defaults().metrics_bind)
    host, _, port = default.partition(":")
    try:
        taken = socket.create_server((host, int(port)))
    except OSError:  # another test run beside this one has it: all the better
        taken = socket.socket()
    with taken:
        pool = start_supervisor(server=redis_server, procs=1, env={"DTQ_METRICS_BIND": default})
        assert pool.wait(20) == 69
        # The helper believes that something was said of the endpoint; the supervisor is told nothing.
        program = ("env", "-u", "DTQ_METRICS_BIND", *PROGRAM)
        pool = start_supervisor(
            server=redis_server, procs=1, env={"DTQ_METRICS_BIND": "off"}, program=program
        ).wait_ready()
        assert pool.log().count('"fact":"no_endpoint"') == 1
        assert f"cannot listen on {default}: it is taken" in pool.log()
        assert pool.stop() == 0


def test_after_kill_9_with_a_busy_child_the_port_is_free_at_once(
    start_supervisor: SupervisorStarter, redis_server: RedisServer, producer: Producer, ledger: Ledger
) -> None:
    flags = ("--metrics-bind", f"127.0.0.1:{free_port()}")
    for _ in range(3):
        pool = start_supervisor(server=redis_server, procs=1, flags=flags).wait_ready()
        task = producer.send("sleep", {"seconds": 30}, timeout=40.0)
        started(ledger, task)
        pool.kill()
        successor = start_supervisor(server=redis_server, procs=1, flags=flags).wait_ready()
        producer.cancel(task)
        successor.destroy()
        pool.destroy()
