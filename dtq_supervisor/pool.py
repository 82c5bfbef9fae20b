"""N slots and the template they are forked from: `step(pool, now, event) → actions`. Pure: no clock, no I/O.

An event that no longer fits (another life, a state that has moved on) changes nothing. Two things always
hold: every `Exited` yields exactly one `Settle`, and a kill is ordered only for a child whose pid is known
and whose exit is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtq_supervisor import births, claiming, executions, reloading, resizing, retirement, stopping
from dtq_supervisor.events import (
    ENDED_BY_VERDICT,
    EXIT_IMPORT,
    EXIT_INTERRUPTED,
    Action,
    BackoffOver,
    Begin,
    BootOverdue,
    CancelGraceOver,
    ChildReady,
    ContactMade,
    ContactRefused,
    DeathSettled,
    DumpDone,
    Event,
    ExecutionOver,
    Exited,
    Forked,
    ForkFailed,
    GraceOver,
    GraceWarning,
    HardDue,
    LeaveOverdue,
    MemorySeen,
    MourningOver,
    PatienceOver,
    QuietAsked,
    ReloadAsked,
    ReloadDue,
    ResizeAsked,
    ResumeAsked,
    Revoked,
    SettingsRead,
    SettingsRefused,
    Settle,
    SettlingStuck,
    SoftDue,
    StackAsked,
    StacksAsked,
    StayedIdle,
    Stop,
    TemplateBackoffOver,
    TemplateFailed,
    TemplateGone,
    TemplateOverdue,
    TemplateUp,
    Verdict,
)
from dtq_supervisor.recycling import reason_of
from dtq_supervisor.roster import Policy, Pool, free_row, leave
from dtq_supervisor.slot import WORKING, Slot, State

__all__ = ["Policy", "Pool", "step"]

SIGKILL = 9


def step(pool: Pool, now: float, event: Event) -> list[Action]:
    """What is to be done about the event, in this order. `now`: monotonic seconds."""
    if pool.left:
        return _after_the_end(pool, event)
    actions: list[Action] = []
    _STEPS[type(event)](pool, now, event, actions)
    if not pool.left:
        reloading.advance(pool, now, actions)
    if pool.stopping and not pool.left and not pool.living():
        leave(pool, pool.exit_code, actions)
    return actions


def _after_the_end(pool: Pool, event: Event) -> list[Action]:
    """The loop has been left, but an exit that is still collected is settled like every other."""
    return [_settle(event, _verdict(pool, event))] if isinstance(event, Exited) else []


def _verdict(pool: Pool, event: Exited) -> Verdict | None:
    slot = pool.find(event.slot, event.life)
    return slot.verdict if slot and slot.pid == event.pid else None


def _settle(event: Exited, verdict: Verdict | None) -> Settle:
    return Settle(event.slot, event.life, verdict, event.code, event.signal)


def on_exited(pool: Pool, now: float, event: Exited, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life)
    if slot is None or slot.pid not in (0, event.pid):
        actions.append(_settle(event, None))
        return
    verdict, slot.pid = slot.verdict, event.pid
    actions.append(_settle(event, verdict))
    _note_interruption(pool, event, verdict)
    if pool.stands_by(slot):
        reloading.standby_ended(pool, now, slot, _end_of(event), actions)
        return
    if slot.state is State.STARTING or (verdict and verdict.kind == "boot"):
        killed = verdict is None and event.signal == SIGKILL
        births.boot_died(pool, now, slot, _end_of(event), actions, killed=killed)
        if event.code == EXIT_IMPORT and not pool.proven:
            stopping.give_up(pool, now, "the application could not be imported in a child", actions)
        return
    by_itself = slot.state in WORKING
    slot.take("gone")
    if not pool.stopping and slot.number not in pool.closed:
        pool.replaced[reason_of(slot.leaving, event, verdict)] += 1
    slot.mourn(now)
    free_row(pool, slot)
    _hold_if_spinning(slot, now, event, by_itself)
    births.refill(pool, now, slot, actions)


def _end_of(event: Exited) -> str:
    if event.signal:
        return f"pid {event.pid} was ended by signal {event.signal}"
    return f"pid {event.pid} ended with exit code {event.code}"


def _note_interruption(pool: Pool, event: Exited, verdict: Verdict | None) -> None:
    """Work that a stop cut short: what we timed out or cancelled has its outcome, what we lost an owner."""
    lost = event.busy and (verdict is None or verdict.kind not in ENDED_BY_VERDICT)
    if pool.stopping and (lost or event.released):
        pool.exit_code = pool.exit_code or EXIT_INTERRUPTED


def _hold_if_spinning(slot: Slot, now: float, event: Exited, spinning: bool) -> None:
    """A child that ends by itself before its first task would do so for ever, hundreds a minute: from the
    second in a row on there is a pause. After kill -9, or with a task begun, it is replaced at once."""
    if not spinning or event.began or event.signal == SIGKILL:
        slot.failures = 0
    elif slot.failures:
        slot.hold(now)
    else:
        slot.failures = 1


_STEPS: dict[type, Callable[[Pool, float, Any, list[Action]], None]] = {
    Begin: births.on_begin,
    TemplateUp: births.on_template_up,
    TemplateFailed: births.on_template_failed,
    TemplateGone: births.on_template_gone,
    TemplateOverdue: births.on_template_overdue,
    TemplateBackoffOver: births.on_template_backoff_over,
    Forked: births.on_forked,
    ForkFailed: births.on_fork_failed,
    ChildReady: births.on_child_ready,
    BootOverdue: births.on_boot_overdue,
    BackoffOver: births.on_backoff_over,
    Exited: on_exited,
    DeathSettled: births.on_mourned,
    MourningOver: births.on_mourned,
    SoftDue: executions.on_soft_due,
    HardDue: executions.on_hard_due,
    DumpDone: executions.on_dump_done,
    Revoked: executions.on_revoked,
    CancelGraceOver: executions.on_cancel_grace_over,
    SettlingStuck: executions.on_settling_stuck,
    MemorySeen: retirement.on_memory_seen,
    LeaveOverdue: retirement.on_leave_overdue,
    StayedIdle: executions.on_stayed_idle,
    ExecutionOver: executions.on_execution_over,
    Stop: stopping.on_stop,
    GraceWarning: stopping.on_grace_warning,
    GraceOver: stopping.on_grace_over,
    PatienceOver: stopping.on_patience_over,
    StacksAsked: executions.on_stacks_asked,
    StackAsked: executions.on_stack_asked,
    ResizeAsked: resizing.on_resize_asked,
    QuietAsked: claiming.on_quiet_asked,
    ResumeAsked: claiming.on_resume_asked,
    ReloadAsked: reloading.on_reload_asked,
    SettingsRead: reloading.on_settings_read,
    SettingsRefused: reloading.on_settings_refused,
    ReloadDue: reloading.on_reload_due,
    ContactMade: stopping.on_contact_made,
    ContactRefused: stopping.on_contact_refused,
}
