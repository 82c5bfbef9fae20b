"""Which child is replaced although it works, which limits are refused, what a replacement is counted as."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from dtq_supervisor import cgroup
from dtq_supervisor.deadlines import Gap, Watched, leave_alarms
from dtq_supervisor.events import (
    Alarm,
    ChildReady,
    DeathSettled,
    Exited,
    Fork,
    Forked,
    HardKill,
    LeaveLoop,
    LeaveOverdue,
    MemorySeen,
    OrderStop,
    Settle,
    Stop,
    StopMode,
    Verdict,
)
from dtq_supervisor.pool import Pool, step
from dtq_supervisor.recycling import Limits, TooSmall, reason_of
from dtq_supervisor.slot import State
from tests.unit.test_cpus import SERVICE, V1, V2, tree
from tests.unit.test_pool import at_work, deeds, said, state

MB = 1 << 20
GRACEFUL = Stop(StopMode.GRACEFUL)


def limited(procs: int = 1, **limits: int) -> Pool:
    return at_work(procs, limits=Limits(**limits))


# --- by count


def test_without_a_limit_a_child_may_execute_any_number() -> None:
    assert Limits().tasks_of(3, 17) == 0
    assert Limits(tasks_jitter=50).tasks_of(3, 17) == 0


def test_without_jitter_every_child_executes_just_as_many() -> None:
    assert {Limits(tasks=7).tasks_of(slot, life) for slot in range(8) for life in range(1, 50)} == {7}


def test_jitter_spreads_the_children_of_one_start_and_the_lives_of_one_slot() -> None:
    limits = Limits(tasks=1000, tasks_jitter=100)
    for numbers in (
        sorted(limits.tasks_of(slot, 1) for slot in range(8)),
        sorted(limits.tasks_of(0, life) for life in range(1, 9)),
    ):
        assert numbers[0] >= 1000
        assert numbers[-1] <= 1100
        assert min(b - a for a, b in itertools.pairwise(numbers)) >= 3, numbers


def test_a_child_is_told_at_its_fork_how_many_it_may_execute() -> None:
    pool = limited(tasks=5)
    actions = step(pool, 1.0, Exited(0, 1, 100, 0, None, began=5, spent=True))
    assert deeds(actions) == [Settle(0, 1, None, 0, None), Fork(0, 2, 1, 0, may_claim=False, stop_after=5)]
    assert pool.replaced == {"tasks": 1}


# --- by memory


def test_a_child_that_has_outgrown_its_limit_ends_at_its_task_boundary() -> None:
    pool = limited(memory=100 * MB)
    assert step(pool, 1.0, MemorySeen(0, 1, 100 * MB, 3)) == []
    actions = step(pool, 1.1, MemorySeen(0, 1, 101 * MB, 3))
    assert (deeds(actions), said(actions)) == ([OrderStop(0, 1)], ["outgrown"])
    assert step(pool, 1.2, MemorySeen(0, 1, 500 * MB, 3)) == []
    assert deeds(step(pool, 2.0, Exited(0, 1, 100, 0, None, began=3)))[1:] == [
        Fork(0, 2, 1, 0, may_claim=False)
    ]
    assert pool.replaced == {"memory": 1}


def test_above_the_hard_limit_a_child_is_killed_in_mid_task_and_the_task_is_named() -> None:
    pool = limited(memory=100 * MB, hard_memory=200 * MB)
    step(pool, 1.0, MemorySeen(0, 1, 150 * MB, 3))
    verdict = Verdict("memory", 3, 201 * MB, 200 * MB)
    assert step(pool, 1.1, MemorySeen(0, 1, 201 * MB, 3)) == [HardKill(0, 1, 3, verdict)]
    assert step(pool, 1.2, MemorySeen(0, 1, 900 * MB, 3)) == []
    assert deeds(step(pool, 1.3, Exited(0, 1, 100, None, 9, began=3, busy=True)))[0] == Settle(
        0, 1, verdict, None, 9
    )
    assert pool.replaced == {"hard_memory": 1}
    assert verdict.why == "it held more than --hard-memory-per-child: 210763776 of 209715200 bytes"


def test_between_two_tasks_nobody_is_killed_for_its_size() -> None:
    pool = limited(hard_memory=200 * MB)
    assert deeds(step(pool, 1.0, MemorySeen(0, 1, 300 * MB))) == [OrderStop(0, 1)]
    # It had claimed one more before it saw the order: that one is at work now, and too much.
    assert deeds(step(pool, 1.1, MemorySeen(0, 1, 300 * MB, 4))) == [
        HardKill(0, 1, 4, Verdict("memory", 4, 300 * MB, 200 * MB))
    ]


def test_a_size_that_was_seen_of_an_earlier_life_changes_nothing() -> None:
    pool = limited(memory=100 * MB, hard_memory=200 * MB)
    step(pool, 1.0, Exited(0, 1, 100, None, 9))
    step(pool, 1.0, DeathSettled(0, 1))
    assert step(pool, 1.1, MemorySeen(0, 1, 900 * MB, 1)) == []
    assert step(pool, 1.1, MemorySeen(0, 2, 900 * MB, 1)) == [], "not before it is ready"


def test_a_stop_still_kills_what_eats_the_machines_memory() -> None:
    pool = limited(hard_memory=200 * MB)
    step(pool, 1.0, GRACEFUL)
    assert deeds(step(pool, 1.1, MemorySeen(0, 1, 300 * MB, 2))) == [
        HardKill(0, 1, 2, Verdict("memory", 2, 300 * MB, 200 * MB))
    ]


# --- limits that cannot work


@pytest.mark.parametrize(
    ("limits", "size", "found"),
    [
        (Limits(memory=109 * MB), 100 * MB, TooSmall("--max-memory-per-child", 109 * MB, 100 * MB, 110 * MB)),
        (
            Limits(hard_memory=109 * MB),
            100 * MB,
            TooSmall("--hard-memory-per-child", 109 * MB, 100 * MB, 110 * MB),
        ),
        (Limits(memory=111 * MB, hard_memory=200 * MB), 100 * MB, None),
        (Limits(memory=MB), 0, None),
        (Limits(), 100 * MB, None),
    ],
)
def test_a_limit_below_eleven_tenths_of_a_new_child_cannot_work(
    limits: Limits, size: int, found: TooSmall | None
) -> None:
    assert limits.too_small(size) == found


def booting(**limits: int) -> Pool:
    pool = limited(2, **limits)
    for slot in (0, 1):
        step(pool, 1.0, Exited(slot, 1, 100 + slot, None, 9))
        step(pool, 1.0, DeathSettled(slot, 1))
        step(pool, 1.0, Forked(slot, 2, 200 + slot))
    return pool


def test_if_the_first_child_shows_it_the_start_is_refused() -> None:
    pool = booting(memory=64 * MB)
    pool.proven = False
    actions = step(pool, 1.1, ChildReady(0, 2, 100 * MB))
    assert said(actions)[0] == "memory_limit_refused"
    assert state(pool, 0) is state(pool, 1) is State.DOOMED
    step(pool, 1.2, Exited(1, 2, 201, None, 9))
    assert LeaveLoop(78) in step(pool, 1.2, Exited(0, 2, 200, None, 9))
    assert pool.replaced == {"crash": 2}, "what a stop ends is not replaced"


def test_later_it_is_told_once_and_the_limit_does_not_hold() -> None:
    pool = booting(memory=64 * MB)
    assert said(step(pool, 1.1, ChildReady(0, 2, 100 * MB))) == ["memory_limit_ignored"]
    assert said(step(pool, 1.1, ChildReady(1, 2, 100 * MB))) == []
    assert step(pool, 1.2, MemorySeen(0, 2, 900 * MB, 1)) == []
    assert pool.at_work() == 2


# --- what does not end


def test_a_child_with_nothing_in_hand_has_ten_seconds_to_end() -> None:
    assert leave_alarms(Watched(0, 1)) == []
    leaving = Watched(0, 1, leaving_since=50.0)
    assert leave_alarms(leaving) == [Alarm(60.0, LeaveOverdue(0, 1))]
    assert leave_alarms(leaving, Gap(49.0, 58.0)) == [Alarm(68.0, LeaveOverdue(0, 1))]


def test_one_that_hangs_in_its_stop_hooks_is_killed_and_replaced() -> None:
    pool = limited(tasks=1)
    assert step(pool, 60.0, LeaveOverdue(0, 1)) == [HardKill(0, 1, 0, Verdict("leaving"))]
    step(pool, 60.1, Exited(0, 1, 100, None, 9, began=1, spent=True))
    assert pool.replaced == {"leaving": 1}
    assert state(pool) is State.STARTING


def test_a_stop_gives_it_the_whole_grace() -> None:
    pool = limited(tasks=1)
    step(pool, 59.0, GRACEFUL)
    assert step(pool, 60.0, LeaveOverdue(0, 1)) == []


# --- counting


@pytest.mark.parametrize(
    ("leaving", "end", "verdict", "reason"),
    [
        ("", {"code": 0, "spent": True}, None, "tasks"),
        ("memory", {"code": 0}, None, "memory"),
        ("memory", {"code": 0, "spent": True}, None, "memory"),
        ("", {"code": 0}, None, "ended"),
        ("", {"code": 0, "busy": True}, None, "crash"),
        ("", {"code": 3}, None, "crash"),
        ("memory", {"signal": 11, "busy": True}, None, "crash"),
        ("", {"signal": 9}, Verdict("timeout", 1), "timeout"),
        ("", {"signal": 9}, Verdict("memory", 1), "hard_memory"),
        ("memory", {"signal": 9}, Verdict("cancelled", 1), "cancelled"),
        ("", {"signal": 9}, Verdict("stuck", 1), "stuck"),
    ],
)
def test_a_replacement_has_one_reason(
    leaving: str, end: dict[str, Any], verdict: Verdict | None, reason: str
) -> None:
    exited = Exited(0, 1, 100, **{"code": None, "signal": None, **end})
    assert reason_of(leaving, exited, verdict) == reason


def test_boots_that_fail_are_counted_and_ends_at_a_stop_are_not() -> None:
    pool = limited(2)
    step(pool, 1.0, Exited(0, 1, 100, 1, None))
    step(pool, 1.0, Forked(0, 2, 200))
    step(pool, 1.1, Exited(0, 2, 200, 1, None))
    assert pool.replaced == {"crash": 1, "boot": 1}
    step(pool, 1.2, GRACEFUL)
    step(pool, 1.3, Exited(1, 1, 101, 0, None))
    assert pool.replaced == {"crash": 1, "boot": 1}


# --- a kernel that ends all together


@pytest.mark.parametrize(
    ("mounts", "own", "files", "found"),
    [
        (V2, f"0::{SERVICE}\n", {f"sys/fs/cgroup{SERVICE}/memory.oom.group": "0\n"}, None),
        (V2, f"0::{SERVICE}\n", {f"sys/fs/cgroup{SERVICE}/memory.oom.group": "1\n"}, SERVICE),
        (V2, f"0::{SERVICE}\n", {"sys/fs/cgroup/system.slice/memory.oom.group": "1\n"}, "/system.slice"),
        (V1, f"4:memory:{SERVICE}\n", {f"sys/fs/cgroup/memory{SERVICE}/memory.oom.group": "1\n"}, None),
        ("", "", {}, None),
    ],
)
def test_a_group_that_is_killed_as_a_whole_is_noticed(
    tmp_path: Path, mounts: str, own: str, files: dict[str, str], found: str | None
) -> None:
    root = tree(tmp_path, {"proc/self/mountinfo": mounts, "proc/self/cgroup": own, **files})
    expected = None if found is None else root / f"sys/fs/cgroup{found}/memory.oom.group"
    assert cgroup.oom_group(root) == expected
