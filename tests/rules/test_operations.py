"""What docs/operations.md says that the log says, it may say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtq_supervisor.logs import WORDS

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
LINES = [line for box in re.findall(r"```log\n(.*?)```", PAGE, re.DOTALL) for line in box.splitlines()]


def pattern(wording: str) -> str:
    """What a wording can become: anything in the place of a fact."""
    parts = re.split(r"\{[^}]*\}", wording.partition("\n")[0])
    return ".+".join(map(re.escape, parts))


@pytest.mark.parametrize("line", LINES)
def test_every_line_of_a_log_that_is_shown_has_its_wording(line: str) -> None:
    assert [key for key, wording in WORDS.items() if re.fullmatch(pattern(wording), line)]


def test_every_fact_that_is_counted_or_explained_is_one() -> None:
    (counted,) = re.findall(r"numbers as fields: count (.*?)\.", PAGE, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", counted)) | set(
        re.findall(r"^\| `([a-z]+_[a-z_]+)`", PAGE, re.MULTILINE)
    )
    assert len(named) > 6
    assert named <= set(WORDS)
