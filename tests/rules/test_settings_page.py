"""docs/settings.md says what the table says."""

from __future__ import annotations

from pathlib import Path

from dtq_child.settings import ACTIONS, SETTINGS
from dtq_child.settings_page import render

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_what_the_table_renders() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: make settings"


def test_every_name_and_flag_has_a_row_of_its_own() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| ")]
    for setting in (*SETTINGS, *ACTIONS):
        name = setting.env or setting.flags[0]
        (row,) = (row for row in rows if f"| `{name}` " in row)
        assert all(f"`{flag}`" in row for flag in setting.flags)
        assert setting.help in row


def test_every_row_has_the_columns_of_its_table() -> None:
    rows = [line for line in render().splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {8}
