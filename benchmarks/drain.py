"""How fast a pool drains no-op tasks: record, result and events on, Redis on the same machine.

python -m benchmarks.drain --tasks 20000 --procs 2 --runs 3
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks import reference
from benchmarks.stage import Stage, machine, stage, until
from benchmarks.tasks import noop
from dtq_child.broker import Actor

ACTOR = Actor("benchmark", "benchmarks.drain")


def once(on: Stage, tasks: int) -> tuple[float, float, float]:
    """(tasks a second, client round trips a task, Redis CPU µs a task) of one drain."""
    on.broker.pause("default", ACTOR)
    noop.app.enqueue_many([noop.call() for _ in range(tasks)], batch=500)
    on.redis.call("CONFIG", "RESETSTAT")
    cpu = _cpu(on)
    begun = time.perf_counter()
    on.broker.resume("default", ACTOR)
    until(lambda: on.broker.depth("default") == 0, 300, "all drained", pause=0.1)
    seconds = time.perf_counter() - begun
    trips = (on.calls("evalsha") + on.calls("blpop")) / tasks
    return tasks / seconds, trips, (_cpu(on) - cpu) / tasks * 1e6


def _cpu(on: Stage) -> float:
    info = on.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument(
        "--reference", action="store_true", help="interleave benchmarks.reference, and give the ratio"
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="NAME=VALUE", help="a setting of the Redis server"
    )
    args = parser.parse_args()
    print(machine())
    with stage(args.procs, "--prefetch", str(args.prefetch)) as on:
        for setting in args.config:
            on.redis.call("CONFIG", "SET", *setting.split("=", 1))
        print(f"Redis {on.info('server')['redis_version']}, {args.procs} children, prefetch {args.prefetch}")
        runs, bare = [], []
        for _ in range(args.runs):
            rate, trips, cpu = once(on, args.tasks)
            runs.append(rate)
            if args.reference:
                bare.append(reference.measure(on.url, args.tasks, args.procs))
                print(f"  {bare[-1]:8.0f} messages/s by the reference", flush=True)
            print(
                f"  {rate:8.0f} tasks/s   {trips:.3f} round trips/task   {cpu:.1f} µs of Redis CPU/task",
                flush=True,
            )
        print(f"median {statistics.median(runs):.0f} tasks/s")
        if bare:
            print(f"ratio to the reference {statistics.median(runs) / statistics.median(bare):.2f}")


if __name__ == "__main__":
    main()
