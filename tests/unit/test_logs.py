"""What the supervisor says, and that nobody ever waits for a reader."""

from __future__ import annotations

import ast
import json
import logging
import os
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtq_supervisor import logs
from dtq_supervisor.logs import FACTS, WORDS, JsonFormatter, LineHandler, LineWriter, TextFormatter, wording
from tests.support.waiting import until

SOURCES = sorted((Path(logs.__file__).parent).glob("*.py"))


def said_keys(source: Path) -> Iterator[tuple[str, int]]:
    """The keys of every `say(level, "key", …)` and `Say(level, "key", …)`."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("say", "Say"):
            for word in ast.walk(node.args[1]):
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    yield word.value, node.lineno


def test_everything_that_is_said_has_a_wording_and_every_wording_is_said() -> None:
    said = {key for source in SOURCES for key, _ in said_keys(source)}
    # Where the key is chosen beforehand, its name stands elsewhere in the source.
    texts = "".join(source.read_text() for source in SOURCES if source.name != "logs.py")
    assert {key for key in said if key not in WORDS} - {""} <= {"task_id"}
    assert {key for key in WORDS if f'"{key}"' not in texts} == set()


def test_a_wording_is_filled_by_name() -> None:
    assert wording("ready", {"slot": 3, "pid": 4711}) == "ready: child 3 (pid 4711) takes tasks"


@pytest.mark.parametrize(("key", "facts"), [("no_such_key", {"slot": 3}), ("ready", {"slot": 3})])
def test_what_cannot_be_worded_is_shown_plainly(key: str, facts: dict[str, int]) -> None:
    assert wording(key, facts) == f"{key}: slot 3"


def test_wordings_use_names_alone() -> None:
    for key, words in WORDS.items():
        for _, name, _, _ in string.Formatter().parse(words):
            assert name is None or name.isidentifier(), key


def record(message: str = "hello %s", **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("dtq.supervisor", logging.WARNING, __file__, 1, message, ("you",), None)
    made.__dict__[FACTS] = facts
    return made


def test_a_line_for_machines_has_the_facts_as_fields() -> None:
    line = json.loads(JsonFormatter("w-1").format(record(slot=3, pid=4711, task_id="abc", attempt=2)))
    assert line["message"] == "hello you"
    assert line["level"] == "warning"
    assert {name: line[name] for name in ("worker", "slot", "pid", "task_id", "attempt")} == {
        "worker": "w-1",
        "slot": 3,
        "pid": 4711,
        "task_id": "abc",
        "attempt": 2,
    }


def test_a_fact_never_takes_the_place_of_who_says_it() -> None:
    line = json.loads(JsonFormatter("w-1").format(record(worker="w-2", level="deep", pid=None, empty="")))
    assert (line["worker"], line["about_worker"]) == ("w-1", "w-2")
    assert (line["level"], line["about_level"]) == ("warning", "deep")
    assert not {"pid", "empty"} & line.keys()


def test_a_line_for_people_says_when_how_bad_and_what() -> None:
    clock, rest = TextFormatter().format(record()).split(" ", 1)
    assert len(clock) == len("12:00:00.000")
    assert rest == "warning: hello you"


def test_lines_are_written_in_their_order() -> None:
    reader, fd = os.pipe()
    writer = LineWriter(fd)
    for n in range(200):
        writer.put(f"line {n} ü")
    assert writer.close(5.0)
    assert os.read(reader, 65536).decode().splitlines() == [f"line {n} ü" for n in range(200)]
    os.close(reader)
    os.close(fd)


def test_a_full_pipe_holds_nobody_up_and_what_is_lost_is_counted_and_told() -> None:
    reader, fd = os.pipe()
    writer = LineWriter(fd, most=100)
    line = "x" * 1023
    for _ in range(2000):
        writer.put(line)
    lost = writer.dropped
    assert lost >= 2000 - 100 - 2 * 64 - 64  # the queue, what the thread has in hand, and the pipe's 64 KB
    assert not writer.close(0.05)
    seen = b""

    def everything() -> bool:
        nonlocal seen
        seen += os.read(reader, 65536)
        return seen.count(b"\n") >= 2001 - lost

    until(everything, 10)
    assert b"(%d log lines were dropped" % lost in seen
    assert seen.count(b"x" * 1023) == 2000 - lost
    os.close(reader)
    os.close(fd)


def test_a_reader_that_goes_away_ends_nothing() -> None:
    reader, fd = os.pipe()
    os.close(reader)
    writer = LineWriter(fd)
    writer.put("nobody hears this")
    until(lambda: writer.dropped == 1, 5)
    writer.put("nor this")
    until(lambda: writer.dropped == 2, 5)
    assert writer.close(5.0)
    os.close(fd)


def test_a_stderr_that_another_program_made_non_blocking_is_waited_for() -> None:
    reader, fd = os.pipe()
    os.set_blocking(fd, False)
    writer = LineWriter(fd)
    for _ in range(200):
        writer.put("x" * 1023)
    seen = b""
    while seen.count(b"\n") < 200:
        seen += os.read(reader, 65536)
    assert writer.close(5.0)
    assert writer.dropped == 0
    os.close(reader)
    os.close(fd)


def test_a_record_that_cannot_be_formatted_does_not_hurt_who_wrote_it() -> None:
    lines: list[str] = []
    handler = LineHandler(lines.append)
    handler.setFormatter(TextFormatter())
    handler.handle(logging.LogRecord("dtq.x", logging.INFO, __file__, 1, "%d", ("no number",), None))
    assert "could not be written" in lines[0]
