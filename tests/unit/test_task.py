"""What a task is: its states, its record as read, the alphabets of its names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dtq_child.errors import InvalidTask
from dtq_child.task import (
    EDGES,
    TERMINAL,
    WAITING,
    Record,
    Status,
    check_idempotency_key,
    check_priority,
    check_queue,
    check_task_id,
    check_task_type,
    text,
)


def test_states_are_named_as_documented() -> None:
    assert {str(status) for status in Status} == {
        *("queued", "scheduled", "running", "retry_scheduled"),
        *("succeeded", "dead_lettered", "cancelled", "expired"),
    }
    assert TERMINAL | WAITING | {Status.RUNNING} == set(Status)
    assert not TERMINAL & WAITING


def test_only_an_operators_requeue_leads_out_of_an_end() -> None:
    out = {status: EDGES[status] for status in TERMINAL if EDGES[status]}
    assert out == {Status.DEAD_LETTERED: {Status.QUEUED}}


def test_every_state_can_be_reached_and_left() -> None:
    reached: set[Status | None] = {None}
    while more := {after for before in reached for after in EDGES[before]} - reached:
        reached |= more
    assert reached == {None, *Status}
    for status in {*WAITING, Status.RUNNING}:
        assert EDGES[status], status
    assert set(EDGES) == {None, *Status}


def test_everything_that_waits_or_runs_can_be_cancelled() -> None:
    assert {before for before in EDGES if Status.CANCELLED in EDGES[before]} == {*WAITING, Status.RUNNING}


# -- records


def test_a_record_is_read_with_its_types() -> None:
    record = Record(
        {
            "status": b"running",
            "attempt": b"2",
            "payload": b'{"a":1}',
            "metadata": b'{"who":"ada"}',
            "execution:10": b'{"outcome":"failed"}',
            "execution:9": b'{"outcome":"released"}',
        }
    )
    assert record.status is Status.RUNNING
    assert (record.number("attempt"), record.number("due_at_ms")) == (2, None)
    assert (record.get("payload"), record.get("trace")) == ('{"a":1}', "")
    assert record.metadata == {"who": "ada"}
    assert record.executions() == [
        {"delivery": 9, "outcome": "released"},
        {"delivery": 10, "outcome": "failed"},
    ]
    assert record.as_dict()["attempt"] == "2"


@pytest.mark.parametrize("metadata", [b"", b"[1]", b"{", b"\xff", b"null", b"12"])
def test_what_other_programs_wrote_is_no_error(metadata: bytes) -> None:
    record = Record({"status": b"resting", "attempt": b"two", "metadata": metadata, "execution:1": metadata})
    assert record.status is None
    assert record.number("attempt") is None
    assert record.metadata == {}
    assert record.executions() == [{"delivery": 1}]
    assert Record({}).executions() == []


def test_bytes_that_are_no_text_are_shown() -> None:
    assert text(b"caf\xe9") == "caf\\xe9"
    assert text("plain") == "plain"
    assert Record({"last_error": b"\xff"}).get("last_error") == "\\xff"


# -- alphabets

RIGHT: list[tuple[Callable[[Any], Any], list[Any]]] = [
    (check_queue, ["default", "a", "A-z_0.9", "x" * 64]),
    (check_task_id, ["0", "018f-aa_B", "x" * 64]),
    (check_task_type, ["shop.tasks.resize", "größe", "with space", "x" * 200]),
    (check_priority, [0, 9]),
    (check_idempotency_key, ["a", "a:b c", "ü" * 128, "\n"]),
]
WRONG: list[tuple[Callable[[Any], Any], list[Any]]] = [
    (check_queue, ["", "x" * 65, "a b", "a:b", "ü", "a\n", None, 5, b"default"]),
    (check_task_id, ["", "x" * 65, "a.b", "a:b", "a\n", None, 5]),
    (check_task_type, ["", "x" * 201, "ü" * 101, "a\nb", "a\x00", "\u200b", "\ud800", None, 5]),
    (check_priority, [-1, 10, 5.0, "5", True, None]),
    (check_idempotency_key, ["", "ü" * 129, "x" * 257, "\ud800", None, 5]),
]


@pytest.mark.parametrize(("check", "values"), RIGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_names_within_their_bounds(check: Callable[[Any], Any], values: list[Any]) -> None:
    for value in values:
        assert check(value) == value


@pytest.mark.parametrize(("check", "values"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_names_outside_their_bounds_are_refused_and_shown(
    check: Callable[[Any], Any], values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(InvalidTask) as refused:
            check(value)
        assert repr(value) in str(refused.value)
