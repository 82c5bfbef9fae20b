"""Live and ready in every state (R37), and who is idle without a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtq_child.retry import DEFAULT_RETRY
from dtq_child.row import Counters, Execution, Phase, Row
from dtq_supervisor import health, snapshot
from dtq_supervisor.events import Begin, BootOverdue, ContactMade, Exited, Forked, Stop, StopMode, TemplateUp
from dtq_supervisor.health import Facts
from dtq_supervisor.idleness import FRUITLESS_MOST, IDLE_MOST_S, Idleness, Idler, Look
from dtq_supervisor.pool import Policy, Pool, step
from dtq_supervisor.slot import State
from dtq_supervisor.snapshot import SlotView, Snapshot
from dtq_supervisor.status import About, status

NOW = 1000.0
BAND = "dtq:stream:default:p5"
EXECUTION = Execution(
    *(7, "t1", "images.resize", BAND, "1-1", 2, 1, 3, 0, 3, 600_000),
    *(NOW - 500, 0.0, NOW + 100, DEFAULT_RETRY, NOW - 500),
)


def row(phase: Phase = Phase.READY, **fields: Any) -> Row:
    busy = phase in (Phase.EXECUTING, Phase.SETTLING)
    made = Row(
        life=1,
        pid=100,
        phase=phase,
        seq=7 if busy else 0,
        execution=EXECUTION if busy else None,
        held=(),
        settling_since=0.0,
        counters=Counters(processed=3),
        idle_since=0.0 if busy else NOW - 900,
        redis_ok_since=NOW - 950,
        last_claim=NOW - 1,
        stop=False,
        may_claim=True,
        renewed=0.0,
        order_kind=0,
        order_seq=0,
    )
    return replace(made, **fields)


def slot(number: int = 0, state: State = State.READY, of: Row | None = None, **fields: Any) -> SlotView:
    return SlotView(number, state, 1, 1, 100 + number, of if of else row(), **fields)


def facts(*slots: SlotView, now: float = NOW, **fields: Any) -> Facts:
    """All is well, but for what is given; those of Snapshot by their names, too."""
    given = {name: fields.pop(name) for name in list(fields) if name in Snapshot.__dataclass_fields__}
    shot = Snapshot(
        **{"at": now, "slots": slots, "template": "up", "contact": True, "claiming": True, **given}
    )
    well = {"tick": now, "redis_ok_since": now - 950, "redis_heard_at": now - 0.5}
    return Facts(now=now, snapshot=shot, **{**well, **fields})


def why_not(what: Facts) -> str:
    return "; ".join(health.ready(what).reasons)


# --- healthy


def test_an_idle_pool_is_healthy() -> None:
    assert health.ready(facts(slot(0), slot(1))).text() == "ok\n"
    assert health.live(facts(slot(0))).well


def test_a_long_legal_task_is_healthy() -> None:
    assert health.ready(facts(slot(0, of=row(Phase.EXECUTING)))).well


def test_one_child_that_is_ready_is_enough() -> None:
    assert health.ready(facts(slot(0), slot(1, State.BACKOFF, trouble="the import failed"))).well


def test_a_supervisor_that_was_told_to_claim_nothing_is_healthy() -> None:
    quiet = facts(slot(0, of=row(redis_ok_since=0.0)), claiming=False)
    assert health.ready(quiet).well


# --- not


@pytest.mark.parametrize(("age", "live"), [(0.0, True), (29.9, True), (30.1, False), (1e5, False)])
def test_live_is_a_main_loop_that_ticked_within_30_s(age: float, live: bool) -> None:
    assert health.live(facts(slot(0), tick=NOW - age)).well == live
    assert (
        live or health.live(facts(tick=NOW - age)).text() == f"the main loop has not ticked for {age:.0f} s\n"
    )


def test_a_main_loop_that_hangs_is_not_ready_long_before_it_counts_as_dead() -> None:
    hung = facts(slot(0), tick=NOW - 6, redis_ok_since=0.0)
    assert why_not(hung) == "the main loop has not ticked for 6 s, so no child claims"
    assert health.live(hung).well


def test_redis_that_is_away_is_told_however_it_is_away() -> None:
    assert why_not(facts(slot(0), redis_heard_at=0.0, redis_ok_since=0.0)) == "Redis has not answered yet"
    lost = facts(slot(0), redis_ok_since=0.0, redis_heard_at=NOW - 42)
    assert why_not(lost) == "Redis is not available: the last answer came 42 s ago"
    outage = facts(slot(0), redis_away=True, redis_heard_at=NOW - 0.2)
    assert why_not(outage) == "Redis is not available: the last answer came 0 s ago"
    silent = facts(slot(0), redis_heard_at=NOW - 7)
    assert why_not(silent) == "Redis has not answered for 7 s"


def test_one_call_that_fails_beside_others_that_are_answered_is_no_outage() -> None:
    assert health.ready(facts(slot(0), redis_ok_since=0.0, redis_heard_at=NOW - 0.9)).well
    assert not health.ready(facts(slot(0), redis_ok_since=0.0, redis_heard_at=NOW - 1.1)).well


def test_a_redis_that_only_the_supervisor_reaches_is_not_enough() -> None:
    cut_off = row(redis_ok_since=0.0)
    assert why_not(facts(slot(0, of=cut_off), slot(1, of=cut_off))) == "no child reaches Redis"
    assert health.ready(facts(slot(0, of=cut_off), slot(1))).well


def test_a_supervisor_that_stops_is_not_ready() -> None:
    assert why_not(facts(slot(0, State.STOPPING), stopping=True)) == "it is stopping"


def test_children_that_cannot_boot_are_told_with_the_cause_and_the_next_try() -> None:
    stuck = slot(0, State.BACKOFF, trouble="pid 9 ended with exit code 4", next_try_at=NOW + 8)
    reason = "no child is ready: child 0: pid 9 ended with exit code 4, the next try in 8 s"
    assert why_not(facts(stuck, slot(1, State.STARTING))) == reason
    assert why_not(facts(slot(0, State.STARTING))) == "no child is ready: 1 of 1 are starting"
    assert why_not(facts(slot(0, State.EMPTY), template="starting")).endswith("is being imported")
    lost = facts(slot(0, State.EMPTY), template="down", trouble="SyntaxError", template_next_at=NOW + 4)
    assert why_not(lost) == "no child is ready: the template was lost: SyntaxError, the next try in 4 s"


def test_an_idler_is_told_with_what_waits() -> None:
    idler = Idler(0, 1, 0, 100, NOW - 14, BAND, replace=False)
    reason = f"child 0 (pid 100) has been idle for 14 s while {BAND} holds entries"
    assert why_not(facts(slot(0), idlers=(idler,))) == reason


# --- what the pool notes for it


def test_the_pool_remembers_why_a_child_did_not_boot_until_one_does() -> None:
    pool = Pool.of(1, Policy(boot_timeout_s=9.0))
    for event in (Begin(), ContactMade(), TemplateUp(1), Forked(0, 1, 100), BootOverdue(0, 1)):
        step(pool, 9.0, event)
    step(pool, 9.1, Exited(0, 1, 100, None, 9))
    taken = snapshot.take(pool, [], 9.1, claiming=True)
    assert (taken.slots[0].state, taken.slots[0].next_try_at) == (State.BACKOFF, 9.6)
    assert taken.slots[0].trouble == "it was not ready within 9 s (--boot-timeout)"
    step(pool, 9.6, pool.alarms()[0].event)
    step(pool, 9.6, Forked(0, 2, 101))
    step(pool, 9.7, Exited(0, 2, 101, 70, None))
    assert snapshot.take(pool, [], 9.7, claiming=True).slots[0].trouble == "pid 101 ended with exit code 70"


def test_a_row_of_another_life_is_not_shown() -> None:
    pool = Pool.of(1, Policy())
    for event in (Begin(), ContactMade(), TemplateUp(1), Forked(0, 1, 100)):
        step(pool, 1.0, event)
    (only,) = pool.slots
    assert snapshot.take(pool, [(only, row())], 1.0, claiming=True).slots[0].row is not None
    assert snapshot.take(pool, [(only, row(life=2))], 1.0, claiming=True).slots[0].row is None
    step(pool, 1.0, Stop(StopMode.GRACEFUL))
    assert snapshot.take(pool, [], 1.0, claiming=False).stopping


# --- idle without a reason


class Watch:
    """Looks every two seconds."""

    def __init__(self) -> None:
        self.idleness = Idleness()
        self.now = NOW

    def looks(self, *slots: SlotView, seconds: float = 2.0, **given: Any) -> tuple[Idler, ...]:
        """What the last of the looks in that time finds."""
        found: tuple[Idler, ...] = ()
        fields = {"band": BAND, "age_ms": 60_000, "ok_since": NOW - 900, **given}
        shot = Snapshot(slots=slots, contact=True, claiming=fields.pop("claiming", True))
        end = self.now + seconds
        while self.now < end:
            self.now += 2.0
            found = self.idleness.look(Look(self.now, **fields), shot)
        return found


def test_an_idle_child_beside_waiting_entries_is_found_after_10_s_and_then_replaced() -> None:
    watch = Watch()
    assert watch.looks(slot(0), seconds=10) == ()
    (found,) = watch.looks(slot(0))
    assert (found.slot, found.life, found.seq, found.replace) == (0, 1, 0, False)
    (again,) = watch.looks(slot(0))
    assert again.replace


@pytest.mark.parametrize(
    "given",
    [{"band": "", "age_ms": -1}, {"age_ms": 999}, {"ok_since": 0.0}, {"claiming": False}],
    ids=["nothing waits", "it waits no second", "Redis is away", "nobody may claim"],
)
def test_without_entries_without_redis_without_leave_idle_is_healthy(given: dict[str, Any]) -> None:
    assert Watch().looks(slot(0), seconds=60, **given) == ()


@pytest.mark.parametrize(
    "of",
    [
        row(Phase.EXECUTING),
        row(Phase.SETTLING),
        row(may_claim=False),
        row(stop=True),
        row(redis_ok_since=0.0),
    ],
    ids=["executes", "settles", "may not claim", "is to end", "has no Redis"],
)
def test_whoever_has_a_reason_is_left_alone(of: Row) -> None:
    assert Watch().looks(slot(0, of=of), seconds=60) == ()


@pytest.mark.parametrize("state", [s for s in State if s is not State.READY])
def test_only_children_that_are_ready_are_judged(state: State) -> None:
    assert Watch().looks(slot(0, state), seconds=60) == ()


def test_all_the_time_counts_anew_when_the_reason_for_idling_ends() -> None:
    watch = Watch()
    assert watch.looks(slot(0), seconds=60, band="", age_ms=-1) == ()
    assert watch.looks(slot(0), seconds=10) == ()
    assert watch.looks(slot(0, of=row(idle_since=watch.now - 1)), seconds=8) == ()
    assert watch.looks(slot(0, of=row(may_claim=False)), seconds=8) == ()
    assert watch.looks(slot(0), seconds=10) == ()
    assert watch.looks(slot(0)) != ()


def test_after_a_time_without_looks_nobody_is_found_for_what_was_before() -> None:
    watch = Watch()
    assert watch.looks(slot(0), seconds=14) != ()
    watch.now += 60.0
    assert watch.looks(slot(0)) == ()
    watch.looks(slot(0), seconds=14)
    watch.idleness.forget()
    assert watch.looks(slot(0), seconds=10) == ()


def test_where_another_child_is_no_cure_the_pauses_grow_until_one_executes_something() -> None:
    watch, pauses = Watch(), []
    for life in range(1, 9):
        begun = watch.now
        view = replace(slot(0, of=row(life=life, idle_since=begun)), life=life)
        while not any(idler.replace for idler in watch.looks(view)):
            assert watch.now - begun < 400
        pauses.append(watch.now - begun)
    assert pauses == sorted(pauses)
    assert pauses[0] < 2 * IDLE_MOST_S
    assert pauses[-1] < IDLE_MOST_S * 2**FRUITLESS_MOST + 10
    watch.looks(replace(slot(0, of=row(Phase.EXECUTING, life=9)), life=9))
    begun = watch.now
    view = replace(slot(0, of=row(life=10, idle_since=begun)), life=10)
    while not any(idler.replace for idler in watch.looks(view)):
        assert watch.now - begun < 20


# --- /status

ABOUT = About(
    worker_id="here-1-aa",
    hostname="here",
    pid=1,
    version="1.0",
    app="shop:app",
    queues=("default", "mail"),
    redis_url="redis://127.0.0.1:6379/0",
    started_at=NOW - 960,
    leader=True,
    paused=("mail",),
    redis_errors=2,
    counted=Counters(processed=5),
    replaced={"timeout": 1},
)


def test_status_tells_what_each_slot_executes_and_until_when() -> None:
    busy, empty = slot(0, of=row(Phase.EXECUTING)), SlotView(1, State.EMPTY)
    told = status(facts(busy, empty), ABOUT, with_ids=True)
    assert (told["state"], told["leader"], told["paused_queues"]) == ("running", True, ["mail"])
    assert (told["live"]["ok"], told["ready"]) == (True, {"ok": True, "reasons": []})
    first, second = told["slots"]
    assert (first["phase"], first["since_s"], first["counters"]["processed"]) == ("executing", 500.0, 3)
    assert first["task"]["task_id"] == "t1"
    assert (first["task"]["running_s"], first["task"]["deadline_s"]) == (500.0, 100.0)
    assert first["task"]["soft_deadline_s"] is None
    assert (second["state"], second["pid"], second["task"], second["phase"]) == ("empty", None, None, None)


def test_status_names_no_task_to_a_stranger() -> None:
    told = status(facts(slot(0, of=row(Phase.EXECUTING))), ABOUT, with_ids=False)
    assert told["slots"][0]["task"]["task_type"] == "images.resize"
    assert "t1" not in str(told)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({}, "running"),
        ({"claiming": False}, "quiet"),
        ({"contact": False, "claiming": False}, "starting"),
        ({"stopping": True}, "stopping"),
    ],
)
def test_status_says_in_one_word_how_it_stands(given: dict[str, Any], state: str) -> None:
    assert status(facts(slot(0), **given), ABOUT, with_ids=True)["state"] == state
