"""The probe handlers: an application of small tasks that do, on order, what tasks do to a pool at their
worst.

Their task types are their plain names. Each notes "start", then "end" or "raised", in the ledger that
DTQ_TEST_LEDGER names, with the attempt and delivery of `current_task()`; `noop` notes nothing, for
throughput.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from dtq_child import App, RejectTask, RetryTask, SoftTimeout, current_task
from tests.support.ledger import Ledger

P = ParamSpec("P")
R = TypeVar("R")
POLL_SECONDS = 0.005

app = App()
_hoard: list[bytes] = []
_helpers: list[subprocess.Popen[bytes]] = []  # kept, or their objects would wait for them when collected


class ProbeFailure(Exception):
    """What the probes raise when told to fail."""


def note(word: str, **facts: Any) -> None:
    task = current_task()
    Ledger.from_environment().note(task.id, word, attempt=task.attempt, delivery=task.delivery, **facts)


def noted(handler: Callable[P, R]) -> Callable[P, R]:
    """Notes the start and the end of a plain handler."""

    @functools.wraps(handler)
    def probe(*args: P.args, **kwargs: P.kwargs) -> R:
        # An interruption comes at any instant, in a note as well.
        try:
            note("start", crashes=current_task().crashes, deadline=current_task().deadline)
            result = handler(*args, **kwargs)
            note("end")
        except BaseException as error:
            note("raised", error=type(error).__name__)
            raise
        return result

    return probe


def noted_async(handler: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    @functools.wraps(handler)
    async def probe(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            note("start", crashes=current_task().crashes, deadline=current_task().deadline)
            result = await handler(*args, **kwargs)
            note("end")
        except BaseException as error:
            note("raised", error=type(error).__name__)
            raise
        return result

    return probe


# -- well-behaved


@app.task(name="noop")
def noop() -> None:
    """Nothing at all."""


@app.task(name="note")
@noted
def just_note(value: Any = None) -> Any:
    """Returns what it was given."""
    return value


@app.task(name="sleep")
@noted
def sleep(seconds: float) -> None:
    time.sleep(seconds)


@app.task(name="async_sleep")
@noted_async
async def async_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


@app.task(name="spin")
@noted
def spin(seconds: float) -> int:
    """Burns a core in Python code for that long."""
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        rounds += 1
    return rounds


@app.task(name="spin_until")
@noted
def spin_until(path: str) -> int:
    """Burns a core in Python code until the test makes the file."""
    rounds = 0
    while rounds % 10_000 or not os.path.exists(path):
        rounds += 1
    return rounds


@app.task(name="wait_for_file")
@noted
def wait_for_file(path: str) -> None:
    """Runs until the test makes the file."""
    while not os.path.exists(path):
        time.sleep(POLL_SECONDS)


@app.task(name="hang_first")
@noted
def hang_first(seconds: float, stuck: bool = False, then: str = "") -> int:
    """In its first delivery it sleeps that long, if `stuck` in one C call that holds the GIL.

    Later ones return at once, or when the file `then` exists. Returns the number of the delivery.
    """
    delivery = current_task().delivery
    if delivery == 1 and stuck:
        sleep_in_c(seconds)
    elif delivery == 1:
        time.sleep(seconds)
    while delivery > 1 and then and not os.path.exists(then):
        time.sleep(POLL_SECONDS)
    return delivery


# -- failing


@app.task(name="fail")
@noted
def fail(message: str = "told to") -> NoReturn:
    raise ProbeFailure(message)


@app.task(name="fail_times")
@noted
def fail_times(n: int) -> int:
    """Fails in the first n attempts; returns the attempt that worked."""
    attempt = current_task().attempt
    if attempt <= n:
        raise ProbeFailure(f"attempt {attempt} of {n} that fail")
    return attempt


@app.task(name="retry_task")
@noted
def retry_task(delay: float, times: int = 1) -> int:
    """Asks for another attempt after `delay` seconds, `times` times; returns the attempt that did not."""
    attempt = current_task().attempt
    if attempt <= times:
        raise RetryTask(delay=delay)
    return attempt


@app.task(name="reject")
@noted
def reject(message: str = "told to") -> NoReturn:
    raise RejectTask(message)


@app.task(name="swallow")
@noted
def swallow(kind: str, seconds: float) -> int:
    """For that long, swallows everything whose class, or a base of it, has this name (BaseException,
    SoftTimeout …).

    Notes each as "swallowed"; returns how many there were.
    """
    end, count = time.monotonic() + seconds, 0
    while (left := end - time.monotonic()) > 0:
        try:
            time.sleep(left)
        except BaseException as error:
            if kind not in (base.__name__ for base in type(error).__mro__):
                raise
            count += 1
            note("swallowed", error=type(error).__name__)
    return count


@app.task(name="tidy")
@noted
def tidy(seconds: float) -> str:
    """Sleeps that long; ends early and well, if it is told of its soft timeout, which it notes as "told"."""
    try:
        time.sleep(seconds)
    except SoftTimeout:
        note("told")
        return "told"
    return "not told"


@app.task(name="raise_base")
@noted
def raise_base(name: str) -> NoReturn:
    """Raises the exception of builtins that has this name."""
    kind: type[BaseException] = getattr(builtins, name)
    raise kind("told to")


# -- stuck, deaf, greedy


@app.task(name="gil_sleep")
@noted
def gil_sleep(seconds: float) -> None:
    sleep_in_c(seconds)


def sleep_in_c(seconds: float) -> None:
    """One C call that holds the GIL that long, whatever signals come.

    Not sleep(3): the first signal ends it, so a stack dump would set the "stuck" handler free. A mutex that
    this thread has locked already is waited for again after each signal.
    """
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(128)  # zeros: an initialised mutex
    libc.pthread_mutex_lock(mutex)
    whole, fraction = divmod(time.time() + seconds, 1)
    until = (ctypes.c_long * 2)(int(whole), int(fraction * 1e9))
    libc.pthread_mutex_timedlock(mutex, until)


@app.task(name="light_sleep_in_c")
@noted
def light_sleep_in_c(seconds: float, again: bool = False) -> str:
    """A C call that holds the GIL, and that any signal ends, as most waits in C code are ended."""
    libc = ctypes.PyDLL(None)
    libc.sleep(int(seconds))
    note("woken")
    while again:
        libc.sleep(int(seconds))
    return "slept"


@app.task(name="ignore_term")
@noted
def ignore_term(seconds: float) -> None:
    """Deaf to TERM and INT for that long."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(seconds)


@app.task(name="read_fifo")
@noted
def read_fifo(path: str) -> str:
    """Opens a FIFO to which nobody writes, and waits there for ever."""
    return Path(path).read_text()


@app.task(name="eat_memory")
@noted
def eat_memory(mb: int, until: str = "") -> int:
    """Makes that many MiB resident, holds them until the file `until` exists (if named), and returns the
    bytes."""
    eaten = [b"\x01" * (1 << 20) for _ in range(mb)]
    note("eaten", mb=mb)
    while until and not os.path.exists(until):
        time.sleep(POLL_SECONDS)
    return sum(map(len, eaten))


@app.task(name="hoard")
@noted
def hoard(mb: int) -> int:
    """Makes that many MiB more resident for the rest of this process's life; returns its pid."""
    _hoard.append(b"\x01" * (mb << 20))
    return os.getpid()


@app.task(name="big_result")
@noted
def big_result(mb: float) -> str:
    return "x" * int(mb * (1 << 20))


@app.task(name="print_lots")
@noted
def print_lots(lines: int) -> None:
    """Writes that many lines of 100 bytes to each of its outputs."""
    for stream in (sys.stdout, sys.stderr):
        for number in range(lines):
            stream.write(f"{number:>99}\n")
        stream.flush()


# -- dying


@app.task(name="sys_exit")
@noted
def sys_exit(code: int) -> NoReturn:
    sys.exit(code)


@app.task(name="os_exit")
@noted
def os_exit(code: int) -> NoReturn:
    os._exit(code)


@app.task(name="segfault")
@noted
def segfault() -> None:
    ctypes.string_at(0)


@app.task(name="kill_self")
@noted
def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="crash_once")
@noted
def crash_once(path: str) -> int:
    """SIGKILLs itself if the file is not there yet, and makes it before; returns the pid that got through."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return os.getpid()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was survived")


# -- leaving things behind


@app.task(name="grandchild")
@noted
def grandchild(seconds: float, stuck: float = 0.0) -> int:
    """Starts a helper of that many seconds in its own group, notes the pid as "helper" and returns it.

    With `stuck`, it first hangs in C code that long.
    """
    return _start_helper(seconds, stuck, own_session=False)


@app.task(name="grandchild_own_session")
@noted
def grandchild_own_session(seconds: float, stuck: float = 0.0) -> int:
    """The same with a helper that made a session of its own."""
    return _start_helper(seconds, stuck, own_session=True)


def _start_helper(seconds: float, stuck: float, *, own_session: bool) -> int:
    helper = subprocess.Popen(["sleep", str(seconds)], start_new_session=own_session)
    _helpers.append(helper)
    note("helper", helper=helper.pid)
    if stuck:
        sleep_in_c(stuck)
    return helper.pid


@app.task(name="leak_state")
@noted
def leak_state() -> None:
    """Changes what a task may change of its process, and puts nothing back."""
    os.chdir("/")
    os.umask(0o077)
    os.environ["PROBE_LEAK"] = "1"
    socket.setdefaulttimeout(0.001)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})


@app.task(name="show_state")
@noted
def show_state() -> dict[str, Any]:
    """The counterpart: what leak_state may have changed, as this task finds it."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    return {
        "pid": os.getpid(),
        "cwd": str(Path.cwd()),
        "ignored": [n.name for n in numbers if signal.getsignal(n) is signal.SIG_IGN],
        "blocked": sorted(int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "leak": os.environ.get("PROBE_LEAK", ""),
    }
