"""What follows from what happened: R16, R17 and R19 as a table, and properties that hold for all of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtq_child.error_text import TRACEBACK_BYTES, ErrorText, class_names, error_text
from dtq_child.errors import RejectTask, RetryTask, SoftTimeout
from dtq_child.outcome import (
    BadArgs,
    Cancelled,
    Crashed,
    Decision,
    Facts,
    Happening,
    Raised,
    Released,
    Returned,
    TimedOut,
    UnknownType,
    decide,
)
from dtq_child.payload import dump_result
from dtq_child.retry import MAX_DELAY_S, Backoff

POLICY = Backoff(base=10, factor=4, cap=3600, jitter=0.25, never=(ValueError,)).policy
DAY_MS = 86_400_000
FIRST = Facts(attempt=1, max_attempts=3, crashes=0, max_crashes=3, policy=POLICY, unknown_ttl_ms=DAY_MS)
LAST = replace(FIRST, attempt=3)
MIDDLE = 0.5


def raised(exc: BaseException, *, soft: bool = False) -> Raised:
    """What the runner tells about an exception that left the handler."""
    return Raised(
        error_text(exc),
        class_names(exc),
        wants_retry=isinstance(exc, RetryTask),
        retry_delay_s=exc.delay if isinstance(exc, RetryTask) else None,
        rejected=isinstance(exc, RejectTask),
        soft=soft,
    )


def outline(decision: Decision) -> tuple[str, str, int, str, str]:
    """(kind, reason, delay, what it spends, the error's class)."""
    spent = ("attempt" if decision.spend_attempt else "") + ("crash" if decision.spend_crash else "")
    return decision.kind, decision.reason, decision.delay_ms, spent, decision.error_class


class BadInput(ValueError):
    """A subclass of what the policy forbids."""


BAD_INPUT = f"{__name__}.BadInput"
KILLED = Crashed({"signal": 9})


@pytest.mark.parametrize(
    ("happening", "facts", "expected"),
    [
        (Returned(dump_result(1, 100)), FIRST, ("succeed", "returned", 0, "", "")),
        (Returned(None), LAST, ("succeed", "returned", 0, "", "")),
        (Cancelled(), FIRST, ("cancelled", "cancelled", 0, "", "")),
        (Released(), LAST, ("release", "released", 0, "", "")),
        # Errors spend attempts, and the delay grows with them.
        (raised(OSError("x")), FIRST, ("retry", "raised", 10_000, "attempt", "OSError")),
        (raised(OSError("x")), replace(FIRST, attempt=2), ("retry", "raised", 40_000, "attempt", "OSError")),
        (raised(OSError("x")), LAST, ("dead", "attempts_exhausted", 0, "attempt", "OSError")),
        (
            raised(OSError("x")),
            replace(FIRST, max_attempts=1),
            ("dead", "attempts_exhausted", 0, "attempt", "OSError"),
        ),
        # Leaving the process politely is a failure like any other, code 0 too.
        (raised(SystemExit(0)), FIRST, ("retry", "raised", 10_000, "attempt", "SystemExit")),
        (raised(KeyboardInterrupt()), FIRST, ("retry", "raised", 10_000, "attempt", "KeyboardInterrupt")),
        (raised(GeneratorExit()), LAST, ("dead", "attempts_exhausted", 0, "attempt", "GeneratorExit")),
        # never= and its subclasses.
        (raised(ValueError()), FIRST, ("dead", "never_retried", 0, "attempt", "ValueError")),
        (raised(BadInput()), FIRST, ("dead", "never_retried", 0, "attempt", BAD_INPUT)),
        # The handler's own decisions.
        (raised(RejectTask("no")), FIRST, ("dead", "rejected", 0, "attempt", "RejectTask")),
        (raised(RetryTask(delay=1.5)), FIRST, ("retry", "retry_asked", 1_500, "attempt", "RetryTask")),
        (raised(RetryTask(delay=0)), FIRST, ("retry", "retry_asked", 0, "attempt", "RetryTask")),
        (raised(RetryTask()), FIRST, ("retry", "retry_asked", 10_000, "attempt", "RetryTask")),
        (raised(RetryTask(delay=1)), LAST, ("dead", "attempts_exhausted", 0, "attempt", "RetryTask")),
        # Timeouts, soft and hard.
        (
            raised(SoftTimeout(), soft=True),
            FIRST,
            ("retry", "soft_timeout", 10_000, "attempt", "SoftTimeout"),
        ),
        (
            raised(SoftTimeout(), soft=True),
            LAST,
            ("dead", "attempts_exhausted", 0, "attempt", "SoftTimeout"),
        ),
        (TimedOut(30_000), FIRST, ("retry", "timeout", 10_000, "attempt", "TaskTimeout")),
        (TimedOut(30_000), LAST, ("dead", "timeout", 0, "attempt", "TaskTimeout")),
        # Deaths spend crashes; the attempt stays, even the last one.
        (KILLED, FIRST, ("park", "crash", 0, "crash", "ChildDied")),
        (KILLED, LAST, ("park", "crash", 0, "crash", "ChildDied")),
        (KILLED, replace(FIRST, crashes=1), ("retry", "crash", 1_000, "crash", "ChildDied")),
        (KILLED, replace(FIRST, crashes=2, max_crashes=9), ("retry", "crash", 4_000, "crash", "ChildDied")),
        (KILLED, replace(FIRST, crashes=2), ("dead", "poison", 0, "crash", "PoisonTask")),
        (KILLED, replace(FIRST, max_crashes=1), ("dead", "poison", 0, "crash", "PoisonTask")),
        (KILLED, replace(FIRST, crashes=7), ("dead", "poison", 0, "crash", "PoisonTask")),
        # Unknown types wait for a worker that knows them.
        (UnknownType(0), LAST, ("retry", "unknown_task_type", 5_000, "", "UnknownTaskType")),
        (UnknownType(15_000), FIRST, ("retry", "unknown_task_type", 20_000, "", "UnknownTaskType")),
        (UnknownType(DAY_MS - 7), FIRST, ("retry", "unknown_task_type", 7, "", "UnknownTaskType")),
        (UnknownType(DAY_MS), FIRST, ("dead", "unknown_task_type", 0, "", "UnknownTaskType")),
        (
            BadArgs(error_text(TypeError("missing: width"))),
            FIRST,
            ("dead", "bad_arguments", 0, "", "BadArguments"),
        ),
    ],
)
def test_the_table(happening: Happening, facts: Facts, expected: tuple[str, str, int, str, str]) -> None:
    assert outline(decide(happening, facts, MIDDLE)) == expected


def test_asking_for_a_retry_wins_over_a_broad_never() -> None:
    facts = replace(FIRST, policy=Backoff(never=(Exception,)).policy)
    assert decide(raised(RetryTask(delay=1)), facts, MIDDLE).kind == "retry"
    assert decide(raised(RuntimeError()), facts, MIDDLE).kind == "dead"
    assert decide(TimedOut(1000), facts, MIDDLE).kind == "retry"


@pytest.mark.parametrize(
    ("asked", "delay_ms"),
    [
        (-5, 0),
        (float("inf"), MAX_DELAY_S * 1000),
        pytest.param(10**400, MAX_DELAY_S * 1000, id="10**400"),
        (timedelta(minutes=2), 120_000),
        (float("nan"), 10_000),
        ("soon", 10_000),
        (True, 10_000),
    ],
)
def test_a_delay_that_is_no_time_to_wait_is_the_policys(asked: object, delay_ms: int) -> None:
    decision = decide(raised(RetryTask(delay=asked)), FIRST, MIDDLE)  # type: ignore[arg-type]
    assert decision.delay_ms == delay_ms


def test_the_error_travels_whole() -> None:
    try:
        raise OSError("disk full")
    except OSError as exc:
        decision = decide(raised(exc), FIRST, MIDDLE)
    assert decision.error_message == "disk full"
    assert "disk full" in decision.traceback
    assert "test_outcome.py" in decision.traceback


def test_a_timeout_tells_its_limit_the_stack_and_the_cause() -> None:
    stack = "Thread 0x1 (most recent call first):\n" + "  File x\n" * 10_000 + "the outermost frame"
    decision = decide(TimedOut(1500, stack, {"signal": 9}), FIRST, MIDDLE)
    assert "1.5 s" in decision.error_message
    assert decision.traceback.startswith("Thread 0x1")
    assert decision.traceback.endswith("the outermost frame")
    assert len(decision.traceback.encode()) <= TRACEBACK_BYTES
    assert decision.cause == {"signal": 9}


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        ({"signal": 11}, "killed by signal 11"),
        ({"signal": "SIGKILL", "exit_code": None}, "killed by signal SIGKILL"),
        ({"exit_code": 0, "signal": None}, "exited with code 0"),
        ({}, "lease ran out"),
    ],
)
def test_a_poison_task_tells_how_its_processes_died(cause: dict[str, object], says: str) -> None:
    stack = {"stack": "Thread 0x1"}
    decision = decide(Crashed({**cause, **stack}), replace(FIRST, crashes=2), MIDDLE)
    assert "died 3 times, the limit is 3" in decision.error_message
    assert says in decision.error_message
    assert decision.cause == {**cause, **stack}
    assert decision.traceback == "Thread 0x1"


def test_an_unknown_type_says_what_to_do_about_it() -> None:
    assert "include=" in decide(UnknownType(2 * DAY_MS), FIRST, MIDDLE).error_message


errors = st.builds(ErrorText, st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
names = st.lists(st.sampled_from(["ValueError", "OSError", "Exception", "x.Y"])).map(tuple)
happenings: st.SearchStrategy[Happening] = st.one_of(
    st.builds(Returned),
    st.builds(
        Raised,
        errors,
        names,
        wants_retry=st.booleans(),
        retry_delay_s=st.none() | st.floats(),
        rejected=st.booleans(),
        soft=st.booleans(),
    ),
    st.builds(TimedOut, st.integers(0, 10**10), st.text()),
    st.builds(
        Crashed, st.dictionaries(st.sampled_from(["signal", "exit_code", "stack"]), st.integers() | st.text())
    ),
    st.builds(Cancelled),
    st.builds(Released),
    st.builds(UnknownType, st.integers(-1000, 10**12)),
    st.builds(BadArgs, errors),
)
counts = st.one_of(st.integers(0, 5), st.integers(0, 10**9))
all_facts = st.builds(Facts, counts, counts, counts, counts, st.just(POLICY), st.integers(0, 10**12))


@given(happenings, all_facts, st.floats(0, 1))
def test_every_decision_is_one_that_can_be_settled(happening: Happening, facts: Facts, chance: float) -> None:
    decision = decide(happening, facts, chance)
    assert decision.kind in {"succeed", "retry", "dead", "park", "release", "cancelled"}
    assert 0 <= decision.delay_ms <= MAX_DELAY_S * 1000 * 1.25
    assert decision.delay_ms == 0 or decision.kind == "retry"
    assert decision.retryable == (decision.kind in {"retry", "park", "release"})
    assert not (decision.spend_attempt and decision.spend_crash)


@given(happenings, all_facts, st.floats(0, 1))
def test_nothing_runs_again_beyond_its_limits(happening: Happening, facts: Facts, chance: float) -> None:
    decision = decide(happening, facts, chance)
    if decision.retryable and decision.spend_attempt:
        assert facts.attempt < facts.max_attempts
    if decision.retryable and decision.spend_crash:
        assert facts.crashes + 1 < facts.max_crashes
    if decision.spend_crash:
        assert isinstance(happening, Crashed)
    if decision.spend_attempt:
        assert isinstance(happening, Raised | TimedOut)
