"""The stop: told, warned, killed, and never waited for in vain (R36). Steps of `pool.step`. Pure."""

from __future__ import annotations

from typing import Literal

from dtq_child.row import Order
from dtq_supervisor import reloading
from dtq_supervisor.events import (
    EXIT_IMPORT,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    Action,
    BeginDuties,
    CloseClaims,
    ContactMade,
    ContactRefused,
    GraceOver,
    GraceWarning,
    OpenClaims,
    OrderStop,
    PatienceOver,
    Say,
    SoftKill,
    Stop,
    StopMode,
    Verdict,
)
from dtq_supervisor.roster import (
    PATIENCE_S,
    SAME_SIGNAL_S,
    WARNING_MOST_S,
    Pool,
    Stopping,
    doom,
    leave,
    tell_ready,
)
from dtq_supervisor.slot import RUNNING, WORKING, Slot, State


def on_stop(pool: Pool, now: float, event: Stop, actions: list[Action]) -> None:
    pool.exit_code = pool.exit_code or event.exit_code
    before = pool.stopping
    if before is None:
        _begin_stop(pool, now, event.mode, actions)
    elif before.mode is StopMode.GRACEFUL and (
        event.mode is StopMode.IMMEDIATE or now - before.asked_at >= SAME_SIGNAL_S
    ):
        before.mode = StopMode.IMMEDIATE
        actions.append(Say("warning", "stop_immediate", {}))
        _kill_all(pool, now, "immediate", actions)


def _begin_stop(pool: Pool, now: float, mode: StopMode, actions: list[Action]) -> None:
    grace = pool.policy.shutdown_grace_s if mode is StopMode.GRACEFUL else 0.0
    over = now + grace
    pool.stopping = Stopping(mode, now, over - min(WARNING_MOST_S, grace / 10), over)
    actions.append(CloseClaims())
    facts = {"mode": mode.value, "grace_s": grace, "children": len(pool.living())}
    actions.append(Say("info", "stopping" if mode is StopMode.GRACEFUL else "stopping_now", facts))
    reloading.abandon(pool, now, actions)
    for slot in pool.everyone():
        stop_slot(slot, "immediate", actions)
    if mode is StopMode.IMMEDIATE:
        _kill_all(pool, now, "immediate", actions)


def stop_slot(slot: Slot, kind: Literal["immediate", "surplus"], actions: list[Action]) -> None:
    """No child, or one that boots, is no loss: it goes at once. Others end at their task boundary."""
    slot.held_until = 0.0
    if slot.state is State.BACKOFF:
        slot.take("give_up")
    elif slot.state is State.STARTING:
        doom(slot, Verdict(kind), actions)
    elif slot.state in WORKING:
        slot.take("stop")
        actions.append(OrderStop(slot.number, slot.life))


def _kill_all(pool: Pool, now: float, kind: Literal["grace", "immediate"], actions: list[Action]) -> None:
    for slot in pool.everyone():
        if slot.state in RUNNING:
            doom(slot, Verdict(kind), actions)
    if pool.stopping and not pool.stopping.patience_at:
        pool.stopping.patience_at = now + PATIENCE_S


def on_grace_warning(pool: Pool, now: float, event: GraceWarning, actions: list[Action]) -> None:
    if pool.stopping is None or pool.stopping.warned:
        return
    pool.stopping.warned = True
    told = [slot for slot in pool.everyone() if slot.state is State.STOPPING]
    actions += [SoftKill(slot.number, slot.life, 0, Order.SHUTDOWN) for slot in told]


def on_grace_over(pool: Pool, now: float, event: GraceOver, actions: list[Action]) -> None:
    if pool.stopping is None or pool.stopping.patience_at:
        return
    actions.append(Say("warning", "grace_over", {"children": len(pool.living())}))
    _kill_all(pool, now, "grace", actions)


def on_patience_over(pool: Pool, now: float, event: PatienceOver, actions: list[Action]) -> None:
    if pool.stopping is None or not pool.stopping.patience_at:
        return
    left = pool.living()
    actions += [Say("error", "left_behind", {"slot": slot.number, "pid": slot.pid}) for slot in left]
    leave(pool, pool.exit_code or EXIT_INTERRUPTED, actions)


def on_contact_made(pool: Pool, now: float, event: ContactMade, actions: list[Action]) -> None:
    pool.contact = True
    if not pool.stopping:
        if not pool.quiet:
            actions.append(OpenClaims())
        actions.append(BeginDuties())
        tell_ready(pool, actions)


def on_contact_refused(pool: Pool, now: float, event: ContactRefused, actions: list[Action]) -> None:
    actions.append(Say("error", "refused", {"reason": event.reason}))
    on_stop(pool, now, Stop(StopMode.IMMEDIATE, EXIT_REFUSED), actions)


def give_up(pool: Pool, now: float, reason: str, actions: list[Action]) -> None:
    actions.append(Say("error", "import_failed", {"reason": reason}))
    on_stop(pool, now, Stop(StopMode.IMMEDIATE, EXIT_IMPORT), actions)
