"""Looks at processes from outside: who is whose child, in which group, under which title, with what open."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

GONE = (psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError, FileNotFoundError)


@dataclass(frozen=True, slots=True)
class Process:
    """What one process was at the moment of looking.

    `title` is what `ps` shows, also after setproctitle; `born` (epoch seconds) tells it from a later owner
    of its pid.
    """

    pid: int
    ppid: int
    pgid: int
    sid: int
    name: str
    title: str
    status: str
    cmdline: tuple[str, ...]
    born: float

    def __str__(self) -> str:
        return f"{self.pid} (parent {self.ppid}, group {self.pgid}, {self.status}) {self.title or self.name}"


def look(pid: int) -> Process | None:
    """The process as it is now, a zombie too; None if there is none."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            words = command_line(pid)
            return Process(
                pid=pid,
                ppid=process.ppid(),
                pgid=os.getpgid(pid),
                sid=os.getsid(pid),
                name=process.name(),
                title=" ".join(words).rstrip(),
                status=process.status(),
                cmdline=tuple(words),
                born=process.create_time(),
            )
    except GONE:
        return None


def command_line(pid: int) -> list[str]:
    """The words of /proc/<pid>/cmdline. After setproctitle the first word is the whole title: psutil would
    split that at its blanks."""
    raw = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    return [word.decode(errors="replace") for word in raw.split(b"\0")]


def tree(pid: int) -> list[Process]:
    """The process and all below it, parents before children; empty if it is gone."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except GONE:
        return []
    return looks([pid, *(child.pid for child in below)])


def looks(pids: Iterable[int]) -> list[Process]:
    return [found for found in map(look, pids) if found is not None]


def alive(pid: int) -> bool:
    """Whether a process of this pid can still do anything: a zombie cannot."""
    found = look(pid)
    return found is not None and found.status != psutil.STATUS_ZOMBIE


def still(process: Process) -> bool:
    """Whether this very process, and not a later owner of its pid, is alive."""
    found = look(process.pid)
    return found is not None and found.born == process.born and found.status != psutil.STATUS_ZOMBIE


def stopped(pid: int) -> bool:
    found = look(pid)
    return found is not None and found.status == psutil.STATUS_STOPPED


def descriptors(pid: int) -> dict[int, str]:
    """What each open descriptor leads to, as /proc tells it: a path, `socket:[…]`, `/memfd:… (deleted)`."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except FileNotFoundError:  # closed while we looked
            continue
    return found


def groups(pid: int) -> dict[int, list[int]]:
    """Group → its living members, of the process and all below it."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for process in tree(pid):
        if process.status != psutil.STATUS_ZOMBIE:
            members[process.pgid].append(process.pid)
    return dict(members)


def group_members(pgid: int) -> list[int]:
    """The living processes of one group, wherever they hang in the tree."""
    everyone = looks(psutil.pids())
    return [p.pid for p in everyone if p.pgid == pgid and p.status != psutil.STATUS_ZOMBIE]


def with_environment(variable: str, prefix: str) -> list[int]:
    """Pids whose environment *at exec* holds the variable with a value of that prefix.

    Processes that called setproctitle have overwritten theirs and are not found this way.
    """
    wanted = f"{variable}={prefix}".encode()
    found = []
    for pid in psutil.pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except (*GONE, PermissionError):
            continue
        if any(word.startswith(wanted) for word in environment.split(b"\0")):
            found.append(pid)
    return found
