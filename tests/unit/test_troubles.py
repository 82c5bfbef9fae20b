"""What the log says of an outage that nine duties meet: once, rarely, and that it is over when it is over."""

from __future__ import annotations

import logging

import pytest

from dtq_child.errors import BrokerRefused, BrokerUnavailable
from dtq_supervisor.logs import FACTS
from dtq_supervisor.troubles import Troubles

DUTIES = ("heartbeat", "settler", "cancels", "reaper", "leader", "scheduler")
AWAY = BrokerUnavailable("Connection refused.")


class Desk:
    """Troubles, their clock, and what the log has said: (second, fact, duty)."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 100.0
        self.troubles = Troubles(lambda: self.now)
        self._caplog = caplog

    def fail(self, *duties: str, error: Exception = AWAY, sent: float | None = None) -> None:
        for duty in duties:
            self.troubles.failed(duty, error, self.now if sent is None else sent)  # type: ignore[arg-type]

    def answer(self, *duties: str, sent: float | None = None) -> None:
        for duty in duties:
            self.troubles.answered(duty, self.now if sent is None else sent)

    def said(self) -> list[str]:
        """The facts told since the last call, without what is for debugging."""
        told = [getattr(r, FACTS)["fact"] for r in self._caplog.records if r.levelno > logging.DEBUG]
        self._caplog.clear()
        return told


@pytest.fixture
def desk(caplog: pytest.LogCaptureFixture) -> Desk:
    caplog.set_level(logging.DEBUG, "dtq.supervisor")
    return Desk(caplog)


def test_an_outage_of_a_minute_is_told_in_five_lines_by_all_duties_together(desk: Desk) -> None:
    for _ in range(600):
        desk.fail(*DUTIES)
        desk.now += 0.1
    assert desk.said() == ["redis_away", *["redis_still_away"] * 3]
    desk.answer(*DUTIES)
    assert desk.said() == ["redis_back"]


def test_a_duty_with_nothing_to_ask_does_not_end_an_outage(desk: Desk) -> None:
    desk.fail(*DUTIES)
    desk.now += 1
    for duty in DUTIES:
        desk.troubles.idle(duty)
    assert desk.said() == ["redis_away"]
    desk.answer("heartbeat")
    assert desk.said() == ["redis_back"]


def test_an_outage_is_over_when_the_last_that_failed_is_answered_or_idle(desk: Desk) -> None:
    """Reads go on while Redis refuses all writes for want of a replica: one duty is answered, one is not."""
    for _ in range(40):
        desk.fail("leader")
        desk.answer("reaper", "cancels")
        desk.now += 0.1
    assert desk.said() == ["redis_away"]
    desk.fail("scheduler", "leader")
    desk.now += 0.1
    desk.answer("reaper", "leader")
    assert desk.said() == []
    desk.troubles.idle("scheduler")
    assert desk.said() == ["redis_back"]


def test_a_reply_to_what_was_sent_before_the_failure_ends_nothing(desk: Desk) -> None:
    desk.fail("reaper", "reaper")
    desk.now += 1
    desk.answer("heartbeat", sent=99.0)
    desk.troubles.idle("reaper")
    assert desk.said() == ["redis_away"]


def test_a_connection_that_turns_out_dead_after_the_outage_begins_no_other(desk: Desk) -> None:
    desk.fail("reaper", "leader")
    desk.now += 1
    desk.answer("reaper", "leader")
    assert desk.said() == ["redis_away", "redis_back"]
    for duty in ("settler", "reconcile"):
        desk.now += 20
        desk.fail(duty)
        desk.now += 0.01
        desk.answer("reaper", duty)
    assert desk.said() == []


def test_one_duty_alone_is_away_when_it_fails_twice(desk: Desk) -> None:
    for _ in range(2):
        assert desk.said() == []
        desk.now += 0.1
        desk.fail("heartbeat")
        desk.answer("reaper")
    assert desk.said() == ["redis_away"]


def test_outages_in_quick_succession_are_not_each_told(desk: Desk) -> None:
    for _ in range(33):
        desk.fail("reaper", "leader")
        desk.now += 0.15
        desk.answer("reaper", "leader")
        desk.now += 0.15
    assert desk.said() == ["redis_away", "redis_back"] * 2


def test_what_redis_answers_and_refuses_is_told_for_each_duty(desk: Desk) -> None:
    no = BrokerRefused("NOPERM")
    for _ in range(290):
        desk.fail("leader", "heartbeat", error=no)
        desk.answer("reaper")
        desk.now += 0.1
    assert desk.said() == ["redis_refuses"] * 2
    desk.answer("leader")
    assert desk.said() == ["redis_accepts"]
    desk.now += 2
    desk.fail("heartbeat", error=no)
    assert desk.said() == ["redis_refuses"]


def test_an_error_that_redis_answers_ends_an_outage(desk: Desk) -> None:
    desk.fail("leader", "leader")
    desk.now += 1
    desk.fail("leader", error=BrokerRefused("NOPERM"))
    assert desk.said() == ["redis_away", "redis_back", "redis_refuses"]
