"""What `dtq demo` shows while it runs, and the report at its end, which checks every promise it makes."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from dtq_child import App, Call, Handle, Record, Status
from dtq_child.broker import Broker

WIDTH = 40
STACK_LINES = 8


@dataclass(frozen=True, slots=True)
class Misfits:
    """The four tasks that misbehave, by what they do."""

    hangs: Call
    dies_once: Call
    fails_once: Call
    always_crashes: Call

    def calls(self) -> list[Call]:
        return [self.hangs, self.dies_once, self.fails_once, self.always_crashes]


class Watch:
    """Follows the job: a bar on a terminal, a line every 2 s elsewhere, and a note at each misfit's end."""

    def __init__(self, app: App, handles: list[Handle], misfits: Misfits) -> None:
        self.broker = broker_of(app)
        self.total = len(handles) + 4
        self.waiting = {call.task_id: call for call in misfits.calls()}
        self.misfits = misfits
        self.shown = 0.0
        self.left_now = self.total
        self.terminal = sys.stdout.isatty()

    def left(self) -> int:
        return self.left_now

    def look(self) -> bool:
        """True when nothing is left anywhere."""
        for task_id in list(self.waiting):
            record = self.broker.record(task_id)
            if record is not None and record.status in (Status.SUCCEEDED, Status.DEAD_LETTERED):
                del self.waiting[task_id]
                self._say(
                    _fate(self.misfits, task_id, record, self.broker.result(task_id), self._cause(record))
                )
        depth = self.broker.depth("demo")
        self.left_now = max(depth, len(self.waiting))
        self._bar()
        return depth == 0 and not self.waiting

    def _cause(self, record: Record) -> Mapping[str, Any]:
        letter_id = record.get("dead_letter_id")
        letter = self.broker.dead_letter(letter_id) if letter_id else None
        return orjson.loads(letter["cause"] or b"{}") if letter else {}

    def _say(self, lines: list[str]) -> None:
        clear = f"\r{' ' * (WIDTH + 40)}\r" if self.terminal else ""
        print(clear + "\n".join(lines), flush=True)

    def _bar(self) -> None:
        done = self.total - self.left_now
        now = time.monotonic()
        if self.terminal:
            full = WIDTH * done // self.total
            print(f"\r  [{'#' * full}{'.' * (WIDTH - full)}] {done}/{self.total}", end="", flush=True)
            if self.left_now == 0:
                print(flush=True)
        elif now - self.shown >= 2 or self.left_now == 0:
            self.shown = now
            print(f"  {done}/{self.total} tasks done", flush=True)


def broker_of(app: App) -> Broker:
    broker = app.broker
    if not isinstance(broker, Broker):
        raise TypeError(f"the demo needs the real broker, not {broker!r}")
    return broker


def _fate(
    misfits: Misfits, task_id: str, record: Record, result: bytes | None, cause: Mapping[str, Any]
) -> list[str]:
    if task_id == misfits.hangs.task_id:
        head = f"  * a task hung inside C code: {record.get('last_error')}. Where it was:"
        return [head, *_stack(record.get("traceback"))]
    if task_id == misfits.dies_once.task_id:
        again = float(result or b"nan")
        return [
            f"  * a task killed its own process with SIGKILL and ran again {again:.0f} ms after the death"
        ]
    error = f"{record.get('last_error_class')}: {record.get('last_error')}"
    if task_id == misfits.fails_once.task_id:
        return [f"  * a task failed ({error}) and succeeded at attempt {record.get('attempt')}"]
    return [
        f"  * a task crashed its process {record.get('crashes')} times, its limit, and was put aside",
        *_told(cause),
        *_stack(record.get("traceback")),
    ]


def _told(cause: Mapping[str, Any]) -> list[str]:
    """The parts of a dead letter's cause, without the stack."""
    memory, cpu = cause.get("max_rss_bytes", 0) / 1e6, cause.get("cpu_ms", 0)
    return [
        f"      its dead letter keeps the cause: {cause.get('signal')}, sent by {cause.get('killed_by')}",
        f"      (that is {cause.get('certainty')}), while {cause.get('phase')}, "
        f"with {memory:.0f} MB of memory, after {cpu} ms of CPU. Where it was:",
    ]


def _stack(text: str) -> list[str]:
    """Of the task; the frames below it are dtq's."""
    frames = [line.strip() for line in text.splitlines() if line.startswith("  File")]
    own = itertools.takewhile(lambda line: "/dtq_child/" not in line, frames)
    return [f"        {line}" for line in itertools.islice(own, STACK_LINES)]


def report(
    app: App,
    handles: list[Handle],
    misfits: Misfits,
    seconds: float,
    procs: int,
    exit_code: int,
    leftovers: list[str],
) -> int:
    """Prints the figures and what is not as promised. 0 when all is."""
    broker = broker_of(app)
    records = [record for handle in handles if (record := broker.record(handle.id)) is not None]
    done = [record for record in records if record.status is Status.SUCCEEDED]
    values = [handle.result(timeout=1) for handle in handles if handle.status() == Status.SUCCEEDED]
    source, packed = sum(value["bytes"] for value in values), sum(value["packed"] for value in values)
    executions = [record.executions()[-1] for record in done]
    per_child = Counter(_slot(str(execution["consumer"])) for execution in executions)
    cpu = sum(float(execution.get("cpu_ms", 0)) for execution in executions) / 1000
    print(
        f"\n  {len(done)} files, {source / 1e6:.1f} MB of source, {sum(v['tokens'] for v in values):,} tokens"
    )
    print(f"  compressed to {packed / 1e6:.1f} MB ({packed / max(1, source):.0%})")
    print(f"  {seconds:.1f} s: {len(done) / seconds:.0f} tasks/s, {source / 1e6 / seconds:.2f} MB/s")
    print(f"  CPU time of the tasks {cpu:.1f} s: {cpu / seconds:.2f} of {procs} processes busy on average")
    shares = ", ".join(f"{count} by child {slot}" for slot, count in sorted(per_child.items()))
    print(f"  files packed: {shares} (a child that died was replaced under its number)")
    problems = _problems(broker, misfits, len(handles), len(done), exit_code, leftovers)
    for problem in problems:
        print(f"  NOT AS PROMISED: {problem}")
    if not problems:
        print("  every task has exactly one outcome, every queue is empty, no process is left.")
    return 1 if problems else 0


def _slot(consumer: str) -> int:
    """The 3 of `<worker>:3.7`: the seventh child in that place."""
    return int(consumer.rpartition(":")[2].partition(".")[0])


def _problems(
    broker: Broker, misfits: Misfits, expected: int, done: int, exit_code: int, leftovers: list[str]
) -> list[str]:
    found = []
    if done != expected:
        found.append(f"{expected - done} files were not packed")
    wanted = {
        misfits.hangs.task_id: (Status.DEAD_LETTERED, "TaskTimeout"),
        misfits.dies_once.task_id: (Status.SUCCEEDED, ""),
        misfits.fails_once.task_id: (Status.SUCCEEDED, ""),
        misfits.always_crashes.task_id: (Status.DEAD_LETTERED, "PoisonTask"),
    }
    for task_id, (status, error) in wanted.items():
        record = broker.record(task_id)
        if (
            record is None
            or record.status is not status
            or (error and record.get("last_error_class") != error)
        ):
            found.append(f"task {task_id} should have ended {status} {error}: {record and record.as_dict()}")
    if broker.depth("demo"):
        found.append(f"{broker.depth('demo')} entries are left in the queue")
    if exit_code != 0:
        found.append(f"the supervisor ended with exit code {exit_code}")
    found += [f"still running: {process}" for process in leftovers]
    return found
