"""What became of a task whose process died, as the log tells it: words, and facts for machines. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dtq_child.errors import POISON_TASK
from dtq_child.row import Execution
from dtq_supervisor.events import Fact
from dtq_supervisor.judgement import Judgement, crash_delays

_WITHOUT_DETAILS: Mapping[str, str] = {
    "parked": "runs again at once",
    "released": "is released, nothing spent",
    "scheduled": "runs again later, after one more crash",
    "dead": f"is dead-lettered: {POISON_TASK}",
    "given_back": "is given back to the child that has it by its record",
}
OF_OTHERS: Mapping[str, str] = {
    "taken": "is taken over, not begun",
    "parked": "runs again at once, after a crash",
    "scheduled": "runs again later, after one more crash",
    "dead": f"is dead-lettered: {POISON_TASK}",
}
"""Of a worker that is not heard of, whose rows we do not see."""


def fate(task_id: str, what: str, judgement: Judgement, random01: float) -> dict[str, Fact]:
    """`what`: as settle_dead.lua told it, of a death that was judged with `random01`. The dead child's row
    describes the task that it was executing, and no other."""
    named = judgement.named
    if named is None or named.task_id != task_id:
        return {"what": what, "fate": _WITHOUT_DETAILS.get(what, what), "of_type": ""}
    facts: dict[str, Fact] = {
        "what": what,
        "fate": _WITHOUT_DETAILS.get(what, what),
        "of_type": f" ({named.task_type})",
        "task_type": named.task_type,
        "attempt": named.attempt,
        "max_attempts": named.max_attempts,
    }
    if what in ("dead", "retry") and judgement.how == "ended":
        return {**facts, **_ended(what, named, judgement)}
    if what in ("parked", "scheduled", "dead") and judgement.how == "crash":
        return {**facts, **_crashed(what, named, judgement, random01)}
    return facts


def _ended(what: str, named: Execution, judgement: Judgement) -> dict[str, Fact]:
    delay_s, error = judgement.ended[1] / 1000, judgement.error_class
    words = "is dead-lettered" if what == "dead" else f"runs again in {delay_s:g} s"
    words += f": {error}, attempt {named.attempt} of {named.max_attempts}"
    return {"fate": words, "error_class": error, "delay_s": None if what == "dead" else delay_s}


def _crashed(what: str, named: Execution, judgement: Judgement, random01: float) -> dict[str, Fact]:
    crash, error = named.crashes + 1, POISON_TASK if what == "dead" else judgement.error_class
    delay_s: float | None = None
    if what == "scheduled":
        delays = crash_delays(random01)
        delay_s = delays[min(max(crash - 2, 0), len(delays) - 1)] / 1000
    words = {
        "parked": "runs again at once",
        "scheduled": f"runs again in {delay_s or 0:g} s",
        "dead": f"is dead-lettered: {error}",
    }[what]
    return {
        "fate": f"{words}, crash {crash} of {named.max_crashes}",
        "error_class": error,
        "crash": crash,
        "max_crashes": named.max_crashes,
        "delay_s": delay_s,
    }
