"""A reload, event by event: what is begun, who goes when, and what a failure leaves. The random world is in
test_pool.py."""

from __future__ import annotations

import os

import pytest

from dtq_child.settings import defaults
from dtq_supervisor import snapshot
from dtq_supervisor.configuration import Configuration, fixed
from dtq_supervisor.events import (
    Action,
    AdoptSettings,
    AllowClaims,
    BootOverdue,
    ChildReady,
    CloseClaims,
    DeathSettled,
    Event,
    Exited,
    Fork,
    Forked,
    HardKill,
    KillTemplate,
    OrderStop,
    ReadSettings,
    ReloadAsked,
    ReloadDue,
    RetireTemplate,
    SettingsRead,
    SettingsRefused,
    Settle,
    StartTemplate,
    Stop,
    StopMode,
    TemplateFailed,
    TemplateGone,
    TemplateOverdue,
    TemplateUp,
    Verdict,
)
from dtq_supervisor.notice import NoNotice, Notice, read, told_of
from dtq_supervisor.pool import Policy, Pool, step
from dtq_supervisor.recycling import Limits
from dtq_supervisor.roster import Reloaded
from dtq_supervisor.slot import State
from tests.unit.test_pool import deeds, said

CURRENT = defaults(app="shop:app", procs=2)
CHANGED = defaults(app="shop:app", procs=3, visibility_timeout_s=60, timeout_s=9)


def at_work(procs: int = 2) -> Pool:
    """All READY: slot n has pid 100 + n, life 1; rows for successors, too."""
    pool = Pool.of(procs, Policy(), procs + max(1, procs // 4))
    feed(pool, 0.0, TemplateUp(1))
    for slot in range(procs):
        feed(pool, 0.0, Forked(slot, 1, 100 + slot), ChildReady(slot, 1))
    return pool


def feed(pool: Pool, now: float, *events: Event) -> list[Action]:
    """Everything that is done about them."""
    if not pool.generations:
        pool.generations, pool.template.generation, pool.template.state = 1, 1, "starting"
    return [action for event in events for action in step(pool, now, event)]


def canary_of(pool: Pool, policy: Policy | None = None) -> Fork:
    """Up to the birth of the canary, pid 200."""
    feed(pool, 10.0, ReloadAsked(), SettingsRead(policy or Policy()))
    (fork,) = feed(pool, 11.0, TemplateUp(2))
    assert isinstance(fork, Fork)
    feed(pool, 11.0, Forked(fork.slot, fork.life, 200))
    return fork


def outcome(pool: Pool) -> Reloaded:
    assert pool.reloaded is not None
    return pool.reloaded


def test_settings_come_first_then_a_template_then_one_child_alone() -> None:
    pool = at_work()
    assert deeds(feed(pool, 10.0, ReloadAsked())) == [ReadSettings()]
    assert feed(pool, 10.0, SettingsRead(Policy())) == [StartTemplate(2, candidate=True)]
    assert feed(pool, 11.0, TemplateUp(2)) == [Fork(0, 2, 2, row=2, may_claim=False)]
    assert feed(pool, 11.0, TemplateUp(2)) == []
    assert pool.at_work() == 2


def test_an_old_child_is_told_to_end_when_its_successor_is_ready_and_that_claims_when_it_is_settled() -> None:
    pool = at_work()
    canary_of(pool)
    ready = deeds(feed(pool, 12.0, ChildReady(0, 2)))
    assert ready == [RetireTemplate(1), AdoptSettings(), OrderStop(0, 1)]
    gone = deeds(feed(pool, 12.1, Exited(0, 1, 100, 0, None)))
    assert gone == [Settle(0, 1, None, 0, None), Fork(1, 2, 2, row=0, may_claim=False)]
    assert feed(pool, 12.2, DeathSettled(0, 1)) == [AllowClaims(0, 2)]
    assert (pool.slots[0].life, pool.slots[0].generation) == (2, 2)
    feed(pool, 12.3, Forked(1, 2, 201))
    assert deeds(feed(pool, 12.3, ChildReady(1, 2))) == [OrderStop(1, 1)]
    assert said(feed(pool, 12.4, Exited(1, 1, 101, 0, None))) == ["reloaded"]
    assert outcome(pool) == Reloaded(1, 10.0, True, "", 2)
    assert pool.replaced["reload"] == 2


def test_at_most_a_quarter_is_replaced_at_a_time() -> None:
    pool = at_work(8)
    fork = canary_of(pool)
    forks = [a for a in feed(pool, 12.0, ChildReady(fork.slot, fork.life)) if isinstance(a, Fork)]
    assert len(forks) == 1  # the canary is the other one
    assert len(pool.living()) == 10


@pytest.mark.parametrize(
    "event", [TemplateFailed(2, "no module"), TemplateGone(2, "signal 11"), TemplateOverdue(2)]
)
def test_a_template_that_fails_leaves_everything_as_it_was(event: Event) -> None:
    pool = at_work()
    feed(pool, 10.0, ReloadAsked(), SettingsRead(Policy(boot_timeout_s=5.0)))
    actions = feed(pool, 15.0, event)
    assert (said(actions), deeds(actions)) == (["reload_failed"], [KillTemplate(2)])
    assert (pool.template.generation, pool.template.state, pool.at_work()) == (1, "up", 2)
    assert pool.policy == Policy()
    assert pool.alarms() == []
    assert not outcome(pool).done


def test_refused_settings_start_nothing() -> None:
    pool = at_work()
    feed(pool, 10.0, ReloadAsked())
    actions = feed(pool, 10.0, SettingsRefused("timeout_s: bad"))
    assert (said(actions), deeds(actions)) == (["reload_failed"], [])
    assert outcome(pool).reason == "timeout_s: bad"


def test_a_canary_that_dies_fails_the_reload_and_the_old_template_forks_on() -> None:
    pool = at_work()
    canary_of(pool)
    actions = feed(pool, 12.0, Exited(0, 2, 200, 7, None))
    assert deeds(actions) == [Settle(0, 2, None, 7, None), KillTemplate(2)]
    assert "exit code 7" in outcome(pool).reason
    assert pool.standbys == {}
    refilled = deeds(feed(pool, 13.0, Exited(1, 1, 101, None, 9)))
    assert refilled[-1] == Fork(1, 2, 1, row=1, may_claim=False)


def test_a_canary_that_hangs_is_killed_with_its_template() -> None:
    pool = at_work()
    canary_of(pool, Policy(boot_timeout_s=5.0))
    actions = deeds(feed(pool, 16.0, BootOverdue(0, 2)))
    assert actions == [KillTemplate(2), HardKill(0, 2, 0, Verdict("reload"))]
    assert "within 5 s" in outcome(pool).reason
    assert said(feed(pool, 16.1, Exited(0, 2, 200, None, 9))) == []
    assert pool.standbys == {}
    assert pool.at_work() == 2


def test_a_canary_too_large_for_the_new_limits_fails_the_reload() -> None:
    pool = at_work()
    canary_of(pool, Policy(limits=Limits(memory=100 << 20)))
    feed(pool, 12.0, ChildReady(0, 2, 99 << 20))
    assert "--max-memory-per-child 100M cannot work" in outcome(pool).reason
    assert pool.policy.limits == Limits()


def test_a_child_that_dies_before_the_canary_is_ready_is_replaced_by_the_old_generation() -> None:
    pool = at_work()
    canary_of(pool)
    died = deeds(feed(pool, 12.0, Exited(0, 1, 100, None, 9)))
    assert died == [Settle(0, 1, None, None, 9), Fork(0, 3, 1, row=0, may_claim=False)]
    feed(pool, 12.1, Forked(0, 3, 300), ChildReady(0, 3))
    assert OrderStop(0, 3) in feed(pool, 12.2, ChildReady(0, 2))


def test_a_child_that_dies_after_that_has_its_successor_or_one_of_the_new_generation() -> None:
    pool = at_work()
    canary_of(pool)
    feed(pool, 12.0, ChildReady(0, 2))
    died = deeds(feed(pool, 12.1, Exited(1, 1, 101, None, 9)))
    assert died == [Settle(1, 1, None, None, 9), Fork(1, 2, 2, row=1, may_claim=False)]
    assert said(feed(pool, 12.2, Exited(0, 1, 100, 0, None))) == ["reloaded"]


def test_a_long_task_gives_up_its_turn_and_has_a_successor_again_in_the_end() -> None:
    pool = at_work(3)
    canary_of(pool)
    feed(pool, 12.0, ChildReady(0, 2))
    due = min(alarm.at for alarm in pool.alarms())
    assert feed(pool, due, ReloadDue()) == [OrderStop(0, 2)]  # the successor, which others need now
    forks = feed(pool, 15.0, Exited(0, 2, 200, 0, None))
    assert forks == [Settle(0, 2, None, 0, None), Fork(1, 2, 2, row=3, may_claim=False)]
    for slot in (1, 2):
        feed(pool, 16.0, Forked(slot, 2, 300 + slot), ChildReady(slot, 2))
        actions = feed(pool, 16.0, Exited(slot, 1, 100 + slot, 0, None), DeathSettled(slot, 1))
    assert "reloaded_but" in said(actions)
    assert [a for a in actions if isinstance(a, Fork)] == [Fork(0, 3, 2, row=2, may_claim=False)]
    assert pool.slots[0].state is State.STOPPING


def test_successors_that_fail_in_a_row_end_the_reload_and_the_others_work_on() -> None:
    pool = at_work(3)
    canary_of(pool)
    feed(pool, 12.0, ChildReady(0, 2))
    feed(pool, 12.1, Exited(0, 1, 100, 0, None))
    now = 12.1
    for life in (2, 3, 4):
        feed(pool, now, Forked(1, life, 400 + life))
        actions = feed(pool, now, Exited(1, life, 400 + life, 7, None))
        now = max((alarm.at for alarm in pool.alarms()), default=now)
        feed(pool, now, ReloadDue())
    assert said(actions) == ["successor_failed", "reload_failed"]
    assert [slot.generation for slot in pool.slots] == [2, 1, 1]
    assert pool.at_work() == 3
    assert pool.alarms() == [alarm for alarm in pool.alarms() if not isinstance(alarm.event, ReloadDue)]


def test_any_number_of_hangups_during_a_reload_are_one_more() -> None:
    pool = at_work()
    feed(pool, 10.0, ReloadAsked())
    assert deeds(feed(pool, 10.0, ReloadAsked(), ReloadAsked())) == []
    assert deeds(feed(pool, 10.1, SettingsRefused("bad"))) == [ReadSettings()]
    assert deeds(feed(pool, 10.2, SettingsRefused("bad"))) == []
    assert outcome(pool).number == 2


def test_a_hangup_during_the_first_import_is_answered_after_it() -> None:
    pool = Pool.of(1, Policy(), 2)
    assert deeds(feed(pool, 0.0, ReloadAsked())) == []
    assert ReadSettings() in feed(pool, 1.0, TemplateUp(1))


def test_a_stop_ends_both_generations() -> None:
    pool = at_work()
    canary_of(pool)
    actions = deeds(feed(pool, 12.0, Stop(StopMode.GRACEFUL)))
    assert actions == [
        CloseClaims(),
        KillTemplate(2),
        OrderStop(0, 1),
        OrderStop(1, 1),
        HardKill(0, 2, 0, Verdict("immediate")),
    ]
    assert not outcome(pool).done
    assert feed(pool, 12.1, ReloadAsked()) == []


# --- settings, and what is told


def test_what_cannot_change_in_a_running_supervisor_is_named() -> None:
    from_ = Configuration(CURRENT, lambda: CHANGED)
    assert isinstance(from_.read(), SettingsRefused)
    assert fixed(CURRENT, CHANGED) == [
        "procs: changed from 2 to 3, which takes a restart",
        "visibility_timeout_s: changed from 30 to 60, which takes a restart",
    ]
    assert from_.settings is from_.candidate is CURRENT


def test_a_look_from_outside_shows_the_reload() -> None:
    pool = at_work()
    canary_of(pool)
    shot = snapshot.take(pool, [], 11.0, claiming=True)
    assert (shot.reload_phase, shot.standing_by, shot.reloaded) == ("canary", 1, None)
    feed(pool, 12.0, Exited(0, 2, 200, 7, None))
    shot = snapshot.take(pool, [], 12.0, claiming=True)
    assert (shot.reload_phase, shot.standing_by, shot.reloaded) == ("", 0, outcome(pool))


def test_the_notice_is_read_as_it_was_told() -> None:
    pool = at_work()
    notice = Notice()
    try:
        notice.tell(told_of(pool))
        first = read(os.getpid())
        assert (first.generation, first.phase, first.children, first.last) == (1, "", ((1, 2),), None)
        feed(pool, 10.0, ReloadAsked(), SettingsRefused("bad \ud800" + "x" * 9000))
        notice.tell(told_of(pool))
        last = read(os.getpid()).last
        assert last is not None
        assert (last.outcome, last.begun, last.reason[:3]) == ("failed", 10.0, "bad")
        assert len(last.reason.encode()) <= 4000
    finally:
        notice.close()
    with pytest.raises(NoNotice):
        read(os.getpid())
