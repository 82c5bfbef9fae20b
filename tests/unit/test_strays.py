"""Which entries under our own names nobody answers for."""

from __future__ import annotations

import pytest

from dtq_child.retry import DEFAULT_RETRY
from dtq_child.row import Counters, Execution, Phase, Row
from dtq_supervisor.holdings import Child
from dtq_supervisor.strays import IDLE_MS, TURN_MS, Pending, suspects

BAND = "dtq:stream:default:p5"
LOST = Pending(BAND, "1-1", "w:0.1", "t1", "1")


def child(
    phase: Phase = Phase.READY, executing: str = "", held: tuple[str, ...] = (), *, torn: bool = False
) -> Child:
    execution = None
    if executing:
        execution = Execution(
            1, "t1", "probe", BAND, executing, 1, 1, 3, 0, 3, 1000, 1.0, 0.0, 2.0, DEFAULT_RETRY, 1.0
        )
    row = Row(
        life=1,
        pid=1,
        phase=phase,
        seq=1,
        execution=execution,
        held=tuple((BAND, entry_id) for entry_id in held),
        settling_since=0.0,
        counters=Counters(),
        idle_since=0.0,
        redis_ok_since=0.0,
        last_claim=0.0,
        stop=False,
        may_claim=True,
        renewed=0.0,
        order_kind=0,
        order_seq=0,
    )
    return Child(0, 0, 1, "w:0.1", None if torn else row)


def found(idle_ms: int = IDLE_MS + 1) -> list[tuple[Pending, int]]:
    return [(LOST, idle_ms)]


def test_one_that_no_row_names_is_suspect() -> None:
    assert suspects(found(), [child()], [child()], set()) == {LOST}
    assert suspects(found(), [], [], set()) == {LOST}, "its life is long over and settled"


@pytest.mark.parametrize("named", [child(Phase.EXECUTING, executing="1-1"), child(held=("1-1",))])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_row_that_names_it_before_or_after_answers_for_it(named: Child, when: str) -> None:
    rows = ([named], [child()]) if when == "before" else ([child()], [named])
    assert suspects(found(), *rows, set()) == set()


def test_a_death_that_is_still_to_be_settled_answers_for_it() -> None:
    assert suspects(found(), [], [], {"w:0.1"}) == set()
    assert suspects(found(), [], [], {"w:9.9"}) == {LOST}


def test_a_row_that_cannot_be_read_answers_for_all_of_its_own() -> None:
    assert suspects(found(), [child(torn=True)], [child()], set()) == set()


@pytest.mark.parametrize("phase", [Phase.CLAIMING, Phase.SETTLING])
def test_a_child_in_the_middle_of_a_turn_may_still_be_answered(phase: Phase) -> None:
    assert suspects(found(), [child(phase)], [child()], set()) == set()
    assert suspects(found(TURN_MS), [child(phase)], [child()], set()) == {LOST}
