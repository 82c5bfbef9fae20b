"""The pool's step, event by event; then a machine that feeds it a random world."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dtq_child.row import Order
from dtq_supervisor.deadlines import overdue
from dtq_supervisor.events import (
    Action,
    AllowClaims,
    BackoffOver,
    Begin,
    BeginDuties,
    BootOverdue,
    CancelGraceOver,
    ChildReady,
    CloseClaims,
    ContactMade,
    ContactRefused,
    DeathSettled,
    DumpDone,
    DumpStack,
    Event,
    ExecutionOver,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    GraceOver,
    GraceWarning,
    HardDue,
    HardKill,
    HoldClaims,
    KillStray,
    KillTemplate,
    LeaveLoop,
    LeaveOverdue,
    MemorySeen,
    MourningOver,
    OpenClaims,
    OrderStop,
    PatienceOver,
    QuietAsked,
    ReadSettings,
    ReloadAsked,
    ResizeAsked,
    ResumeAsked,
    RetireTemplate,
    Revoked,
    Say,
    SettingsRead,
    SettingsRefused,
    Settle,
    SettlingStuck,
    ShowStack,
    SoftDue,
    SoftKill,
    StackAsked,
    StacksAsked,
    StartTemplate,
    StayedIdle,
    Stop,
    StopMode,
    TemplateBackoffOver,
    TemplateFailed,
    TemplateGone,
    TemplateOverdue,
    TemplateUp,
    Verdict,
)
from dtq_supervisor.pool import Policy, Pool, step
from dtq_supervisor.recycling import Limits
from dtq_supervisor.slot import ALIVE, BACKOFF_MOST_S, State

BOOT_S = Policy().boot_timeout_s
GRACEFUL, IMMEDIATE = Stop(StopMode.GRACEFUL), Stop(StopMode.IMMEDIATE)


def deeds(actions: list[Action]) -> list[Action]:
    """Without what is only said."""
    return [action for action in actions if not isinstance(action, Say)]


def said(actions: list[Action]) -> list[str]:
    return [action.key for action in actions if isinstance(action, Say)]


def at_work(procs: int = 2, **policy: Any) -> Pool:
    """A pool whose children are all READY: slot n has pid 100 + n, life 1."""
    pool = Pool.of(procs, Policy(**policy))
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    for slot in range(procs):
        step(pool, 0.0, Forked(slot, 1, 100 + slot))
        step(pool, 0.0, ChildReady(slot, 1))
    return pool


def state(pool: Pool, slot: int = 0) -> State:
    return pool.slots[slot].state


def alarms(pool: Pool) -> list[tuple[float, Event]]:
    return [(alarm.at, alarm.event) for alarm in pool.alarms()]


# --- birth


def test_the_template_comes_first_and_then_a_child_for_every_slot() -> None:
    pool = Pool.of(2, Policy())
    assert step(pool, 0.0, Begin()) == [StartTemplate(1)]
    assert step(pool, 0.0, Begin()) == []
    assert step(pool, 1.0, TemplateUp(1)) == [Fork(0, 1, 1, row=0), Fork(1, 1, 1, row=1)]
    assert step(pool, 1.0, TemplateUp(1)) == []


def test_the_pool_says_once_that_it_is_ready() -> None:
    pool = Pool.of(2, Policy())
    step(pool, 0.0, Begin())
    assert said(step(pool, 0.0, ContactMade())) == []
    step(pool, 0.0, TemplateUp(1))
    step(pool, 0.0, Forked(0, 1, 100))
    step(pool, 0.0, Forked(1, 1, 101))
    assert said(step(pool, 0.0, ChildReady(0, 1))) == ["ready"]
    assert said(step(pool, 0.0, ChildReady(1, 1))) == []
    assert pool.at_work() == 2


def test_the_pool_is_not_ready_before_redis_has_answered() -> None:
    pool = Pool.of(2, Policy())
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    step(pool, 0.0, Forked(0, 1, 100))
    step(pool, 0.0, Forked(1, 1, 101))
    assert said(step(pool, 0.0, ChildReady(0, 1))) == ["ready_no_redis"]
    assert said(step(pool, 0.0, ChildReady(1, 1))) == []
    assert said(step(pool, 1.0, ContactMade())) == ["ready"]


@pytest.mark.parametrize("event", [TemplateFailed(1, "no module"), TemplateGone(1, "signal 11")])
def test_an_import_that_fails_at_the_first_start_ends_everything_with_4(event: Event) -> None:
    pool = Pool.of(2, Policy())
    step(pool, 0.0, Begin())
    actions = step(pool, 1.0, event)
    assert LeaveLoop(4) in actions
    assert said(actions) == ["import_failed"]
    assert pool.alarms() == []


def test_an_import_that_takes_too_long_at_the_first_start_ends_everything_with_4() -> None:
    pool = Pool.of(2, Policy(boot_timeout_s=9.0))
    step(pool, 0.0, Begin())
    assert alarms(pool) == [(9.0, TemplateOverdue(1))]
    assert deeds(step(pool, 9.0, TemplateOverdue(1))) == [KillTemplate(1), LeaveLoop(4)]


def test_a_template_that_dies_later_is_replaced_with_back_off_and_its_children_go_on() -> None:
    pool = at_work()
    assert deeds(step(pool, 10.0, TemplateGone(1, "signal 9"))) == []
    assert pool.at_work() == 2
    assert alarms(pool) == [(10.5, TemplateBackoffOver())]
    assert step(pool, 10.5, TemplateBackoffOver()) == [StartTemplate(2)]
    assert deeds(step(pool, 11.0, TemplateFailed(2, "no module"))) == [KillTemplate(2)]
    assert alarms(pool) == [(12.0, TemplateBackoffOver())]  # a second more: it grows
    step(pool, 12.0, TemplateBackoffOver())
    assert step(pool, 13.0, TemplateUp(3)) == []  # nobody is missing


def test_a_child_that_dies_while_there_is_no_template_is_replaced_by_the_next_one() -> None:
    pool = at_work()
    step(pool, 10.0, TemplateGone(1))
    assert deeds(step(pool, 10.1, Exited(0, 1, 100, None, 9))) == [Settle(0, 1, None, None, 9)]
    assert step(pool, 10.2, DeathSettled(0, 1)) == []
    step(pool, 10.5, TemplateBackoffOver())
    assert step(pool, 11.0, TemplateUp(2)) == [Fork(0, 2, 2, row=0)]


def test_failed_boots_are_tried_again_after_a_growing_pause() -> None:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    now, pauses = 0.0, []
    for life in range(1, 12):
        step(pool, now, Forked(0, life, 100 + life))
        step(pool, now, Exited(0, life, 100 + life, 1, None))
        assert state(pool) is State.BACKOFF
        ((at, event),) = alarms(pool)
        pauses.append(at - now)
        now = at
        assert deeds(step(pool, now, event)) == [Fork(0, life + 1, 1, row=0)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == BACKOFF_MOST_S


def test_children_killed_from_outside_while_they_boot_are_soon_replaced_unless_it_goes_on() -> None:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    now, pauses = 0.0, []
    for life in range(1, 9):
        step(pool, now, Forked(0, life, 100 + life))
        step(pool, now, Exited(0, life, 100 + life, None, 9))
        ((at, event),) = alarms(pool)
        pauses.append(at - now)
        now = at
        step(pool, now, event)
    assert max(pauses[:5]) < 0.1
    assert pauses[5:] == pytest.approx([16.0, 30.0, 30.0])


@pytest.mark.parametrize(
    ("end", "first_minute"),
    [((3, None), 7), ((None, 11), 7), ((None, 9), 8)],
    ids=["exits", "crashes", "is killed from outside"],
)
def test_a_slot_whose_children_die_at_once_costs_few_forks_a_minute(
    end: tuple[int | None, int | None], first_minute: int
) -> None:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    forks, now = [0.0], 0.0
    while now < 3600.0:
        life = len(forks)
        step(pool, now, Forked(0, life, 100 + life))
        step(pool, now, Exited(0, life, 100 + life, *end))
        ((now, event),) = alarms(pool)
        step(pool, now, event)
        forks.append(now)
    in_minute = [sum(60 * n <= at < 60 * (n + 1) for at in forks) for n in range(60)]
    assert in_minute[0] == first_minute
    assert set(in_minute[1:]) == {2}


def test_a_fork_that_failed_is_a_failed_boot() -> None:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    actions = step(pool, 0.0, ForkFailed(0, 1, "EAGAIN"))
    assert (deeds(actions), said(actions)) == ([], ["boot_failed"])
    assert state(pool) is State.BACKOFF


def test_a_child_that_does_not_get_ready_is_killed_and_backed_off() -> None:
    pool = at_work(1, boot_timeout_s=9.0)
    step(pool, 100.0, Exited(0, 1, 100, None, 9))
    step(pool, 100.0, DeathSettled(0, 1))
    step(pool, 100.0, Forked(0, 2, 200))
    assert alarms(pool) == [(109.0, BootOverdue(0, 2))]
    assert step(pool, 109.0, BootOverdue(0, 2)) == [HardKill(0, 2, 0, Verdict("boot"))]
    actions = step(pool, 109.1, Exited(0, 2, 200, None, 9))
    assert deeds(actions) == [Settle(0, 2, Verdict("boot"), None, 9)]
    assert state(pool) is State.BACKOFF


def test_a_template_that_does_not_answer_is_killed_before_its_row_is_given_away() -> None:
    pool = at_work(1, boot_timeout_s=9.0)
    step(pool, 100.0, Exited(0, 1, 100, None, 9))
    step(pool, 100.0, DeathSettled(0, 1))
    assert deeds(step(pool, 109.0, BootOverdue(0, 2))) == [KillTemplate(1)]
    assert state(pool) is State.STARTING
    assert alarms(pool) == [(math.inf, BootOverdue(0, 2)), (109.5, TemplateBackoffOver())]
    # It may have been slow only; else it is known after its death that there is no child.
    assert step(copy.deepcopy(pool), 109.1, Forked(0, 2, 200)) == []
    assert said(step(pool, 109.1, TemplateGone(1))) == ["boot_failed"]
    assert state(pool) is State.BACKOFF


def test_a_fork_that_a_dead_template_never_reported_never_was() -> None:
    pool = at_work(1)
    step(pool, 100.0, Exited(0, 1, 100, None, 9))
    assert said(step(pool, 100.5, TemplateGone(1))) == ["template_lost", "boot_failed"]
    assert state(pool) is State.BACKOFF


def test_a_child_that_no_slot_expects_is_killed_and_settled_like_everybody() -> None:
    pool = at_work(1)
    assert step(pool, 107.0, Forked(0, 2, 200)) == [KillStray(0, 2, 200)]
    assert step(pool, 107.1, Exited(0, 2, 200, None, 9)) == [Settle(0, 2, None, None, 9)]


def test_without_preloading_the_first_child_that_cannot_import_ends_everything_with_4() -> None:
    pool = Pool.of(2, Policy(preload=False))
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    step(pool, 0.0, Forked(0, 1, 100))
    step(pool, 0.0, Forked(1, 1, 101))
    actions = deeds(step(pool, 1.0, Exited(0, 1, 100, 4, None)))
    assert actions[0] == Settle(0, 1, None, 4, None)
    assert HardKill(1, 1, 0, Verdict("immediate")) in actions
    assert deeds(step(pool, 1.1, Exited(1, 1, 101, None, 9)))[-1] == LeaveLoop(4)


def test_without_preloading_a_first_import_that_takes_too_long_ends_everything_with_4() -> None:
    pool = Pool.of(1, Policy(preload=False, boot_timeout_s=9.0))
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    step(pool, 0.0, Forked(0, 1, 100))
    assert HardKill(0, 1, 0, Verdict("boot")) in step(pool, 9.0, BootOverdue(0, 1))
    assert LeaveLoop(4) in step(pool, 9.1, Exited(0, 1, 100, None, 9))


def test_once_a_child_was_ready_a_failing_import_is_only_backed_off() -> None:
    pool = at_work(1, preload=False)
    step(pool, 1.0, Exited(0, 1, 100, None, 9))
    step(pool, 1.0, Forked(0, 2, 200))
    assert deeds(step(pool, 2.0, Exited(0, 2, 200, 4, None))) == [Settle(0, 2, None, 4, None)]
    assert state(pool) is State.BACKOFF


# --- death


@pytest.mark.parametrize(("code", "signal"), [(None, 9), (None, 11), (1, None), (0, None)])
def test_a_dead_child_is_settled_and_replaced_in_the_same_step(code: int | None, signal: int | None) -> None:
    pool = at_work()
    actions = step(pool, 5.0, Exited(1, 1, 101, code, signal, began=3, busy=True))
    assert actions == [Settle(1, 1, None, code, signal), Fork(1, 2, 1, row=1, may_claim=False)]


def test_a_successor_claims_nothing_before_the_death_is_settled() -> None:
    """Else it would take up new work, and the task of the dead would find every child busy."""
    pool = at_work()
    step(pool, 5.0, Exited(0, 1, 100, None, 9, began=1, busy=True))
    step(pool, 5.01, Forked(0, 2, 200))
    assert step(pool, 5.02, DeathSettled(0, 1)) == [AllowClaims(0, 2)]
    assert step(pool, 5.03, DeathSettled(0, 1)) == []
    assert alarms(pool) == [(5.0 + BOOT_S, BootOverdue(0, 2))]


def test_a_settling_that_fails_keeps_nobody_for_long() -> None:
    pool = at_work()
    step(pool, 5.0, Exited(0, 1, 100, None, 9, began=1, busy=True))
    assert (6.0, MourningOver(0, 1)) in alarms(pool)
    assert step(pool, 6.0, MourningOver(0, 1)) == [AllowClaims(0, 2)]
    assert step(pool, 7.0, DeathSettled(0, 1)) == []


def test_only_the_last_death_of_a_slot_is_waited_for() -> None:
    pool = at_work()
    step(pool, 5.0, Exited(0, 1, 100, None, 9, began=1, busy=True))
    step(pool, 5.1, Forked(0, 2, 200))
    step(pool, 5.2, ChildReady(0, 2))
    step(pool, 5.3, Exited(0, 2, 200, None, 9))
    assert step(pool, 5.4, DeathSettled(0, 1)) == []
    assert step(pool, 5.5, DeathSettled(0, 2)) == [AllowClaims(0, 3)]


def test_idle_children_killed_from_outside_are_replaced_at_once_however_often() -> None:
    pool = at_work(1)
    for life in range(1, 50):
        actions = deeds(step(pool, 5.0, Exited(0, life, 99 + life, None, 9)))
        assert Fork(0, life + 1, 1, row=0, may_claim=False) in actions
        step(pool, 5.0, Forked(0, life + 1, 100 + life))
        step(pool, 5.0, ChildReady(0, life + 1))


def test_a_child_that_stayed_idle_beside_waiting_entries_is_replaced_and_blamed_for_nothing() -> None:
    pool = at_work()
    assert step(pool, 50.0, StayedIdle(1, 1, 7)) == [HardKill(1, 1, 0, Verdict("idle"))]
    assert step(pool, 50.0, StayedIdle(1, 1, 7)) == []
    actions = step(pool, 50.1, Exited(1, 1, 101, None, 9, began=7))
    assert actions == [
        Settle(1, 1, Verdict("idle"), None, 9),
        Fork(1, 2, 1, row=1, may_claim=False),
    ]
    assert step(pool, 50.2, StayedIdle(1, 1, 7)) == []


def test_the_stacks_of_one_child_can_be_asked_for() -> None:
    pool = at_work()
    assert step(pool, 5.0, StackAsked(1, 1)) == [ShowStack(1, 1)]
    assert step(pool, 5.0, StackAsked(1, 2)) == []
    assert step(pool, 5.0, StackAsked(7, 1)) == []


def test_children_that_end_by_themselves_before_their_first_task_do_not_spin() -> None:
    pool = at_work(1)
    now, forks = 5.0, 0
    life, pid = 1, 100
    while now < 125.0:
        step(pool, now, Exited(0, life, pid, 70, None))
        for at, event in alarms(pool):
            if isinstance(event, BackoffOver):
                now = at
                step(pool, now, event)
        life, pid, forks = life + 1, pid + 1, forks + 1
        step(pool, now, Forked(0, life, pid))
        step(pool, now, ChildReady(0, life))
    assert forks <= 10
    assert state(pool) is State.READY


def test_a_task_begun_ends_that_suspicion() -> None:
    pool = at_work(1)
    step(pool, 1.0, Exited(0, 1, 100, 70, None))
    step(pool, 1.0, Forked(0, 2, 200))
    step(pool, 1.0, ChildReady(0, 2))
    step(pool, 2.0, Exited(0, 2, 200, 70, None, began=1))
    assert pool.slots[0].failures == 0
    assert state(pool) is State.STARTING


def test_an_exit_that_no_slot_expects_is_settled_all_the_same() -> None:
    pool = at_work()
    assert step(pool, 5.0, Exited(0, 9, 4711, 0, None)) == [Settle(0, 9, None, 0, None)]
    assert step(pool, 5.0, Exited(0, 1, 4711, 0, None)) == [Settle(0, 1, None, 0, None)]
    assert pool.at_work() == 2


# --- timeouts, cancel, lost leases


def test_a_hard_timeout_takes_two_steps_and_blames_its_execution() -> None:
    pool = at_work()
    assert step(pool, 5.0, HardDue(0, 1, 3)) == [DumpStack(0, 1, 3)]
    assert step(pool, 5.0, HardDue(0, 1, 3)) == []
    assert step(pool, 5.1, DumpDone(0, 1, 3)) == [HardKill(0, 1, 3, Verdict("timeout", 3))]
    actions = step(pool, 5.2, Exited(0, 1, 100, None, 9, began=3, busy=True))
    assert actions == [
        Settle(0, 1, Verdict("timeout", 3), None, 9),
        Fork(0, 2, 1, row=0, may_claim=False),
    ]


def test_a_task_that_ends_while_its_stacks_are_dumped_is_not_killed() -> None:
    pool = at_work()
    step(pool, 5.0, HardDue(0, 1, 3))
    assert step(pool, 5.1, ExecutionOver(0, 1, 3)) == []
    assert step(pool, 5.1, DumpDone(0, 1, 3)) == []
    assert step(pool, 9.0, HardDue(0, 1, 4)) == [DumpStack(0, 1, 4)]


@pytest.mark.parametrize("event", [HardDue(0, 2, 3), SoftDue(0, 2, 3), Revoked(0, 2, 3, "superseded")])
def test_nothing_is_begun_against_another_life(event: Event) -> None:
    assert step(at_work(), 5.0, event) == []


def test_a_soft_timeout_is_sent_once_and_the_slot_recovers_with_the_execution() -> None:
    pool = at_work()
    assert step(pool, 5.0, SoftDue(0, 1, 3)) == [SoftKill(0, 1, 3, Order.SOFT_TIMEOUT)]
    assert step(pool, 5.0, SoftDue(0, 1, 3)) == []
    assert state(pool) is State.SOFT_TIMED_OUT
    assert step(pool, 6.0, ExecutionOver(0, 1, 3)) == []
    assert state(pool) is State.READY
    assert step(pool, 7.0, SoftDue(0, 1, 4)) == [SoftKill(0, 1, 4, Order.SOFT_TIMEOUT)]


def test_a_cancelled_task_is_told_and_killed_after_its_grace() -> None:
    pool = at_work(cancel_grace_s=5.0)
    revoked = Revoked(0, 1, 3, "cancelled")
    assert step(pool, 10.0, revoked) == [SoftKill(0, 1, 3, Order.CANCELLED)]
    assert step(pool, 11.0, revoked) == []  # seen again each second: the grace is not prolonged
    assert alarms(pool) == [(15.0, CancelGraceOver(0, 1, 3))]
    assert step(pool, 15.0, CancelGraceOver(0, 1, 3)) == [HardKill(0, 1, 3, Verdict("cancelled", 3))]


def test_a_cancelled_task_that_ends_in_time_is_not_killed() -> None:
    pool = at_work()
    step(pool, 10.0, Revoked(0, 1, 3, "cancelled"))
    step(pool, 11.0, ExecutionOver(0, 1, 3))
    assert alarms(pool) == []
    assert step(pool, 15.0, CancelGraceOver(0, 1, 3)) == []


def test_a_superseded_execution_is_killed_at_once_also_when_it_was_cancelled_before() -> None:
    pool = at_work()
    step(pool, 10.0, Revoked(0, 1, 3, "cancelled"))
    killed = step(pool, 11.0, Revoked(0, 1, 3, "superseded"))
    assert killed == [HardKill(0, 1, 3, Verdict("superseded", 3))]


def test_stuck_settling_is_a_kill_that_counts_as_a_crash() -> None:
    pool = at_work()
    assert step(pool, 10.0, SettlingStuck(0, 1, 3)) == [HardKill(0, 1, 3, Verdict("stuck", 3))]


def test_a_doomed_child_is_killed_once() -> None:
    pool = at_work()
    step(pool, 10.0, Revoked(0, 1, 3, "superseded"))
    for event in (HardDue(0, 1, 3), SettlingStuck(0, 1, 3), Revoked(0, 1, 3, "superseded"), GRACEFUL):
        assert not any(isinstance(a, HardKill | DumpStack) for a in step(pool, 10.0, event))


def test_stacks_are_shown_for_every_living_child() -> None:
    assert step(at_work(), 5.0, StacksAsked()) == [ShowStack(0, 1), ShowStack(1, 1)]


# --- the stop


def test_a_graceful_stop_waits_for_the_children_and_ends_with_0() -> None:
    pool = at_work()
    assert deeds(step(pool, 10.0, GRACEFUL)) == [CloseClaims(), OrderStop(0, 1), OrderStop(1, 1)]
    assert deeds(step(pool, 11.0, Exited(0, 1, 100, 0, None, began=5))) == [Settle(0, 1, None, 0, None)]
    actions = deeds(step(pool, 15.0, Exited(1, 1, 101, 0, None, began=5)))
    assert actions == [Settle(1, 1, None, 0, None), LeaveLoop(0)]


def test_running_tasks_are_warned_a_little_before_the_end_of_the_grace_and_then_killed() -> None:
    pool = at_work(shutdown_grace_s=25.0)
    step(pool, 10.0, GRACEFUL)
    assert alarms(pool) == [(35.0, GraceOver()), (33.0, GraceWarning())]
    assert step(pool, 33.0, GraceWarning()) == [SoftKill(n, 1, 0, Order.SHUTDOWN) for n in (0, 1)]
    assert step(pool, 33.0, GraceWarning()) == []
    killed = deeds(step(pool, 35.0, GraceOver()))
    assert killed == [HardKill(n, 1, 0, Verdict("grace")) for n in (0, 1)]
    step(pool, 35.1, Exited(0, 1, 100, None, 9, began=1, busy=True))
    actions = deeds(step(pool, 35.1, Exited(1, 1, 101, None, 9, began=1, busy=True)))
    assert actions == [Settle(1, 1, Verdict("grace"), None, 9), LeaveLoop(1)]


def test_an_idle_child_killed_at_the_end_of_the_grace_interrupts_nothing() -> None:
    pool = at_work(1)
    step(pool, 10.0, GRACEFUL)
    step(pool, 35.0, GraceOver())
    assert LeaveLoop(0) in step(pool, 35.1, Exited(0, 1, 100, None, 9, began=4, busy=False))


def test_a_task_that_times_out_while_we_stop_is_no_interruption() -> None:
    pool = at_work(1)
    step(pool, 10.0, GRACEFUL)
    step(pool, 11.0, HardDue(0, 1, 3))
    step(pool, 11.1, DumpDone(0, 1, 3))
    assert LeaveLoop(0) in step(pool, 11.2, Exited(0, 1, 100, None, 9, began=3, busy=True))


def test_a_task_whose_child_crashes_while_we_stop_was_interrupted() -> None:
    pool = at_work(1)
    step(pool, 10.0, GRACEFUL)
    assert LeaveLoop(1) in step(pool, 11.0, Exited(0, 1, 100, None, 11, began=3, busy=True))


def test_a_task_that_was_handed_back_when_told_of_the_stop_was_interrupted() -> None:
    pool = at_work(1)
    step(pool, 10.0, GRACEFUL)
    assert LeaveLoop(1) in step(pool, 11.0, Exited(0, 1, 100, 0, None, began=3, released=True))


def test_copies_of_a_stop_signal_are_one_and_a_later_one_means_now() -> None:
    pool = at_work()
    step(pool, 10.0, GRACEFUL)
    assert step(pool, 10.005, GRACEFUL) == []
    assert step(pool, 10.9, GRACEFUL) == []
    killed = deeds(step(pool, 13.0, GRACEFUL))
    assert killed == [HardKill(n, 1, 0, Verdict("immediate")) for n in (0, 1)]
    assert deeds(step(pool, 15.0, GRACEFUL)) == []


def test_an_immediate_stop_kills_at_once() -> None:
    killed = [a for a in step(at_work(), 10.0, IMMEDIATE) if isinstance(a, HardKill)]
    assert killed == [HardKill(n, 1, 0, Verdict("immediate")) for n in (0, 1)]


def test_a_child_that_is_being_forked_when_the_stop_comes_is_killed_when_it_is_there() -> None:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    assert deeds(step(pool, 1.0, GRACEFUL)) == [CloseClaims()]
    assert step(pool, 1.1, Forked(0, 1, 100)) == [HardKill(0, 1, 0, Verdict("immediate"))]
    assert LeaveLoop(0) in step(pool, 1.2, Exited(0, 1, 100, None, 9))


def test_a_stop_does_not_wait_for_a_fork_of_a_dead_template() -> None:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    step(pool, 1.0, GRACEFUL)
    assert LeaveLoop(0) in step(pool, 1.1, TemplateGone(1))


def test_a_stop_during_the_first_import_ends_at_once() -> None:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    assert deeds(step(pool, 1.0, GRACEFUL)) == [CloseClaims(), LeaveLoop(0)]


def test_a_stop_ends_slots_in_back_off() -> None:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    step(pool, 0.0, ForkFailed(0, 1, "EAGAIN"))
    assert LeaveLoop(0) in step(pool, 0.1, GRACEFUL)
    assert state(pool) is State.EMPTY


def test_a_killed_process_that_the_kernel_keeps_does_not_keep_us() -> None:
    pool = at_work(1, shutdown_grace_s=2.0)
    step(pool, 10.0, GRACEFUL)
    step(pool, 12.0, GraceOver())
    assert alarms(pool) == [(13.0, PatienceOver())]
    actions = step(pool, 13.0, PatienceOver())
    assert (said(actions), deeds(actions)) == (["left_behind"], [LeaveLoop(1)])


def test_an_exit_after_the_end_is_still_settled() -> None:
    pool = at_work(1, shutdown_grace_s=2.0)
    step(pool, 10.0, GRACEFUL)
    step(pool, 12.0, GraceOver())
    step(pool, 13.0, PatienceOver())
    late = step(pool, 13.1, Exited(0, 1, 100, None, 9, busy=True))
    assert late == [Settle(0, 1, Verdict("grace"), None, 9)]


def test_children_claim_once_redis_has_been_found_fit() -> None:
    assert deeds(step(at_work(1), 1.0, ContactMade())) == [OpenClaims(), BeginDuties()]


def test_a_contact_that_comes_during_the_stop_opens_nothing() -> None:
    pool = at_work(1)
    step(pool, 1.0, GRACEFUL)
    assert step(pool, 1.1, ContactMade()) == []


def test_a_refused_first_contact_stops_with_its_own_code() -> None:
    pool = at_work(1)
    assert said(step(pool, 1.0, ContactRefused("cluster"))) == ["refused", "stopping_now"]
    assert LeaveLoop(69) in step(pool, 1.1, Exited(0, 1, 100, None, 9, busy=True))


# --- a random world


@dataclass
class Child:
    """A child as the kernel and its row know it."""

    slot: int
    life: int
    pid: int
    ready: bool = False
    seq: int = 0
    killed: bool = False


@dataclass
class World:
    """Everything outside the pool: asked-for forks, living children, dumps that are under way.

    `silent`: lives that may not claim; `unsettled`: lives that have ended; `told`: lives that are to end;
    `up`: generations whose template takes fork requests; `reading`: settings are read."""

    asked: list[Fork] = field(default_factory=list)
    living: list[Child] = field(default_factory=list)
    dumping: set[tuple[int, int, int]] = field(default_factory=set)
    dumped: set[tuple[int, int, int]] = field(default_factory=set)
    silent: set[tuple[int, int]] = field(default_factory=set)
    unsettled: set[tuple[int, int]] = field(default_factory=set)
    told: set[tuple[int, int]] = field(default_factory=set)
    strays: int = 0
    starting: set[int] = field(default_factory=set)
    up: set[int] = field(default_factory=set)
    reading: bool = False

    def find(self, slot: int, life: int) -> Child | None:
        return next((c for c in self.living if (c.slot, c.life) == (slot, life)), None)


PROCS, MOST, SPARE = 3, 5, 1


class PoolMachine(RuleBasedStateMachine):
    """Feeds random events, fitting and stale ones, does what the actions say, and checks what must hold."""

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(tasks=4, memory=100, hard_memory=200)
        policy = Policy(boot_timeout_s=10.0, shutdown_grace_s=8.0, cancel_grace_s=3.0, limits=limits)
        self.pool = Pool.of(PROCS, policy, MOST + SPARE, MOST)
        self.wanted = PROCS
        self.claims = False
        self.world = World()
        self.now = 1000.0
        self.next_pid = 100
        self.stop_asked = 0.0
        self.left: int | None = None
        self.feed(Begin())

    # doing what the pool says

    def feed(self, event: Event) -> list[Action]:
        actions = step(self.pool, self.now, event)
        settles = [a for a in actions if isinstance(a, Settle)]
        if isinstance(event, Exited):
            assert [(s.slot, s.life) for s in settles] == [(event.slot, event.life)]
        else:
            assert settles == []
        for action in actions:
            self.do(action)
            if isinstance(action, OpenClaims | HoldClaims | CloseClaims):
                self.claims = isinstance(action, OpenClaims)
        return actions

    def do(self, action: Action) -> None:  # noqa: C901, PLR0912 - one case an action
        match action:
            case Fork():
                assert not self.pool.stopping, "no fork while stopping"
                assert self.left is None
                assert action.generation in self.world.up
                assert self.world.find(action.slot, action.life) is None
                self.world.asked.append(action)
                if not action.may_claim:
                    self.world.silent.add((action.slot, action.life))
            case AllowClaims():
                self.world.silent.remove((action.slot, action.life))
            case Settle():
                self.world.unsettled.add((action.slot, action.life))
            case HardKill():
                child = self.world.find(action.slot, action.life)
                assert child is not None, "a kill for a slot without a living child"
                assert not child.killed, "killed twice"
                key = (action.slot, action.life, action.seq)
                assert action.verdict.kind != "timeout" or key in self.world.dumped
                assert action.verdict.seq == action.seq
                child.killed = True
            case KillStray():
                child = self.world.find(action.slot, action.life)
                assert child is not None
                assert child.pid == action.pid
                child.killed = True
            case DumpStack():
                child = self.world.find(action.slot, action.life)
                assert child is not None
                assert not child.killed
                self.world.dumping.add((action.slot, action.life, action.seq))
            case OrderStop():
                assert self.world.find(action.slot, action.life) is not None
                assert self.pool.stopping or self.is_replaced(action)
                self.world.told.add((action.slot, action.life))
            case SoftKill() | ShowStack():
                assert self.world.find(action.slot, action.life) is not None
            case ReadSettings():
                assert not self.world.reading
                self.world.reading = True
            case StartTemplate():
                assert self.left is None
                assert not self.pool.stopping
                self.world.starting.add(action.generation)
            case KillTemplate() | RetireTemplate():
                self.world.up.discard(action.generation)
                self.world.starting.discard(action.generation)
            case LeaveLoop():
                assert self.left is None, "left twice"
                self.left = action.exit_code
            case _:
                pass

    def is_replaced(self, order: OrderStop) -> bool:
        """Nobody is told to end for a reload before a successor stands by that is ready; but a successor, or
        who has grown too large or is one too many."""
        standby, slot = self.pool.standbys.get(order.slot), self.pool.find(order.slot, order.life)
        return (slot is not None and slot.leaving in ("memory", "surplus")) or (
            standby is not None
            and (
                standby.life == order.life
                or (
                    standby.state is State.READY
                    and standby.generation > self.pool.slots[order.slot].generation
                )
            )
        )

    # what may happen

    @initialize(stands=st.booleans())
    def it_stands_already(self, stands: bool) -> None:
        if stands:
            for _ in range(3):
                self.all_goes_well(None)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5, 9.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        """Alarms go off in their order, each at most a little late."""
        until = self.now + seconds
        while True:
            due = [a for a in self.pool.alarms() if a.at <= until]
            if not due:
                break
            first = min(due, key=lambda a: a.at)
            self.now = max(self.now, first.at)
            self.feed(overdue([first], self.now)[0])
            assert first not in self.pool.alarms(), f"it would go off for ever: {first}"
        self.now = until

    @precondition(lambda self: bool(self.world.starting))
    @rule(ending=st.sampled_from(["up", "up", "up", "failed"]))
    def template_answers(self, ending: Literal["up", "failed"] = "up") -> None:
        generation = min(self.world.starting)
        self.world.starting.discard(generation)
        if ending == "up":
            self.world.up.add(generation)
            self.feed(TemplateUp(generation))
        else:
            self.feed(TemplateFailed(generation, "no module"))
            self.feed(TemplateGone(generation, "exit code 4"))

    @rule(data=st.data())
    def template_dies(self, data: st.DataObject) -> None:
        """What it was asked for and had not reported never comes. A killed or retired one dies, too."""
        generation = data.draw(st.integers(1, self.pool.generations))
        self.world.up.discard(generation)
        self.world.starting.discard(generation)
        self.feed(TemplateGone(generation, "signal 9"))
        self.world.asked = [fork for fork in self.world.asked if fork.generation != generation]

    @rule()
    def somebody_wants_a_reload(self) -> None:
        before = self.pool.reload
        self.feed(ReloadAsked())
        assert before is None or self.pool.reload is before, "it follows what is under way"

    @precondition(lambda self: self.world.reading)
    @rule(good=st.sampled_from([True, True, True, False]))
    def settings_are_read(self, good: bool = True) -> None:
        self.world.reading = False
        policy = Policy(boot_timeout_s=10.0, shutdown_grace_s=8.0, cancel_grace_s=3.0)
        self.feed(SettingsRead(policy) if good else SettingsRefused("bad TOML"))

    @rule(number=st.integers(0, PROCS))
    def all_goes_well_for_a_while(self, number: int) -> None:
        """A reload comes to its end, whatever was before; one child works on a long task."""
        if self.pool.stopping or self.left is not None or not self.pool.imported:
            return
        long = next(((slot.number, slot.life) for slot in self.pool.slots[number:]), None)
        for _ in range(60):
            self.all_goes_well(long)
        assert self.pool.reload is None
        assert not self.pool.reload_wanted
        assert self.pool.boots_held_until == 0.0
        busy = [slot for slot in self.pool.slots if slot.state is State.STOPPING]
        assert len(busy) <= 1
        late = [slot for slot in busy if slot.number not in self.pool.closed]
        old = [slot.number for slot in late if slot.generation < self.pool.era]
        assert old == list(self.pool.standbys)
        assert all(standby.state is State.READY for standby in self.pool.standbys.values())
        assert (
            self.pool.reloaded is None
            or not self.pool.reloaded.done
            or all(
                slot.generation >= self.pool.era
                for slot in self.pool.slots
                if slot not in busy and slot.number not in self.pool.closed
            )
        )

    def all_goes_well(self, long: tuple[int, int] | None) -> None:
        if self.world.reading:
            self.settings_are_read(True)
        if self.world.starting:
            self.template_answers("up")
        for fork in list(self.world.asked):
            self.world.asked.remove(fork)
            self.birth(fork)
        for child in list(self.world.living):
            life = (child.slot, child.life)
            if child.killed or (life in self.world.told and life != long):
                self.world.living.remove(child)
                how = (None, 9) if child.killed else (0, None)
                self.feed(Exited(child.slot, child.life, child.pid, *how, 1))
            elif not child.ready:
                child.ready = True
                self.feed(ChildReady(child.slot, child.life))
        for dead in sorted(self.world.unsettled):
            self.feed(DeathSettled(*dead))
        self.world.unsettled.clear()
        self.time_passes(3.0)

    @precondition(lambda self: bool(self.world.asked))
    @rule(data=st.data(), works=st.sampled_from([True, True, True, False]))
    def fork_is_answered(self, data: st.DataObject, works: bool) -> None:
        fork = self.world.asked.pop(data.draw(st.integers(0, len(self.world.asked) - 1)))
        if not works:
            self.feed(ForkFailed(fork.slot, fork.life, "EAGAIN"))
            return
        self.birth(fork)

    def birth(self, fork: Fork) -> None:
        self.next_pid += 1
        self.world.living.append(Child(fork.slot, fork.life, self.next_pid))
        self.feed(Forked(fork.slot, fork.life, self.next_pid))

    def some_child(self, data: st.DataObject) -> Child:
        return data.draw(st.sampled_from(self.world.living))

    @precondition(lambda self: bool(self.world.living))
    @rule(data=st.data())
    def child_gets_ready(self, data: st.DataObject) -> None:
        child = self.some_child(data)
        if not child.killed:
            child.ready = True
            size = data.draw(st.sampled_from([0, 50, 50, 50, 95])) if self.pool.proven else 50
            self.feed(ChildReady(child.slot, child.life, size))

    @precondition(lambda self: bool(self.world.living))
    @rule(data=st.data(), stale=st.sampled_from([0, 0, 0, 1]))
    def execution_goes_wrong(self, data: st.DataObject, stale: int) -> None:
        child = self.some_child(data)
        if child.killed or not child.ready:
            return
        where = (child.slot, child.life - stale, data.draw(st.integers(1, 3)))
        events: list[Event] = [
            SoftDue(*where),
            HardDue(*where),
            Revoked(*where, "cancelled"),
            Revoked(*where, "superseded"),
            SettlingStuck(*where),
            StayedIdle(*where),
            ExecutionOver(*where),
            MemorySeen(where[0], where[1], 150, where[2]),
            MemorySeen(where[0], where[1], 250, data.draw(st.sampled_from([0, where[2]]))),
            LeaveOverdue(where[0], where[1]),
        ]
        self.feed(data.draw(st.sampled_from(events)))

    @precondition(lambda self: bool(self.world.dumping))
    @rule(data=st.data(), still=st.booleans())
    def dump_ends(self, data: st.DataObject, still: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.dumping)))
        self.world.dumping.discard(key)
        if still:
            self.world.dumped.add(key)
            self.feed(DumpDone(*key))
        else:
            self.feed(ExecutionOver(*key))

    @precondition(lambda self: bool(self.world.living))
    @rule(
        data=st.data(),
        end=st.sampled_from([(0, None), (1, None), (70, None), (None, 9), (None, 11)]),
        began=st.integers(0, 2),
    )
    def child_dies(self, data: st.DataObject, end: tuple[int | None, int | None], began: int) -> None:
        child = self.some_child(data)
        self.world.living.remove(child)
        code, signal = (None, 9) if child.killed else end
        self.feed(Exited(child.slot, child.life, child.pid, code, signal, began, busy=began > 1))

    @precondition(lambda self: bool(self.world.unsettled))
    @rule(data=st.data())
    def death_is_settled(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(sorted(self.world.unsettled)))
        self.world.unsettled.discard(life)
        self.feed(DeathSettled(*life))

    @rule(by=st.sampled_from([1, 1, -1, -1, 3, -3]), data=st.data())
    def another_number_is_asked_for(self, by: int, data: st.DataObject) -> None:
        busy = frozenset(child.slot for child in self.world.living if data.draw(st.booleans()))
        self.feed(ResizeAsked(by, busy))
        if not self.pool.stopping and self.left is None:
            self.wanted = max(1, min(MOST, self.wanted + by))

    @rule(event=st.sampled_from([QuietAsked(), ResumeAsked(), ContactMade()]))
    def claims_are_held_or_opened(self, event: Event) -> None:
        self.feed(event)

    @rule(slot=st.integers(-1, PROCS), life=st.integers(0, 3))
    def nonsense_comes(self, slot: int, life: int) -> None:
        """Events of lives and slots that are not, which threads may send late."""
        if self.world.find(slot, life) is None:
            for event in (SoftDue(slot, life, 1), HardDue(slot, life, 1), BootOverdue(slot, life + 50)):
                assert self.feed(event) == []

    @rule(slot=st.integers(-1, PROCS), life=st.integers(0, 3))
    def somebody_wants_stacks(self, slot: int, life: int) -> None:
        self.feed(StacksAsked())
        self.feed(StackAsked(slot, life))

    @rule(mode=st.sampled_from([GRACEFUL, GRACEFUL, IMMEDIATE]), really=st.integers(0, 9))
    def stop_comes(self, mode: Stop, really: int) -> None:
        if really == 0:
            self.stop_asked = self.stop_asked or self.now
            self.feed(mode)

    # what must always hold

    @invariant()
    def no_more_children_than_slots(self) -> None:
        expected = self.pool.living()
        assert len(self.pool.slots) <= MOST
        assert [slot.number for slot in self.pool.slots] == list(range(len(self.pool.slots)))
        assert len(self.pool.standbys) <= SPARE
        assert all(standby.state in ALIVE for standby in self.pool.standbys.values())
        mine = [c for c in self.world.living if self.pool.find(c.slot, c.life)]
        strays = [c for c in self.world.living if c not in mine]
        assert len(mine) <= len(expected)
        assert strays == [] or self.left is not None

    @invariant()
    def rows_have_one_owner(self) -> None:
        rows = [slot.row for slot in self.pool.living()]
        assert sorted([*rows, *self.pool.free_rows]) == list(range(MOST + SPARE))

    @invariant()
    def every_empty_place_has_a_reason(self) -> None:
        for slot in self.pool.slots:
            if slot.state not in ALIVE and not self.pool.stopping and self.left is None:
                waits = slot.held_until > 0.0 or slot.number in self.pool.closed
                assert waits or self.pool.template.state != "up", f"{slot} is forgotten"

    @invariant()
    def no_change_of_their_number_is_lost_or_doubled(self) -> None:
        assert self.pool.procs() == self.wanted
        running = [s for s in self.pool.slots if s.number in self.pool.closed and s.state in ALIVE]
        assert all(slot.state in (State.STOPPING, State.DOOMED) for slot in running)

    @invariant()
    def claims_are_open_when_nobody_objects(self) -> None:
        pool = self.pool
        assert pool.left or self.claims == (pool.contact and not pool.quiet and not pool.stopping)

    @invariant()
    def who_may_not_claim_mourns(self) -> None:
        for slot in self.pool.living():
            silent = (slot.number, slot.life) in self.world.silent
            if self.pool.stands_by(slot):
                assert silent, slot
                continue
            assert self.pool.left or silent == bool(slot.mourned), slot
            assert self.pool.left or not slot.mourned or slot.mourned_until - self.now <= 1.0

    @invariant()
    def pauses_are_bounded(self) -> None:
        for slot in self.pool.slots:
            assert slot.held_until - self.now <= BACKOFF_MOST_S
        assert self.pool.template.retry_at - self.now <= BACKOFF_MOST_S

    @invariant()
    def a_graceful_stop_is_over_in_its_time(self) -> None:
        if self.stop_asked and self.left is None:
            assert self.now <= self.stop_asked + 8.0 + 1.0

    def teardown(self) -> None:
        """Whatever came before, a stop ends, with children that die when they are killed and with others."""
        if self.left is None:
            self.feed(GRACEFUL)
            for child in [c for c in self.world.living if c.killed][::2]:
                self.world.living.remove(child)
                self.feed(Exited(child.slot, child.life, child.pid, None, 9))
            self.time_passes(8.0 + 1.0)
        assert self.left is not None
        assert self.pool.alarms() == []


PoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolMachine = PoolMachine.TestCase
