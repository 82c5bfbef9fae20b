"""What is done about one execution: soft and hard timeout, cancel, lost lease, stuck settling. And about
none, where there should be one.

Steps of `pool.step`. Pure.
"""

from __future__ import annotations

from dtq_child.row import Order
from dtq_supervisor.events import (
    Action,
    CancelGraceOver,
    DumpDone,
    DumpStack,
    ExecutionOver,
    HardDue,
    Revoked,
    SettlingStuck,
    ShowStack,
    SoftDue,
    SoftKill,
    StackAsked,
    StacksAsked,
    StayedIdle,
    Verdict,
)
from dtq_supervisor.roster import Pool, doom
from dtq_supervisor.slot import RUNNING, State


def on_soft_due(pool: Pool, now: float, event: SoftDue, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, RUNNING)
    if slot is None or event.seq in (slot.soft_seq, slot.dump_seq):
        return
    slot.soft_seq = event.seq
    if slot.state is State.READY:
        slot.take("soft_timeout")
    actions.append(SoftKill(slot.number, slot.life, event.seq, Order.SOFT_TIMEOUT))


def on_hard_due(pool: Pool, now: float, event: HardDue, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, RUNNING)
    if slot is not None and event.seq != slot.dump_seq:
        slot.dump_seq = event.seq
        actions.append(DumpStack(slot.number, slot.life, event.seq))


def on_dump_done(pool: Pool, now: float, event: DumpDone, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, RUNNING)
    if slot is not None and event.seq == slot.dump_seq:
        doom(slot, Verdict("timeout", event.seq), actions)


def on_revoked(pool: Pool, now: float, event: Revoked, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, RUNNING)
    if slot is None:
        return
    if event.why == "superseded":
        doom(slot, Verdict("superseded", event.seq), actions)
    elif event.seq != slot.cancel_seq:
        slot.cancel_seq = event.seq
        slot.cancel_deadline = now + pool.policy.cancel_grace_s
        actions.append(SoftKill(slot.number, slot.life, event.seq, Order.CANCELLED))


def on_cancel_grace_over(pool: Pool, now: float, event: CancelGraceOver, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, RUNNING)
    if slot is not None and event.seq == slot.cancel_seq:
        doom(slot, Verdict("cancelled", event.seq), actions)


def on_settling_stuck(pool: Pool, now: float, event: SettlingStuck, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, RUNNING)
    if slot is not None:
        doom(slot, Verdict("stuck", event.seq), actions)


def on_stayed_idle(pool: Pool, now: float, event: StayedIdle, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, {State.READY})
    if slot is not None:
        doom(slot, Verdict("idle"), actions)


def on_execution_over(pool: Pool, now: float, event: ExecutionOver, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, RUNNING)
    if slot is None:
        return
    if slot.soft_seq == event.seq:
        slot.soft_seq = 0
        if slot.state is State.SOFT_TIMED_OUT:
            slot.take("recover")
    if slot.dump_seq == event.seq:
        slot.dump_seq = 0
    if slot.cancel_seq == event.seq:
        slot.cancel_seq = 0


def on_stacks_asked(pool: Pool, now: float, event: StacksAsked, actions: list[Action]) -> None:
    actions += [ShowStack(slot.number, slot.life) for slot in pool.living() if slot.pid]


def on_stack_asked(pool: Pool, now: float, event: StackAsked, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life)
    if slot is not None and slot.pid:
        actions.append(ShowStack(slot.number, slot.life))
