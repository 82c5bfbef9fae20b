"""How late delayed tasks start on an idle pool: from the due time in the record, by the clock of Redis, to
the handler's first line, by this machine's, which is the same one.

python -m benchmarks.lateness --tasks 100
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from benchmarks.stage import Stage, machine, percentile, stage, until
from benchmarks.tasks import clock


def measure(on: Stage, path: Path, tasks: int, delay: float, spacing: float) -> list[float]:
    """Milliseconds from due to start of each. They are sent at uneven intervals, so that the due times fall
    anywhere between two looks of the promoter."""
    bound = clock.options(delay=delay)
    dice = random.Random(1)
    ids = []
    for _ in range(tasks):
        ids.append(bound.delay(str(path)).id)
        time.sleep(dice.uniform(0, 2 * spacing))
    until(
        lambda: path.exists() and path.read_bytes().count(b"\n") >= tasks,
        delay + 30,
        "all started",
        pause=0.05,
    )
    started = dict(line.split() for line in path.read_bytes().splitlines())
    return [int(started[task_id.encode()]) / 1e6 - due_ms(on, task_id) for task_id in ids]


def due_ms(on: Stage, task_id: str) -> int:
    record = on.broker.record(task_id)
    if record is None:
        raise LookupError(f"no record of task {task_id}")
    return int(record.get("due_at_ms"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--procs", type=int, default=4)
    parser.add_argument("--delay", type=float, default=2.0, help="seconds")
    parser.add_argument("--spacing", type=float, default=0.05, help="seconds between two tasks, on average")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder, stage(args.procs) as on:
        print(f"Redis {on.info('server')['redis_version']}, {args.procs} idle children")
        until(lambda: on.redis.call("EXISTS", "dtq:lock:scheduler") == 1, 30, "a leader")
        late = measure(on, Path(folder) / "starts", args.tasks, args.delay, args.spacing)
        print(
            f"{len(late)} tasks with a delay of {args.delay:g} s start late by "
            f"p50 {percentile(late, 0.5):.2f} ms, p99 {percentile(late, 0.99):.2f} ms, "
            f"max {max(late):.2f} ms, min {min(late):.2f} ms"
        )
        early = sum(moment < 0 for moment in late)
        print(f"{early} early" if early else "none early")


if __name__ == "__main__":
    main()
