"""More probe handlers, on the App of the usual ones: results and errors that nobody can write down, tasks
that meddle with their process, async ones, and hooks."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from dtq_child import Backoff, current_task
from dtq_child.context import CurrentTask
from tests.support.handlers import POLL_SECONDS, ProbeFailure, app, note, noted, noted_async

__all__ = ["app"]

AGAIN = Backoff(base=0, factor=1, cap=0, jitter=0)


# -- what cannot be written down


class Unprintable(Exception):
    """Has no text: asking for it raises what `kind` says."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__(kind)

    def __str__(self) -> str:
        raise self.args[0]("no text of me")


def _chain(length: int) -> Exception:
    error = ProbeFailure("the last of the chain")
    for number in range(length):
        outer = ProbeFailure(f"link {number}")
        outer.__cause__, error = error, outer
    return error


def _group(depth: int) -> Exception:
    error: Exception = ProbeFailure("innermost")
    for number in range(depth):
        error = ExceptionGroup(f"level {number}", [error, ValueError(f"beside level {number}")])
    return error


ODD_ERRORS: dict[str, Callable[[], BaseException]] = {
    "unprintable": lambda: Unprintable(ValueError),
    "exits when printed": lambda: Unprintable(SystemExit),
    "lone surrogates": lambda: ProbeFailure("before \ud800 after"),
    "50 MB of text": lambda: ProbeFailure("é" * (25 << 20)),
    "3000 causes": lambda: _chain(3000),
    "a group in groups": lambda: _group(30),
}


@app.task(name="raise_odd", max_attempts=1)
@noted
def raise_odd(kind: str) -> NoReturn:
    """Raises the one of ODD_ERRORS."""
    raise ODD_ERRORS[kind]()


def _cycle() -> list[Any]:
    it: list[Any] = []
    it.append(it)
    return it


def _deep(levels: int) -> list[Any]:
    it: list[Any] = []
    for _ in range(levels):
        it = [it]
    return it


ODD_RESULTS: dict[str, Callable[[], Any]] = {
    "NaN": lambda: {"ratio": [1.0, float("nan")]},
    "infinity": lambda: float("-inf"),
    "a set": lambda: {1, 2},
    "bytes": lambda: b"raw",
    "an object": lambda: {"it": object()},
    "a lone surrogate": lambda: "before \udfff after",
    "65 bits": lambda: [1 << 64],
    "keys that are no text": lambda: {1: "one"},
    "a cycle": _cycle,
    "1000 levels": lambda: _deep(1000),
}


@app.task(name="return_odd")
@noted
def return_odd(kind: str) -> Any:
    """Returns the one of ODD_RESULTS."""
    return ODD_RESULTS[kind]()


# -- failing for good, and only at first


@app.task(name="never_retried", max_attempts=3, retry=Backoff(base=0, factor=1, cap=0, never=(LookupError,)))
@noted
def never_retried(kind: str) -> NoReturn:
    """Raises the builtin exception: KeyError is a LookupError, ValueError is none."""
    raise {"KeyError": KeyError, "ValueError": ValueError}[kind]("told to")


@app.task(name="swallow_first")
@noted
def swallow_first(seconds: float) -> int:
    """In its first delivery it swallows all that is raised into it for that long, each noted as "swallowed".

    Later ones return at once. Returns the number of the delivery."""
    delivery, end = current_task().delivery, time.monotonic() + seconds
    while delivery == 1 and (left := end - time.monotonic()) > 0:
        try:
            time.sleep(left)
        except BaseException as error:  # noqa: BLE001
            note("swallowed", error=type(error).__name__)
    return delivery


# -- meddling with signals


class Alarmed(Exception):
    """What the handlers of signals raise that tasks set."""


def _raise_alarmed(number: int, frame: FrameType | None) -> None:
    raise Alarmed(signal.Signals(number).name)


@app.task(name="own_alarm", max_attempts=1)
@noted
def own_alarm(seconds: float) -> None:
    """Uses an alarm as its own timeout: it fails with Alarmed."""
    signal.signal(signal.SIGALRM, _raise_alarmed)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        time.sleep(10)


@app.task(name="leave_traps")
@noted
def leave_traps(seconds: float) -> int:
    """Returns the pid, but leaves an alarm that is still to ring, with the system's action, which kills;
    every signal blocked; and for some that are pending handlers that raise."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPROF):
        signal.signal(number, _raise_alarmed)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGALRM)
    return os.getpid()


@app.task(name="wait_and_show")
@noted
def wait_and_show(seconds: float) -> dict[str, Any]:
    """Sleeps that long, and shows whether it was disturbed, its timers and what is blocked."""
    begun = time.monotonic()
    time.sleep(seconds)
    return {
        "pid": os.getpid(),
        "slept": time.monotonic() - begun,
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0],
        "blocked": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }


# -- forks, and closes what is not its own


@app.task(name="fork_and_come_back")
@noted
def fork_and_come_back(how: str) -> str:
    """The forked process comes out of the handler, too, and first: it "returns", "raises" or "exits"."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return "the first"
    if how == "raises":
        raise ProbeFailure("in the forked process")
    if how == "exits":
        raise SystemExit(3)
    return "the forked one"


def _lasts() -> None:
    signal.pause()


def _says(_: int) -> int:
    return os.getpid()


@app.task(name="terminate_processes", timeout=10)
@noted
def terminate_processes(count: int) -> list[int | None]:
    """Ends processes of `multiprocessing` as soon as they are started, and says how they ended."""
    processes = [multiprocessing.get_context("fork").Process(target=_lasts) for _ in range(count)]
    for process in processes:
        process.start()
        process.terminate()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


@app.task(name="fail_in_pool", timeout=10, max_attempts=1)
@noted
def fail_in_pool() -> NoReturn:
    """Leaves a `Pool` with an error; its workers are terminated and waited for."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(_says, range(4))
        raise ProbeFailure("told to")


@app.task(name="interrupt_fork", timeout=10)
@noted
def interrupt_fork() -> int:
    """A forked process is sent SIGINT, as by a terminal; it ends with 7 if that is a KeyboardInterrupt."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(tell, b".")
            while True:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            os._exit(7)
    os.read(ready, 1)
    os.kill(pid, signal.SIGINT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@app.task(name="close_files", max_attempts=1)
@noted
def close_files(which: str) -> NoReturn:
    """Closes the file that is its standard error, or every descriptor but the standard ones; and fails."""
    if which == "stderr":
        signal.signal(signal.SIGUSR1, _raise_alarmed)  # something to be told of after the handler
        sys.stderr.close()
    else:
        os.closerange(3, 4096)
    raise ProbeFailure("told to")


# -- async


def _shown() -> dict[str, Any]:
    task = current_task()
    return {"id": task.id, "attempt": task.attempt, "queue": task.queue, "metadata": dict(task.metadata)}


@app.task(name="show_async")
@noted_async
async def show_async() -> list[dict[str, Any]]:
    """What current_task() says before and after an await, in a task of the loop, and in a thread."""

    async def beside() -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return _shown()

    before = _shown()
    inside = await asyncio.gather(beside(), asyncio.to_thread(_shown))
    return [before, *inside, _shown()]


@app.task(name="tidy_async")
@noted_async
async def tidy_async(seconds: float) -> str:
    """Sleeps that long; ends early and well if it is cancelled, which it notes with the reason as "told"."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError as cancelled:
        note("told", why=str(cancelled.args[0] if cancelled.args else ""))
        return "told"
    return "not told"


@app.task(name="deaf_async", max_attempts=1)
@noted_async
async def deaf_async(seconds: float) -> None:
    """Awaits that long, whatever cancels it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


# -- hooks: note what they see of tasks whose metadata ask for it, and fail


@app.on_task_start
def at_start(task: CurrentTask) -> None:
    if task.metadata.get("hooks"):
        note("at start", same=task.id == current_task().id)
        raise ProbeFailure("a hook that fails changes no outcome")


@app.on_task_end
def at_end(task: CurrentTask, error: BaseException | None) -> None:
    if task.metadata.get("hooks"):
        note("at end", error=None if error is None else type(error).__name__)
        raise SystemExit("nor does one that exits")


@app.task(name="hooked", max_attempts=1)
@noted
def hooked(failing: bool = False) -> str:
    if failing:
        raise ProbeFailure("told to")
    return "done"


@app.task(name="hooked_async", max_attempts=1)
@noted_async
async def hooked_async(failing: bool = False) -> str:
    await asyncio.sleep(0)
    if failing:
        raise ProbeFailure("told to")
    return "done"


@app.task(name="known_later")
@noted
def known_later() -> int:
    """A type that workers of the usual handlers do not know."""
    return os.getpid()


@app.task(name="hold", timeout=60)
@noted
def hold(path: str) -> int:
    """Runs until the test makes the file; returns the pid."""
    while not os.path.exists(path):
        time.sleep(POLL_SECONDS)
    return os.getpid()
