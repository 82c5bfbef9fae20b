"""Entries that were no tasks are told of, and many of them in few words."""

from __future__ import annotations

import pytest

from dtq_child.oddities import QUIET_S, Oddities, words


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_the_first_is_told_at_once_and_the_others_together(caplog: pytest.LogCaptureFixture) -> None:
    met = Oddities()
    met.note({"unreadable": 1})
    met.tell(100.0)
    assert [line[:36] for line in told(caplog)] == ["1 entry could not be read as a task "]
    for _ in range(30):
        met.note({"unreadable": 2, "absorbed": 1, "groups_made": 1})
        met.tell(101.0)
    assert told(caplog) == []
    met.tell(100.0 + QUIET_S)
    assert [line.split(" ")[0] for line in told(caplog)] == ["60", "30"]
    met.tell(200.0)
    assert told(caplog) == []


def test_what_is_not_odd_is_not_told() -> None:
    assert words({"rebuilt": 3, "crashes": 1, "absorbed": 0}) == []
