"""One server with a producer, an operator and children that are only names: what the stories of the scripts
are told with, and what they look at."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, cast

from dtq_child.broker import Accepted, Actor, Broker
from dtq_child.connection import Link, open_link
from dtq_child.keys import GROUP, Keys, consumer, park
from dtq_child.outcome import Decision
from dtq_child.payload import Result
from dtq_child.scripts import Constants, Scripts
from dtq_child.settings import defaults
from dtq_child.task import Call, Token
from dtq_child.turns import Delivery, Outcome, Pair, Turns, Want
from tests.support.servers import RedisServer
from tests.support.snapshot import Places, snapshot

OPERATOR = Actor("ada", "test", "r1", "because")
NOTHING = Result(b"null", 4, truncated=False)


class Desk:
    """Nothing runs but what the test calls. `url`: what our links connect to, if not the server itself."""

    def __init__(self, server: RedisServer, url: str = "", **settings: Any) -> None:
        self.server = server
        self.settings = defaults(redis_url=url or server.url, **settings)
        self.keys = Keys(self.settings.key_prefix)
        self.scripts = Scripts(self.keys, Constants.of(self.settings))
        self.broker = Broker(self.settings)
        self.redis = cast(Any, server.client(decode_responses=True))
        self._raw = cast(Any, server.client())
        self._links: list[Link] = []
        self._markers = itertools.count(1)
        self._subscriber = self.redis.pubsub(ignore_subscribe_messages=True)
        self._subscriber.subscribe(self.keys.events)
        self._subscriber.get_message(timeout=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._subscriber.close()
        self.broker.close()
        for link in self._links:
            link.close()

    # -- who acts

    def link(self) -> Link:
        self._links.append(open_link(self.settings.redis_url))
        return self._links[-1]

    def child(self, slot: int = 0, *queues: str, worker: str = "w1", life: int = 1) -> Turns:
        name = consumer(worker, slot, life)
        return Turns(self.link(), self.keys, self.settings, worker, name, queues or ("default",))

    def enqueue(self, *ids: str, **options: Any) -> list[Accepted]:
        return self.broker.enqueue([call(task_id, **options) for task_id in ids])

    def began(self, child: Turns, task_id: str, **options: Any) -> Delivery:
        """A new task, begun by that child."""
        self.enqueue(task_id, **options)
        claimed = claim(child)
        assert claimed.token.task_id == task_id
        return claimed

    def dead(self, task_id: str, **options: Any) -> None:
        """A task in the dead letters."""
        child = self.child(9, options.get("queue", "default"), worker="undertaker")
        assert child.settle(buried(self.began(child, task_id, **options))) == "settled"

    def hold(self, child: Turns, task_id: str) -> Pair:
        """The child reads the entry of a queued task and does not begin it."""
        stream = self.record(task_id)["stream"]
        if not self.redis.xinfo_groups(stream):
            self.redis.xgroup_create(stream, GROUP, "0")
        [[_, [(entry_id, fields)]]] = self.redis.xreadgroup(GROUP, child.consumer, {stream: ">"}, count=1)
        assert fields["task_id"] == task_id
        return stream, entry_id

    def add_entry(self, fields: Mapping[str, str | bytes] | Mapping[bytes, bytes]) -> str:
        """An entry in the band of these tests by another program's hand, without a bell."""
        words: list[str | bytes] = []
        for name, value in fields.items():
            words += [name, value]
        return str(self.server.cli("XADD", self.stream(), "*", *words).decode())

    # -- what is

    def stream(self, queue: str = "default", band: int = 5) -> str:
        return self.keys.stream(queue, band)

    def now_ms(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def record(self, task_id: str) -> dict[str, str]:
        return cast(dict[str, str], self.redis.hgetall(self.keys.task(task_id)))

    def status(self, task_id: str) -> str | None:
        return cast("str | None", self.redis.hget(self.keys.task(task_id), "status"))

    def edit(self, task_id: str, /, **fields: Any) -> None:
        self.redis.hset(self.keys.task(task_id), mapping=fields)

    def execution(self, task_id: str, delivery: int) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.record(task_id)[f"execution:{delivery}"]))

    def idempotency(self, key: str, queue: str = "default") -> dict[str, Any] | None:
        value = self.redis.get(self.keys.idempotency(queue, key))
        return None if value is None else cast(dict[str, Any], json.loads(value))

    def entries(self, queue: str = "default", band: int = 5) -> list[tuple[str, dict[str, str]]]:
        return cast(list[tuple[str, dict[str, str]]], self.redis.xrange(self.stream(queue, band)))

    def letters(self) -> list[tuple[str, dict[str, str]]]:
        return cast(list[tuple[str, dict[str, str]]], self.redis.xrange(self.keys.dead_letter))

    def audit(self) -> list[dict[str, str]]:
        return [fields for _, fields in self.redis.xrange(self.keys.audit)]

    def owner(self, stream: str, entry_id: str) -> str | None:
        """The consumer under which the entry is pending."""
        found = self.redis.xpending_range(stream, GROUP, entry_id, entry_id, 1)
        return found[0]["consumer"] if found else None

    def idle_ms(self, stream: str, entry_id: str) -> int:
        return int(self.redis.xpending_range(stream, GROUP, entry_id, entry_id, 1)[0]["time_since_delivered"])

    def rings(self, queue: str = "default") -> int:
        return int(self.redis.llen(self.keys.bell_queue(queue)))

    def worker_rings(self, worker: str = "w1") -> int:
        return int(self.redis.llen(self.keys.bell_worker(worker)))

    def places(self) -> Places:
        return snapshot(self.redis, self.keys.prefix)

    def everything(self) -> dict[bytes, object]:
        """Every key with its value, and whether it ends: equal before and after whatever changed nothing."""
        keys = sorted(self._raw.keys("*"))
        pipe = self._raw.pipeline(transaction=False)  # a full server refuses transactions
        for key in keys:
            pipe.type(key)
            pipe.pttl(key)
        answers = pipe.execute()
        for key, kind in zip(keys, answers[::2], strict=True):
            # The order within a hash or a set may change by itself, so their DUMP does.
            getattr(pipe, {b"hash": "hgetall", b"set": "smembers"}.get(kind, "dump"))(key)
        ends = (left != -1 for left in answers[1::2])
        return dict(zip(keys, zip(pipe.execute(), ends, strict=True), strict=True))

    def events(self) -> list[dict[str, Any]]:
        """What was published since this was last asked."""
        marker = f"marker-{next(self._markers)}"
        self.redis.publish(self.keys.events, marker)
        seen: list[dict[str, Any]] = []
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            message = self._subscriber.get_message(timeout=0.2)
            if message is None:
                continue
            if message["data"] == marker:
                return seen
            seen.append(json.loads(message["data"]))
        raise AssertionError(f"the marker did not come back; seen: {seen}")

    def told(self) -> list[tuple[str, str]]:
        """The same, only type and task."""
        return [(event["type"], event["task_id"]) for event in self.events()]


def call(task_id: str, **options: Any) -> Call:
    return Call(**{"task_id": task_id, "queue": "default", "task_type": "probe", "payload": b"{}", **options})


def claim(child: Turns, *held: Pair, **want: bool) -> Delivery:
    """The child claims, and gets something."""
    claimed = child.turn(None, Want(**want), held).claimed
    assert claimed is not None
    return claimed


def drain(child: Turns, **want: bool) -> list[str]:
    """Claims and settles until nothing comes; the ids in their order."""
    ids: list[str] = []
    outcome = None
    while True:
        reply = child.turn(outcome, Want(**want))
        if reply.claimed is None and not reply.more:
            return ids
        outcome = None
        if reply.claimed is not None:
            ids.append(reply.claimed.token.task_id)
            outcome = succeeded(reply.claimed)


def at_park(child: Turns) -> str:
    return park(child.worker_id)


def pair(delivery: Delivery) -> Pair:
    return delivery.token.stream, delivery.token.entry_id


# -- ends of a delivery


def ended(
    delivery: Delivery | Token, decision: Decision, result: Result | None = None, **facts: Any
) -> Outcome:
    """Of a mere token: without what makes a success settle by the short way."""
    facts = facts or {"pid": 4711, "cpu_ms": 1.5}
    if isinstance(delivery, Token):
        return Outcome(delivery, "default", decision, result, facts, 3)
    token, queue = delivery.token, delivery.queue
    return Outcome(token, queue, decision, result, facts, 3, delivery.task_type, delivery.attempt)


def succeeded(delivery: Delivery | Token, result: Result | None = NOTHING) -> Outcome:
    return ended(delivery, Decision("succeed", "returned"), result)


def retried(delivery: Delivery | Token, delay_ms: int = 0, *, spend: bool = True) -> Outcome:
    decision = Decision(
        "retry",
        "raised",
        delay_ms=delay_ms,
        spend_attempt=spend,
        error_class="ValueError",
        error_message="no such thing",
        traceback="Traceback: here",
        retryable=True,
    )
    return ended(delivery, decision)


def unknown(delivery: Delivery | Token, delay_ms: int = 5000) -> Outcome:
    decision = Decision("retry", "unknown_task_type", delay_ms=delay_ms, error_class="UnknownTaskType")
    return ended(delivery, decision)


def buried(delivery: Delivery | Token, *, spend: bool = True) -> Outcome:
    decision = Decision(
        "dead",
        "attempts_exhausted",
        spend_attempt=spend,
        error_class="ValueError",
        error_message='it said "no"',
        traceback="Traceback: there",
        cause={"signal": "SIGSEGV"},
    )
    return ended(delivery, decision)


def handed_back(delivery: Delivery | Token) -> Outcome:
    return ended(delivery, Decision("release", "released", retryable=True))


Ending = Callable[[Delivery], Outcome]
KINDS: dict[str, tuple[Ending, str]] = {
    "succeed": (succeeded, "succeeded"),
    "retry": (lambda delivery: retried(delivery, 60_000), "retry_scheduled"),
    "unknown": (lambda delivery: unknown(delivery, 60_000), "retry_scheduled"),
    "dead": (buried, "dead_lettered"),
    "release": (handed_back, "queued"),
}
"""Each way in which a delivery ends, and the status that is to be read then."""
