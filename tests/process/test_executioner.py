"""A supervisor that is killed leaves no child behind longer than its lease; who ends by itself is let."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtq_child import executioner
from dtq_child.executioner import LAST_STEPS_S, Ward, judge, lease_end
from dtq_child.retry import RetryPolicy
from dtq_child.scoreboard import Counters, Execution, Phase, Row
from tests.process.stand import Stand, gone
from tests.support.processes import group_members, look
from tests.support.waiting import until

StandOf = Callable[..., Stand]
VISIBILITY_S = 2.0


@pytest.fixture
def stand_of(tmp_path: Path) -> Iterator[StandOf]:
    """Starts a stand whose options are for the doubles."""
    made: list[Stand] = []

    def start(**options: Any) -> Stand:
        made.append(Stand(tmp_path, **options))
        return made[-1].__enter__()

    yield start
    for stand in made:
        stand.__exit__()


def died(stand: Stand) -> float:
    """Kills the supervisor; returns when."""
    stand.die()
    return time.monotonic()


def life_after(pid: int, death: float, most: float) -> float:
    """Waits until the process is gone; returns how long it outlived its supervisor."""
    until(lambda: gone(pid), most, lambda: f"still there: {look(pid)}", interval=0.002)
    return time.monotonic() - death


def begin(stand: Stand, double: str) -> tuple[int, int]:
    """(template, a child that executes), with a short lease."""
    template = stand.template_of(double, visibility_timeout_s=VISIBILITY_S, heartbeat_interval_s=1)
    return template, stand.birth(phase=3)


# -- stories


@pytest.mark.parametrize("double", ["idle", "deaf"])
def test_an_idle_child_is_gone_at_once_whether_it_notices_or_not(stand_of: StandOf, double: str) -> None:
    stand = stand_of()
    template = stand.template_of(double)
    children = [stand.birth(slot=slot) for slot in range(3)]

    death = died(stand)

    for pid in children:
        assert life_after(pid, death, 2) < 1
    life_after(template, death, 2)


def test_a_child_stuck_in_c_code_is_gone_when_its_lease_is_over(stand_of: StandOf) -> None:
    """It holds the GIL: neither the kernel's notice nor any handler reaches it."""
    stand = stand_of()
    template, child = begin(stand, "executes")
    claimed = stand.row(index=0)["execution"]["claim_sent"]

    death = died(stand)
    life_after(child, death, 5)

    assert VISIBILITY_S <= time.monotonic() - claimed < VISIBILITY_S + 0.5
    life_after(template, death, 5)


def test_a_child_is_told_of_its_supervisor_s_death_at_once(stand_of: StandOf) -> None:
    stand = stand_of(timeout=1)
    _, child = begin(stand, "hears")

    death = died(stand)

    assert float(stand.told("heard")) - death < 0.2
    life_after(child, death, 5)


def test_a_lease_that_was_renewed_counts_from_then(stand_of: StandOf) -> None:
    stand = stand_of()
    _, child = begin(stand, "executes")
    renewed = time.monotonic() + 0.7
    stand.renew(index=0, sent=renewed)

    life_after(child, died(stand), 5)

    assert VISIBILITY_S <= time.monotonic() - renewed < VISIBILITY_S + 0.5


def test_a_deadline_before_the_end_of_the_lease_counts(stand_of: StandOf) -> None:
    stand = stand_of(timeout=0.8)
    _, child = begin(stand, "executes")
    deadline = stand.row(index=0)["execution"]["hard_deadline"]

    life_after(child, died(stand), 5)

    assert 0 <= time.monotonic() - deadline < 0.5


def test_a_child_that_cannot_settle_has_its_lease_and_no_deadline(stand_of: StandOf) -> None:
    stand = stand_of(timeout=0.3)
    template = stand.template_of("settles", visibility_timeout_s=VISIBILITY_S, heartbeat_interval_s=1)
    child = stand.birth(phase=4)
    claimed = stand.row(index=0)["execution"]["claim_sent"]

    death = died(stand)
    life_after(child, death, 5)

    assert VISIBILITY_S <= time.monotonic() - claimed < VISIBILITY_S + 0.5
    life_after(template, death, 5)


def test_a_child_that_ends_by_itself_is_let(stand_of: StandOf) -> None:
    """It finishes its task a second later, settles it, runs its stop hooks, and ends."""
    stand = stand_of(seconds=1.0)
    template, child = begin(stand, "finishes")

    death = died(stand)

    finished = float(stand.told("finished"))
    assert finished - float(stand.told("orphaned")) >= 1.3
    life_after(child, death, 3)
    life_after(template, death, 3)


@pytest.mark.parametrize("stays", [True, False])
def test_what_a_child_had_started_dies_with_it(stand_of: StandOf, stays: bool) -> None:
    """Whether it was killed at its deadline or ended by itself before."""
    stand = stand_of(busy=True, stays=stays, timeout=0.5 if stays else 60)
    template = stand.template_of("helped")
    child = stand.birth(phase=3)
    own, away = json.loads(stand.told("helpers"))

    death = died(stand)
    life_after(child, death, 5)

    life_after(own, death, 5)
    life_after(template, death, 5)
    assert not gone(away), "a session of its own: documented to live on"
    os.kill(away, signal.SIGKILL)


def test_on_an_older_kernel_a_group_is_killed_by_its_number() -> None:
    leader = subprocess.Popen(["sh", "-c", "sleep 3600 & sleep 3600"], process_group=0)
    pidfd = os.pidfd_open(leader.pid)
    until(lambda: len(group_members(leader.pid)) == 3, 10)

    executioner._signal_group_by_number(Ward(slot=0, life=1, row=0, pid=leader.pid, pidfd=pidfd))

    assert leader.wait(timeout=10) == -signal.SIGKILL
    until(lambda: group_members(leader.pid) == [], 10)
    # Its number may be anybody's now, and nobody is signalled.
    executioner._signal_group_by_number(Ward(slot=0, life=1, row=0, pid=os.getpgid(0), pidfd=pidfd))
    os.close(pidfd)


def test_an_executioner_is_not_ended_by_what_ends_services(stand_of: StandOf) -> None:
    stand = stand_of()
    template, child = begin(stand, "executes")
    death = died(stand)
    until(lambda: (found := look(template)) and "supervisor died" in found.title, 2)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(template, number)

    life_after(child, death, 5)
    life_after(template, death, 5)


def test_a_log_that_nobody_reads_does_not_stop_an_executioner(stand_of: StandOf) -> None:
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    assert os.write(writer, b"x" * room) == room
    stand = stand_of(stderr=writer, timeout=0.5)
    template, child = begin(stand, "executes")

    death = died(stand)

    life_after(child, death, 5)
    life_after(template, death, 5)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("processes", range(2, 9))
def test_a_supervisor_killed_amid_forks_leaves_nobody(stand_of: StandOf, processes: int) -> None:
    """Also between a fork and the child's asking the kernel for the news of its parent's death."""
    stand = stand_of(rows=8)
    stand.template_of("deaf")
    stand.message("imported")
    for slot in range(8):
        stand.fork(generation=1, slot=slot, life=1)
    until(lambda: len(stand.tree()) >= processes, 10, interval=0)
    family = [process.pid for process in stand.tree()]

    death = died(stand)

    for pid in family:
        life_after(pid, death, 7)
    until(lambda: not working_in(stand.folder), 7, lambda: str(working_in(stand.folder)))


def working_in(folder: Path) -> list[str]:
    """Whoever is there, wherever it hangs in the tree."""
    left = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                left.append(entry.name)
        except OSError:
            continue  # it has just ended
    return left


# -- the rule, without processes


EXECUTION = Execution(
    seq=1,
    task_id="018f",
    task_type="shop.work",
    stream="dtq:stream:default:p5",
    entry_id="1-0",
    delivery=1,
    attempt=1,
    max_attempts=3,
    crashes=0,
    max_crashes=3,
    timeout_ms=1000,
    started=100.0,
    soft_deadline=0.0,
    hard_deadline=400.0,
    policy=RetryPolicy(1.0, 2.0, 3.0, 0.0),
    claim_sent=100.0,
)


def row(phase: Phase, *, life: int = 1, hard_deadline: float = 400.0, renewed: float = 0.0) -> Row:
    busy = phase in (Phase.EXECUTING, Phase.SETTLING)
    execution = EXECUTION
    execution.hard_deadline = hard_deadline
    return Row(
        life=life,
        pid=4711,
        phase=phase,
        seq=1,
        execution=execution if busy else None,
        held=(),
        settling_since=0.0,
        counters=Counters(),
        idle_since=0.0,
        redis_ok_since=0.0,
        last_claim=0.0,
        stop=False,
        may_claim=True,
        renewed=renewed,
        order_kind=0,
        order_seq=0,
    )


def ward() -> Ward:
    return Ward(slot=0, life=1, row=0, pid=4711, pidfd=-1)


@pytest.mark.parametrize(
    ("phase", "deadline", "renewed", "end"),
    [
        (Phase.EXECUTING, 400.0, 0.0, 130.0),
        (Phase.EXECUTING, 400.0, 120.0, 150.0),
        (Phase.EXECUTING, 400.0, 90.0, 130.0),
        (Phase.EXECUTING, 110.0, 0.0, 110.0),
        (Phase.EXECUTING, 0.0, 0.0, 130.0),
        (Phase.SETTLING, 110.0, 0.0, 130.0),
    ],
)
def test_the_end_of_a_lease(phase: Phase, deadline: float, renewed: float, end: float) -> None:
    assert lease_end(row(phase, hard_deadline=deadline, renewed=renewed), 30.0) == end


@pytest.mark.parametrize("phase", [Phase.BOOTING, Phase.READY, Phase.CLAIMING])
def test_whoever_executes_nothing_has_no_time(phase: Phase) -> None:
    child = ward()
    judge(child, row(phase), 105.0, 30.0)
    assert child.until == 105.0


def test_whoever_is_about_to_end_may_end() -> None:
    child = ward()
    judge(child, row(Phase.EXITING), 105.0, 30.0)
    judge(child, row(Phase.EXITING), 105.5, 30.0)
    assert child.until == 105.0 + LAST_STEPS_S


def test_whoever_has_just_settled_may_end() -> None:
    child = ward()
    judge(child, row(Phase.EXECUTING), 105.0, 30.0)
    judge(child, row(Phase.SETTLING), 106.0, 30.0)
    assert child.until == 130.0

    for now in (107.0, 107.5):
        judge(child, row(Phase.READY), now, 30.0)
    judge(child, row(Phase.EXITING), 107.7, 30.0)

    assert child.until == 107.0 + LAST_STEPS_S


def test_a_row_that_cannot_be_read_leaves_what_was_known() -> None:
    child = ward()
    judge(child, row(Phase.EXECUTING), 105.0, 30.0)
    judge(child, None, 106.0, 30.0)
    assert child.until == 130.0

    stranger = ward()
    judge(stranger, None, 106.0, 30.0)
    judge(stranger, None, 116.0, 30.0)
    assert stranger.until == 136.0


def test_a_row_of_another_life_protects_nobody() -> None:
    child = ward()
    judge(child, row(Phase.EXECUTING, life=2), 105.0, 30.0)
    assert child.until == 105.0
