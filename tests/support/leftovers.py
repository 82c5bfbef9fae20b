"""Starts the tests' processes and finds those that a test left behind, whatever they did to hide.

pytest is made the reaper of all orphans below it, so a process whose parent died, that made a session of
its own or overwrote its environment by setproctitle still hangs below pytest: "left behind" is then simply
"below us, and not kept". The tag in the environment serves people who read `ps e`, and the cleaning up
after one supervisor.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO

import psutil

from tests.support.processes import Process, look, still, tree

TAG = "DTQ_TEST_TAG"
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.005
BOUND = Path(__file__).with_name("bound.py")
# What was started for more than one test (pid of a server of a module …): not left behind, nor what hangs
# below it.
kept: set[int] = set()


def adopt_orphans() -> None:
    """Makes this process the parent of every orphan below it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def spawn(
    command: Sequence[str],
    *,
    tag: str,
    output: IO[bytes],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own that dies with us; both its outputs go to `output`."""

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(BOUND), str(os.getpid()), *command],
            env={**(os.environ if env is None else env), TAG: tag},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    # The kernel's "parent died" is about the *thread* that forked: a test's own thread would take the
    # program with it.
    if threading.current_thread() is threading.main_thread():
        return start()
    return _nursery().submit(start).result()


@cache
def _nursery() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="test-nursery")


def left_behind(patience: float = 1.0) -> list[Process]:
    """The living processes below us that nobody keeps; those about to end get `patience` seconds to do so."""
    deadline = time.monotonic() + patience
    while found := _below_us():
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    reap_adopted()
    return found


def _below_us() -> list[Process]:
    roots = [pid for pid in _direct_children() if pid not in kept]
    below = {process.pid: process for pid in roots for process in tree(pid)}
    return [process for process in below.values() if process.status != psutil.STATUS_ZOMBIE]


def _direct_children() -> list[int]:
    # Not psutil: that reads the whole process table, and this runs after each of a thousand quick tests.
    while True:
        threads = Path("/proc/self/task").iterdir()
        try:
            return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread ended while we read, and its children hang at another now


def reap_adopted() -> None:
    """Collects adopted zombies, but those whose status a Popen may want: of our session, or leading one."""
    own_session = os.getsid(0)
    for pid in _direct_children():
        process = look(pid)
        if process is None or process.status != psutil.STATUS_ZOMBIE:
            continue
        if process.sid not in (own_session, process.pid):
            os.waitpid(pid, os.WNOHANG)


def kill_all(processes: Iterable[Process], timeout: float = 5.0) -> None:
    """SIGKILLs those of them that still are who they were, and waits until each is dead (a zombie is)."""
    victims = [process for process in processes if still(process)]
    for victim in victims:
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it went by itself
    deadline = time.monotonic() + timeout
    while survivors := [victim for victim in victims if still(victim)]:
        if time.monotonic() >= deadline:
            raise AssertionError(f"SIGKILL did not end {survivors}")
        time.sleep(POLL_SECONDS)
