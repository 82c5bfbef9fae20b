"""What the log says became of a task whose process died."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtq_child.retry import DEFAULT_RETRY
from dtq_child.row import Execution
from dtq_supervisor.fate import fate
from dtq_supervisor.judgement import Judgement

TASK = Execution(
    seq=1,
    task_id="018f",
    task_type="shop.resize",
    stream="dtq:stream:default:p5",
    entry_id="1-1",
    delivery=1,
    attempt=2,
    max_attempts=3,
    crashes=0,
    max_crashes=3,
    timeout_ms=1000,
    started=1.0,
    soft_deadline=0.0,
    hard_deadline=2.0,
    policy=DEFAULT_RETRY,
    claim_sent=0.9,
)
CRASH = Judgement("crash", False, TASK, "ChildDied", "it died")


@pytest.mark.parametrize(
    ("what", "crashes", "words"),
    [
        ("parked", 0, "runs again at once, crash 1 of 3"),
        ("dead", 2, "is dead-lettered: PoisonTask, crash 3 of 3"),
        ("released", 0, "is released, nothing spent"),
    ],
)
def test_a_crash_is_told_with_its_number(what: str, crashes: int, words: str) -> None:
    told = fate("018f", what, replace(CRASH, named=replace(TASK, crashes=crashes)), 0.5)
    assert told["fate"] == words
    assert (told["of_type"], told["attempt"], told["what"]) == (" (shop.resize)", 2, what)


def test_a_later_crash_is_told_with_its_delay() -> None:
    told = fate("018f", "scheduled", replace(CRASH, named=replace(TASK, crashes=1)), 0.5)
    assert told["fate"] == f"runs again in {told['delay_s']:g} s, crash 2 of 3"
    assert isinstance(told["delay_s"], float)
    assert told["delay_s"] > 0


def test_a_timeout_is_told_with_its_attempt() -> None:
    ended = Judgement("ended", True, TASK, "TaskTimeout", "too long", ("retry", 4000, "timeout"))
    assert fate("018f", "retry", ended, 0.5)["fate"] == "runs again in 4 s: TaskTimeout, attempt 2 of 3"
    assert fate("018f", "dead", ended, 0.5)["fate"] == "is dead-lettered: TaskTimeout, attempt 2 of 3"


def test_of_what_the_row_did_not_name_no_more_is_said_than_is_known() -> None:
    told = fate("another", "parked", CRASH, 0.5)
    assert told == {"what": "parked", "fate": "runs again at once", "of_type": ""}
    assert fate("another", "absorbed", CRASH, 0.5)["fate"] == "absorbed"
