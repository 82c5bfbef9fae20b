"""The duty threads: started and stopped by name, never silently gone; how they reach the loop."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dtq_child.row import Counters
from dtq_supervisor import duties
from dtq_supervisor.duties import Duties
from dtq_supervisor.events import ContactMade, StacksAsked
from dtq_supervisor.inbox import Inbox
from dtq_supervisor.seat import RedisPulse, summed
from tests.support.waiting import until


@dataclass
class Probe:
    """Runs until it is told to stop, or dies as often as it was told to."""

    name: str
    deaths: int = 0
    done: bool = False
    lives: int = 0
    running: threading.Event = field(default_factory=threading.Event)

    def run(self, stop: threading.Event, healthy: Callable[[], bool]) -> None:
        self.lives += 1
        if self.lives <= self.deaths:
            raise SystemExit("even this") if self.lives % 2 else ValueError("or this")
        self.running.set()
        if not self.done:
            stop.wait()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duties, "RESTART_FIRST_S", 0.001)
    monkeypatch.setattr(duties, "RESTART_MOST_S", 0.002)


def run(*probes: Probe) -> Duties:
    return Duties(probes, lambda: True)


def in_a_second() -> float:
    return time.monotonic() + 1.0


def test_they_are_started_and_stopped_by_name() -> None:
    first, second = Probe("first"), Probe("second")
    both = run(first, second)
    both.start("first")
    assert first.running.wait(5)
    assert not second.running.is_set()
    both.start()
    assert second.running.wait(5)
    both.stop("first")
    assert both.join(in_a_second(), ["first"]) == []
    assert both.join(time.monotonic()) == ["second"]
    both.stop()
    assert both.join(in_a_second()) == []
    assert (first.lives, second.lives) == (1, 1)


def test_one_that_dies_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe("mortal", deaths=3)
    some = run(probe)
    some.start()
    assert probe.running.wait(5)
    some.stop()
    assert some.join(in_a_second()) == []
    assert probe.lives == 4
    assert [r.getMessage() for r in caplog.records].count("mortal failed") == 3


def test_one_whose_work_is_done_is_not_started_again() -> None:
    probe = Probe("brief", done=True)
    some = run(probe)
    some.start()
    assert some.join(in_a_second()) == []
    some.start()
    assert probe.lives == 1


def test_one_that_was_stopped_before_it_began_never_begins() -> None:
    probe = Probe("late")
    some = run(probe)
    some.stop("late", "unknown")
    some.start()
    assert some.join(time.monotonic()) == []
    assert probe.lives == 0


def test_what_is_put_into_the_inbox_wakes_the_loop_and_comes_in_order() -> None:
    inbox = Inbox()
    assert inbox.take() == []
    threads = [threading.Thread(target=inbox.put, args=(ContactMade(),)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inbox.put(StacksAsked())
    assert select.select([inbox], [], [], 0)[0]
    assert inbox.take() == [ContactMade()] * 20 + [StacksAsked()]
    assert not select.select([inbox], [], [], 0)[0]
    inbox.close()


def test_a_connection_is_good_since_its_last_failure_and_whole_since_its_last_slow_reply() -> None:
    pulse = RedisPulse()
    assert (pulse.ok_since(), pulse.whole_since(99.0)) == (0.0, 0.0)
    pulse.success(99.9, 100.0)
    pulse.success(101.0, 101.1)
    assert (pulse.ok_since(), pulse.whole_since(101.2)) == (100.0, 100.0)
    pulse.success(102.0, 103.5)
    assert (pulse.ok_since(), pulse.whole_since(103.6)) == (100.0, 103.5)
    pulse.failure()
    assert (pulse.ok_since(), pulse.whole_since(104.0), pulse.errors) == (0.0, 0.0, 1)
    pulse.success(104.0, 104.1)
    assert (pulse.ok_since(), pulse.whole_since(104.2)) == (104.1, 104.1)


def test_whoever_asked_nothing_for_a_while_has_stood_still_and_has_not_heard_whole() -> None:
    pulse = RedisPulse()
    pulse.success(100.0, 100.1)
    pulse.success(101.0, 101.1)
    assert pulse.whole_since(150.0) == 0.0
    pulse.success(150.0, 150.1)
    assert (pulse.ok_since(), pulse.whole_since(150.2)) == (100.1, 150.1)


def test_counters_of_several_lives_add_up() -> None:
    total = summed([Counters(processed=2, claims=5), Counters(processed=3, failed=1), Counters()])
    assert total == Counters(processed=5, failed=1, claims=5)


def test_duties_learn_whether_the_loop_is_well() -> None:
    """The loop's stamp decides whether duties are well; they ask through the callable they were given."""
    asked = threading.Event()

    class Asking(Probe):
        def run(self, stop: threading.Event, healthy: Callable[[], bool]) -> None:
            while not stop.wait(0.001):
                if not healthy():
                    asked.set()

    well = threading.Event()
    well.set()
    some = Duties([Asking("asking")], well.is_set)
    some.start()
    assert not asked.wait(0.02)
    well.clear()
    until(asked.is_set, 5)
    some.stop()
    assert some.join(in_a_second()) == []
