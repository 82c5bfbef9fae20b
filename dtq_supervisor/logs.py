"""What the supervisor says: the wording of every fact, one line each, on stderr.

No caller ever waits for a reader: lines go through a bounded queue to a thread that writes them, and what
finds the queue full is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from dtq_supervisor.events import Fact, Facts, Level

WORDS: Mapping[str, str] = {
    # the supervisor
    "starting": "dtq {version} starts {app} as {worker} with {procs} children ({procs_origin})",
    "place": "it works on {redis}, queues {queues}, key prefix {prefix}",
    "untested_python": "dtq has not been tested on Python {python}",
    "embedded": "a private Redis for trying out; producers use DTQ_REDIS_URL={url}",
    "embedded_gone": "the private Redis has ended ({reason})",
    "contact": "Redis {version} answers",
    "refused": "cannot work with this Redis: {reason}",
    "no_persistence": "Redis keeps nothing on disk: its tasks are lost with it",
    "evicting_allowed": "Redis may evict tasks when it is full (maxmemory-policy {policy})",
    "gap": "the main loop did not run for {seconds:.1f} s; deadlines of that time count from now",
    "slow_tick": "one round of the main loop took {seconds:.2f} s",
    "signal": "signal {name}",
    "signal_ignored": "signal {name} has no meaning yet and is ignored",
    "reload_unavailable": "SIGHUP: reload is not available; restart the service for new code",
    "stopping": "stopping (graceful): {children} children have {grace_s:g} s to finish",
    "stopping_now": "stopping (immediate): {children} children are killed now",
    "burst_over": "nothing waits or runs in the queues {queues}: with --burst that is the end",
    "stop_immediate": "told to stop again: every child is killed now",
    "grace_over": "the shutdown grace is over: {children} children are killed",
    "left_behind": "child {slot} (pid {pid}) was killed and does not end; it is left behind",
    "strangers_killed": "{count} processes that tasks had left behind were killed",
    "unsettled": "{count} deaths could not be told to Redis in time: their leases run out",
    "unfinished": "threads that were still busy at the end: {duties}",
    "stopped": "stopped, exit code {exit_code}",
    # the template
    "imported": "template g{generation} (pid {pid}) imported {app} in {seconds:.2f} s: {types} task types",
    "import_failed": "the application cannot be imported: {reason}",
    "no_task_types": "{app} declares no task types, so nothing can be executed: "
    "name the modules of its tasks in App(include=[…])",
    "template_lost": "template g{generation} is lost: {reason}; the next one in {delay_s:g} s",
    # children
    "ready": "ready: child {slot} (pid {pid}) takes tasks",
    "ready_no_redis": "child {slot} (pid {pid}) is up; Redis has not answered yet, so it takes no tasks",
    "boot_failed": "child {slot} did not start: {reason}; the next one in {delay_s:g} s",
    "died": "child {slot} (pid {pid}) died: {how}, {killed_by}; it was executing {task_type} {task_id}",
    "died_idle": "child {slot} (pid {pid}) died: {how}, {killed_by}",
    "ended": "child {slot} (pid {pid}) ended",
    "soft_kill": "{order} for {task_type} {task_id} in child {slot} (pid {pid})",
    "killed": "child {slot} (pid {pid}) is killed: {why}; it was executing {task_type} {task_id}",
    "killed_idle": "child {slot} (pid {pid}) is killed: {why}",
    "stray": "child {slot} (pid {pid}) came when nobody waited for it any more, and is killed",
    "stack": "stacks of child {slot} (pid {pid}):\n{stack}",
    "no_stack": "child {slot} (pid {pid}) did not show its stacks",
    # duties
    "redis_away": "Redis is not available: {reason}",
    "redis_still_away": "Redis is still not available, after {seconds:.0f} s: {reason}",
    "redis_refuses": "{duty}: Redis refuses: {reason}",
    "redis_back": "Redis answers again, after {seconds:.1f} s",
    "redis_accepts": "{duty}: Redis does not refuse any more, after {seconds:.1f} s",
    "call_failed": "{duty}: {reason}",
    "settled": "child {slot}.{life} is settled: task {task_id} {what}",
    "reaped": "task {task_id} of a worker not heard of: {what}",
    "strays": "{count} entries under our names that no child knew of are released",
    "clock_jumped": "the clock of Redis jumped by {seconds:.1f} s: nobody is taken for dead for a while",
    "band_problem": "{problem}",
    "leading": "this worker leads: it promotes, reconciles and sweeps",
    "lead_lost": "this worker leads no more ({reason})",
    "set_aside": "not promoted: {problem}",
    "stranded": "{count} stranded entries of {stream} are released",
    "requeued": "{count} tasks that were nowhere have a place again",
    "worker_stale": "worker {worker} has ended without a farewell",
    "duty_died": "{duty} failed and is started again in {delay_s:.1f} s",
}
"""`say` fills these by name. A fact that a wording leaves out is still a field of the JSON line."""

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
QUEUE_LINES = 10_000
FACTS = "dtq_facts"

log = logging.getLogger("dtq.supervisor")


def say(level: Level, key: str, facts: Facts | None = None) -> None:
    """Logs the fact `key` of WORDS."""
    facts = facts or {}
    log.log(LEVELS[level], "%s", wording(key, facts), extra={FACTS: {"fact": key, **facts}})


def wording(key: str, facts: Facts) -> str:
    """The sentence; what cannot be worded is shown plainly, for a log must not fail."""
    try:
        return WORDS[key].format_map(facts)
    except (KeyError, ValueError, TypeError):
        return f"{key}: " + ", ".join(f"{name} {value}" for name, value in facts.items())


class TextFormatter(logging.Formatter):
    """For people: time of day, level where it matters, who, what."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        who = "" if record.name == log.name else f"{record.name.removeprefix('dtq.')}: "
        text = f"{clock}.{int(record.msecs):03d} {level}{who}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """For machines: one object a line, `ts` in UTC, the facts as fields of their own."""

    def __init__(self, worker_id: str) -> None:
        super().__init__()
        self._worker_id = worker_id

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "ts": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "worker": self._worker_id,
        }
        facts: Mapping[str, Fact] = getattr(record, FACTS, {})
        known = {name: fact for name, fact in facts.items() if fact not in (None, "", line.get(name))}
        line.update((f"about_{name}" if name in line else name, fact) for name, fact in known.items())
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class LineWriter:
    """A queue of lines and the thread that writes them to a descriptor. `put` never waits."""

    def __init__(self, fd: int = 2, most: int = QUEUE_LINES) -> None:
        self.dropped = 0
        """Lines that nobody will see, in all."""
        self._fd, self._most = fd, most
        self._lines: deque[bytes] = deque()
        self._told = 0
        self._writing = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="dtq-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        raw = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if len(self._lines) >= self._most or self._closing:
                self.dropped += 1
                return
            self._lines.append(raw)
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Waits at most so long until all is written. False: it is not."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._lines and not self._writing, seconds)
            self._closing = True
            self._changed.notify_all()
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._lines) or self._closing)
                if not self._lines:
                    return
                lines = [self._lines.popleft() for _ in range(min(64, len(self._lines)))]
                missed, self._told = self.dropped - self._told, self.dropped
                self._writing = True
            if missed:
                lines.insert(0, b"(%d log lines were dropped: nobody read them in time)\n" % missed)
            self._write(b"".join(lines), len(lines))

    def _write(self, raw: bytes, count: int) -> None:
        while raw:
            try:
                raw = raw[os.write(self._fd, raw) :]
            except BlockingIOError:  # another program has made our stderr non-blocking
                select.select((), (self._fd,), (), 1.0)
            except OSError:  # its reader is gone, or its disk is full: nobody is left to tell
                with self._changed:
                    self.dropped += count
                    self._told += count
                return


class LineHandler(logging.Handler):
    """Hands finished lines to a writer."""

    def __init__(self, put: Callable[[str], None]) -> None:
        super().__init__()
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self.format(record))
        except Exception as error:  # noqa: BLE001 - a line that cannot be formatted must not hurt who wrote it
            self._put(f"a log line of {record.name} could not be written: {error!r}")


def set_up(level: str, form: str, worker_id: str, fd: int = 2) -> LineWriter:
    """Sends all logging of this process through a new writer. `form`: auto, text or json."""
    text = os.isatty(fd) if form == "auto" else form == "text"
    writer = LineWriter(fd)
    handler = LineHandler(writer.put)
    handler.setFormatter(TextFormatter() if text else JsonFormatter(worker_id))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("dtq").setLevel(LEVELS[level])
    logging.captureWarnings(True)
    threading.excepthook = _thread_died
    sys.excepthook = _died
    return writer


def _thread_died(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "a thread"
    if args.exc_value is not None:
        info = (args.exc_type, args.exc_value, args.exc_traceback)
        log.error("%s died", name, exc_info=info)


def _died(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    log.critical("uncaught error", exc_info=(kind, error, trace))
