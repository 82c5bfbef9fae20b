"""Counts in the row, and tells in the log, what became of an outcome."""

from __future__ import annotations

import logging

from dtq_child.scoreboard import ChildRow
from dtq_child.turns import UNKNOWN_REASON, Outcome

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
        log.warning("the outcome of task %s was refused: its record has gone on", outcome.token.task_id)
    elif decision.kind == "succeed":
        row.count("processed")
    elif decision.kind == "release":
        row.count("released")
        log.info("task %s was interrupted and handed back", outcome.token.task_id)
    elif decision.kind == "dead" or decision.reason != UNKNOWN_REASON:
        row.count("processed")
        row.count("failed" if decision.kind == "dead" else "retried")
        _tell(outcome)


def _tell(outcome: Outcome) -> None:
    decision = outcome.decision
    again = f"tried again in {decision.delay_ms / 1000:g} s" if decision.kind == "retry" else "dead-lettered"
    log.warning(
        "task %s failed and is %s (%s): %s: %s%s",
        outcome.token.task_id,
        again,
        decision.reason,
        decision.error_class,
        decision.error_message,
        f"\n{decision.traceback}" if decision.traceback else "",
    )
