"""How many children suit this machine: the CPUs we may use, not those it has (R38)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from dtq_supervisor import cgroup


def default_procs() -> tuple[int, str]:
    """(processes, where the number comes from)."""
    return allowed_cpus(len(os.sched_getaffinity(0)))


def allowed_cpus(affinity: int, root: Path = Path("/")) -> tuple[int, str]:
    """The smaller of affinity and tightest quota, rounded up, at least 1. `root`: where / is, for tests."""
    quotas = sorted(_quotas(root))
    if not quotas or math.ceil(quotas[0][0]) >= affinity:
        return max(1, affinity), f"{affinity} CPUs allowed by affinity"
    quota, file = quotas[0]
    return max(1, math.ceil(quota)), f"cgroup quota of {quota:g} CPUs in {file}, {affinity} by affinity"


def _quotas(root: Path) -> Iterator[tuple[float, str]]:
    for version, folder in cgroup.folders("cpu", root):
        file = folder / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")
        try:
            quota = _v2(file) if version == 2 else _v1(file)
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            continue  # the top group has no such file; or no permission, or no number: no limit from here
        if quota > 0:
            yield quota, str(file)


def _v2(file: Path) -> float:
    """CPUs from `<quota µs> <period µs>`; "max" for the quota means none, and is no number."""
    quota, period = file.read_text().split()[:2]
    return int(quota) / int(period)


def _v1(file: Path) -> float:
    """CPUs; negative where there is no limit."""
    return int(file.read_text()) / int(file.with_name("cpu.cfs_period_us").read_text())
