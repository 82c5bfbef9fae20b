"""The log of a template and of its children: records as lines on stderr, which hold nothing up."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from typing import Any

from dtq_child import log_lines
from dtq_child.outlet import Outlet
from dtq_child.settings import Settings

STDERR = 2


class LineHandler(logging.Handler):
    """Hands finished lines to whoever writes them."""

    def __init__(self, put: Callable[[str], None], form: logging.Formatter) -> None:
        super().__init__()
        self._put = put
        self.setFormatter(form)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a line that cannot be formatted must not hurt who wrote it
            line = self.format(_unformattable(record, error))
        self._put(line)


def _unformattable(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    words, facts = "a log line cannot be written (%r): %r", (error, str(record.msg))
    return logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, words, facts, None)


class OutletHandler(LineHandler):
    """Writes them itself, without waiting."""

    def __init__(self, form: logging.Formatter) -> None:
        self.outlet = Outlet(STDERR, lambda count: log_lines.dropped_line(form, "dtq.log", count))
        super().__init__(self.outlet.put, form)

    def close(self) -> None:
        self.outlet.close()
        super().close()


def set_up(settings: Settings, **who: Any) -> None:
    """`who` (slot=3, pid=4711 …) goes on each line. An application that has given the root logger handlers of
    its own keeps them."""
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, OutletHandler)]
    if len(ours) < len(root.handlers):
        return
    form = log_lines.formatter(settings.log_format, os.isatty(STDERR), who)
    root.handlers[:] = [OutletHandler(form)]
    for old in ours:  # the template's, of which a child was forked
        old.close()
    root.setLevel(settings.log_level.upper())


def past_the_application(words: str) -> None:
    """A line that must not wait for handlers of the application's own: whoever reads those may be gone."""
    ours = [handler for handler in logging.root.handlers if isinstance(handler, OutletHandler)]
    record = logging.LogRecord("dtq.template", logging.WARNING, "", 0, "%s", (words,), None)
    if ours:
        ours[0].handle(record)
    else:
        _bare(f"dtq-supervisor: template: {words}")


def last_words() -> None:
    """The error that is being handled, where nothing may have been set up yet."""
    _bare(traceback.format_exc().rstrip())


def _bare(line: str) -> None:
    outlet = Outlet(STDERR, "{} lines were dropped".format)
    outlet.put(line)
    outlet.close()
