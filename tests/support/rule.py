"""A fault of the proxy that waits for its command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Words = list[bytes]
Match = bytes | Callable[[Words], bool]


@dataclass
class Rule:
    """`fired` counts how often it struck: a test asserts on it, or its fault may never have happened."""

    kind: Literal["drop_reply", "drop_request", "answer"]
    match: Match
    skip: int = 0
    count: int = 1
    answer: bytes = b""
    fired: int = 0

    def strikes(self, words: Words) -> bool:
        if self.fired >= self.count or not self._matches(words):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.fired += 1
        return True

    def _matches(self, words: Words) -> bool:
        if callable(self.match):
            return self.match(words)
        return self.match in b" ".join(words)
