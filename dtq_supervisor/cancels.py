"""Looks several times a second whether what our children execute was cancelled or given to others (R33).

Asking beats listening: a subscription to the events would have every supervisor parse every event of the
fleet to find the one in a thousand that is a cancel, and what was lost would have to be asked for still."""

from __future__ import annotations

from collections.abc import Sequence

from dtq_supervisor.duty import RedisDuty
from dtq_supervisor.heartbeat import CHUNK
from dtq_supervisor.holdings import Holding, children
from dtq_supervisor.line import Line, Word
from dtq_supervisor.revocation import revoke

EVERY_S = 0.25


def look(line: Line, holdings: Sequence[Holding]) -> list[tuple[Holding, str]]:
    """What each execution has become, as `heartbeat.renew` says; renews nothing. Raises BrokerError."""
    answers: list[tuple[Holding, str]] = []
    for at in range(0, len(holdings), CHUNK):
        chunk = holdings[at : at + CHUNK]
        keys = [line.keys.cancelled, *(line.keys.task(holding.task_id) for holding in chunk)]
        words: list[Word] = [len(chunk), *(word for holding in chunk for word in holding.words())]
        reply = line.run("inflight", keys, words)
        answers += [(holding, word.decode()) for holding, word in zip(chunk, reply, strict=True)]
    return answers


class CancelWatch(RedisDuty):
    """While anything executes, four calls a second; else none."""

    name = "cancels"

    def beat(self) -> float:
        found = [holding for child in children(self.seat) for holding in child.holdings()]
        executing = [holding for holding in found if holding.executing]
        if executing:
            revoke(self.seat, look(self.line, executing))
        return EVERY_S
