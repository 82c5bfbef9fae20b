"""The default number of children, from file trees as machines and containers have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtq_supervisor import cgroup
from dtq_supervisor.cpus import allowed_cpus, default_procs

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
V1_IN_CONTAINER = (
    "32 31 0:29 /docker/4f1 /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 /docker/4f1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
)
SERVICE = "/system.slice/dtq.service"
CPU = "sys/fs/cgroup/cpu,cpuacct"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def v1_quota(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


TREES = {
    "no /proc at all": ({}, 64, 64),
    "v2, no limit": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": f"0::{SERVICE}\n",
            f"sys/fs/cgroup{SERVICE}/cpu.max": "max 100000\n",
        },
        64,
        64,
    ),
    "v2, two CPUs": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": f"0::{SERVICE}\n",
            f"sys/fs/cgroup{SERVICE}/cpu.max": "200000 100000\n",
        },
        64,
        2,
    ),
    "v2, a slice above is tighter": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": f"0::{SERVICE}\n",
            f"sys/fs/cgroup{SERVICE}/cpu.max": "1200000 100000\n",
            "sys/fs/cgroup/system.slice/cpu.max": "250000 100000\n",
        },
        64,
        3,
    ),
    "v2, a container with a namespace of its own": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
        64,
        1,
    ),
    "v2, our group is outside of the namespace": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/../../user.slice\n",
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
        },
        64,
        3,
    ),
    "v2, the quota is wider than the affinity": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "800000 100000\n",
        },
        4,
        4,
    ),
    "v2, a file that makes no sense": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "\n",
        },
        4,
        4,
    ),
    "v1, no limit": (
        {
            "proc/self/mountinfo": V1,
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
            **v1_quota(f"{CPU}/x", -1),
        },
        8,
        8,
    ),
    "v1, a service": (
        {
            "proc/self/mountinfo": V1,
            "proc/self/cgroup": f"4:memory:/\n3:cpu,cpuacct:{SERVICE}\n1:name=systemd:{SERVICE}\n",
            **v1_quota(f"{CPU}{SERVICE}", 150000),
            **v1_quota(CPU, -1),
        },
        8,
        2,
    ),
    "v1, a container that sees its host's path": (
        {
            "proc/self/mountinfo": V1_IN_CONTAINER,
            "proc/self/cgroup": "4:memory:/docker/4f1\n3:cpu,cpuacct:/docker/4f1\n",
            **v1_quota(CPU, 50000, 50000),
        },
        8,
        1,
    ),
    "v1, a group inside of a container": (
        {
            "proc/self/mountinfo": V1_IN_CONTAINER,
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/4f1/inner\n",
            **v1_quota(CPU, 400000),
            **v1_quota(f"{CPU}/inner", 300000),
        },
        8,
        3,
    ),
    "v1 and v2 side by side": (
        {
            "proc/self/mountinfo": V1 + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
            "proc/self/cgroup": "3:cpu,cpuacct:/x\n0::/x\n",
            **v1_quota(f"{CPU}/x", 200000),
        },
        8,
        2,
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_the_default_is_the_tighter_of_affinity_and_quota(name: str, tmp_path: Path) -> None:
    files, affinity, expected = TREES[name]
    procs, origin = allowed_cpus(affinity, tree(tmp_path, files))
    assert procs == expected
    assert ("cgroup quota" in origin) == (expected < affinity)


def test_the_origin_names_the_file_and_the_exact_quota(tmp_path: Path) -> None:
    files, affinity, _ = TREES["v2, a slice above is tighter"]
    _, origin = allowed_cpus(affinity, tree(tmp_path, files))
    assert (
        origin == f"cgroup quota of 2.5 CPUs in {tmp_path}/sys/fs/cgroup/system.slice/cpu.max, 64 by affinity"
    )


def test_other_controllers_have_folders_of_their_own(tmp_path: Path) -> None:
    files, _, _ = TREES["v1, a container that sees its host's path"]
    root = tree(tmp_path, files)
    assert list(cgroup.folders("memory", root)) == [(1, root / "sys/fs/cgroup/memory")]


def test_the_innermost_folder_comes_first(tmp_path: Path) -> None:
    files, _, _ = TREES["v2, two CPUs"]
    root = tree(tmp_path, files)
    top = root / "sys/fs/cgroup"
    assert list(cgroup.folders("memory", root)) == [
        (2, top / "system.slice/dtq.service"),
        (2, top / "system.slice"),
        (2, top),
    ]


def test_this_machine_gives_an_answer() -> None:
    procs, origin = default_procs()
    assert 1 <= procs <= len(os.sched_getaffinity(0))
    assert "affinity" in origin
