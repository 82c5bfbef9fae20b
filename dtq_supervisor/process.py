"""The hands: which processes are ours, their signals, and the one place where their exits are collected.

Only the main thread uses this. What the kernel says about a child stays with the kernel until `collect` takes
it, so as long as a process is known here, its pid is its own and may be signalled. `Popen` objects are never
polled: a poll takes the status away.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

PATIENCE_S = 1.0
"""How long an exit may wait for the template's report that names it, while reports are awaited."""

REMEMBERED = 256

log = logging.getLogger("dtq.process")


@dataclass(frozen=True, slots=True)
class Child:
    """One life of one slot."""

    slot: int
    life: int


@dataclass(frozen=True, slots=True)
class TemplateProcess:
    generation: int


@dataclass(frozen=True, slots=True)
class Other:
    """A program that we started, like an embedded Redis."""

    name: str


Who = Child | TemplateProcess | Other


@dataclass(frozen=True, slots=True)
class Exit:
    """One collected exit. `code` or `signal`; neither if somebody else took the status. `max_rss_bytes` is
    never below what the process had when it was forked. `at`: monotonic seconds."""

    who: Who
    pid: int
    code: int | None
    signal: int | None
    core_dumped: bool = False
    max_rss_bytes: int = 0
    cpu_ms: int = 0
    at: float = 0.0


@dataclass(slots=True)
class _Known:
    who: Who
    pidfd: int | None


@dataclass(slots=True)
class Strangers:
    """Processes that became ours because their parents died: helpers of tasks, mostly. `statuses`: of those
    collected last, in case a report was late."""

    collected: int = 0
    statuses: dict[int, Exit] = field(default_factory=dict)

    def collect(self, end: Exit) -> None:
        self.collected += 1
        self.statuses[end.pid] = end
        if len(self.statuses) > REMEMBERED:
            del self.statuses[next(iter(self.statuses))]


class Processes:
    """All processes whose parent we are, by pid.

    `drain` reads what the templates have reported, adds the children it names here, and says whether fork
    requests are still unanswered."""

    def __init__(self, drain: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._drain, self._clock = drain, clock
        self._known: dict[int, _Known] = {}
        self._pids: dict[Child, int] = {}
        self._strangers = Strangers()
        self._lost: list[Exit] = []
        self._waiting_since: float | None = None
        self._epoll = select.epoll()

    # Who is there.

    def add_child(self, slot: int, life: int, pid: int) -> None:
        """A child that a template reports. If it has already vanished, `collect` says so."""
        self._waiting_since = None
        who = Child(slot, life)
        late = self._strangers.statuses.pop(pid, None)
        if late is not None:
            self._lost.append(
                Exit(
                    who,
                    pid,
                    late.code,
                    late.signal,
                    late.core_dumped,
                    late.max_rss_bytes,
                    late.cpu_ms,
                    late.at,
                )
            )
        elif self._add(who, pid):
            self._pids[who] = pid
        else:
            self._lost.append(Exit(who, pid, code=None, signal=None, at=self._clock()))

    def add_template(self, generation: int, pid: int) -> None:
        self._add(TemplateProcess(generation), pid)

    def add_other(self, name: str, pid: int) -> None:
        self._add(Other(name), pid)

    def pid(self, slot: int, life: int) -> int | None:
        """None: not known, or its exit was collected."""
        return self._pids.get(Child(slot, life))

    def children(self) -> dict[Child, int]:
        """The uncollected ones and their pids."""
        return dict(self._pids)

    @property
    def strangers_collected(self) -> int:
        return self._strangers.collected

    def fileno(self) -> int:
        """Readable when a known process has ended. A stranger's end is told by SIGCHLD only."""
        return self._epoll.fileno()

    def close(self) -> None:
        for known in self._known.values():
            if known.pidfd is not None:
                os.close(known.pidfd)
        self._known.clear()
        self._pids.clear()
        self._epoll.close()

    def _add(self, who: Who, pid: int) -> bool:
        """False: there is no such process any more."""
        pidfd = None
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            # Out of descriptors, most likely. The pid is enough to signal it and to collect it.
            log.warning("no pidfd for %s, pid %d: %s", who, pid, error)
        self._known[pid] = _Known(who, pidfd)
        if pidfd is not None:
            self._epoll.register(pidfd, select.EPOLLIN)
        return True

    # Signals.

    def signal(self, slot: int, life: int, number: int) -> bool:
        """To the child alone. False: its exit was collected, nobody was signalled."""
        pid = self.pid(slot, life)
        return pid is not None and _send(os.kill, pid, number)

    def kill_group(self, slot: int, life: int) -> bool:
        """Kills the child and what it started. False: its exit was collected, nobody was signalled."""
        pid = self.pid(slot, life)
        if pid is None:
            return False
        _send(os.killpg, pid, signal.SIGKILL)
        # Itself, too: a task can have moved it to another group.
        return _send(os.kill, pid, signal.SIGKILL)

    def kill_strangers(self) -> int:
        """For the end: kills what became ours and is nobody's, and says how many. What those had started
        becomes ours when they are dead: call it again after `collect`, until there are none."""
        mine = {process.pid for process in psutil.Process().children()}
        strangers = mine - self._known.keys()
        return sum(_send(os.kill, pid, signal.SIGKILL) for pid in strangers if not _is_zombie(pid))

    # Exits.

    def collect(self) -> list[Exit]:
        """The exits of known processes since the last call, each once. Never waits."""
        exits, self._lost = self._lost, []
        while (pid := _ended(os.P_ALL, 0)) is not None:
            if pid not in self._known and self._is_awaited(pid):
                # It stands first in the kernel's list until it is collected: the others are asked one by one.
                exits += self._collect_known()
                break
            exits += self._collect_one(pid)
        return exits + self._collect_vanished()

    def _is_awaited(self, pid: int) -> bool:
        """Whether an unknown exit may still turn out to be a child's."""
        awaited = self._drain()
        if not awaited:
            self._waiting_since = None
        if pid in self._known or not awaited:
            return False
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        # A template that was silent for so long is not waited for again with each stranger.
        return self._clock() - self._waiting_since < PATIENCE_S

    def _collect_known(self) -> list[Exit]:
        ended = [pid for pid in self._known if _ended(os.P_PID, pid) is not None]
        return [end for pid in ended for end in self._collect_one(pid)]

    def _collect_one(self, pid: int) -> list[Exit]:
        known = self._known.get(pid)
        if known is None:
            self._strangers.collect(_wait(Other("stranger"), pid, self._clock()))
            return []
        if not isinstance(known.who, Other):
            # Before its status is taken: as long as it is a zombie, the number of its group is its own.
            _send(os.killpg, pid, signal.SIGKILL)
        end = _wait(known.who, pid, self._clock())
        self._forget(pid, known)
        return [end]

    def _collect_vanished(self) -> list[Exit]:
        """Those whose status somebody else took: code that waits for any child, in this process."""
        vanished = []
        for fd, _ in self._epoll.poll(0):
            pid, known = next(item for item in self._known.items() if item[1].pidfd == fd)
            if not _exists(fd):
                vanished.append(Exit(known.who, pid, code=None, signal=None, at=self._clock()))
                self._forget(pid, known)
        return vanished

    def _forget(self, pid: int, known: _Known) -> None:
        del self._known[pid]
        if isinstance(known.who, Child):
            self._pids.pop(known.who, None)
        if known.pidfd is not None:
            self._epoll.unregister(known.pidfd)
            os.close(known.pidfd)


def _ended(kind: int, number: int) -> int | None:
    """The pid of an ended child of ours, which stays uncollected."""
    try:
        found = os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None  # none at all, or not ours yet
    return None if found is None else found.si_pid


def _wait(who: Who, pid: int, now: float) -> Exit:
    """Collects a child that has ended."""
    _, status, usage = os.wait4(pid, 0)
    return Exit(
        who,
        pid,
        code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        core_dumped=os.WCOREDUMP(status),
        max_rss_bytes=usage.ru_maxrss * 1024,
        cpu_ms=round((usage.ru_utime + usage.ru_stime) * 1000),
        at=now,
    )


def _send(how: Callable[[int, int], None], pid: int, number: int) -> bool:
    try:
        how(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_name(number: int) -> str:
    """SIGKILL; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # the real-time ones


def _exists(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return False
    return True


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
