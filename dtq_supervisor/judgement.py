"""What a death means for the tasks that were pending for the dead child (R16, R28). Pure.

    killed by us: verdict             the execution it names       everything else pending
    ---------------------             ----------------------       -----------------------
    timeout                           ended as TaskTimeout         released
    stuck, memory                     a crash                      released
    superseded, cancelled, boot,
    grace, immediate, leaving,
    surplus, idle                     released                     released

    not by us                         what runs                    what is held
    ---------                         ---------                    ------------
    exit code 0, with nothing to do   released                     released
    any other exit code, a signal     a crash                      handed back

A handler that calls os._exit(0) ends its process while executing: a crash like any other, or it would come
back for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from dtq_child.error_text import MESSAGE_BYTES, TRACEBACK_BYTES, clip, clip_middle
from dtq_child.errors import CHILD_DIED
from dtq_child.outcome import Facts, TimedOut, decide
from dtq_child.retry import crash_delay_ms
from dtq_child.row import Execution, Phase, Row
from dtq_supervisor.events import Verdict

Word = bytes | str | int
How = Literal["crash", "ended", "release"]
_BLAMING = frozenset({"timeout", "stuck", "memory"})
_CRASH_DELAYS = 12
"""After that many crashes the delay has long reached its cap."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one life, a clean one too.

    `row`: its copy from when the child could no longer write it (None: it died in the middle of a write).
    `verdict`: why we killed it (None: we did not). `cause`: JSON-able evidence. `stack`: where it was.
    `at`: monotonic seconds, 0.0 if not told."""

    slot: int
    life: int
    consumer: str
    row: Row | None
    verdict: Verdict | None = None
    cause: Mapping[str, Any] = field(default_factory=dict)
    stack: str = ""
    exit_code: int | None = None
    signal: int | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """`exact`: only the execution in `named` is to blame. `ended`: kind, delay in ms and outcome of that
    execution, when `how` is "ended"."""

    how: How
    exact: bool
    named: Execution | None
    error_class: str
    message: str
    ended: tuple[str, int, str] = ("", 0, "")

    def words(self, death: Death, random01: float) -> list[Word]:
        """The arguments of settle_dead.lua from `how` on."""
        named = self.named
        token: list[Word] = (
            [named.task_id, named.stream, named.entry_id, named.delivery] if named else [""] * 4
        )
        bounds: list[Word] = [named.max_attempts or "", named.max_crashes or ""] if named else ["", ""]
        return [
            self.how,
            "1" if self.exact else "0",
            *token,
            self.error_class,
            self.message,
            clip_middle(death.stack, TRACEBACK_BYTES),
            orjson.dumps(dict(death.cause)),
            orjson.dumps(_brief(death.cause)),
            orjson.dumps(_facts(death, self)),
            *self.ended,
            *bounds,
            *crash_delays(random01),
        ]


def crash_delays(random01: float) -> list[int]:
    """ms to wait after the 2nd, 3rd … crash; the last one holds for all that follow."""
    return [crash_delay_ms(crashes, random01) for crashes in range(2, 2 + _CRASH_DELAYS)]


def judge(death: Death, random01: float) -> Judgement:
    """`random01`, a number from 0 to 1, places a retry's delay within its jitter."""
    verdict, execution = death.verdict, death.row.execution if death.row else None
    if verdict is None:
        return _died_by_itself(death, execution)
    if verdict.kind not in _BLAMING:
        return _released(death, execution)
    if death.row is None:
        # Nobody knows what ran. It is blamed all the same: released, it could hang the next child, and so on.
        return Judgement("crash", False, None, CHILD_DIED, message_of(death))
    named = execution if execution and execution.seq == verdict.seq else None
    if verdict.kind == "timeout" and named:
        return _timed_out(death, named, random01)
    return Judgement("crash", True, named, CHILD_DIED, message_of(death))


def _released(death: Death, execution: Execution | None) -> Judgement:
    return Judgement("release", False, execution, CHILD_DIED, message_of(death))


def _died_by_itself(death: Death, execution: Execution | None) -> Judgement:
    if death.exit_code == 0 and death.row is not None and execution is None:
        return _released(death, execution)
    return Judgement("crash", False, execution, CHILD_DIED, message_of(death))


def _timed_out(death: Death, execution: Execution, random01: float) -> Judgement:
    facts = Facts(
        attempt=execution.attempt,
        max_attempts=execution.max_attempts,
        crashes=execution.crashes,
        max_crashes=execution.max_crashes,
        policy=execution.policy,
        unknown_ttl_ms=0,
    )
    decision = decide(TimedOut(execution.timeout_ms, death.stack, death.cause), facts, random01)
    ended = (decision.kind, decision.delay_ms, decision.reason)
    return Judgement("ended", True, execution, decision.error_class, decision.error_message, ended)


def message_of(death: Death) -> str:
    """`child 3 (pid 4711) was killed by SIGKILL while executing`, with what is known about the sender."""
    pid = f" (pid {death.row.pid})" if death.row and death.row.pid else ""
    doing = f" while {_doing(death.row)}" if death.row else ""
    return clip(f"child {death.slot}{pid} {_end_of(death)}{doing}", MESSAGE_BYTES)


def _end_of(death: Death) -> str:
    if death.verdict is not None:
        return f"was killed by its supervisor ({death.verdict.why})"
    if death.signal:
        told = death.cause.get("signal")
        name = told if isinstance(told, str) else f"signal {death.signal}"
        return f"was killed by {name} ({_sender(death.cause)})"
    if death.exit_code is not None:
        return f"exited with code {death.exit_code}"
    return "died"


def _sender(cause: Mapping[str, Any]) -> str:
    return str(cause.get("killed_by") or "unknown sender")


def _doing(row: Row) -> str:
    return "idle" if row.phase is Phase.READY else row.phase.name.lower()


def _facts(death: Death, judgement: Judgement) -> dict[str, Any]:
    """What the execution's history says besides who, when and how it ended."""
    facts: dict[str, Any] = {}
    if death.row and death.row.pid:
        facts["pid"] = death.row.pid
    if judgement.named and death.at > judgement.named.started > 0:
        facts["duration_ms"] = round((death.at - judgement.named.started) * 1000)
    facts |= {name: death.cause[name] for name in ("max_rss_bytes", "cpu_ms") if name in death.cause}
    if judgement.how != "release":
        facts["error"] = judgement.error_class
    return {**facts, "cause": _brief(death.cause)}


def _brief(cause: Mapping[str, Any]) -> dict[str, Any]:
    """Without the stack, which the record keeps once, as its traceback."""
    return {name: fact for name, fact in cause.items() if name != "stack"}
