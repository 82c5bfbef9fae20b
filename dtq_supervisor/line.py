"""A duty's own line to Redis: who we are there, one link, and what its calls say about the connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dtq_child.connection import REPLY_TIMEOUT_S, Link, ServerReply
from dtq_child.errors import BrokerError, BrokerRefused, BrokerUnavailable
from dtq_child.keys import Keys, park
from dtq_child.scripts import Scripts
from dtq_supervisor.seat import Seat

Word = bytes | str | int
SHOWN_KEYS = 6


class Pulse(Protocol):
    """What the calls of all duties say about the connection as a whole; monotonic seconds."""

    def success(self, sent: float, received: float) -> None: ...

    def failure(self) -> None: ...


@dataclass(slots=True)
class Line:
    """One link under the supervisor's name. For one thread."""

    link: Link
    scripts: Scripts
    worker_id: str
    queues: tuple[str, ...]
    pulse: Pulse
    former_queues: tuple[str, ...] = ()
    sent: float = 0.0
    """When the last command went out, monotonic seconds."""
    received: float = 0.0
    """When the last reply came, monotonic seconds."""

    @classmethod
    def of(cls, seat: Seat, name: str, reply_timeout_s: float = REPLY_TIMEOUT_S) -> Line:
        return cls(
            seat.make_link(name, reply_timeout_s),
            seat.scripts,
            seat.worker_id,
            tuple(seat.queues),
            seat.redis_ok,
            seat.former_queues,
        )

    def follow(self, seat: Seat) -> None:
        """A reload may have changed what a line was made of."""
        self.scripts, self.queues, self.former_queues = seat.scripts, seat.queues, seat.former_queues

    @property
    def keys(self) -> Keys:
        return self.scripts.keys

    @property
    def park(self) -> str:
        return park(self.worker_id)

    @property
    def bell(self) -> str:
        return self.keys.bell_worker(self.worker_id)

    def streams(self) -> list[str]:
        """The bands of our queues, from p9 down, the queues in turn within a band."""
        return [self.keys.stream(queue, band) for band in range(9, -1, -1) for queue in self.queues]

    def streams_of_children(self) -> list[str]:
        """The same, and the bands where only children of an older configuration have entries."""
        return [*self.streams(), *(band for queue in self.former_queues for band in self.keys.bands(queue))]

    def run(self, script: str, keys: Sequence[str], args: Sequence[Word]) -> Any:
        """One call of a script. Raises BrokerError."""
        try:
            return self._ask(lambda: self.scripts.run(self.link, script, list(keys), list(args)))
        except ServerReply as error:
            raise _naming(error, script, keys) from error

    def call(self, *words: Word) -> Any:
        """One plain command. Raises BrokerError."""
        try:
            return self._ask(lambda: self.link.call(*words))
        except ServerReply as error:
            raise _naming(error, str(words[0]), [str(word) for word in words[1:2]]) from error

    def _ask(self, ask: Callable[[], Any]) -> Any:
        self.sent = time.monotonic()
        try:
            reply = ask()
        except (BrokerUnavailable, BrokerRefused):
            self.pulse.failure()
            raise
        except BrokerError:
            # It answered, if not as we like.
            self._answered()
            raise
        self._answered()
        return reply

    def _answered(self) -> None:
        self.received = time.monotonic()
        self.pulse.success(self.sent, self.received)


def _naming(error: ServerReply, asked: str, keys: Sequence[str]) -> ServerReply:
    """A key that holds something else is for people to find, and Redis does not name it."""
    if "WRONGTYPE" not in str(error) or not keys:
        return error
    shown = ", ".join(keys[:SHOWN_KEYS]) + (", …" if len(keys) > SHOWN_KEYS else "")
    return ServerReply(f"{error} ({asked} of {'' if len(keys) == 1 else 'one of '}{shown})")


def counts_of(flat: Sequence[Any]) -> dict[str, int]:
    """What a script counted, from the flat list that it came in."""
    return {flat[at].decode(): int(flat[at + 1]) for at in range(0, len(flat), 2)}


def pairs_of(flat: Sequence[Any]) -> list[tuple[str, str]]:
    return [(flat[at].decode(), flat[at + 1].decode()) for at in range(0, len(flat), 2)]
