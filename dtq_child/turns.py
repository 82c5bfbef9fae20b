"""What a child asks of Redis: settle the task just done and claim the next, in one round trip; hand back;
wait on a bell."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from dtq_child.connection import Link, NoSuchScript
from dtq_child.errors import RedisOutOfMemory
from dtq_child.keys import Keys, park
from dtq_child.outcome import Decision
from dtq_child.payload import Result
from dtq_child.scripts import Constants, Scripts
from dtq_child.settings import Settings
from dtq_child.task import Token, text

Pair = tuple[str, str]
"""A held entry: its stream and its entry id."""

UNKNOWN_REASON = "unknown_task_type"
_MANY_QUEUES = 10


def about(token: Token, task_type: str, queue: str, attempt: int) -> dict[str, Any]:
    return {"task_id": token.task_id, "task_type": task_type, "queue": queue, "attempt": attempt}


@dataclass(slots=True)
class Delivery:
    """What a claim hands out. None: neither the producer nor the record says; the declaration, then the
    settings, decide."""

    token: Token
    queue: str
    priority: int
    task_type: str
    payload: bytes
    attempt: int
    max_attempts: int | None
    crashes: int
    max_crashes: int | None
    timeout_ms: int | None
    soft_timeout_ms: int | None
    retry: bytes
    metadata: bytes
    trace: str
    first_unknown_ms: int | None
    redelivered: bool
    idempotency_key: str
    store_result: bool
    waited_ms: int

    @property
    def about(self) -> dict[str, Any]:
        """What a log line carries as extra."""
        return about(self.token, self.task_type, self.queue, self.attempt)


@dataclass(slots=True)
class Outcome:
    """The end of a delivery, all of it bytes in hand. `execution`: facts of the process, JSON-able.

    `task_type`, `attempt`: as the delivery had them; a success that names them settles cheaper, unless
    JSON would have to escape the type's name (`escaped`)."""

    token: Token
    queue: str
    decision: Decision
    result: Result | None
    execution: dict[str, Any]
    max_attempts: int
    task_type: str = ""
    attempt: int = 0
    escaped: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """What to look for after settling; without `claim` for nothing. own: what is pending under our name;
    park: what came back; woken: by a bell; everywhere: do not trust the hint index."""

    claim: bool = True
    own: bool = False
    park: bool = False
    woken: bool = False
    everywhere: bool = False

    def as_flags(self) -> bytes:
        if not self.claim:
            return b""
        return (
            b"c"
            + (b"o" if self.own else b"")
            + (b"p" if self.park else b"")
            + (b"w" if self.woken else b"")
            + (b"e" if self.everywhere else b"")
        )


@dataclass(slots=True)
class Reply:
    """`settled`: none | settled | rebuilt | already | fenced. `more`: look again at once. `park_left`: the
    park holds more."""

    settled: str
    claimed: Delivery | None = None
    held: tuple[Pair, ...] = ()
    paused: frozenset[str] = frozenset()
    more: bool = False
    park_left: bool = False
    problems: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


# Within a command each word stands behind its length, and the last one before an end of line.
_HEADS = tuple(b"\r\n$%d\r\n" % length for length in range(1024))
_END = b"\r\n"


def bulks(words: Iterable[bytes]) -> bytes:
    """Words of a command in wire form, to be preceded by their number and followed by _END."""
    heads = _HEADS
    return b"".join(
        [
            heads[len(word)] + word if len(word) < 1024 else b"\r\n$%d\r\n%b" % (len(word), word)
            for word in words
        ]
    )


def _numbers(flat: Sequence[Any]) -> dict[str, int]:
    return {text(flat[at]): int(flat[at + 1]) for at in range(0, len(flat), 2)}


def _int(raw: bytes | None) -> int | None:
    if not raw:
        return None
    try:
        return int(raw)
    except ValueError:
        return None


def _packed_ending(kind: bytes, outcome: Outcome) -> tuple[bytes, int]:
    """The arguments of a settle as settle_and_claim.lua wants them, packed, and how many they are."""
    token, decision, result = outcome.token, outcome.decision, outcome.result
    facts = outcome.execution
    if decision.error_class:
        facts = {**facts, "error": decision.error_class, "cause": decision.cause}
    data = size = flag = kept = b""
    if result is not None and result.unavailable is None:
        data, size, kept = result.data, b"%d" % result.size, b"1"
        flag = b"truncated" if result.truncated else b""
    elif result is not None and result.unavailable is not None:
        flag = result.unavailable.encode()
    words = (
        kind,
        token.task_id.encode(),
        token.stream.encode(),
        token.entry_id.encode(),
        b"%d" % token.delivery,
        orjson.dumps(facts),
        data,
        size,
        flag,
        kept,
        outcome.queue.encode(),
        b"" if outcome.escaped else outcome.task_type.encode(),
        b"%d" % outcome.attempt,
    )
    if kind == b"ok":
        return bulks(words), len(words)
    why = (
        b"%d" % decision.delay_ms,
        b"1" if decision.spend_attempt else b"0",
        decision.error_class.encode("utf-8", "backslashreplace"),
        decision.error_message.encode("utf-8", "backslashreplace"),
        decision.traceback.encode("utf-8", "backslashreplace"),
        orjson.dumps(decision.cause) if decision.cause else b"",
        b"%d" % outcome.max_attempts,
        b"1" if decision.kind == "retry" and decision.reason == UNKNOWN_REASON else b"",
        decision.reason.encode(),
    )
    return bulks(words + why), len(words) + len(why)


_NO_ENDING = bulks((b"-",))
# The usual turn, a success and a plain claim, is answered in so many parts, every other one in more.
_USUAL = 3

# What Decision.kind is called on the wire; `cancelled` has nothing to settle.
_KINDS = {"succeed": b"ok", "retry": b"retry", "dead": b"dead", "release": b"release", "park": b"release"}


class Turns:
    """One child's side of the scripts. Every method sends at most one command that changes anything, and
    raises BrokerError."""

    def __init__(
        self, link: Link, keys: Keys, settings: Settings, worker_id: str, consumer: str, queues: Sequence[str]
    ) -> None:
        self.link, self.keys, self.worker_id, self.consumer = link, keys, worker_id, consumer
        self.queues = tuple(queues)
        self.scripts = Scripts(keys, Constants.of(settings))
        self._park = park(worker_id)
        self._bells = {queue: keys.bell_queue(queue) for queue in self.queues}
        self._worker_bell = keys.bell_worker(worker_id)
        self._event_random, self._event_count, self._rotation = os.urandom(8).hex().encode(), 0, 0
        self._prepare(settings)

    def _prepare(self, settings: Settings) -> None:
        """Packs what every turn repeats: the head, the constant keys and the constant arguments."""
        known = [
            self.keys.nil,
            self._worker_bell,
            *self._bells.values(),
            *(self.keys.paused(q) for q in self.queues),
        ]
        if len(self.queues) <= _MANY_QUEUES:
            known += [self.keys.stream(queue, band) for band in range(9, -1, -1) for queue in self.queues]
        same = [self.consumer, self.worker_id, self._park, str(round(settings.visibility_timeout_s * 1000))]
        same += [str(settings.prefetch), str(len(self.queues)), *self.queues]
        script = (b"EVALSHA", self.scripts.sha("settle_and_claim").encode())
        packed = bulks(key.encode() for key in known)
        self._claim_head = bulks((*script, b"%d" % len(known))) + packed
        self._settle_head = bulks((*script, b"%d" % (len(known) + 2))) + packed
        self._same = bulks(word.encode() for word in same)
        # EVALSHA, sha, numkeys, keys, event base, minute, constant arguments; flags, rotation, number of held
        self._words = 3 + len(known) + 2 + len(same) + 3
        self._record_key, self._result_key = self.keys.task("").encode(), self.keys.result("").encode()
        self._names = {
            name.encode(): name
            for queue in self.queues
            for name in (queue, self._park, *(self.keys.stream(queue, band) for band in range(10)))
        }
        self._know_minute(0)

    def _know_minute(self, minute: int) -> None:
        """`minute` of Redis' clock since 1970: the date of an event is not worked out at every turn."""
        self._minute = minute
        begun = datetime.fromtimestamp(minute * 60, UTC).strftime("%Y-%m-%dT%H:%M:")
        self._minute_and_same = bulks((b"%d %b" % (minute, begun.encode()),)) + self._same

    def turn(self, outcome: Outcome | None, want: Want, held: Sequence[Pair] = ()) -> Reply:
        """Settles `outcome`, then claims. Not to be repeated after an error as it is: settle first, then ask
        for our own (R10)."""
        kind = _KINDS.get(outcome.decision.kind) if outcome is not None else None
        self._rotation = (self._rotation + 1) % len(self.queues)
        tail = [want.as_flags(), b"%d" % self._rotation, b"%d" % len(held)]
        for stream, entry in held:
            tail += (stream.encode(), entry.encode())
        if outcome is None or kind is None:
            head, keys, ending, endings = self._claim_head, b"", _NO_ENDING, 1
        else:
            head, (ending, endings) = self._settle_head, _packed_ending(kind, outcome)
            task_id = outcome.token.task_id.encode()
            keys = bulks((self._record_key + task_id, self._result_key + task_id))
            endings += 2
        parts = (
            b"*%d" % (self._words + endings + 2 * len(held)),
            head,
            keys,
            self._event_base(),
            self._minute_and_same,
            ending,
            bulks(tail),
            _END,
        )
        return self._read(self._send(b"".join(parts)))

    def settle(self, outcome: Outcome) -> str:
        """Settles only; may be repeated: an outcome that counted answers `already`."""
        return self.turn(outcome, Want(claim=False)).settled

    def _event_base(self) -> bytes:
        """24 characters."""
        self._event_count = (self._event_count + 1) & 0xFFFFFFFF
        return b"\r\n$24\r\n%b%08x" % (self._event_random, self._event_count)

    def _send(self, packed: bytes) -> Any:
        try:
            return self.link.call_packed(packed)
        except NoSuchScript:
            self.scripts.load(self.link, "settle_and_claim")
            return self.link.call_packed(packed)

    def _read(self, reply: list[Any]) -> Reply:
        if len(reply) == _USUAL:
            settled, begun, minute = reply
            if minute != self._minute:
                self._know_minute(minute)
            return Reply(settled.decode(), self._delivery(begun))
        settled, begun, held, paused, flags, problems, counts = reply
        return Reply(
            settled=settled.decode(),
            claimed=self._delivery(begun) if begun else None,
            held=tuple((text(held[at]), text(held[at + 1])) for at in range(0, len(held), 2)),
            paused=frozenset(text(queue) for queue in paused) if paused else frozenset(),
            more=b"m" in flags,
            park_left=b"p" in flags,
            problems=tuple(text(problem) for problem in problems),
            counts=_numbers(counts) if counts else {},
        )

    def _delivery(self, begun: list[Any]) -> Delivery:
        stream, entry_id, task_id, queue, delivery, band, waited, unknown, v = begun
        names = self._names
        return Delivery(
            token=Token(
                text(task_id), names.get(stream) or text(stream), entry_id.decode(), delivery, self.consumer
            ),
            queue=names.get(queue) or text(queue),
            priority=band,
            task_type=text(v[18]),
            payload=v[17],
            attempt=_int(v[4]) or 1,
            max_attempts=_int(v[5]) if v[5] else None,
            crashes=_int(v[6]) or 0 if v[6] else 0,
            max_crashes=_int(v[7]) if v[7] else None,
            timeout_ms=_int(v[8]) if v[8] else None,
            soft_timeout_ms=_int(v[9]) if v[9] else None,
            retry=v[10] or b"",
            metadata=v[11] or b"",
            trace=text(v[12]) if v[12] else "",
            first_unknown_ms=unknown,
            redelivered=delivery > 1,
            idempotency_key=text(v[13]) if v[13] else "",
            store_result=v[16] != b"0",
            waited_ms=waited,
        )

    def release(self, tokens: Sequence[Token], held: Sequence[Pair] = (), to_anyone: bool = True) -> int:
        """Hands entries back, spending nothing; those that are not ours any more are left alone. Returns how
        many went."""
        if not tokens and not held:
            return 0
        args: list[bytes | str | int] = [self.consumer, self.worker_id, self._park, "1" if to_anyone else "0"]
        args.append(len(tokens) + len(held))
        for token in tokens:
            args += [token.stream, token.entry_id, token.task_id, token.delivery]
        for stream, entry in held:
            args += [stream, entry, "", ""]
        return int(self.scripts.run(self.link, "release", [self._worker_bell], args)[0])

    def wait(self, queues: Sequence[str], timeout_s: float) -> str | None:
        """Waits on the bells of these queues and of the supervisor. The queue whose bell rang, `""` for the
        supervisor's, None when none did. The token is taken: whoever may not use it rings back."""
        bells = [self._bells[queue] for queue in queues]
        # BLPOP takes 0 for "for ever", and 6.2 takes 0.001 for 0.
        rang = self.link.call("BLPOP", *bells, self._worker_bell, f"{max(0.01, timeout_s):.3f}")
        if rang is None:
            return None
        name = text(rang[0])
        return next((queue for queue in queues if self._bells[queue] == name), "")

    def ring_back(self, queue: str) -> None:
        """Gives back a token that `wait` took: a queue's, or the supervisor's (`""`)."""
        try:
            self.link.call("RPUSH", self._bells[queue] if queue else self._worker_bell, "1")
        except RedisOutOfMemory:
            return  # a bell is a hint: whoever would have heard it looks by itself within DTQ_BLOCK_MS
