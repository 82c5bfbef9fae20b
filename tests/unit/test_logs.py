"""One fact, one line on stderr, for people or for machines."""

from __future__ import annotations

import json
import logging

from dtq_child.context import CurrentTask
from dtq_child.logs import JsonLines, TextLines

WHO = {"slot": 3, "pid": 4711}


def record(
    logger: logging.Logger | logging.LoggerAdapter[logging.Logger], error: bool = False
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
        (logger.exception if error else logger.warning)("words %s", "and more")
    finally:
        target.removeHandler(handler)
    return caught[0]


def test_a_line_for_machines_carries_who_and_the_task() -> None:
    task = CurrentTask(id="018f", task_type="shop.resize", queue="images", attempt=2)
    line = json.loads(JsonLines(WHO).format(record(task.logger)))
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "shop.resize",
        "message": "words and more",
        "slot": 3,
        "pid": 4711,
        "task_id": "018f",
        "task_type": "shop.resize",
        "queue": "images",
        "attempt": 2,
    }


def test_an_error_is_one_line_for_machines() -> None:
    text = JsonLines(WHO).format(record(logging.getLogger("shop"), error=True))
    assert "\n" not in text
    assert "ValueError: no" in json.loads(text)["error"]


def test_a_line_for_people_says_the_same() -> None:
    task = CurrentTask(id="018f", task_type="shop.resize", queue="images")
    text = TextLines(WHO).format(record(task.logger))
    assert "WARNING shop.resize [slot=3 pid=4711] task_id=018f" in text
    assert text.endswith(": words and more")
