"""One fact, one line on stderr, for people or for machines, the same whoever says it."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from dtq_child.context import CurrentTask, enter, leave
from dtq_child.log_lines import FACTS, JsonLines, TextLines, formatter
from dtq_child.logs import LineHandler
from dtq_supervisor.logs import wording

WHO = {"worker": "w", "slot": 3, "pid": 4711}
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def record(
    logger: logging.Logger | logging.LoggerAdapter[logging.Logger],
    error: bool = False,
    extra: dict[str, Any] | None = None,
) -> logging.LogRecord:
    caught: list[logging.LogRecord] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            caught.append(record)

    target = logger.logger if isinstance(logger, logging.LoggerAdapter) else logger
    handler = Catch()
    target.addHandler(handler)
    try:
        raise ValueError("no")
    except ValueError:
        (logger.exception if error else logger.warning)("words %s", "and more", extra=extra)
    finally:
        target.removeHandler(handler)
    return caught[0]


def test_a_line_for_machines_carries_who_and_the_task() -> None:
    task = CurrentTask(id="018f", task_type="shop.resize", queue="images", attempt=2)
    line = json.loads(JsonLines(WHO).format(record(task.logger)))
    assert DATE.fullmatch(line.pop("ts"))
    assert line == {
        "level": "warning",
        "logger": "shop.resize",
        "message": "words and more",
        "worker": "w",
        "slot": 3,
        "pid": 4711,
        "task_id": "018f",
        "task_type": "shop.resize",
        "queue": "images",
        "attempt": 2,
    }


def test_lines_of_other_loggers_carry_the_task_in_which_they_are_written() -> None:
    token = enter(CurrentTask(id="018f", task_type="shop.resize", queue="images"))
    try:
        inside = JsonLines(WHO).format(record(logging.getLogger("library")))
    finally:
        leave(token)
    assert json.loads(inside)["task_id"] == "018f"
    assert "task_id" not in json.loads(JsonLines(WHO).format(record(logging.getLogger("library"))))


def test_an_error_is_one_line_for_machines() -> None:
    text = JsonLines(WHO).format(record(logging.getLogger("shop"), error=True))
    assert "\n" not in text
    assert "ValueError: no" in json.loads(text)["traceback"]


def test_a_line_for_people_says_the_same() -> None:
    task = CurrentTask(id="018f", task_type="shop.resize", queue="images")
    text = TextLines(WHO).format(record(task.logger))
    assert "WARNING shop.resize [worker=w slot=3 pid=4711] task_id=018f" in text
    assert DATE.match(text)
    assert text.endswith(": words and more")


def test_a_line_about_a_child_names_it_and_not_who_speaks() -> None:
    facts = {"fact": "died", "slot": 3, "pid": 12, "task_id": "018f", "worker": "another", "stack": None}
    said = record(logging.getLogger("dtq.supervisor"), extra={FACTS: facts})
    us = {"worker": "w", "pid": 1}
    assert "[worker=w pid=12 slot=3] task_id=018f: " in TextLines(us).format(said)
    line = json.loads(JsonLines(us).format(said))
    assert (line["worker"], line["about_worker"]) == ("w", "another")
    assert (line["slot"], line["pid"], line["fact"], line["task_id"]) == (3, 12, "died", "018f")
    assert "stack" not in line


def test_what_json_cannot_carry_is_told_escaped() -> None:
    stray, huge = "caf\udce9 \ud800", 2**70
    said = record(logging.getLogger("shop"), extra={"task_id": stray, "attempt": huge})
    line = json.loads(JsonLines(WHO).format(said))
    assert line["task_id"] == "caf\\udce9 \\ud800"
    assert line["attempt"] == huge
    assert (line["slot"], line["message"]) == (3, "words and more")


def test_a_line_that_cannot_be_worded_says_so_and_hurts_nobody() -> None:
    lines: list[str] = []
    logger = logging.Logger("shop")
    logger.addHandler(LineHandler(lines.append, JsonLines(WHO)))
    logger.warning("%d boxes", "many")
    (line,) = map(json.loads, lines)
    assert "a log line cannot be written" in line["message"]
    assert "%d boxes" in line["message"]


def test_a_terminal_reads_text_and_everything_else_json() -> None:
    assert isinstance(formatter("auto", True, WHO), TextLines)
    assert isinstance(formatter("auto", False, WHO), JsonLines)
    assert isinstance(formatter("text", False, WHO), TextLines)
    assert isinstance(formatter("json", True, WHO), JsonLines)


def test_a_number_agrees_with_its_noun() -> None:
    told = " could not be told to Redis in time: leases run out"
    assert wording("unsettled", {"count": 1}) == "1 death" + told
    assert wording("unsettled", {"count": 8}) == "8 deaths" + told


def test_a_fact_without_all_its_parts_is_told_all_the_same() -> None:
    assert wording("left_behind", {"slot": 1}) == "left_behind: slot 1"
