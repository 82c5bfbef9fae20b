"""Where every task is at one instant, asked by one script and told without the package under test."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

TERMINAL = frozenset({"succeeded", "dead_lettered", "cancelled", "expired"})
_SCRIPT = Path(__file__).with_suffix(".lua").read_text()


@dataclass(frozen=True, slots=True)
class Waiting:
    """An entry that was never handed out, or a stray."""

    stream: str
    entry_id: str
    task_id: str


@dataclass(frozen=True, slots=True)
class Pending:
    """An entry in somebody's hands. `task_id` is "" if its body was deleted."""

    stream: str
    entry_id: str
    task_id: str
    consumer: str
    idle_ms: int
    deliveries: int


@dataclass(frozen=True, slots=True)
class Places:
    """The bands, the zsets, the dead letters and the records, all of the same instant.

    `strays` are delivered entries that are pending for nobody. `records` holds, by task id, the fields
    status, entry_id, consumer, delivery, attempt and crashes as text. Scores and `time_ms` are epoch ms.
    """

    time_ms: int
    lengths: dict[str, int]
    last_delivered: dict[str, str]
    undelivered: list[Waiting]
    pending: list[Pending]
    strays: list[Waiting]
    schedule: dict[str, float]
    claimed: dict[str, float]
    dead_letters: list[tuple[str, str]]
    records: dict[str, dict[str, str]]
    odd: list[str]
    _where: dict[str, set[str]] = field(default_factory=dict)

    def where(self, task_id: str) -> set[str]:
        """The places of a task: undelivered, pending, schedule, claimed, terminal; dead_letter if only that
        is left.

        Empty: the task is lost. At rest it is exactly one. A stray is no place.
        """
        return set(self._where.get(task_id, ()))

    def homeless(self, task_ids: Iterable[str]) -> set[str]:
        """Those of the accepted tasks that are nowhere; empty at every instant (R9)."""
        return {task_id for task_id in task_ids if not self.where(task_id)}

    def status(self, task_id: str) -> str | None:
        record = self.records.get(task_id)
        return None if record is None else record["status"]

    def depth(self) -> int:
        """How many entries lie in all bands, handed out or not."""
        return sum(self.lengths.values())

    def at_rest(self) -> bool:
        """Whether nothing is left to do: no entry in a band, nothing pending, both zsets empty."""
        return not (self.depth() or self.pending or self.schedule or self.claimed)

    def held_by(self, consumer: str) -> list[Pending]:
        return [pending for pending in self.pending if pending.consumer == consumer]


def snapshot(client: redis.Redis, prefix: str = "dtq:", task_ids: Iterable[str] = ()) -> Places:
    """Asks once. Records come for every task met anywhere, the recent ones and `task_ids`."""
    reply: Any = client.eval(_SCRIPT, 0, prefix, json.dumps(list(task_ids)))
    # Unreadable entries may hold any bytes; they come back as lone surrogates.
    text = reply.decode("utf-8", "surrogateescape") if isinstance(reply, bytes) else reply
    return _places(json.loads(text))


def _places(told: dict[str, Any]) -> Places:
    # Lua's empty table becomes {} in JSON, whatever it was meant to be.
    rows = {name: told[name] or [] for name in ("undelivered", "pending", "strays", "dead_letters", "odd")}
    places = Places(
        time_ms=told["time_ms"],
        lengths={stream: band["length"] for stream, band in told["bands"].items()},
        last_delivered={stream: band["last_delivered"] for stream, band in told["bands"].items()},
        undelivered=[Waiting(*row) for row in rows["undelivered"]],
        pending=[Pending(*row) for row in rows["pending"]],
        strays=[Waiting(*row) for row in rows["strays"]],
        schedule={task_id: float(score) for task_id, score in told["schedule"] or []},
        claimed={task_id: float(score) for task_id, score in told["claimed"] or []},
        dead_letters=[(entry_id, task_id) for entry_id, task_id in rows["dead_letters"]],
        records=told["records"] or {},
        odd=rows["odd"],
    )
    places._where.update(_place_by_task(places))
    return places


def _place_by_task(places: Places) -> dict[str, set[str]]:
    where: defaultdict[str, set[str]] = defaultdict(set)
    for waiting in places.undelivered:
        where[waiting.task_id].add("undelivered")
    for pending in places.pending:
        where[pending.task_id].add("pending")
    for task_id in places.schedule:
        where[task_id].add("schedule")
    for task_id in places.claimed:
        where[task_id].add("claimed")
    for task_id, record in places.records.items():
        if record["status"] in TERMINAL:
            where[task_id].add("terminal")
    for _, task_id in places.dead_letters:
        # A dead-lettered task's record says so in the same step; alone, the letter speaks for an expired
        # record.
        if not where[task_id]:
            where[task_id].add("dead_letter")
    return where
