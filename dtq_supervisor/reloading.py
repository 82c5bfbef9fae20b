"""A reload: settings, a template, one child of it alone, then a few successors ahead of the old. Steps of
`pool.step`. Pure.

settings ──read──▶ template ──up──▶ canary ──ready──▶ rolling ──▶ done
   │                  │                │                 │
   └──────────────────┴────────────────┴──▶ failed       └──▶ failed
     nothing has changed                    what was not replaced works on

A successor stands by: born of the new generation for a slot that still has its old child, and without a
claim. When it is ready the old child is told to end at its task boundary; when that has exited the successor
moves into the slot. A child with a long task does not keep the others waiting: when its turn is over its
successor makes room for theirs, and comes again when nobody else is in need of one.

Rejected: to let the successor claim when the old child is told to end. There would be more tasks at a time
than children were asked for.
"""

from __future__ import annotations

from dtq_supervisor.events import (
    Action,
    AdoptSettings,
    AllowClaims,
    Fact,
    KillTemplate,
    OrderStop,
    ReadSettings,
    ReloadAsked,
    ReloadDue,
    RetireTemplate,
    Say,
    SettingsRead,
    SettingsRefused,
    StartTemplate,
    Verdict,
)
from dtq_supervisor.recycling import RELOAD
from dtq_supervisor.roster import Pool, Reload, Reloaded, Template, doom, fork, free_row
from dtq_supervisor.slot import ALIVE, WORKING, Slot, State, backoff

TURN_S = 2.0
"""An idle child that is told to end does so within half a second."""
FAILURES_MOST = 3
"""Successors that fail in a row after the canary was fine; then the reload has failed, too."""
BORN = frozenset({State.STARTING, State.READY})


# What is asked.


def on_reload_asked(pool: Pool, now: float, event: ReloadAsked, actions: list[Action]) -> None:
    if pool.stopping:
        return
    if pool.reload or not pool.imported:
        actions.append(Say("info", "reload_waits"))
    pool.reload_wanted = True  # `advance` begins it, now or after what is under way


def _begin(pool: Pool, now: float, actions: list[Action]) -> None:
    pool.reload_wanted = False
    pool.reloads += 1
    pool.reload = Reload(pool.reloads, now)
    actions += [Say("info", "reloading", {"number": pool.reloads}), ReadSettings()]


def on_settings_read(pool: Pool, now: float, event: SettingsRead, actions: list[Action]) -> None:
    reload = pool.reload
    if reload is None or reload.phase != "settings":
        return
    reload.phase, reload.policy = "template", event.policy
    deadline = now + event.policy.boot_timeout_s
    reload.candidate = Template(pool.next_generation(), "starting", deadline)
    actions.append(StartTemplate(reload.candidate.generation, candidate=True))


def on_settings_refused(pool: Pool, now: float, event: SettingsRefused, actions: list[Action]) -> None:
    if pool.reload and pool.reload.phase == "settings":
        fail(pool, now, event.reason, actions)


def on_reload_due(pool: Pool, now: float, event: ReloadDue, actions: list[Action]) -> None:
    """`advance` does what is to be done; here only what has passed is noted."""
    if pool.boots_held_until <= now:
        pool.boots_held_until = 0.0
    for slot in pool.everyone():
        if slot.turn_until <= now:
            slot.turn_until = 0.0


# The candidate: the template of a reload until its canary is ready.


def is_candidate(pool: Pool, generation: int) -> bool:
    return pool.reload is not None and generation == pool.reload.candidate.generation > 0


def candidate_up(pool: Pool, now: float) -> None:
    reload = pool.reload
    if reload and reload.phase == "template":
        reload.phase = "canary"
        reload.candidate.state, reload.candidate.up_at = "up", now


def candidate_overdue(pool: Pool, now: float, actions: list[Action]) -> None:
    reload = pool.reload
    if reload and reload.candidate.state == "starting":
        seconds = reload.policy.boot_timeout_s
        fail(pool, now, f"the import took more than {seconds:g} s (--boot-timeout)", actions)


def _commit(pool: Pool, reload: Reload, actions: list[Action]) -> None:
    """The canary is ready: from now on children are born of its generation, and work by its settings."""
    old, pool.template = pool.template, reload.candidate
    pool.era, pool.policy = reload.candidate.generation, reload.policy
    reload.phase, reload.candidate = "rolling", Template()
    if old.state == "up":
        # It lives until its last child is gone: it would be their executioner.
        actions.append(RetireTemplate(old.generation))
    elif old.state == "starting":
        actions.append(KillTemplate(old.generation))
    facts: dict[str, Fact] = {"number": reload.number, "generation": pool.era, "spare": pool.spare()}
    actions += [AdoptSettings(), Say("info", "reload_rolling", facts)]
    for slot in pool.slots:
        if slot.state not in ALIVE:  # it failed with the old code, which says nothing about the new
            slot.failures, slot.held_until = 0, pool.template.up_at


# How it ends.


def fail(pool: Pool, now: float, reason: str, actions: list[Action]) -> None:
    reload = pool.reload
    if reload is None:
        return
    candidate = reload.candidate.generation
    if candidate:
        actions.append(KillTemplate(candidate))
    for standby in pool.standbys.values():
        keeps = pool.slots[standby.number].state in (State.STOPPING, State.DOOMED)
        if standby.generation == candidate or not keeps:
            _send_away(standby, actions)
    _conclude(pool, now, reload, reason, actions)


def abandon(pool: Pool, now: float, actions: list[Action]) -> None:
    """The supervisor stops, both generations with it."""
    pool.reload_wanted = False
    if pool.reload:
        if pool.reload.candidate.generation:
            actions.append(KillTemplate(pool.reload.candidate.generation))
        _conclude(pool, now, pool.reload, "the supervisor was told to stop", actions)


def _conclude(pool: Pool, now: float, reload: Reload, reason: str, actions: list[Action]) -> None:
    pool.reload, pool.boot_failures = None, 0
    generation = pool.template.generation
    pool.reloaded = Reloaded(reload.number, reload.begun, not reason, reason, generation)
    facts: dict[str, Fact] = {"number": reload.number, "generation": generation, "old": len(_old(pool))}
    if reason:
        actions.append(Say("error", "reload_failed", {**facts, "reason": reason}))
    else:
        actions.append(Say("info", "reloaded_but" if facts["old"] else "reloaded", facts))


# Successors.


def successor(pool: Pool, number: int) -> Slot | None:
    """Who moves into the slot when it is empty. Not a canary: nobody knows yet whether it is any good."""
    standby = pool.standbys.get(number)
    if standby is None or standby.state not in BORN or number in pool.closed:
        return None
    return None if is_candidate(pool, standby.generation) else standby


def standby_ready(pool: Pool, now: float, standby: Slot, actions: list[Action]) -> None:
    pool.boot_failures, pool.boots_held_until = 0, 0.0
    if pool.reload and is_candidate(pool, standby.generation):
        _commit(pool, pool.reload, actions)


def standby_ended(pool: Pool, now: float, standby: Slot, reason: str, actions: list[Action]) -> None:
    """It has exited, or never was. Its slot has its old child still."""
    sent_away = standby.state is State.STOPPING
    verdict = standby.verdict
    free_row(pool, standby)
    del pool.standbys[standby.number]
    if pool.stopping or sent_away or (verdict and verdict.kind in ("reload", "leaving")):
        return
    if is_candidate(pool, standby.generation):
        fail(pool, now, f"its first child did not start: {reason}", actions)
        return
    if verdict and verdict.kind == "boot":
        reason = f"it was not ready within {pool.policy.boot_timeout_s:g} s (--boot-timeout)"
    pool.boot_failures += 1
    delay = backoff(pool.boot_failures - 1)
    pool.boots_held_until = now + delay
    facts: dict[str, Fact] = {"slot": standby.number, "life": standby.life, "reason": reason}
    actions.append(Say("error", "successor_failed", {**facts, "delay_s": delay}))
    if pool.reload and pool.reload.phase == "rolling" and pool.boot_failures >= FAILURES_MOST:
        fail(pool, now, f"{FAILURES_MOST} successors in a row did not start: {reason}", actions)


def _send_away(standby: Slot, actions: list[Action]) -> None:
    if standby.state is State.READY:
        standby.take("stop")
        actions.append(OrderStop(standby.number, standby.life))
    elif standby.state is State.STARTING:
        doom(standby, Verdict("reload"), actions)


# What is next, looked at after every event.


def advance(pool: Pool, now: float, actions: list[Action]) -> None:
    for standby in list(pool.standbys.values()):
        _move_in(pool, standby, actions)
    if pool.stopping:
        return
    _hand_over(pool, now, actions)
    _make_room(pool, actions)
    _boot(pool, now, actions)
    _finish(pool, now, actions)
    if pool.reload_wanted and pool.imported and pool.reload is None:
        _begin(pool, now, actions)


def _move_in(pool: Pool, standby: Slot, actions: list[Action]) -> None:
    slot = pool.slots[standby.number]
    if slot.state in ALIVE or successor(pool, standby.number) is None:
        return
    del pool.standbys[standby.number]
    pool.slots[standby.number] = standby
    standby.mourned, standby.mourned_until = slot.mourned, slot.mourned_until
    if not standby.mourned:
        actions.append(AllowClaims(standby.number, standby.life))


def _hand_over(pool: Pool, now: float, actions: list[Action]) -> None:
    for standby in pool.standbys.values():
        slot = pool.slots[standby.number]
        due = standby.state is State.READY and standby.generation >= pool.era > slot.generation
        if due and slot.state in WORKING:
            slot.take("stop")
            slot.turn_until, slot.leaving = now + TURN_S, RELOAD
            actions.append(OrderStop(slot.number, slot.life))


def _make_room(pool: Pool, actions: list[Action]) -> None:
    """Successors that nobody is in need of at this moment go: those of an older generation, those for a slot
    that was closed, and those that wait for a long task while others would have their turn."""
    for standby in pool.standbys.values():
        needless = standby.generation < pool.era or standby.number in pool.closed
        if needless and standby.state is State.READY:
            _send_away(standby, actions)
    leaving = sum(standby.state not in BORN for standby in pool.standbys.values())
    lacking = min(len(_in_need(pool)), pool.spare()) - leaving
    for standby in pool.standbys.values():
        if lacking <= 0 or len(pool.standbys) < pool.spare():
            return
        slot = pool.slots[standby.number]
        waits = standby.state is State.READY and slot.state is State.STOPPING and not slot.turn_until
        if waits and not is_candidate(pool, standby.generation):
            _send_away(standby, actions)
            lacking -= 1


def _in_need(pool: Pool) -> list[Slot]:
    """Slots that are to have a successor now, most urgent first: of a canary only one, then every old one."""
    reload = pool.reload
    if reload and reload.phase == "canary":
        if any(standby.generation == reload.candidate.generation for standby in pool.standbys.values()):
            return []
        free = [slot for slot in _open(pool) if slot.number not in pool.standbys]
        return sorted(free or _open(pool), key=_canary_order)[:1]
    if reload and reload.phase == "rolling":
        return [
            slot
            for slot in _old(pool)
            if slot.number not in pool.standbys and (slot.state in WORKING or slot.state is State.STARTING)
        ]
    return []


def _canary_order(slot: Slot) -> int:
    """Where nobody is, there it is needed most; a child that is told to end already has its turn behind."""
    return 0 if slot.state not in ALIVE else 1 if slot.state in WORKING else 2


def _boot(pool: Pool, now: float, actions: list[Action]) -> None:
    reload = pool.reload
    canary = reload is not None and reload.phase == "canary"
    template = reload.candidate if reload and canary else pool.template
    if template.state != "up" or pool.boots_held_until > now:
        return
    wanted = _in_need(pool)
    if not canary and not wanted:
        # Those that finish a long task; they are not to be missing a successor in the end.
        wanted = [
            slot
            for slot in _old(pool)
            if slot.state is State.STOPPING and slot.number not in (*pool.standbys, *pool.closed)
        ]
    for slot in wanted:
        reserved = sum(other.state not in ALIVE for other in pool.slots)
        taken = slot.number in pool.standbys
        if taken or len(pool.standbys) >= pool.spare() or len(pool.free_rows) <= reserved:
            return
        standby = pool.standbys[slot.number] = Slot(slot.number)
        fork(pool, now, standby, template, actions, may_claim=False)


def _finish(pool: Pool, now: float, actions: list[Action]) -> None:
    """Done: whatever begins from now on begins in the new generation. Long tasks may go on."""
    if pool.reload and pool.reload.phase == "rolling":
        told = (State.STOPPING, State.DOOMED)
        if all(slot.state in told and not slot.turn_until for slot in _old(pool)):
            _conclude(pool, now, pool.reload, "", actions)


def _open(pool: Pool) -> list[Slot]:
    return [slot for slot in pool.slots if slot.number not in pool.closed]


def _old(pool: Pool) -> list[Slot]:
    return [slot for slot in pool.slots if slot.state in ALIVE and slot.generation < pool.era]
