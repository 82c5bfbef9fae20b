"""What producers and operators ask of Redis about tasks: enqueue, look, cancel, pause, requeue, discard."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dtq_child.connection import Link, LinkPool, Pause, ServerReply, open_link
from dtq_child.errors import BrokerUnavailable, IdempotencyConflict, QueueFull, TaskNotFound
from dtq_child.keys import Keys
from dtq_child.scripts import Constants, Scripts
from dtq_child.settings import Settings
from dtq_child.task import Call, Record, text

T = TypeVar("T")
MAX_CALLS = 500


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer for one call. `new`: this call made it; `deduplicated`: another task holds its idempotency
    key."""

    task_id: str
    new: bool
    deduplicated: bool
    status: str


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, for the audit. `via` says by which door; an empty `name` writes no audit where that is
    allowed."""

    name: str = ""
    via: str = ""
    request_id: str = ""
    detail: str = ""

    def as_args(self) -> list[str | bytes | int]:
        return [self.name, self.via, self.request_id, self.detail]


def _optional(value: int | None) -> str | int:
    return "" if value is None else value


def payload_hash(payload: bytes) -> str:
    """SHA-1, because scripts can make it, too: when they write a key anew, of a payload that they have."""
    return hashlib.sha1(payload, usedforsecurity=False).hexdigest()


class Broker:
    """Thread-safe; one a process. Every method ends within `enqueue_timeout_s` or raises
    BrokerUnavailable."""

    def __init__(self, settings: Settings, make_link: Callable[[], Link] | None = None) -> None:
        self.settings = settings
        self.keys = Keys(settings.key_prefix)
        self.scripts = Scripts(self.keys, Constants.of(settings))
        reply_timeout = max(0.1, min(5.0, settings.enqueue_timeout_s))
        self._pool = LinkPool(make_link or (lambda: open_link(settings.redis_url, reply_timeout)))

    def close(self) -> None:
        self._pool.close()

    def enqueue(self, calls: Sequence[Call]) -> list[Accepted]:
        """Accepts all calls (at most MAX_CALLS) or none, in one round trip. Resends after an error are safe:
        a known id answers with its task (R10).

        Raises QueueFull, IdempotencyConflict, RedisOutOfMemory, BrokerUnavailable."""
        keys, args = self._enqueue_words(calls)
        reply = self._again(lambda link: self.scripts.run(link, "enqueue", keys, args))
        word = reply[0]
        if word == b"ok":
            return [
                Accepted(text(reply[at + 1]), reply[at] == 0, reply[at] == 2, text(reply[at + 2]))
                for at in range(1, len(reply), 3)
            ]
        if word == b"full":
            raise QueueFull(text(reply[1]), int(reply[2]), self.settings.queue_max_depth)
        if word == b"conflict":
            call = calls[int(reply[2])]
            raise IdempotencyConflict(call.queue, call.idempotency_key, text(reply[1]))
        raise ServerReply(text(reply[1]))

    def _enqueue_words(self, calls: Sequence[Call]) -> tuple[list[str], list[bytes | str | int]]:
        k = self.keys
        keys = [k.recent, k.queues, k.schedule]
        args: list[bytes | str | int] = [len(calls), self.settings.queue_max_depth]
        for call in calls:
            key = call.idempotency_key
            keys += [
                k.task(call.task_id),
                k.stream(call.queue, call.priority),
                k.idempotency(call.queue, key) if key else k.nil,
                k.bell_queue(call.queue),
            ]
            args += [
                call.task_id,
                call.queue,
                call.task_type,
                call.payload,
                call.priority,
                _optional(call.max_attempts),
                _optional(call.timeout_ms),
                _optional(call.soft_timeout_ms),
                _optional(call.max_crashes),
                call.retry,
                key,
                payload_hash(call.payload) if key else "",
                _optional(call.delay_ms),
                _optional(call.eta_ms),
                _optional(call.expires_ms),
                call.metadata,
                call.trace,
                "" if call.store_result else "0",
                _optional(call.expires_at_ms),
            ]
        return keys, args

    def record(self, task_id: str) -> Record | None:
        reply = self._again(lambda link: link.call("HGETALL", self.keys.task(task_id)))
        return Record(_pairs(reply)) if reply else None

    def status(self, task_id: str) -> str:
        """Raises TaskNotFound."""
        reply = self._again(lambda link: link.call("HGET", self.keys.task(task_id), "status"))
        if reply is None:
            raise TaskNotFound(task_id)
        return text(reply)

    def result(self, task_id: str) -> bytes | None:
        reply = self._again(lambda link: link.call("GET", self.keys.result(task_id)))
        return reply if reply is None else bytes(reply)

    def dead_letter(self, dead_letter_id: str) -> dict[str, bytes] | None:
        """The fields of a dead letter by its stream id (a record's `dead_letter_id`); None when it was
        trimmed or taken out."""
        found = self._again(
            lambda link: link.call("XRANGE", self.keys.dead_letter, dead_letter_id, dead_letter_id)
        )
        return _pairs(found[0][1]) if found else None

    def depth(self, queue: str) -> int:
        """Entries of a queue, waiting and in flight, over its ten bands (not the schedule)."""
        bands = self.keys.bands(queue)
        return self._again(lambda link: sum(int(link.call("XLEN", band)) for band in bands))

    def cancel(self, task_id: str, actor: Actor | None = None) -> str:
        """`cancelled` before it started, `stopping` while it ran (the same answers again to whoever asks
        twice), `too_late`, or `unknown` (it will not start if it turns up)."""
        k = self.keys
        keys = [k.task(task_id), k.schedule, k.claimed, k.cancelled]
        args = [task_id, *(actor or Actor()).as_args()]
        return text(self._again(lambda link: self.scripts.run(link, "cancel", keys, args))[0])

    def pause(self, queue: str, actor: Actor) -> bool:
        """From the return on nothing of the queue starts. False when it was paused already."""
        keys = [self.keys.paused(queue), self.keys.audit]
        return bool(
            self._again(lambda link: self.scripts.run(link, "pause", keys, [queue, *actor.as_args()]))
        )

    def resume(self, queue: str, actor: Actor) -> bool:
        """False when it was not paused."""
        keys = [self.keys.paused(queue), self.keys.audit, self.keys.bell_queue(queue)]
        return bool(
            self._again(lambda link: self.scripts.run(link, "resume", keys, [queue, *actor.as_args()]))
        )

    def paused(self, queue: str) -> bool:
        return bool(self._again(lambda link: link.call("EXISTS", self.keys.paused(queue))))

    def requeue(self, task_id: str, actor: Actor, dead_letter_id: str = "") -> tuple[str, str]:
        """(`requeued` | `not_dead` | `not_found`, status found). Never resent: after BrokerUnavailable look
        at the record. Raises IdempotencyConflict, RedisOutOfMemory."""
        keys = [self.keys.task(task_id), self.keys.dead_letter, self.keys.queues]
        reply = self._once("requeue", keys, [task_id, dead_letter_id, *actor.as_args()])
        if reply[0] == b"conflict":
            raise IdempotencyConflict(text(reply[2]), text(reply[3]), text(reply[1]))
        return text(reply[0]), text(reply[1]) if len(reply) > 1 else ""

    def discard(self, task_id: str, actor: Actor, dead_letter_id: str = "") -> tuple[str, str]:
        """(`discarded` | `not_dead` | `not_found`, status found). Never resent."""
        keys = [self.keys.task(task_id), self.keys.dead_letter, self.keys.audit]
        reply = self._once("discard", keys, [task_id, dead_letter_id, *actor.as_args()])
        return text(reply[0]), text(reply[1]) if len(reply) > 1 else ""

    def _once(self, script: str, keys: list[str], args: list[bytes | str | int]) -> Any:
        with self._pool.link() as link:
            link.deadline = time.monotonic() + self.settings.enqueue_timeout_s
            return self.scripts.run(link, script, keys, args)

    def _again(self, ask: Callable[[Link], T]) -> T:
        """Asks until it is answered or the time is over; only for what may safely run more than once."""
        patience = self.settings.enqueue_timeout_s
        end = time.monotonic() + patience
        pause = Pause()
        while True:
            try:
                with self._pool.link() as link:
                    link.deadline = end
                    return ask(link)
            except BrokerUnavailable as error:
                wait = pause.next()
                if time.monotonic() + wait >= end:
                    told = f"Redis did not answer within {patience:g} s (DTQ_ENQUEUE_TIMEOUT_S): {error}"
                    raise BrokerUnavailable(told) from error
                time.sleep(wait)


def _pairs(reply: Any) -> dict[str, bytes]:
    """HGETALL's answer: a flat list in RESP2, a map in RESP3."""
    if isinstance(reply, dict):
        return {text(name): value for name, value in reply.items()}
    return {text(reply[at]): reply[at + 1] for at in range(0, len(reply), 2)}
