"""Entries pending under our own names that no child of ours knows of (R28).

A claim may land after its child has died, or its reply may be lost for good. Nobody else takes such an entry
before its lease is over, and nobody of ours would look. It is one if no row named it, read before and after,
in two looks: the rows of a moment say nothing about an entry that is just changing hands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtq_child.row import Phase
from dtq_supervisor.holdings import Child
from dtq_supervisor.line import Line, Word

IDLE_MS = 5000
TURN_MS = 15000
"""A child in the middle of a turn may still be answered: connecting and the reply take at most 10 s."""
_TURNING = frozenset({Phase.CLAIMING, Phase.SETTLING})


@dataclass(frozen=True, slots=True)
class Pending:
    """`delivery` if the record runs under that consumer, else "0": what begins later is then left alone."""

    stream: str
    entry_id: str
    consumer: str
    task_id: str
    delivery: str


def list_unnamed(line: Line, named: Iterable[tuple[str, str]]) -> list[tuple[Pending, int]]:
    """What is pending under our consumers but for `named`, idle for more than IDLE_MS, and its idle ms.
    Raises BrokerError."""
    pairs = list(named)
    words: list[Word] = [line.worker_id, line.park, IDLE_MS, len(pairs)]
    words += [word for pair in pairs for word in pair]
    found = []
    for stream, entry_id, consumer, idle, task_id, delivery in line.run(
        "strays", line.streams_of_children(), words
    ):
        names = (name.decode() for name in (stream, entry_id, consumer, task_id, delivery))
        found.append((Pending(*names), int(idle)))
    return found


def release(line: Line, strays: Sequence[Pending]) -> int:
    """Hands them to anybody, spending nothing; what was begun meanwhile stays. Returns how many went."""
    released = 0
    for consumer in sorted({stray.consumer for stray in strays}):
        theirs = [stray for stray in strays if stray.consumer == consumer]
        words: list[Word] = [consumer, line.worker_id, line.park, "1", len(theirs)]
        for stray in theirs:
            words += [stray.stream, stray.entry_id, stray.task_id, stray.delivery]
        released += int(line.run("release", [line.bell], words)[0])
    return released


def named_by(children: Iterable[Child]) -> set[tuple[str, str]]:
    return {(holding.stream, holding.entry_id) for child in children for holding in child.holdings()}


def suspects(
    found: Iterable[tuple[Pending, int]],
    before: Sequence[Child],
    after: Sequence[Child],
    unsettled: set[str],
) -> set[Pending]:
    """Those that nobody answers for. `before`, `after`: the rows around the look; `unsettled`: consumers
    whose death is still to be settled."""
    named = named_by(before) | named_by(after)
    everybody = [*before, *after]
    unreadable = {child.consumer for child in everybody if child.row is None}
    turning = {child.consumer for child in everybody if child.row and child.row.phase in _TURNING}
    return {
        pending
        for pending, idle_ms in found
        if (pending.stream, pending.entry_id) not in named
        and pending.consumer not in unreadable | unsettled
        and not (pending.consumer in turning and idle_ms < TURN_MS)
    }
