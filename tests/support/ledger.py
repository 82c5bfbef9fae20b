"""An append-only file in which handlers note what they did: the witness that stands outside of Redis."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "DTQ_TEST_LEDGER"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `monotonic_ns` compares between the processes of a machine; `wall` is epoch seconds."""

    task_id: str
    word: str
    pid: int
    monotonic_ns: int
    wall: float
    facts: dict[str, Any]


class Ledger:
    """Written by any number of processes at once, read by the test."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def from_environment(cls) -> Ledger:
        """The ledger that DTQ_TEST_LEDGER names. Raises KeyError if it names none."""
        return cls(os.environ[VARIABLE])

    def note(self, task_id: str, word: str, **facts: Any) -> None:
        """Appends one line. It is in the file when this returns, whatever then happens to the process."""
        line = {
            "task_id": task_id,
            "word": word,
            "pid": os.getpid(),
            "monotonic_ns": time.monotonic_ns(),
            "wall": time.time(),
            "facts": facts,
        }
        # Opened for each line: nothing crosses a fork, and no handler can close it.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            text = json.dumps(line).encode() + b"\n"
            written = os.write(descriptor, text)
            if written != len(text):
                raise OSError(f"{self.path}: only {written} of {len(text)} bytes fitted")
        finally:
            os.close(descriptor)

    def entries(self) -> list[Entry]:
        """All finished lines in the order of writing."""
        if not self.path.exists():
            return []
        # A reader may meet a line of which not all bytes are there yet; what follows the last newline is
        # not a line.
        whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        return [Entry(**json.loads(line)) for line in whole.splitlines()]

    def notes(self, task_id: str, word: str | None = None) -> list[Entry]:
        return [e for e in self.entries() if e.task_id == task_id and word in (None, e.word)]

    def starts(self, task_id: str) -> list[Entry]:
        return self.notes(task_id, "start")

    def ends(self, task_id: str) -> list[Entry]:
        return self.notes(task_id, "end")

    def by_task(self) -> dict[str, list[Entry]]:
        grouped: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in self.entries():
            grouped[entry.task_id].append(entry)
        return dict(grouped)
