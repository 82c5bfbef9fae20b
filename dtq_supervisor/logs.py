"""What the supervisor says: the wording of every fact, one line each, on stderr.

No caller ever waits for a reader: lines go through a bounded queue to a thread that writes them, and what
finds the queue full is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dtq_child import log_lines
from dtq_child.log_lines import FACTS
from dtq_child.logs import LineHandler
from dtq_supervisor.events import Facts, Level

WORDS: Mapping[str, str] = {
    # the supervisor
    "starting": "dtq {version} starts {app} as {worker} with {procs:child|children} ({procs_origin})",
    "place": "it works on {redis}, queues {queues}, key prefix {prefix}",
    "untested_python": "dtq has not been tested on Python {python}",
    "endpoint": "health, status and metrics are at {place}",
    "no_endpoint": "no health, status and metrics of this supervisor: {reason}; "
    "another --metrics-bind, or off, ends this warning",
    "embedded": "a private Redis for trying out; producers use DTQ_REDIS_URL={url}",
    "embedded_gone": "the private Redis has ended ({reason})",
    "contact": "Redis {version} answers",
    "refused": "cannot work with this Redis: {reason}",
    "no_persistence": "Redis keeps nothing on disk: its tasks are lost with it",
    "evicting_allowed": "Redis may evict tasks when it is full (maxmemory-policy {policy})",
    "gap": "the main loop did not run for {seconds:.1f} s; deadlines of that time count from now",
    "slow_tick": "one round of the main loop took {seconds:.2f} s",
    "manager_deaf": "the service manager that NOTIFY_SOCKET names cannot be told how things stand: {reason}",
    "signal": "signal {name}",
    "signal_ignored": "signal {name} has no meaning yet and is ignored",
    "resized": "{name}: {procs:child|children} from now on, {before} before",
    "resize_most": "{name}: there is room for {procs:child|children} and no more; restart with more --procs",
    "resize_least": "{name}: the last child stays; SIGTSTP stops it from claiming",
    "quiet": "SIGTSTP (or Ctrl-Z): nothing is claimed any more, what runs is finished; SIGCONT resumes",
    "resumed": "SIGCONT: tasks are claimed again",
    "not_quiet": "SIGCONT: claims were not held, so it changes nothing",
    "too_late": "{name} changes nothing any more: the supervisor is stopping",
    "reloading": "reload {number}: settings and code are read anew",
    "reload_waits": "SIGHUP: the reload begins when what is under way has ended",
    "reload_rolling": "reload {number}: the first child of g{generation} is ready, the others follow, "
    "{spare} at a time",
    "reloaded": "reload {number} is done: all children are g{generation}",
    "reloaded_but": "reload {number} is done: whatever begins now begins in g{generation}; "
    "{old:older child finishes its task|older children finish their tasks}",
    "reload_failed": "reload {number} has failed: {reason}; children come from g{generation}",
    "successor_failed": "the successor of child {slot} did not start: {reason}; "
    "the next one in {delay_s:g} s",
    "stopping": "stopping (graceful): {children:child has|children have} {grace_s:g} s to finish",
    "stopping_now": "stopping (immediate): {children:child is|children are} killed now",
    "burst_over": "nothing waits or runs in the queues {queues}: with --burst that is the end",
    "stop_immediate": "told to stop again: every child is killed now",
    "grace_over": "the shutdown grace is over: {children:child is|children are} killed",
    "left_behind": "child {slot} (pid {pid}) was killed and does not end; it is left behind",
    "strangers_killed": "{count:process|processes} left behind by tasks had to be killed",
    "unsettled": "{count:death|deaths} could not be told to Redis in time: leases run out",
    "unfinished": "threads that were still busy at the end: {duties}",
    "stopped": "stopped, exit code {exit_code}",
    # the template
    "not_preloaded": "template g{generation} (pid {pid}) is up; each child imports {app} by itself "
    "(--no-preload)",
    "imported": "template g{generation} (pid {pid}) imported {app} in {seconds:.2f} s: "
    "{types:task type|task types}",
    "import_failed": "the application cannot be imported: {reason}",
    "no_task_types": "{app} declares no task types, so nothing can be executed: "
    "name the modules of its tasks in App(include=[…])",
    "template_lost": "template g{generation} is lost: {reason}; the next one in {delay_s:g} s",
    # children
    "ready": "ready: child {slot} (pid {pid}) takes tasks",
    "ready_no_redis": "child {slot} (pid {pid}) is up; Redis has not answered yet, so it takes no tasks",
    "boot_failed": "child {slot} did not start: {reason}; the next one in {delay_s:g} s",
    "died": "child {slot} (pid {pid}) died: {how} ({killed_by}); it was executing {task_type} {task_id}",
    "died_idle": "child {slot} (pid {pid}) died: {how} ({killed_by})",
    "ended": "child {slot} (pid {pid}) ended",
    "soft_kill": "{order} for {task_type} {task_id} in child {slot} (pid {pid})",
    "killed": "child {slot} (pid {pid}) is killed: {why}; it was executing {task_type} {task_id}",
    "killed_idle": "child {slot} (pid {pid}) is killed: {why}",
    "stray": "child {slot} (pid {pid}) came when nobody waited for it any more, and is killed",
    "stack": "stacks of child {slot} (pid {pid}):\n{stack}",
    "outgrown": "child {slot} (pid {pid}) holds {size}, above its limit of {limit}: it is replaced when its "
    "task is over",
    "memory_limit_refused": "{flag} {limit} cannot work: a child that has executed nothing holds {size}, so "
    "the pool would replace children for ever; give at least {least}",
    "memory_limit_ignored": "{flag} {limit} does not hold for children of template g{generation}: one "
    "that has executed nothing holds {size}; give at least {least}",
    "memory_unknown": "sizes of processes cannot be read in /proc: the memory limits of children do not hold",
    "oom_group": "{file} is 1: when memory runs out, the kernel kills the supervisor and all children "
    "together; to lose one child only, make it 0 (systemd: OOMPolicy=continue, kubelet: "
    "singleProcessOOMKill)",
    "no_stack": "child {slot} (pid {pid}) did not show its stacks",
    # duties
    "redis_away": "Redis is not available: {reason}",
    "redis_still_away": "Redis is still not available, after {seconds:.0f} s: {reason}",
    "redis_refuses": "{duty}: Redis refuses: {reason}",
    "redis_back": "Redis answers again, after {seconds:.1f} s",
    "redis_accepts": "{duty}: Redis does not refuse any more, after {seconds:.1f} s",
    "call_failed": "{duty}: {reason}",
    "settled": "child {slot}.{life} is settled: task {task_id}{of_type} {fate}",
    "reaped": "task {task_id} of a worker not heard of {fate}",
    "park_opened": "{count:entry|entries} in our park opened to other workers, for nothing is claimed here",
    "odd": "{words}",
    "strays": "{count:entry|entries} under our names, of which no child knew: released",
    "clock_jumped": "the clock of Redis jumped by {seconds:.1f} s: nobody is taken for dead for a while",
    "band_problem": "{problem}",
    "leading": "this worker leads: it promotes, reconciles and sweeps",
    "lead_lost": "this worker leads no more ({reason})",
    "set_aside": "not promoted: {problem}",
    "stranded": "{count:stranded entry|stranded entries} of {stream} released",
    "requeued": "{count:task that was nowhere has|tasks that were nowhere have} a place again",
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

log = logging.getLogger("dtq.supervisor")


def say(level: Level, key: str, facts: Facts | None = None) -> None:
    """Logs the fact `key` of WORDS."""
    facts = facts or {}
    log.log(LEVELS[level], "%s", wording(key, facts), extra={FACTS: {"fact": key, **facts}})


def wording(key: str, facts: Facts) -> str:
    """The sentence; what cannot be worded is shown plainly, for a log must not fail."""
    counted = {name: Count(fact) if type(fact) is int else fact for name, fact in facts.items()}
    try:
        return WORDS[key].format_map(counted)
    except (KeyError, ValueError, TypeError):
        return f"{key}: " + ", ".join(f"{name} {value}" for name, value in facts.items())


class Count(int):
    """`{children:child|children}` in a wording: the number with its noun."""

    def __format__(self, spec: str) -> str:
        one, bar, many = spec.partition("|")
        return f"{int(self)} {one if self == 1 else many}" if bar else format(int(self), spec)


class LineWriter:
    """A queue of lines and the thread that writes them to a descriptor. `put` never waits. `notice` words the
    number of lines that were dropped."""

    def __init__(self, fd: int, notice: Callable[[int], str], most: int = QUEUE_LINES) -> None:
        self.dropped = 0
        """Lines that nobody will see, in all."""
        self._fd, self._notice, self._most = fd, notice, most
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
        # A terminal may stop those that write in the background (`stty tostop`). Unblocked, each try would be
        # answered by this signal, for ever, and each would take a child away.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
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
                lines.insert(0, self._notice(missed).encode() + b"\n")
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


def set_up(level: str, form: str, worker_id: str, fd: int = 2) -> LineWriter:
    """Sends all logging of this process through a new writer. `form`: auto, text or json."""
    lines = log_lines.formatter(form, os.isatty(fd), {"worker": worker_id, "pid": os.getpid()})
    writer = LineWriter(fd, lambda count: log_lines.dropped_line(lines, "dtq.log", count))
    logging.root.handlers[:] = [LineHandler(writer.put, lines)]
    logging.root.setLevel(logging.WARNING)
    set_level(level)
    logging.captureWarnings(True)
    threading.excepthook = _thread_died
    sys.excepthook = _died
    return writer


def set_level(level: str) -> None:
    logging.getLogger("dtq").setLevel(LEVELS[level])


def _thread_died(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread else "a thread"
    if args.exc_value is not None:
        info = (args.exc_type, args.exc_value, args.exc_traceback)
        log.error("%s died", name, exc_info=info)


def _died(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    log.critical("uncaught error", exc_info=(kind, error, trace))
