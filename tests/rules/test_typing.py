"""What mypy says about calls of tasks: the right ones pass, each wrong one is found on its line."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
CALLS = Path("tests/typing/calls.py")
_REPORTED = re.compile(rf"{re.escape(str(CALLS))}:(\d+): error: .*\[([\w-]+)\]$", re.MULTILINE)
_EXPECTED = re.compile(r"# error: ([\w -]+)$")


def test_mypy_finds_wrong_calls_of_tasks_and_only_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    expected = {
        number: set(found[1].split())
        for number, line in enumerate(CALLS.read_text().splitlines(), 1)
        if (found := _EXPECTED.search(line))
    }
    report, trouble, _ = api.run(["--strict", "--no-error-summary", str(CALLS)])
    reported: defaultdict[int, set[str]] = defaultdict(set)
    for number, code in _REPORTED.findall(report):
        reported[int(number)].add(code)
    assert not trouble
    assert len(expected) > 10
    assert reported == expected, report
