"""The server's clock beside ours: running on, jumping, and the window in which a call may be executed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtq_supervisor.server_clock import PATIENCE_MS, ServerClock

OFFSET_MS = 1_700_000_000_000
seconds = st.floats(0, 5)


def server_at(moment: float) -> int:
    return OFFSET_MS + round(moment * 1000)


@given(st.lists(st.tuples(seconds, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_a_clock_that_runs_on_never_jumps(calls: list[tuple[float, float, float]]) -> None:
    """Whatever the calls take, and whenever within them the server looks at its clock."""
    clock, now = ServerClock(100), 50.0
    for pause, took, share in calls:
        sent = now + pause
        now = sent + took
        assert clock.observe(sent, now, server_at(sent + took * share)) == 0.0
    assert clock.steady_since == 0.0


@given(st.floats(0, 1), st.floats(-3600, 3600).filter(lambda jump: abs(jump) > 2.5))
def test_a_jump_is_seen_and_dated(took: float, jump: float) -> None:
    clock = ServerClock(1000)
    clock.observe(10.0, 10.0 + took, server_at(10.0))
    seen = clock.observe(20.0, 20.5, server_at(20.0 + jump))
    assert (seen > 0) == (jump > 0)
    assert seen != 0.0
    assert clock.steady_since == 20.5
    assert clock.observe(21.0, 21.5, server_at(21.0 + jump)) == 0.0


@given(st.floats(0, 1), seconds, st.floats(0, PATIENCE_MS / 1000))
def test_a_call_that_is_executed_in_time_falls_into_the_window(
    took: float, pause: float, delay: float
) -> None:
    clock = ServerClock(100)
    clock.observe(10.0, 10.0 + took, server_at(10.0 + took / 2))
    now = 10.0 + took + pause
    window = clock.window(now)
    assert window is not None
    assert window[0] <= server_at(now + delay) <= window[1]


def test_one_that_waited_too_long_or_met_another_clock_does_not() -> None:
    clock = ServerClock(100)
    clock.observe(10.0, 10.0, server_at(10.0))
    window = clock.window(11.0)
    assert window is not None
    assert server_at(11.0 + PATIENCE_MS / 1000 + 0.2) > window[1]
    assert server_at(11.0 - 0.2) < window[0]


def test_nothing_is_known_before_the_first_reply() -> None:
    assert ServerClock(100).window(5.0) is None
