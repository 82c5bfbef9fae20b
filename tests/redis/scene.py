"""A stage for table tests of scripts: one server, supervisors and children that are only names, and hands
to age what lies there."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, cast

from dtq_child.broker import Broker
from dtq_child.connection import open_link
from dtq_child.keys import GROUP, Keys, consumer, park
from dtq_child.scripts import Constants, Scripts
from dtq_child.settings import defaults
from dtq_child.task import Call, Token
from dtq_child.turns import Delivery, Turns, Want
from dtq_supervisor.line import Line
from tests.support.servers import RedisServer
from tests.support.snapshot import Places, snapshot

US, THEM = "us-1-aa", "them-2-bb"
QUEUES = ("default", "images")


class Calls:
    """Counts what a line reports."""

    def __init__(self) -> None:
        self.good, self.bad = 0, 0

    def success(self, sent: float, received: float) -> None:
        assert 0 < sent <= received
        self.good += 1

    def failure(self) -> None:
        self.bad += 1


class Scene:
    """Everything happens on one empty server; nothing runs but what the test calls."""

    def __init__(self, server: RedisServer, **settings: Any) -> None:
        self.server = server
        self.redis = cast(Any, server.client(decode_responses=True))
        self.settings = defaults(redis_url=server.url, **settings)
        self.keys = Keys(self.settings.key_prefix)
        self.scripts = Scripts(self.keys, Constants.of(self.settings))
        self.broker = Broker(self.settings)
        self.calls = Calls()
        self._links = [open_link(server.url)]
        self._turns: dict[str, Turns] = {}
        self._numbers = itertools.count(1)
        self._pubsub = self.redis.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(self.keys.events)
        self._pubsub.get_message(timeout=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pubsub.close()
        self.broker.close()
        for link in self._links:
            link.close()

    # -- who acts

    def line(self, worker: str = US, queues: Sequence[str] = QUEUES) -> Line:
        self._links.append(open_link(self.server.url))
        return Line(self._links[-1], self.scripts, worker, tuple(queues), self.calls)

    def child(self, worker: str, slot: int = 0, life: int = 1, queues: Sequence[str] = QUEUES) -> Turns:
        name = consumer(worker, slot, life)
        if name not in self._turns:
            self._turns[name] = Turns(self._links[0], self.keys, self.settings, worker, name, queues)
        return self._turns[name]

    # -- what happens

    def enqueue(self, n: int = 1, **options: Any) -> list[str]:
        ids = [f"t{next(self._numbers)}" for _ in range(n)]
        given = {"queue": "default", "task_type": "probe", "payload": b"{}", **options}
        self.broker.enqueue([Call(task_id=task_id, **given) for task_id in ids])
        return ids

    def claim(self, worker: str, slot: int = 0, life: int = 1, **want: bool) -> Delivery:
        """The child claims, and gets something."""
        claimed = self.child(worker, slot, life).turn(None, Want(**want)).claimed
        assert claimed is not None
        return claimed

    def started(self, worker: str, slot: int = 0, life: int = 1, **options: Any) -> Delivery:
        """A new task is enqueued, and that child begins it."""
        task_id = self.enqueue(**options)[0]
        delivery = self.claim(worker, slot, life)
        assert delivery.token.task_id == task_id
        return delivery

    def hold(self, worker: str, task_id: str, slot: int = 0, life: int = 1) -> Token:
        """That child reads the entry and does not begin it: held, or the claim of another program."""
        return self.hold_all(worker, [task_id], slot, life)[0]

    def hold_all(self, worker: str, task_ids: Sequence[str], slot: int = 0, life: int = 1) -> list[Token]:
        """The same with the next entries of one band, which are those of `task_ids`."""
        stream = self.record(task_ids[0])["stream"]
        name = consumer(worker, slot, life)
        if not self.server.cli("XINFO", "GROUPS", stream):
            self.server.cli("XGROUP", "CREATE", stream, GROUP, "0")
        words = ("XREADGROUP", "GROUP", GROUP, name, "COUNT", len(task_ids), "STREAMS", stream, ">")
        entries = self.server.cli(*words)[0][1]
        found = [text(flat[flat.index(b"task_id") + 1]) for _, flat in entries]
        assert found == list(task_ids)
        return [
            Token(task_id, stream, text(entry_id), 0, name)
            for task_id, (entry_id, _) in zip(task_ids, entries, strict=True)
        ]

    def age(self, token: Token, ms: int) -> None:
        """Its owner has not been heard of for so long."""
        pending = self.pending(token)
        assert pending is not None
        self.server.cli("XCLAIM", token.stream, GROUP, pending[0], 0, token.entry_id, "IDLE", ms, "JUSTID")

    def touch(self, task_id: str, ms_ago: int) -> None:
        """The record was last written so long ago."""
        self.redis.hset(self.keys.task(task_id), "updated_at_ms", self.now_ms() - ms_ago)

    def make_due(self, task_id: str) -> None:
        """A task in the schedule is due now."""
        self.make_all_due([task_id])

    def make_all_due(self, task_ids: Sequence[str]) -> None:
        due = self.now_ms()
        with self.redis.pipeline(transaction=False) as pipe:
            for task_id in task_ids:
                pipe.hset(self.keys.task(task_id), "due_at_ms", due)
                pipe.zadd(self.keys.schedule, {task_id: due}, xx=True)
            pipe.execute()

    def fill_memory(self) -> None:
        """From now on every write that may be refused is."""
        self.server.cli("CONFIG", "SET", "maxmemory", "1")

    # -- what is

    def now_ms(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def record(self, task_id: str) -> dict[str, str]:
        found: dict[str, str] = self.redis.hgetall(self.keys.task(task_id))
        return found

    def execution(self, task_id: str, delivery: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.record(task_id)[f"execution:{delivery}"])
        return found

    def pending(self, token: Token) -> tuple[str, int] | None:
        """The consumer that has it, and for how many ms it has been idle."""
        found = self.server.cli("XPENDING", token.stream, GROUP, token.entry_id, token.entry_id, 1)
        return (found[0][1].decode(), int(found[0][2])) if found else None

    def owner(self, token: Token) -> str | None:
        pending = self.pending(token)
        return pending[0] if pending else None

    def consumers(self, stream: str) -> set[str]:
        return {text(facts[1]) for facts in self.server.cli("XINFO", "CONSUMERS", stream, GROUP)}

    def rings(self, bell: str) -> int:
        return int(self.redis.llen(bell))

    def places(self) -> Places:
        return snapshot(self.redis, self.keys.prefix)

    def events(self) -> list[tuple[str, str]]:
        """(type, task or worker) of what was published since this was last asked."""
        marker = f"marker-{next(self._numbers)}"
        self.redis.publish(self.keys.events, marker)
        seen: list[tuple[str, str]] = []
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            message = self._pubsub.get_message(timeout=0.2)
            if message is None:
                continue
            if message["data"] == marker:
                return seen
            event = json.loads(message["data"])
            seen.append((event["type"], event["task_id"] or event["worker_id"]))
        raise AssertionError(f"the marker did not come back; seen: {seen}")


def text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def at_park(worker: str) -> str:
    return park(worker)
