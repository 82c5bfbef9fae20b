"""What the pages say about the tests is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
FUNCTIONS = {name for text in TESTS.values() for name in re.findall(r"def (test_\w+)\(", text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"`(?:tests/\w+/)?(test_\w+(?:\.py)?)`", page.read_text()))
    assert {name for name in named if name not in TESTS and name not in FUNCTIONS} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_benchmark_that_a_page_names_is_there(page: Path) -> None:
    for name in re.findall(r"python -m benchmarks\.(\w+)", page.read_text()):
        assert (ROOT / "benchmarks" / f"{name}.py").is_file(), name
