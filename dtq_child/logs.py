"""Writes log records to stderr, one line each: as text for people, as JSON for machines."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from dtq_child.settings import Settings

# What `current_task().logger` and its like put on a record.
_FACTS = ("task_id", "task_type", "queue", "attempt")


def set_up(settings: Settings, **who: Any) -> None:
    """`who` (slot=3, pid=4711 …) goes on each line. An application that has given the root logger handlers of
    its own keeps them."""
    root = logging.getLogger()
    if root.handlers:
        return
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(who) if as_json else TextLines(who))
    root.addHandler(handler)
    root.setLevel(settings.log_level.upper())


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.123+00:00 WARNING dtq.child [slot=3 pid=4711] task_id=018f…: words`"""

    def __init__(self, who: dict[str, Any]) -> None:
        super().__init__("%(message)s")
        self._who = " ".join(f"{name}={value}" for name, value in who.items())

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={getattr(record, name)}" for name in _FACTS if hasattr(record, name))
        head = f"{_when(record)} {record.levelname} {record.name} [{self._who}]{facts}: "
        return head + super().format(record)


class JsonLines(logging.Formatter):
    """One object a line: ts, level, logger, message, who, the task's facts, and the traceback as `error`."""

    def __init__(self, who: dict[str, Any]) -> None:
        super().__init__("%(message)s")
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": _when(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._who,
            **{name: getattr(record, name) for name in _FACTS if hasattr(record, name)},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
