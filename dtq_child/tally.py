"""Counts in the row, and tells in the log, what became of an outcome."""

from __future__ import annotations

import logging

from dtq_child.scoreboard import ChildRow
from dtq_child.turns import UNKNOWN_REASON, Outcome, about

log = logging.getLogger("dtq.child")


def add(row: ChildRow, outcome: Outcome, answer: str) -> None:
    """`answer` is what Redis said to the settle: settled, rebuilt, already, fenced; none, if there was
    nothing to settle. Processed are the executions that ended by themselves; of them, failed those that were
    dead-lettered and retried those that are tried again. Released are those that a stop interrupted."""
    decision = outcome.decision
    if answer == "none":
        return
    if answer == "fenced":
        row.count("fenced")
        _tell(logging.WARNING, outcome, "'s outcome was refused: its record has gone on")
    elif decision.kind == "succeed":
        row.count("processed")
    elif decision.kind == "release":
        row.count("released")
        _tell(logging.INFO, outcome, " was interrupted and handed back")
    elif decision.kind == "dead" or decision.reason != UNKNOWN_REASON:
        row.count("processed")
        row.count("failed" if decision.kind == "dead" else "retried")
        _tell(logging.WARNING, outcome, _failure(outcome))


def _failure(outcome: Outcome) -> str:
    decision = outcome.decision
    retried = decision.kind == "retry"
    again = f"tried again in {decision.delay_ms / 1000:g} s" if retried else "dead-lettered"
    words = (
        f" failed in attempt {outcome.attempt} of {outcome.max_attempts} and is {again} ({decision.reason})"
    )
    error = f"{decision.error_class}: {decision.error_message}"
    return f"{words}: {error}" + (f"\n{decision.traceback}" if decision.traceback else "")


def _tell(level: int, outcome: Outcome, words: str) -> None:
    facts = about(outcome.token, outcome.task_type, outcome.queue, outcome.attempt)
    log.log(level, "task %s (%s)%s", outcome.token.task_id, outcome.task_type, words, extra=facts)
