"""What a supervisor tells about its reloads to programs on the same machine, like `dtq reload --wait`.

JSON in an unnamed file of memory that it holds open. Whoever may look into /proc/<pid>/fd, which is its own
user and root, finds the file by its name there and reads it: without Redis, without a writable folder, and
nothing is left behind. It is also the proof that this process is a supervisor and has a handler for SIGHUP.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from dtq_child.error_text import clip_middle
from dtq_supervisor.roster import Pool, Reloaded
from dtq_supervisor.slot import RUNNING

NAME = "dtq-reload"
LINK = f"/memfd:{NAME} (deleted)"
REASON_BYTES = 4000
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Ended:
    """A reload that has ended. `begun`: seconds of the monotonic clock, which is the same for all processes
    of a machine."""

    number: int
    begun: float
    outcome: str
    generation: int
    reason: str = ""

    def as_json(self) -> str:
        """For the worker's record, which other machines read: without a time that is only ours."""
        told = {"number": self.number, "outcome": self.outcome, "generation": self.generation}
        return orjson.dumps({**told, "reason": self.reason}).decode()


@dataclass(frozen=True, slots=True)
class Told:
    """`phase`: of the reload under way, empty if there is none. `children`: generation → how many."""

    generation: int = 0
    phase: str = ""
    children: tuple[tuple[int, int], ...] = ()
    last: Ended | None = None


class Notice:
    """The writer's side, for the main thread."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        self._size = 0
        self._told: Told | None = None

    def tell(self, told: Told) -> None:
        if told == self._told:
            return
        self._told = told
        text = orjson.dumps(asdict(told))
        # Blanks over what was there before: one write, and no moment at which the file is empty.
        self._size = max(self._size, len(text))
        os.pwrite(self._fd, text.ljust(self._size), 0)

    def close(self) -> None:
        os.close(self._fd)


class NoNotice(Exception):
    """There is no supervisor of that pid, or none that we may look at."""


def read(pid: int) -> Told:
    """What the supervisor tells now. Raises NoNotice."""
    try:
        path = next((fd for fd in Path(f"/proc/{pid}/fd").iterdir() if _link(fd) == LINK), None)
        if path is None:
            raise NoNotice(f"pid {pid} is no dtq-supervisor, or has not begun yet")
        for _ in range(_TRIES):
            told = _parsed(path.read_bytes())
            if told is not None:
                return told
    except PermissionError:
        raise NoNotice(f"pid {pid} belongs to another user") from None
    except (FileNotFoundError, ProcessLookupError):
        raise NoNotice(f"there is no process {pid}") from None
    raise NoNotice(f"pid {pid} tells nothing that this version understands")


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:  # closed while we looked
        return ""


def _parsed(text: bytes) -> Told | None:
    """None: it was being written at this moment."""
    try:
        found: dict[str, Any] = orjson.loads(text)
        last = found["last"]
        children = tuple((generation, count) for generation, count in found["children"])
        ended = Ended(**last) if last else None
        return Told(found["generation"], found["phase"], children, ended)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None


def told_of(pool: Pool) -> Told:
    children = Counter(slot.generation for slot in pool.slots if slot.state in RUNNING)
    return Told(
        pool.template.generation if pool.imported else 0,
        pool.reload.phase if pool.reload else "",
        tuple(sorted(children.items())),
        _ended(pool.reloaded) if pool.reloaded else None,
    )


def _ended(how: Reloaded) -> Ended:
    # With the end of the reason, too: there a traceback says what was raised.
    reason = clip_middle(how.reason, REASON_BYTES)
    return Ended(how.number, how.begun, "done" if how.done else "failed", how.generation, reason)
