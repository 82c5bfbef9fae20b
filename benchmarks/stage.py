"""A private Redis and a real supervisor for the length of a measurement."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tasks import app
from dtq_child.broker import Broker
from dtq_child.connection import Link, open_link
from dtq_child.settings import defaults
from dtq_supervisor import embedded


@dataclass(frozen=True, slots=True)
class Stage:
    """What a measurement talks to."""

    broker: Broker
    redis: Link
    supervisor: subprocess.Popen[bytes]
    url: str

    def info(self, section: str) -> dict[str, str]:
        lines = self.redis.call("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def calls(self, command: str) -> int:
        """How often Redis was sent this command since the statistics were reset."""
        stat = self.info("commandstats").get(f"cmdstat_{command}", "calls=0,")
        return int(stat.partition("calls=")[2].partition(",")[0])


def until(condition: Callable[[], bool], seconds: float, what: str, pause: float = 0.01) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)


@contextlib.contextmanager
def stage(
    procs: int, *flags: str, queues: str = "default", name: str = "benchmarks.tasks:app"
) -> Iterator[Stage]:
    """A supervisor of the application `name` whose children are all ready. Stops everything at the end."""
    with embedded.start() as server, tempfile.TemporaryDirectory() as folder:
        app.configure(defaults(redis_url=server.url))
        broker = app.broker
        if not isinstance(broker, Broker):
            raise TypeError("measurements need the real broker")
        log = Path(folder) / "supervisor.log"
        command = [sys.executable, "-m", "dtq_supervisor", name, "--redis-url", server.url]
        command += ["--procs", str(procs), "--queues", queues, "--metrics-bind", "off", *flags]
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        with log.open("wb") as err:
            process = subprocess.Popen(command, stderr=err, stdin=subprocess.DEVNULL, env=environ)
        try:
            link = open_link(server.url)
            until(lambda: _ready(process.pid) == procs, 60, f"{procs} children ready")
            yield Stage(broker, link, process, server.url)
        except BaseException:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(40)
            broker.close()


def _ready(supervisor: int) -> int:
    """Children of the supervisor that are idle, by their titles."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == supervisor:
                    title = (entry / "cmdline").read_bytes()
                    count += title.startswith(b"dtq-child[") and b": idle" in title
    return count


def machine() -> str:
    """What the figures were measured on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    cpus = len(os.sched_getaffinity(0))
    return f"{cpus} CPUs ({model}), Linux {platform.release()}, Python {platform.python_version()}"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
