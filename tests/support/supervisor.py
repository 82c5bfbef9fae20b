"""A real supervisor as a subprocess: started, watched from outside, signalled, and cleared away whole."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil
import redis

from tests.support import leftovers
from tests.support.ledger import VARIABLE as LEDGER
from tests.support.ledger import Ledger
from tests.support.processes import Process, look, looks, still, tree, with_environment
from tests.support.servers import RedisServer
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-m", "dtq_supervisor")
TAIL_LINES = 60
_numbers = itertools.count(1)

Readiness = Callable[["SupervisorProcess"], bool]


def pool_stands(supervisor: SupervisorProcess) -> bool:
    """All children are there, are the supervisor's own, and have booted as its worker record says."""
    pids = {child.pid for child in supervisor.children()}
    told = json.loads(supervisor.worker().get("children", "[]"))
    booted = {child.get("pid") for child in told if child.get("phase") != "booting"}
    return len(pids) >= supervisor.procs and pids <= booted


def log_says_ready(supervisor: SupervisorProcess) -> bool:
    """For a supervisor whose Redis cannot be asked."""
    return "ready" in supervisor.log()


class SupervisorProcess:
    """`python -m dtq_supervisor APP --procs N …` in a temporary folder of its own.

    `url` is what the supervisor is told, if it is not the server's own (a fault proxy's); the test itself
    always looks at `server` directly. What the environment of the test says about dtq is kept away from it;
    `env` is added.
    """

    def __init__(
        self,
        app: str,
        *,
        server: RedisServer,
        folder: Path,
        procs: int = 2,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        url: str | None = None,
        ledger: Ledger | None = None,
        program: Sequence[str] = PROGRAM,
        shared: bool = False,
    ) -> None:
        self.server = server
        self.procs = procs
        self.number = next(_numbers)
        self.folder = folder / f"supervisor-{self.number}"
        self.folder.mkdir(parents=True)
        self._env = self._environment(url or server.url, ledger, env or {})
        # Many supervisors run side by side in the tests, and would dispute the default port.
        told = "--metrics-bind" in flags or "DTQ_METRICS_BIND" in self._env
        quiet = () if told else ("--metrics-bind", "off")
        self.command = [*program, app, "--procs", str(procs), *quiet, *flags]
        self._tag = f"{os.environ.get(leftovers.TAG, 'untagged')}/{self.number}."
        self.prefix = self._env.get("DTQ_KEY_PREFIX", "dtq:")
        self._log_file = self.folder / "log"
        self._once_mine: list[Process] = []
        with self._log_file.open("wb") as log:
            self._process = leftovers.spawn(
                self.command, tag=self._tag, output=log, env=self._env, cwd=self.folder
            )
        if shared:
            leftovers.kept.add(self._process.pid)

    def _environment(self, url: str, ledger: Ledger | None, extra: Mapping[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DTQ_")}
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        env = {**inherited, "PYTHONPATH": path, "DTQ_REDIS_URL": url}
        if ledger is not None:
            env[LEDGER] = str(ledger.path)
        return {**env, **extra}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    # -- looking at it

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number if one ended it."""
        return self._process.poll()

    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.log().splitlines()[-TAIL_LINES:])

    def children(self) -> list[psutil.Process]:
        """The task processes whose parent is the supervisor, by slot and age."""
        found = [p for p in self._below() if p.title.startswith("dtq-child[")]
        return _handles(sorted(found, key=lambda p: (slot_of(p.title), p.born)))

    def child_pids(self) -> list[int]:
        return [child.pid for child in self.children()]

    def templates(self) -> list[psutil.Process]:
        """Oldest first: during a reload there are two."""
        found = [p for p in self._below() if p.title.startswith("dtq-supervisor: template")]
        return _handles(sorted(found, key=lambda p: p.born))

    def template(self) -> psutil.Process:
        (only,) = self.templates()
        return only

    def tree(self) -> list[Process]:
        return tree(self.pid)

    def _below(self) -> list[Process]:
        """Its direct children that live, also while it is itself a zombie or stopped."""
        everyone = tree(self.pid)
        return [p for p in everyone if p.ppid == self.pid and p.status != psutil.STATUS_ZOMBIE]

    def worker(self) -> dict[str, str]:
        """Its worker record in Redis, {} if there is none or Redis does not answer."""
        try:
            for key in self.server.cli("KEYS", f"{self.prefix}worker:*"):
                flat = [word.decode() for word in self.server.cli("HGETALL", key)]
                record = dict(zip(flat[::2], flat[1::2], strict=True))
                if record.get("pid") == str(self.pid):
                    return record
        except (redis.ConnectionError, redis.TimeoutError):
            return {}
        return {}

    # -- its life

    def wait_ready(self, timeout: float = 20.0, ready: Readiness = pool_stands) -> Self:
        """Waits until the pool stands. Raises AssertionError with the log's end if it does not or the
        process ends."""

        def stands() -> bool:
            if self.exit_code is not None:
                raise AssertionError(f"supervisor {self.number} ended with {self.exit_code}:\n{self.tail()}")
            return ready(self)

        # Not more often: the look reads the whole process table, and would slow down what it waits for.
        until(
            stands,
            timeout,
            lambda: f"supervisor {self.number} is not ready:\n{self.describe()}",
            interval=0.05,
        )
        return self

    def describe(self) -> str:
        lines = [str(process) for process in self.tree()]
        return "\n".join([*lines, f"worker record: {self.worker()}", "log:", self.tail()])

    def signal(self, number: int) -> None:
        self._remember()
        self._process.send_signal(number)

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises AssertionError with the log's end if it is still there after `timeout`
        seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"supervisor {self.number} has not ended after {timeout:g} s:\n{self.describe()}"
            ) from None

    def stop(self, timeout: float = 40.0) -> int:
        """TERM, and its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        """SIGKILLs the supervisor alone. What it leaves is its template's business, and in the end
        destroy()'s."""
        self.signal(signal.SIGKILL)
        self.wait(10)

    def destroy(self) -> None:
        """Ends it and everything that ever hung below it, helpers in sessions of their own included."""
        self._remember()
        # The supervisor goes first: it must not replace what is killed beside it.
        head = look(self.pid) if self.exit_code is None else None
        leftovers.kill_all([head] if head is not None else [])
        self._process.wait()
        while remains := self._remains():
            leftovers.kill_all(remains)
        leftovers.kept.discard(self.pid)
        leftovers.reap_adopted()

    def _remember(self) -> None:
        self._once_mine += self.tree() if self.exit_code is None else []

    def _remains(self) -> list[Process]:
        """By descent, by session and by the tag: each misses some (a dead parent, setsid, setproctitle)."""
        session = [p for p in looks(psutil.pids()) if p.sid == self.pid]
        tagged = looks(with_environment(leftovers.TAG, self._tag))
        known = {p.pid: p for p in [*self._once_mine, *session, *tagged]}
        return [p for p in known.values() if still(p) and p.pid != os.getpid()]


def slot_of(title: str) -> int:
    """The number in `dtq-child[3] g2: idle`."""
    return int(title.removeprefix("dtq-child[").partition("]")[0])


def _handles(found: Iterable[Process]) -> list[psutil.Process]:
    """Of those that have not ended since they were looked at."""
    handles = []
    for process in found:
        try:
            handles.append(psutil.Process(process.pid))
        except psutil.NoSuchProcess:
            continue
    return handles
