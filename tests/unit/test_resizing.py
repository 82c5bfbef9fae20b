"""One child more, one child fewer: which place it is, and where it ends."""

from __future__ import annotations

import pytest

from dtq_supervisor.events import (
    Action,
    Begin,
    ChildReady,
    Event,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    HardKill,
    LeaveLoop,
    OrderStop,
    ResizeAsked,
    Say,
    Settle,
    Stop,
    StopMode,
    TemplateGone,
    TemplateUp,
    Verdict,
)
from dtq_supervisor.pool import Policy, Pool, step
from dtq_supervisor.resizing import most_for
from dtq_supervisor.slot import State

MORE, FEWER = ResizeAsked(1), ResizeAsked(-1)


def deeds(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Say)]


def said(actions: list[Action]) -> list[str]:
    return [action.key for action in actions if isinstance(action, Say)]


def at_work(procs: int = 2, most: int = 4) -> Pool:
    """All READY: slot n has pid 100 + n, life 1."""
    pool = Pool.of(procs, Policy(), most=most)
    step(pool, 0.0, Begin())
    step(pool, 0.0, TemplateUp(1))
    for slot in range(procs):
        step(pool, 0.0, Forked(slot, 1, 100 + slot))
        step(pool, 0.0, ChildReady(slot, 1))
    return pool


def states(pool: Pool) -> list[State]:
    return [slot.state for slot in pool.slots]


def test_one_more_is_forked_at_once_in_a_new_place() -> None:
    pool = at_work()
    actions = step(pool, 1.0, MORE)
    assert deeds(actions) == [Fork(2, 1, 1, row=2)]
    assert actions[-1] == Say("info", "resized", {"name": "SIGTTIN", "procs": 3, "before": 2})


def test_several_that_came_together_are_so_many() -> None:
    pool = at_work()
    assert deeds(step(pool, 1.0, ResizeAsked(2))) == [Fork(2, 1, 1, row=2), Fork(3, 1, 1, row=3)]
    # Nobody has been born yet in two of these places, so there is nobody to kill.
    assert deeds(step(pool, 2.0, ResizeAsked(-3))) == [OrderStop(1, 1)]
    assert states(pool) == [State.READY, State.STOPPING, State.DOOMED, State.DOOMED]
    assert pool.procs() == 1


def test_at_its_bound_nothing_more_happens_and_that_is_said_once() -> None:
    pool = at_work()
    assert said(step(pool, 1.0, ResizeAsked(5))) == ["resized", "resize_most"]
    assert step(pool, 2.0, MORE) == []
    assert said(step(pool, 3.0, FEWER)) == ["resized"]
    assert said(step(pool, 4.0, ResizeAsked(2))) == ["resized", "resize_most"]
    assert pool.procs() == 4


def test_the_last_child_stays_and_that_is_said_once() -> None:
    pool = at_work()
    assert said(step(pool, 1.0, ResizeAsked(-7))) == ["resized", "resize_least"]
    assert step(pool, 2.0, FEWER) == []
    assert states(pool) == [State.READY, State.STOPPING]


def test_the_idle_one_with_the_highest_number_goes_first() -> None:
    pool = at_work(4)
    assert deeds(step(pool, 1.0, ResizeAsked(-1, frozenset({3, 2})))) == [OrderStop(1, 1)]
    assert deeds(step(pool, 1.0, ResizeAsked(-1, frozenset({3, 2})))) == [OrderStop(0, 1)]


def test_if_all_execute_the_highest_ends_at_its_task_boundary() -> None:
    pool = at_work(3)
    assert deeds(step(pool, 1.0, ResizeAsked(-1, frozenset({0, 1, 2})))) == [OrderStop(2, 1)]
    assert states(pool)[2] is State.STOPPING
    assert step(pool, 9.0, Exited(2, 1, 102, 0, None, began=1)) == [Settle(2, 1, None, 0, None)]
    assert states(pool)[2] is State.EMPTY


def test_a_child_that_boots_or_waits_to_goes_before_one_that_works_and_at_once() -> None:
    pool = at_work(3)
    step(pool, 1.0, Exited(0, 1, 100, None, 9))
    step(pool, 1.0, Forked(0, 2, 200))
    assert deeds(step(pool, 1.1, FEWER)) == [HardKill(0, 2, 0, Verdict("surplus"))]
    assert deeds(step(pool, 1.2, Exited(0, 2, 200, None, 9))) == [Settle(0, 2, Verdict("surplus"), None, 9)]
    assert states(pool) == [State.EMPTY, State.READY, State.READY]


def test_a_place_in_back_off_is_given_up() -> None:
    pool = at_work(2)
    step(pool, 1.0, Exited(0, 1, 100, None, 9))
    step(pool, 1.0, ForkFailed(0, 2, "EAGAIN"))
    assert deeds(step(pool, 1.1, FEWER)) == []
    assert states(pool) == [State.EMPTY, State.READY]
    assert [alarm for alarm in pool.alarms() if "Backoff" in str(alarm)] == []


@pytest.mark.parametrize("end", [ForkFailed(1, 2, "EAGAIN"), TemplateGone(1)])
def test_a_child_that_never_came_leaves_no_back_off_behind(end: Event) -> None:
    pool = at_work(2)
    step(pool, 1.0, Exited(1, 1, 101, None, 9))
    assert deeds(step(pool, 1.1, FEWER)) == []
    assert states(pool)[1] is State.DOOMED
    step(pool, 1.2, end)
    assert states(pool)[1] is State.EMPTY


def test_a_child_that_comes_when_it_is_not_wanted_any_more_is_killed() -> None:
    pool = at_work(2)
    step(pool, 1.0, Exited(1, 1, 101, None, 9))
    step(pool, 1.1, FEWER)
    assert step(pool, 1.2, Forked(1, 2, 201)) == [HardKill(1, 2, 0, Verdict("surplus"))]


def test_an_empty_place_is_filled_before_a_new_one_is_made() -> None:
    pool = at_work(3)
    step(pool, 1.0, ResizeAsked(-2))
    step(pool, 1.1, Exited(1, 1, 101, 0, None))
    assert deeds(step(pool, 2.0, MORE)) == [Fork(1, 2, 1, row=1, may_claim=False)]
    assert len(pool.slots) == 3


def test_one_more_while_closed_slots_still_work_is_a_child_now_and_not_later() -> None:
    pool = at_work(2, most=3)
    step(pool, 1.0, ResizeAsked(-1, frozenset({0, 1})))
    assert deeds(step(pool, 2.0, MORE)) == [Fork(2, 1, 1, row=2)]
    # There is no other place left: its child's end is waited for.
    assert deeds(step(pool, 2.0, MORE)) == []
    actions = step(pool, 5.0, Exited(1, 1, 101, 0, None, began=1))
    assert actions[-1] == Fork(1, 2, 1, row=1, may_claim=False)


def test_while_there_is_no_template_the_number_is_only_noted() -> None:
    pool = Pool.of(1, Policy(), most=2)
    step(pool, 0.0, Begin())
    assert deeds(step(pool, 0.5, MORE)) == []
    assert step(pool, 1.0, TemplateUp(1)) == [Fork(0, 1, 1, row=0), Fork(1, 1, 1, row=1)]


@pytest.mark.parametrize("event", [MORE, FEWER])
def test_a_stop_is_not_disturbed(event: ResizeAsked) -> None:
    pool = at_work(1)
    step(pool, 1.0, Stop(StopMode.GRACEFUL))
    actions = step(pool, 1.1, event)
    assert (said(actions), deeds(actions)) == (["too_late"], [])
    assert LeaveLoop(0) in step(pool, 2.0, Exited(0, 1, 100, 0, None))


@pytest.mark.parametrize(("procs", "most"), [(1, 2), (8, 16), (64, 128), (200, 264)])
def test_there_is_room_for_twice_as_many_and_for_64_more_at_most(procs: int, most: int) -> None:
    assert most_for(procs) == most
