"""Who is overdue, when to look again, and what a gap in the loop changes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtq_supervisor.deadlines import (
    MERCY_S,
    NO_GAP,
    SETTLING_MOST_S,
    Gap,
    Watched,
    confirmed,
    gap_between,
    next_look,
    overdue,
    row_alarms,
)
from dtq_supervisor.events import (
    Alarm,
    CancelGraceOver,
    Concerning,
    DumpDone,
    Event,
    ExecutionOver,
    HardDue,
    Revoked,
    SettlingStuck,
    SoftDue,
)


def due(row: Watched, now: float, redis_ok_since: float = 0.0, gap: Gap = NO_GAP) -> list[Event]:
    return overdue(row_alarms(row, redis_ok_since, gap), now)


def running(**more: float) -> Watched:
    given: dict[str, object] = {"soft_deadline": 110.0, "hard_deadline": 120.0, **more}
    return Watched(2, 7, executing=4, **given)  # type: ignore[arg-type]


def test_a_task_is_softly_overdue_and_then_hard() -> None:
    assert due(running(), 109.9) == []
    assert due(running(), 110.0) == [SoftDue(2, 7, 4)]
    assert due(running(), 120.0) == [SoftDue(2, 7, 4), HardDue(2, 7, 4)]


def test_what_was_begun_is_not_begun_again() -> None:
    assert due(running(soft_sent=4), 119.9) == []
    assert due(running(soft_sent=4, hard_sent=4), 500.0) == []


def test_an_idle_child_and_a_task_without_a_soft_timeout_have_no_such_deadline() -> None:
    assert row_alarms(Watched(0, 1), 0.0) == []
    assert due(running(soft_deadline=0.0), 119.9) == []


def test_settling_keeps_the_deadline_of_the_handler_from_being_enforced() -> None:
    row = Watched(2, 7, settling=4, hard_deadline=120.0, settling_since=119.0)
    assert due(row, 10_000.0) == []  # Redis is away: however long it takes


def test_settling_is_stuck_only_while_our_own_calls_succeed_long_enough() -> None:
    row = Watched(2, 7, settling=4, settling_since=119.0)
    assert due(row, 119.0 + SETTLING_MOST_S - 0.1, redis_ok_since=1.0) == []
    assert due(row, 119.0 + SETTLING_MOST_S, redis_ok_since=1.0) == [SettlingStuck(2, 7, 4)]
    back = 300.0
    assert due(row, back + SETTLING_MOST_S - 0.1, redis_ok_since=back) == []
    assert due(row, back + SETTLING_MOST_S, redis_ok_since=back) == [SettlingStuck(2, 7, 4)]


def test_what_was_begun_against_an_execution_that_is_over_is_void() -> None:
    row = Watched(2, 7, executing=5, hard_deadline=500.0, against=(4, 4, 0))
    assert due(row, 100.0) == [ExecutionOver(2, 7, 4)]
    assert due(Watched(2, 7, against=(4, 0, 0)), 100.0) == [ExecutionOver(2, 7, 4)]
    assert due(Watched(2, 7, executing=4, against=(4, 0, 4)), 100.0) == []


def test_the_loop_sleeps_until_the_next_deadline() -> None:
    alarms = row_alarms(running(), 0.0)
    assert next_look(alarms, 100.0) == pytest.approx(10.0)
    assert next_look(row_alarms(running(soft_sent=4), 0.0), 100.0) == pytest.approx(20.0)
    assert next_look(alarms, 130.0) == 0.0
    assert next_look([], 130.0) == math.inf


def test_a_short_pause_is_no_gap() -> None:
    assert gap_between(100.0, 101.9, missed_s=1.9) is None


def test_deadlines_that_fell_into_a_gap_are_enforced_a_second_later() -> None:
    """Both processes were stopped from 100 to 130; the handler may end within a second of waking up."""
    gap = gap_between(100.0, 130.0, missed_s=30.0)
    assert gap is not None
    assert due(running(), 130.0, gap=gap) == []
    assert due(running(soft_sent=4), 130.0 + MERCY_S, gap=gap) == [HardDue(2, 7, 4)]


def test_a_suspended_machine_is_a_gap_by_the_clock_that_counts_it() -> None:
    """The monotonic clock stood still: 1 s by it, an hour by the other."""
    assert gap_between(100.0, 101.0, missed_s=3600.0) == Gap(100.0, 101.0 + MERCY_S)


def test_a_deadline_outside_the_gap_is_not_moved() -> None:
    gap = Gap(100.0, 131.0)
    assert [gap.moved(at) for at in (99.0, 100.0, 131.0, 140.0)] == [99.0, 100.0, 131.0, 140.0]


CONCERNING: list[Concerning] = [
    SoftDue(2, 7, 4),
    HardDue(2, 7, 4),
    DumpDone(2, 7, 4),
    Revoked(2, 7, 4, "superseded"),
    CancelGraceOver(2, 7, 4),
]


@pytest.mark.parametrize("event", CONCERNING)
@pytest.mark.parametrize(
    "row",
    [None, Watched(2, 7), Watched(2, 7, executing=5), Watched(2, 7, settling=4), Watched(2, 8, executing=4)],
)
def test_a_row_that_has_moved_on_voids_the_event(event: Concerning, row: Watched | None) -> None:
    assert confirmed(event, row) == ExecutionOver(2, 7, 4)


@pytest.mark.parametrize("event", CONCERNING)
def test_an_unchanged_row_confirms_it(event: Concerning) -> None:
    assert confirmed(event, Watched(2, 7, executing=4)) == event


def test_stuck_settling_is_confirmed_by_settling_alone() -> None:
    event = SettlingStuck(2, 7, 4)
    assert confirmed(event, Watched(2, 7, settling=4)) == event
    assert confirmed(event, Watched(2, 7, executing=4)) == ExecutionOver(2, 7, 4)


TIMES = st.integers(0, 10**9).map(lambda ms: ms / 1000)


@given(st.lists(st.builds(lambda at: Alarm(at, SoftDue(0, 1, 1)), TIMES), max_size=9), TIMES)
def test_to_sleep_until_the_next_look_misses_nothing(alarms: list[Alarm], now: float) -> None:
    """Nothing is due before the next look, and at it something is, or there is nothing at all."""
    pause = next_look(alarms, now)
    if pause == math.inf:
        assert alarms == []
    elif pause == 0:
        assert overdue(alarms, now)
    else:
        assert not overdue(alarms, now)
        assert not overdue(alarms, now + pause * 0.999)


@given(TIMES, TIMES, TIMES)
def test_a_gap_never_brings_a_deadline_forward_nor_moves_it_past_its_end(
    a: float, b: float, at: float
) -> None:
    gap = Gap(min(a, b), max(a, b))
    assert at <= gap.moved(at) <= max(at, gap.until)
