"""A term of leadership: it has a number, and its holder stops trusting it before it ends (R31)."""

from __future__ import annotations

import threading

LOCK_MS = 10_000
MARGIN_S = 2.0
"""How long before its end a term is no longer trusted: what was sent until then has run by its end."""


class Term:
    """Shared by the duties of the leader. Thread-safe; monotonic seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._doubted = False
        self.number = 0
        """Of the term held now or last; 0 before the first."""

    def confirmed(self, sent: float) -> bool:
        """The lock was won or renewed by a call sent then. True if a new term has begun."""
        with self._lock:
            new = sent >= self._until
            self.number += new
            self._until = sent + LOCK_MS / 1000 - MARGIN_S
            self._doubted = False
            return new

    def ended(self) -> bool:
        """The lock is another's, or was given back. False if no term was held."""
        with self._lock:
            held, self._until = self._until > 0.0, 0.0
            self._doubted = False
            return held

    def doubt(self) -> None:
        """A script found the lock to be another's, or nobody's: not trusted until it is confirmed again."""
        with self._lock:
            self._doubted = self._until > 0.0

    def doubted(self) -> bool:
        with self._lock:
            return self._doubted

    def trusted(self, now: float) -> bool:
        with self._lock:
            return now < self._until and not self._doubted
