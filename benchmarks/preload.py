"""What preloading saves: the memory of a pool whose application has a large table, with and without
--no-preload. Proportional set size, in which a page that several processes share counts for each in part.

python -m benchmarks.preload --procs 8 --mb 150
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from benchmarks.stage import Stage, machine, stage, until
from benchmarks.tasks import app

APP = "benchmarks.preloaded:app"
ROLES = {"dtq-child": "children", "dtq-supervisor: template": "template", "dtq-supervisor": "supervisor"}


def memory(on: Stage) -> dict[str, float]:
    """Megabytes by role."""
    top = psutil.Process(on.supervisor.pid)
    found: defaultdict[str, float] = defaultdict(float)
    for process in (top, *top.children(recursive=True)):
        title = " ".join(process.cmdline())
        role = next(role for prefix, role in ROLES.items() if title.startswith(prefix))
        found[role] += process.memory_full_info().pss / 1e6
    return dict(found)


def walk_everywhere(on: Stage, procs: int, folder: Path) -> None:
    """Each child reads the whole table once."""
    gate = folder / f"gate-{time.monotonic_ns()}"
    for _ in range(procs):
        app.enqueue("benchmarks.preloaded.walk", {"gate": str(gate)})
    until(lambda: running(on, procs), 120, f"{procs} children at it")
    gate.touch()
    until(lambda: on.broker.depth("default") == 0, 120, "all read")


def running(on: Stage, procs: int) -> bool:
    titles = (" ".join(p.cmdline()) for p in psutil.Process(on.supervisor.pid).children())
    return sum(title.startswith("dtq-child") and "walk" in title for title in titles) == procs


def show(when: str, found: dict[str, float], procs: int) -> None:
    share = found["children"] / procs
    parts = ", ".join(f"{role} {found[role]:.0f}" for role in ("supervisor", "template", "children"))
    print(f"    {when:<28} {sum(found.values()):6.0f} MB in all ({parts}), {share:.0f} a child", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--procs", type=int, default=8)
    parser.add_argument("--mb", type=int, default=150, help="size of the table")
    args = parser.parse_args()
    print(machine())
    for kind in ("objects", "bytes"):
        os.environ.update(PRELOAD_MB=str(args.mb), PRELOAD_OF=kind)
        for flags in ((), ("--no-preload",)):
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder, stage(args.procs, *flags, name=APP) as on:
                seconds = time.monotonic() - begun
                what = " ".join(flags) or "preloaded"
                print(f"  {args.mb} MB of {kind}, {what}: {args.procs} children ready after {seconds:.1f} s")
                show("at the start", memory(on), args.procs)
                walk_everywhere(on, args.procs, Path(folder))
                show("each child has read it all", memory(on), args.procs)


if __name__ == "__main__":
    main()
