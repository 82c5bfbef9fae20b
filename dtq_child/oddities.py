"""Tells of entries that were no tasks, or not any more: another program's mistakes, mostly, which would
otherwise be gone without a word. Of many at once not each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

QUIET_S = 5.0
"""From one word to the next: a program that writes nonsense writes a lot of it."""

_WORDS: Mapping[str, tuple[str, str]] = {
    "unreadable": (
        "1 entry could not be read as a task and is a dead letter now (UnreadableEntry; the letter says why)",
        "{} entries could not be read as tasks and are dead letters now (UnreadableEntry; the letters say "
        "why)",
    ),
    "unburied": (
        "1 entry cannot be read as a task, nor be kept as a dead letter: it stays where it is",
        "{} times an entry could not be read as a task, nor be kept as a dead letter: it stays where it is",
    ),
    "absorbed": (
        "1 entry was removed unexecuted: by its record the task is over, elsewhere, or in no state we know",
        "{} entries were removed unexecuted: by their records the tasks are over, elsewhere, or in no state "
        "we know",
    ),
}

log = logging.getLogger("dtq.child")


def words(counts: Mapping[str, int]) -> list[str]:
    """What a script counted, as far as it is odd."""
    return [
        (one if counts[what] == 1 else many).format(counts[what])
        for what, (one, many) in _WORDS.items()
        if counts.get(what)
    ]


class Oddities:
    """What a child has met. `tell` says it when the time has come; monotonic seconds."""

    def __init__(self) -> None:
        self._untold: Counter[str] = Counter()
        self._quiet_until = 0.0

    def note(self, counts: Mapping[str, int]) -> None:
        for what in _WORDS:
            if counts.get(what):
                self._untold[what] += counts[what]

    def tell(self, now: float) -> None:
        if self._untold and now >= self._quiet_until:
            self._quiet_until = now + QUIET_S
            for line in words(self._untold):
                log.warning("%s", line)
            self._untold.clear()
