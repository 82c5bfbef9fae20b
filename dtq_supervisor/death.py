"""The cause of a death: how a child ended, who ended it, and how sure that is (R28)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dtq_child.error_text import TRACEBACK_BYTES, clip_middle
from dtq_child.scoreboard import Row
from dtq_supervisor import cgroup
from dtq_supervisor.events import Verdict
from dtq_supervisor.process import Exit, signal_name

Certainty = Literal["certain", "likely", "unknown"]

IMPORT_FAILED, INTERNAL_ERROR = 4, 70

_BY_US = {
    "timeout": "dtq: hard timeout",
    "superseded": "dtq: another worker has taken the task over",
    "cancelled": "dtq: the task was cancelled",
    "grace": "dtq: the shutdown grace was over",
    "stuck": "dtq: it could not settle",
    "boot": "dtq: it was not ready within the boot timeout",
    "immediate": "dtq: immediate stop",
    "memory": "dtq: hard memory limit",
    "leaving": "dtq: it did not end",
    "surplus": "dtq: one child fewer",
    "idle": "dtq: it stayed idle",
}
_BY_ITSELF = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGPIPE,
        signal.SIGALRM,
        signal.SIGVTALRM,
        signal.SIGPROF,
    }
)
_BY_THE_KERNEL = {
    signal.SIGSYS: "kernel: a forbidden system call",
    signal.SIGXCPU: "kernel: the limit of CPU time",
    signal.SIGXFSZ: "kernel: the limit of a file's size",
}


@dataclass(frozen=True, slots=True)
class OomEvidence:
    """The kernel killed `kills` processes for want of memory, says `source`, since it was looked at
    before."""

    kills: int
    source: str
    certainty: Certainty


def cause(
    end: Exit, row: Row | None, verdict: Verdict | None, oom: OomEvidence | None, stack: str
) -> dict[str, Any]:
    """What is known about a child's end, JSON-able. What is not known or not so is left out.

    `row`: its row as it was when it died; `verdict`: why we killed it, if we did; `oom`: of the time in which
    it died; `stack`: its dump file, cut to 16 KB here. Fields: signal (its name), signal_number,
    core_dumped, exit_code, killed_by, certainty (certain, likely, unknown), verdict, resident_bytes and
    limit_bytes (of a kill for its memory), phase, max_rss_bytes, cpu_ms, out_of_memory, stack."""
    killed_by, certainty = _killer(end, row, verdict, oom)
    facts = {
        "signal": signal_name(end.signal) if end.signal else None,
        "signal_number": end.signal,
        "core_dumped": end.core_dumped,
        "exit_code": end.code,
        "killed_by": killed_by,
        "certainty": certainty,
        "verdict": verdict.kind if verdict else None,
        "resident_bytes": verdict.size or None if verdict else None,
        "limit_bytes": verdict.limit or None if verdict else None,
        "phase": row.phase.name.lower() if row else None,
        "max_rss_bytes": end.max_rss_bytes,
        "cpu_ms": end.cpu_ms,
        "out_of_memory": asdict(oom) if oom and end.signal == signal.SIGKILL else None,
        "stack": clip_middle(stack, TRACEBACK_BYTES),
    }
    return {name: fact for name, fact in facts.items() if fact not in (None, "") and fact is not False}


def _killer(
    end: Exit, row: Row | None, verdict: Verdict | None, oom: OomEvidence | None
) -> tuple[str, Certainty]:
    if end.code is not None:
        return _left(end.code, busy=row is not None and row.execution is not None), "certain"
    if end.signal is None:
        return "unknown: its status was collected elsewhere", "unknown"
    if end.signal == signal.SIGKILL:
        return _killed(verdict, oom)
    if end.signal in _BY_ITSELF:
        return "itself", "likely"
    if end.signal in _BY_THE_KERNEL:
        return _BY_THE_KERNEL[signal.Signals(end.signal)], "likely"
    return "unknown sender", "unknown"


def _left(code: int, *, busy: bool) -> str:
    if code == IMPORT_FAILED and not busy:
        return "itself: the application could not be imported"
    if code == INTERNAL_ERROR:
        return "itself: an internal error"
    if code == 0 and not busy:
        return "itself: a clean end"
    return "itself: os._exit, or another program in its place"


def _killed(verdict: Verdict | None, oom: OomEvidence | None) -> tuple[str, Certainty]:
    if verdict is not None:
        return _BY_US.get(verdict.kind, f"dtq: {verdict.kind}"), "certain"
    if oom is not None:
        return f"kernel: out of memory ({oom.certainty})", oom.certainty
    return "unknown sender", "unknown"


@dataclass(frozen=True, slots=True)
class _Counter:
    """A count that the kernel keeps. `proves`: it counts kills, and of our own control group alone."""

    path: Path
    read: Callable[[str], int | None]
    proves: bool

    def value(self) -> int | None:
        try:
            return self.read(self.path.read_text())
        except (OSError, ValueError):
            return None


class OomWatch:
    """Tells kills by the kernel for want of memory from other SIGKILLs, by what the kernel counts.

    It counts a kill before it sends the signal, so at a collected exit the count is there. Best is the count
    of our own control group, which includes kills for want of memory on the whole machine, of our processes
    only."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: where / is, for tests."""
        self._counter: _Counter | None = None
        self._last = 0
        for counter in _counters(root):
            value = counter.value()
            if value is not None:
                self._counter, self._last = counter, value
                break

    def evidence(self, killed: int) -> OomEvidence | None:
        """Since the last call. `killed`: how many children died in that time of a SIGKILL that was not ours;
        the evidence is about them all, and certain if each of them is accounted for."""
        value = None if self._counter is None else self._counter.value()
        if self._counter is None or value is None:
            return None
        kills, self._last = value - self._last, value
        if kills <= 0 or killed <= 0:
            return None
        certain = self._counter.proves and kills >= killed
        return OomEvidence(kills, str(self._counter.path), "certain" if certain else "likely")


def _counters(root: Path) -> Iterator[_Counter]:
    """Those that may be there, best first."""
    for version, folder in _own_groups(root):
        if version == 2:
            yield _Counter(folder / "memory.events", _named("oom_kill"), proves=True)
        else:
            yield _Counter(folder / "memory.oom_control", _named("oom_kill"), proves=True)
            # Linux before 4.13 counts no kills, only how often the limit was met.
            yield _Counter(folder / "memory.failcnt", int, proves=False)
    yield _Counter(root / "proc/vmstat", _named("oom_kill"), proves=False)


def _own_groups(root: Path) -> Iterator[tuple[int, Path]]:
    """The own group in each hierarchy that there is, without those above it."""
    seen = set()
    for version, folder in cgroup.folders("memory", root):
        if version not in seen:
            seen.add(version)
            yield version, folder


def _named(name: str) -> Callable[[str], int | None]:
    """Reads lines of a name and a number."""

    def read(text: str) -> int | None:
        for line in text.splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == name:
                return int(words[1])
        return None

    return read
