"""What one row of the scoreboard holds, and where. Pure.

A row has 8192 bytes: the child half, and on another page the supervisor half. Single numbers are words of
eight bytes, found by their number from the row's start; an execution and the held entries are packed structs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from dtq_child.retry import RetryPolicy

ROW_SIZE = 8192
MAX_HELD = 16
COUNTERS = (
    "processed",
    "failed",
    "retried",
    "released",
    "fenced",
    "absorbed",
    "unknown_types",
    "redis_errors",
    "claims",
)

# Words of the child half.
VERSION, LIFE, PID, PHASE = range(4)
SETTLING_SINCE, IDLE_SINCE, REDIS_OK_SINCE, LAST_CLAIM = range(4, 8)
HELD_COUNT, READY_BYTES = 8, 9
FIRST_COUNTER = 10

# Bytes of the child half. Native sizes and alignment: then a number is stored by one machine instruction. A
# `p` is a text and its length in one byte.
EXECUTION_AT = (FIRST_COUNTER + len(COUNTERS)) * 8
EXECUTION = struct.Struct("@QQ8d5I65p201p101p49p")
HELD_AT = EXECUTION_AT + EXECUTION.size
HELD = struct.Struct("@101p49p")
CHILD_HALF = HELD_AT + MAX_HELD * HELD.size

# Words of the supervisor half.
STOP, MAY_CLAIM, RENEWED, ORDER, CONDEMNED, STOP_AFTER = range(896, 902)

_TASK_ID_MAX, _TASK_TYPE_MAX, _STREAM_MAX, _ENTRY_ID_MAX = 64, 200, 100, 48
_KIND_BITS = 8


class Phase(IntEnum):
    """What a child is doing."""

    BOOTING = 0
    READY = 1
    CLAIMING = 2
    EXECUTING = 3
    SETTLING = 4
    EXITING = 5


class Order(IntEnum):
    """What the supervisor asks of a running handler."""

    NONE = 0
    SOFT_TIMEOUT = 1
    CANCELLED = 2
    SHUTDOWN = 3


@dataclass(slots=True)
class Execution:
    """One run of a handler.

    `seq` numbers the executions of one life from 1. `claim_sent`: when the claim that brought the entry was
    sent. `soft_deadline` is 0.0 if there is none. The policy's `never` is not carried: it speaks of
    exceptions, and whoever settles from the row has none."""

    seq: int
    task_id: str
    task_type: str
    stream: str
    entry_id: str
    delivery: int
    attempt: int
    max_attempts: int
    crashes: int
    max_crashes: int
    timeout_ms: int
    started: float
    soft_deadline: float
    hard_deadline: float
    policy: RetryPolicy
    claim_sent: float


@dataclass(slots=True)
class Counters:
    """What one life has counted so far."""

    processed: int = 0
    failed: int = 0
    retried: int = 0
    released: int = 0
    fenced: int = 0
    absorbed: int = 0
    unknown_types: int = 0
    redis_errors: int = 0
    claims: int = 0


@dataclass(slots=True)
class Row:
    """A copy of one row.

    `execution` is there in the phases EXECUTING and SETTLING, `settling_since` in the latter. `seq`: of the
    execution begun last, 0 if there was none. `held`: (stream, entry id) of what was claimed and not
    begun. `idle_since`: in the phase EXITING, since when nothing is in hand any more. `ready_bytes`: its
    resident size when it became ready, 0 if not told. `stop_after`: how many executions it is to begin, 0 if
    any number."""

    life: int
    pid: int
    phase: Phase
    seq: int
    execution: Execution | None
    held: tuple[tuple[str, str], ...]
    settling_since: float
    counters: Counters
    idle_since: float
    redis_ok_since: float
    last_claim: float
    stop: bool
    may_claim: bool
    renewed: float
    order_kind: int
    order_seq: int
    stop_after: int = 0
    ready_bytes: int = 0


def pack_order(kind: int, seq: int) -> int:
    """In one word, so that no reader pairs one order's kind with another's execution."""
    return seq << _KIND_BITS | kind


def unpack_order(word: int) -> tuple[int, int]:
    return word & ((1 << _KIND_BITS) - 1), word >> _KIND_BITS


def pack_execution(execution: Execution) -> bytes:
    """ValueError if a name does not fit: one that is cut would renew and settle something else."""
    e, policy = execution, execution.policy
    return EXECUTION.pack(
        e.seq,
        e.timeout_ms,
        e.started,
        e.soft_deadline,
        e.hard_deadline,
        e.claim_sent,
        policy.base_s,
        policy.factor,
        policy.cap_s,
        policy.jitter,
        e.delivery,
        e.attempt,
        e.max_attempts,
        e.crashes,
        e.max_crashes,
        _fitting(e.task_id, _TASK_ID_MAX),
        e.task_type.encode("utf-8", "replace")[:_TASK_TYPE_MAX],
        _fitting(e.stream, _STREAM_MAX),
        _fitting(e.entry_id, _ENTRY_ID_MAX),
    )


def pack_held(pairs: Iterable[tuple[str, str]]) -> tuple[int, bytes]:
    """How many, and their bytes. ValueError above MAX_HELD."""
    packed = [
        HELD.pack(_fitting(stream, _STREAM_MAX), _fitting(entry_id, _ENTRY_ID_MAX))
        for stream, entry_id in pairs
    ]
    if len(packed) > MAX_HELD:
        raise ValueError(f"{len(packed)} entries held, a row has room for {MAX_HELD}")
    return len(packed), b"".join(packed)


def unpack(
    child_half: bytes, stop: bool, may_claim: bool, renewed: float, order: int, stop_after: int = 0
) -> Row:
    """A row from the bytes of its child half and the words of its supervisor half. ValueError if no child
    wrote them so."""
    numbers = memoryview(child_half[:EXECUTION_AT])
    words, reals = numbers.cast("Q"), numbers.cast("d")
    phase = Phase(words[PHASE])
    execution = _execution(child_half)
    if words[HELD_COUNT] > MAX_HELD:
        raise ValueError(f"{words[HELD_COUNT]} entries held, a row has room for {MAX_HELD}")
    order_kind, order_seq = unpack_order(order)
    return Row(
        life=words[LIFE],
        pid=words[PID],
        phase=phase,
        seq=execution.seq,
        execution=execution if phase in (Phase.EXECUTING, Phase.SETTLING) else None,
        held=tuple(_held(child_half, number) for number in range(words[HELD_COUNT])),
        settling_since=reals[SETTLING_SINCE] if phase is Phase.SETTLING else 0.0,
        counters=Counters(*words[FIRST_COUNTER : FIRST_COUNTER + len(COUNTERS)]),
        idle_since=reals[IDLE_SINCE],
        redis_ok_since=reals[REDIS_OK_SINCE],
        last_claim=reals[LAST_CLAIM],
        stop=stop,
        may_claim=may_claim,
        renewed=renewed,
        order_kind=order_kind,
        order_seq=order_seq,
        stop_after=stop_after,
        ready_bytes=words[READY_BYTES],
    )


def _fitting(text: str, limit: int) -> bytes:
    encoded = text.encode()
    if len(encoded) > limit:
        raise ValueError(f"{text!r} is {len(encoded)} bytes, a row has room for {limit}")
    return encoded


def _execution(child_half: bytes) -> Execution:
    fields = EXECUTION.unpack_from(child_half, EXECUTION_AT)
    seq, timeout_ms, started, soft_deadline, hard_deadline, claim_sent = fields[:6]
    delivery, attempt, max_attempts, crashes, max_crashes = fields[10:15]
    task_id, task_type, stream, entry_id = fields[15:]
    return Execution(
        seq=seq,
        task_id=task_id.decode(),
        task_type=task_type.decode("utf-8", "ignore"),
        stream=stream.decode(),
        entry_id=entry_id.decode(),
        delivery=delivery,
        attempt=attempt,
        max_attempts=max_attempts,
        crashes=crashes,
        max_crashes=max_crashes,
        timeout_ms=timeout_ms,
        started=started,
        soft_deadline=soft_deadline,
        hard_deadline=hard_deadline,
        policy=RetryPolicy(*fields[6:10]),
        claim_sent=claim_sent,
    )


def _held(child_half: bytes, number: int) -> tuple[str, str]:
    stream, entry_id = HELD.unpack_from(child_half, HELD_AT + number * HELD.size)
    return stream.decode(), entry_id.decode()
