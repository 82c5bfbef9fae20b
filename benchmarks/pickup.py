"""How long an idle pool takes from enqueue to the handler's first line, for p9 and p0.

python -m benchmarks.pickup --tasks 300 --procs 8
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.stage import machine, percentile, stage, until
from benchmarks.tasks import stamp


def measure(path: Path, tasks: int, priority: int, rest: float) -> list[float]:
    """Milliseconds from delay() to the handler's first line, one task at a time on an idle pool."""
    path.write_bytes(b"")
    bound = stamp.options(priority=priority)
    for number in range(1, tasks + 1):
        bound.delay(str(path), time.monotonic_ns())
        until(lambda number=number: path.read_bytes().count(b"\n") >= number, 10, "picked up", pause=0.002)  # type: ignore[misc]
        time.sleep(rest)
    return [int(line) / 1e6 for line in path.read_bytes().split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--procs", type=int, default=8)
    parser.add_argument("--queues", type=int, default=1)
    parser.add_argument(
        "--rest", type=float, default=0.02, help="seconds between tasks, for the pool to be idle again"
    )
    args = parser.parse_args()
    names = ["default", *(f"other{number}" for number in range(1, args.queues))]
    print(machine())
    with tempfile.TemporaryDirectory() as folder, stage(args.procs, queues=",".join(names)) as on:
        print(f"Redis {on.info('server')['redis_version']}, {args.procs} idle children, {args.queues} queues")
        for priority in (9, 0):
            late = measure(Path(folder) / "late", args.tasks, priority, args.rest)
            print(
                f"  p{priority}: p50 {percentile(late, 0.5):.2f} ms, p95 {percentile(late, 0.95):.2f} ms, "
                f"p99 {percentile(late, 0.99):.2f} ms, max {max(late):.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
