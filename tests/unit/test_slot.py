"""A slot moves along the drawn edges and no others."""

from __future__ import annotations

import pytest

from dtq_supervisor.slot import (
    ALIVE,
    BACKOFF_FIRST_S,
    BACKOFF_MOST_S,
    EDGES,
    IllegalEdge,
    Slot,
    State,
    backoff,
)

DRAWN = {
    (State.EMPTY, State.STARTING),
    (State.STARTING, State.READY),
    (State.STARTING, State.DOOMED),
    (State.READY, State.SOFT_TIMED_OUT),
    (State.SOFT_TIMED_OUT, State.READY),
    (State.READY, State.STOPPING),
    (State.SOFT_TIMED_OUT, State.STOPPING),
    (State.READY, State.DOOMED),
    (State.SOFT_TIMED_OUT, State.DOOMED),
    (State.STOPPING, State.DOOMED),
    (State.STARTING, State.BACKOFF),
    (State.DOOMED, State.BACKOFF),
    (State.STARTING, State.EMPTY),
    (State.READY, State.EMPTY),
    (State.SOFT_TIMED_OUT, State.EMPTY),
    (State.STOPPING, State.EMPTY),
    (State.DOOMED, State.EMPTY),
    (State.BACKOFF, State.STARTING),
    (State.BACKOFF, State.EMPTY),
}


def test_the_edges_are_those_of_the_design() -> None:
    assert {(source, edge.to) for edge in EDGES.values() for source in edge.sources} == DRAWN


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("state", State)
def test_an_edge_is_taken_from_its_sources_only(name: str, state: State) -> None:
    slot = Slot(0, state)
    if state in EDGES[name].sources:
        slot.take(name)
        assert slot.state is EDGES[name].to
    else:
        with pytest.raises(IllegalEdge, match=name):
            slot.take(name)
        assert slot.state is state


def test_a_new_life_remembers_nothing_that_was_begun_against_the_last() -> None:
    slot = Slot(3, soft_seq=1, dump_seq=2, cancel_seq=3, pid=77, held_until=9.0)
    slot.begin_life(life=1, generation=2, row=5, boot_deadline=60.0)
    assert (slot.life, slot.generation, slot.row, slot.pid) == (1, 2, 5, 0)
    assert (slot.soft_seq, slot.dump_seq, slot.cancel_seq, slot.verdict) == (0, 0, 0, None)
    assert slot.is_now(1)
    assert not slot.is_now(2)


def test_a_slot_without_a_child_holds_no_life() -> None:
    slot = Slot(0, State.EMPTY, life=4)
    assert not slot.is_now(4)
    assert State.EMPTY not in ALIVE


def test_backoff_doubles_to_its_cap_and_stays_there() -> None:
    assert [backoff(n) for n in range(3)] == [BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert {backoff(n) for n in (7, 100, 10**9)} == {BACKOFF_MOST_S}


def test_holding_counts_the_failure() -> None:
    slot = Slot(0)
    assert slot.hold(100.0) == BACKOFF_FIRST_S
    assert (slot.failures, slot.held_until) == (1, 100.0 + BACKOFF_FIRST_S)
