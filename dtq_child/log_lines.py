"""What a log line looks like, in children, templates and supervisors alike: text for people, JSON for
machines."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from dtq_child.context import about_task

TASK_FACTS = ("task_id", "task_type", "queue", "attempt")
"""What `current_task().logger` and its like put on a record, each under its name. Lines of other loggers get
the facts of the task in which they are written."""
FACTS = "dtq_facts"
"""Under this name a record may carry more of them, as one mapping."""
_WHERE = ("slot", "pid")
"""Facts of this name say whom the line is about, and so go where it is said who speaks."""


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    facts = about_task()
    facts |= {name: getattr(record, name) for name in TASK_FACTS if hasattr(record, name)}
    more: Mapping[str, Any] = getattr(record, FACTS, {})
    return facts | {name: fact for name, fact in more.items() if fact not in (None, "")}


def formatter(form: str, terminal: bool, who: Mapping[str, Any]) -> logging.Formatter:
    """`form`: auto, text or json. `who` (worker=…, slot=3, pid=4711) goes on each line."""
    as_text = terminal if form == "auto" else form == "text"
    return TextLines(who) if as_text else JsonLines(who)


def dropped_line(form: logging.Formatter, logger: str, count: int) -> str:
    words = "%d log lines were dropped: nobody read them in time"
    return form.format(logging.LogRecord(logger, logging.WARNING, "", 0, words, (count,), None))


def _when(record: logging.LogRecord) -> str:
    date = datetime.fromtimestamp(record.created, UTC)
    return date.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING dtq.child [worker=… slot=3 pid=4711] task_id=018f…: words`"""

    def __init__(self, who: Mapping[str, Any]) -> None:
        super().__init__("%(message)s")
        self._who = dict(who)

    def format(self, record: logging.LogRecord) -> str:
        facts = facts_of(record)
        who = self._who | {name: facts[name] for name in _WHERE if name in facts}
        about = "".join(f" {name}={facts[name]}" for name in TASK_FACTS if name in facts)
        head = f"{_when(record)} {record.levelname} {record.name} [{_pairs(who)}]{about}: "
        return head + super().format(record)


def _pairs(who: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in who.items())


class JsonLines(logging.Formatter):
    """One object a line: ts, level, logger, message, who, the facts, and an error as `traceback`. A fact
    whose name is taken is told as `about_…`."""

    def __init__(self, who: Mapping[str, Any]) -> None:
        super().__init__("%(message)s")
        self._who = dict(who)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._who,
        }
        for name, fact in facts_of(record).items():
            taken = name in line and name not in _WHERE and line[name] != fact
            line[f"about_{name}" if taken else name] = fact
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _dumps(line)


def _dumps(line: Mapping[str, Any]) -> str:
    try:
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        # A lone surrogate (a file's name, a stray byte of an argument), or a number of more than 64 bits.
        return json.dumps({_escaped(name): _plain(fact) for name, fact in line.items()}, ensure_ascii=False)


def _plain(fact: object) -> int | str:
    return fact if isinstance(fact, int) else _escaped(fact)


def _escaped(fact: object) -> str:
    return str(fact).encode("utf-8", "backslashreplace").decode()
