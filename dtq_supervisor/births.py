"""Templates and children come into being, or fail to. Steps of `pool.step`. Pure."""

from __future__ import annotations

import math

from dtq_supervisor import reloading
from dtq_supervisor.events import (
    EXIT_IMPORT,
    Action,
    AllowClaims,
    BackoffOver,
    Begin,
    BootOverdue,
    ChildReady,
    DeathSettled,
    Fact,
    Forked,
    ForkFailed,
    HardKill,
    KillStray,
    KillTemplate,
    MourningOver,
    Say,
    StartTemplate,
    TemplateBackoffOver,
    TemplateFailed,
    TemplateGone,
    TemplateOverdue,
    TemplateUp,
    Verdict,
)
from dtq_supervisor.recycling import BOOT
from dtq_supervisor.retirement import check_size
from dtq_supervisor.roster import STEADY_S, Pool, doom, fork, free_row, leave, tell_ready
from dtq_supervisor.slot import ALIVE, Slot, State, backoff
from dtq_supervisor.stopping import give_up

CANDIDATE_LOOK_S = 1.0


def on_begin(pool: Pool, now: float, event: Begin, actions: list[Action]) -> None:
    if not pool.template.generation:
        _start_template(pool, now, actions)


def _start_template(pool: Pool, now: float, actions: list[Action]) -> None:
    template = pool.template
    template.generation = pool.next_generation()
    template.state, template.retry_at = "starting", 0.0
    template.deadline = now + pool.policy.boot_timeout_s
    actions.append(StartTemplate(template.generation))


def on_template_up(pool: Pool, now: float, event: TemplateUp, actions: list[Action]) -> None:
    if reloading.is_candidate(pool, event.generation):
        reloading.candidate_up(pool, now)
        return
    template = pool.template
    if event.generation != template.generation or template.state != "starting":
        return
    template.state, template.up_at, template.trouble = "up", now, ""
    pool.imported = True
    _fill(pool, now, actions)


def on_template_failed(pool: Pool, now: float, event: TemplateFailed, actions: list[Action]) -> None:
    if reloading.is_candidate(pool, event.generation):
        reloading.fail(pool, now, event.reason, actions)
    elif event.generation == pool.template.generation and pool.template.state != "down":
        actions.append(KillTemplate(event.generation))
        _lose_template(pool, now, event.reason, actions, event.exit_code)


def on_template_overdue(pool: Pool, now: float, event: TemplateOverdue, actions: list[Action]) -> None:
    if reloading.is_candidate(pool, event.generation):
        reloading.candidate_overdue(pool, now, actions)
    elif event.generation == pool.template.generation and pool.template.state == "starting":
        actions.append(KillTemplate(event.generation))
        reason = f"the import took more than {pool.policy.boot_timeout_s:g} s (--boot-timeout)"
        _lose_template(pool, now, reason, actions)


def on_template_gone(pool: Pool, now: float, event: TemplateGone, actions: list[Action]) -> None:
    if reloading.is_candidate(pool, event.generation):
        reloading.fail(pool, now, f"its template died: {event.reason or 'nobody knows how'}", actions)
    elif event.generation == pool.template.generation and pool.template.state != "down":
        _lose_template(pool, now, event.reason or "it died", actions)
    for slot in pool.everyone():
        if slot.state in ALIVE and not slot.pid and slot.generation == event.generation:
            # All its reports were read, and a child goes on only after it was reported: there is none.
            boot_died(pool, now, slot, "its template died before it was born", actions)


def _lose_template(
    pool: Pool, now: float, reason: str, actions: list[Action], exit_code: int = EXIT_IMPORT
) -> None:
    template = pool.template
    if template.state == "up" and now - template.up_at >= STEADY_S:
        template.failures = 0
    template.state = "down"
    if pool.stopping:
        return
    if pool.reload and pool.reload.phase == "rolling":
        reloading.fail(pool, now, f"its template is lost: {reason}", actions)
    if not pool.imported:
        actions.append(Say("error", "import_failed", {"reason": reason}))
        leave(pool, exit_code, actions)
        return
    delay = backoff(template.failures)
    template.failures += 1
    template.trouble = reason
    template.retry_at = now + delay
    facts: dict[str, Fact] = {"generation": template.generation, "reason": reason, "delay_s": delay}
    actions.append(Say("error", "template_lost", facts))


def on_template_backoff_over(
    pool: Pool, now: float, event: TemplateBackoffOver, actions: list[Action]
) -> None:
    if pool.template.state != "down" or pool.stopping or not pool.imported:
        return
    if pool.reload and pool.reload.candidate.generation:
        # A template that was started now would have a higher number than the one that is to replace it.
        pool.template.retry_at = now + CANDIDATE_LOOK_S
        return
    _start_template(pool, now, actions)


def _fill(pool: Pool, now: float, actions: list[Action]) -> None:
    """Every slot that may have a child and has none gets one."""
    for slot in pool.slots:
        refill(pool, now, slot, actions)


def refill(pool: Pool, now: float, slot: Slot, actions: list[Action]) -> None:
    if pool.stopping or pool.template.state != "up" or slot.state in ALIVE or slot.held_until > now:
        return
    if slot.number not in pool.closed and reloading.successor(pool, slot.number) is None:
        fork(pool, now, slot, pool.template, actions, may_claim=not slot.mourned)


def on_forked(pool: Pool, now: float, event: Forked, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life)
    if slot is None or slot.pid not in (0, event.pid):
        actions.append(KillStray(event.slot, event.life, event.pid))
        return
    slot.pid = event.pid
    if slot.state is State.DOOMED and slot.verdict:  # a stop came while it was being forked
        actions.append(HardKill(slot.number, slot.life, 0, slot.verdict))


def on_fork_failed(pool: Pool, now: float, event: ForkFailed, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life)
    if slot is not None and not slot.pid:
        boot_died(pool, now, slot, f"the fork failed: {event.reason}", actions)


def boot_died(
    pool: Pool, now: float, slot: Slot, reason: str, actions: list[Action], *, killed: bool = False
) -> None:
    if pool.stands_by(slot):
        reloading.standby_ended(pool, now, slot, reason, actions)
        return
    free_row(pool, slot)
    if pool.stopping or slot.number in pool.closed:
        slot.take("boot_died_unwanted")
        return
    slot.take("boot_died")
    if slot.verdict is None:
        slot.trouble = reason
    pool.replaced[BOOT] += 1
    delay = slot.hold(now, killed=killed)
    facts: dict[str, Fact] = {"slot": slot.number, "life": slot.life, "reason": reason, "delay_s": delay}
    actions.append(Say("error", "boot_failed", facts))


def on_child_ready(pool: Pool, now: float, event: ChildReady, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, {State.STARTING})
    if slot is None or not slot.pid:
        return
    slot.take("ready")
    slot.trouble = ""
    check_size(pool, now, slot, event.ready_bytes, actions)
    if slot.state is not State.READY:
        return
    if not pool.proven and not pool.contact:
        actions.append(Say("info", "ready_no_redis", {"slot": slot.number, "pid": slot.pid}))
    pool.proven = True
    tell_ready(pool, actions)
    if pool.stands_by(slot):
        reloading.standby_ready(pool, now, slot, actions)


def on_mourned(pool: Pool, now: float, event: DeathSettled | MourningOver, actions: list[Action]) -> None:
    slot = pool.slots[event.slot]
    if slot.mourned != event.life:
        return
    slot.mourned = 0
    if slot.state in ALIVE:
        actions.append(AllowClaims(slot.number, slot.life))


def on_boot_overdue(pool: Pool, now: float, event: BootOverdue, actions: list[Action]) -> None:
    slot = pool.find(event.slot, event.life, {State.STARTING})
    if slot is None:
        return
    seconds = pool.policy_of(slot.generation).boot_timeout_s
    reason = f"it was not ready within {seconds:g} s (--boot-timeout)"
    slot.trouble = reason
    if slot.pid and reloading.is_candidate(pool, slot.generation):
        reloading.fail(pool, now, f"its first child did not start: {reason}", actions)
        return
    if slot.pid:
        doom(slot, Verdict("boot"), actions)
        if not pool.proven and not pool.policy.preload:  # here the child is what imports first
            give_up(pool, now, reason, actions)
        return
    # Asked and not answered. The child may still come, so the slot waits for that template's death.
    slot.boot_deadline = math.inf
    if reloading.is_candidate(pool, slot.generation):
        reloading.fail(pool, now, "its template does not answer", actions)
        return
    actions.append(KillTemplate(slot.generation))
    if slot.generation == pool.template.generation and pool.template.state == "up":
        _lose_template(pool, now, "it does not answer", actions)


def on_backoff_over(pool: Pool, now: float, event: BackoffOver, actions: list[Action]) -> None:
    slot = pool.slots[event.slot] if event.slot < len(pool.slots) else None
    if slot is not None and slot.state not in ALIVE and now >= slot.held_until:
        slot.held_until = 0.0
        refill(pool, now, slot, actions)
