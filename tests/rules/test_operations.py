"""What docs/operations.md says that the log says, it may say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtq_supervisor.logs import WORDS

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
LINES = [line for box in re.findall(r"```log\n(.*?)```", PAGE, re.DOTALL) for line in box.splitlines()]
NAME = re.compile(r"`(\w+)`")


def pattern(wording: str) -> str:
    """What a wording can become: anything in the place of a fact."""
    parts = re.split(r"\{[^}]*\}", wording.partition("\n")[0])
    return ".+".join(map(re.escape, parts))


@pytest.mark.parametrize("line", LINES)
def test_every_line_of_a_log_that_is_shown_has_its_wording(line: str) -> None:
    assert [key for key, wording in WORDS.items() if re.fullmatch(pattern(wording), line)]


def test_every_fact_that_is_counted_or_explained_is_one() -> None:
    (counted,) = re.findall(r"numbers as fields: count (.*?)\.", PAGE, re.DOTALL)
    table = PAGE[PAGE.index("| in the log |") :].partition("\n\n")[0]
    explained = {
        name for cell in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for name in NAME.findall(cell)
    }
    assert set(NAME.findall(counted)) | explained <= set(WORDS)
    assert len(explained) > 10
