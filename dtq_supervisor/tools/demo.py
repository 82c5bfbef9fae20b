"""`dtq demo`: a real job on a private Redis, with what goes wrong at night going wrong on the way."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from dtq_child.errors import BadConfiguration
from dtq_child.settings import defaults
from dtq_supervisor import embedded
from dtq_supervisor.cpus import default_procs
from dtq_supervisor.tools import demo_report
from dtq_supervisor.tools.demo_report import Misfits
from dtq_supervisor.tools.demo_tasks import always_crash, app, fail_once, hang_in_c, kill_own_process, pack

LIMIT_S = 240.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """One of the ENDING signals."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Unfinished(Exception):
    """The job did not end as it should; says how far it came."""


def add_verb(verbs: Any) -> None:
    parser = verbs.add_parser("demo", help="run real work on a private Redis and report", description=__doc__)
    parser.add_argument(
        "--files", type=int, default=None, help="only that many files (default: all of the standard library)"
    )
    parser.add_argument(
        "--procs", type=int, default=None, help="child processes (default: the CPUs allowed, at least 2)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when all went as promised, 1 when it did not, 128 and its number after a signal."""
    limit = args.files if args.files is not None else _limit_of_environment()
    files = standard_library()[:limit]
    procs = args.procs or max(2, default_procs()[0])
    print(f"dtq demo: {len(files)} files of Python's standard library, {procs} processes", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="dtq-demo-"))
    try:
        with _interruptible(), embedded.start() as redis, supervisor(redis.url, procs, folder) as process:
            print(f"  a private Redis on {redis.url}; dtq-supervisor is process {process.pid}", flush=True)
            return _job(redis.url, process, files, procs, folder)
    except Interrupted as interrupted:
        print(f"\ninterrupted by {signal.Signals(interrupted.number).name}: everything is stopped")
        return 128 + interrupted.number
    except (Unfinished, BadConfiguration) as error:
        print(f"  NOT AS PROMISED: {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """The first signal unwinds everything; those that come while that goes on are not heard."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, lambda number, frame: None)
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _limit_of_environment() -> int | None:
    text = os.environ.get("DTQ_DEMO_FILES", "")
    return int(text) if text.isdigit() else None


def standard_library() -> list[Path]:
    """Every source file of this interpreter's standard library, its tests too, without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if not skipped & set(path.parts) and path.is_file())


@contextlib.contextmanager
def supervisor(url: str, procs: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real dtq-supervisor; its log goes to a file, shown when the job ends badly."""
    log = folder / "supervisor.log"
    command = [sys.executable, "-m", "dtq_supervisor", "dtq_supervisor.tools.demo_tasks:app"]
    command += ["--procs", str(procs), "--queues", "demo", "--redis-url", url, "--log-format", "text"]
    command += ["--metrics-bind", "off"]  # another supervisor of this machine may want the port
    # What this shell sets for other supervisors is not for this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("DTQ_")}
    with log.open("wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=err, cwd=folder, env=env, process_group=0
        )
    try:
        yield process
    except Interrupted:
        process.send_signal(signal.SIGQUIT)
        raise
    except Unfinished:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _job(url: str, process: subprocess.Popen[bytes], files: list[Path], procs: int, folder: Path) -> int:
    app.configure(defaults(redis_url=url))
    misfits = Misfits(
        hang_in_c.call(), kill_own_process.call(str(folder / "death")), fail_once.call(), always_crash.call()
    )
    begun = time.monotonic()
    handles = app.enqueue_many([pack.call(str(path)) for path in files])
    app.enqueue_many(misfits.calls())
    took = time.monotonic() - begun
    print(
        f"  {len(handles) + 4} tasks enqueued in {took * 1000:.0f} ms; four of them will misbehave",
        flush=True,
    )
    watch = demo_report.Watch(app, handles, misfits)
    while not watch.look():
        if process.poll() is not None or time.monotonic() - begun > LIMIT_S:
            ended = "runs" if process.returncode is None else f"ended with exit code {process.returncode}"
            seconds = time.monotonic() - begun
            raise Unfinished(f"{watch.left()} tasks are left after {seconds:.0f} s; the supervisor {ended}")
        time.sleep(0.1)
    seconds = time.monotonic() - begun
    _end(process)
    return demo_report.report(
        app, handles, misfits, seconds, procs, process.returncode, _left_running(folder)
    )


def _left_running(folder: Path) -> list[str]:
    """Processes that work in the folder of our supervisor: none, if it kept its word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == folder.resolve():
                    title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{entry.name} {title.strip()}")
    return found
