"""SIGTSTP holds claims, SIGCONT opens them; neither does more than that."""

from __future__ import annotations

from dtq_supervisor.events import (
    Action,
    Begin,
    BeginDuties,
    CloseClaims,
    ContactMade,
    Forked,
    HoldClaims,
    LeaveLoop,
    OpenClaims,
    QuietAsked,
    ResumeAsked,
    Say,
    Stop,
    StopMode,
    TemplateUp,
)
from dtq_supervisor.pool import Policy, Pool, step


def deeds(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Say)]


def said(actions: list[Action]) -> list[str]:
    return [action.key for action in actions if isinstance(action, Say)]


def begun(*, contact: bool = True) -> Pool:
    pool = Pool.of(1, Policy())
    step(pool, 0.0, Begin())
    if contact:
        step(pool, 0.0, ContactMade())
    return pool


def test_claims_are_held_and_opened_again_once_each() -> None:
    pool = begun()
    actions = step(pool, 1.0, QuietAsked())
    assert (deeds(actions), said(actions)) == ([HoldClaims()], ["quiet"])
    assert step(pool, 2.0, QuietAsked()) == []
    actions = step(pool, 3.0, ResumeAsked())
    assert (deeds(actions), said(actions)) == ([OpenClaims()], ["resumed"])
    actions = step(pool, 4.0, ResumeAsked())
    assert (deeds(actions), said(actions)) == ([], ["not_quiet"])


def test_held_before_the_first_contact_they_stay_held_after_it() -> None:
    pool = begun(contact=False)
    step(pool, 1.0, QuietAsked())
    assert deeds(step(pool, 2.0, ContactMade())) == [BeginDuties()]
    assert deeds(step(pool, 3.0, ResumeAsked())) == [OpenClaims()]


def test_a_resume_opens_nothing_before_redis_has_been_found_fit() -> None:
    pool = begun(contact=False)
    step(pool, 1.0, QuietAsked())
    assert deeds(step(pool, 2.0, ResumeAsked())) == []
    assert deeds(step(pool, 3.0, ContactMade())) == [OpenClaims(), BeginDuties()]


def test_a_stop_closes_them_for_good() -> None:
    pool = begun()
    step(pool, 1.0, QuietAsked())
    assert deeds(step(pool, 2.0, Stop(StopMode.GRACEFUL))) == [CloseClaims(), LeaveLoop(0)]
    pool = begun()
    step(pool, 1.0, TemplateUp(1))
    step(pool, 1.0, Forked(0, 1, 100))
    step(pool, 1.0, QuietAsked())
    step(pool, 2.0, Stop(StopMode.GRACEFUL))
    for event in (ResumeAsked(), QuietAsked()):
        actions = step(pool, 3.0, event)
        assert (deeds(actions), said(actions)) == ([], ["too_late"])
