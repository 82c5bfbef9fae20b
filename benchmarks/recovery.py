"""How soon a task runs again whose process was killed: kill -9 of busy children, one after the other, every
slot busy and tasks waiting.

python -m benchmarks.recovery --kills 100 --procs 4
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.stage import machine, percentile, stage, until
from benchmarks.tasks import hold

PATIENCE_S = 30.0


@dataclass(slots=True)
class Start:
    """`at`: monotonic nanoseconds."""

    pid: int
    at: int


@dataclass(slots=True)
class Round:
    """Tasks that run until told to end, and a file in which each start is noted."""

    folder: Path
    spin: bool
    sent: list[str] = field(default_factory=list)

    def send(self) -> None:
        gate = self.folder / f"gate-{len(self.sent)}"
        self.sent.append(hold.delay(str(self.folder / "starts"), str(gate), self.spin).id)

    def end(self, number: int) -> None:
        (self.folder / f"gate-{number}").touch()

    def starts(self) -> dict[str, list[Start]]:
        found: defaultdict[str, list[Start]] = defaultdict(list)
        path = self.folder / "starts"
        for line in path.read_bytes().splitlines() if path.exists() else ():
            task_id, pid, at = line.split()
            found[task_id.decode()].append(Start(int(pid), int(at)))
        return found

    def started(self, number: int, times: int) -> Start:
        """Waits for that start of the task, and returns it."""
        task_id = self.sent[number]
        until(lambda: len(self.starts()[task_id]) >= times, PATIENCE_S, f"start {times} of {task_id}", 0.002)
        return self.starts()[task_id][times - 1]


def recover(tasks: Round, number: int) -> float:
    """Kills the process of a running task. Seconds until that task's next start."""
    pid = tasks.started(number, 1).pid
    killed = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    return (tasks.started(number, 2).at - killed) / 1e9


def measure(tasks: Round, kills: int, procs: int, tell: Callable[[int, float], None]) -> list[float]:
    for _ in range(2 * procs):
        tasks.send()
    seconds = []
    for number in range(kills):
        for busy in range(number, number + procs):
            tasks.started(busy, 1)
        seconds.append(recover(tasks, number))
        tell(number, seconds[-1])
        tasks.end(number)
        tasks.send()
    for number in range(kills, len(tasks.sent)):
        tasks.end(number)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--procs", type=int, default=4)
    parser.add_argument("--spin", action="store_true", help="the tasks burn their cores; else they sleep")
    parser.add_argument("--verbose", action="store_true", help="show each recovery")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder, stage(args.procs) as on:
        what = "that burn their cores" if args.spin else "that sleep"
        print(
            f"Redis {on.info('server')['redis_version']}, {args.procs} children, all busy with tasks {what}"
        )

        def tell(number: int, seconds: float) -> None:
            if args.verbose:
                print(f"  {number:4} {seconds * 1000:7.1f} ms", flush=True)

        seconds = measure(Round(Path(folder), args.spin), args.kills, args.procs, tell)
        until(lambda: on.broker.depth("default") == 0, PATIENCE_S, "all ended")
        print(
            f"from kill -9 to the same task's next start, {len(seconds)} kills: "
            f"median {statistics.median(seconds) * 1000:.0f} ms, "
            f"p99 {percentile(seconds, 0.99) * 1000:.0f} ms, max {max(seconds) * 1000:.0f} ms"
        )


if __name__ == "__main__":
    main()
