"""What a death means for the tasks that were pending for the dead child."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtq_child.retry import DEFAULT_RETRY, crash_delay_ms
from dtq_child.row import Counters, Execution, Phase, Row
from dtq_supervisor.events import Verdict, VerdictKind
from dtq_supervisor.judgement import Death, crash_delays, judge, message_of

RELEASING: tuple[VerdictKind, ...] = (
    *("superseded", "cancelled", "grace", "immediate", "boot", "leaving", "surplus", "idle"),
)
LUA_ARGUMENTS_BEFORE_DELAYS = 17


def execution(seq: int = 3, **changed: Any) -> Execution:
    facts: dict[str, Any] = {
        "seq": seq,
        "task_id": "t1",
        "task_type": "probe",
        "stream": "dtq:stream:default:p5",
        "entry_id": "1-1",
        "delivery": 2,
        "attempt": 1,
        "max_attempts": 3,
        "crashes": 0,
        "max_crashes": 3,
        "timeout_ms": 1500,
        "started": 100.0,
        "soft_deadline": 0.0,
        "hard_deadline": 101.5,
        "policy": DEFAULT_RETRY,
        "claim_sent": 99.0,
    }
    return Execution(**{**facts, **changed})


def row(phase: Phase = Phase.EXECUTING, seq: int = 3, **changed: Any) -> Row:
    busy = phase in (Phase.EXECUTING, Phase.SETTLING)
    return Row(
        life=1,
        pid=4711,
        phase=phase,
        seq=seq,
        execution=execution(seq, **changed) if busy else None,
        held=(),
        settling_since=0.0,
        counters=Counters(),
        idle_since=0.0,
        redis_ok_since=0.0,
        last_claim=0.0,
        stop=False,
        may_claim=True,
        renewed=0.0,
        order_kind=0,
        order_seq=0,
    )


def death(of: Row | None = None, verdict: VerdictKind | None = None, seq: int = 3, **facts: Any) -> Death:
    return Death(0, 1, "w:0.1", of, Verdict(verdict, seq) if verdict else None, **facts)


def test_the_execution_that_a_timeout_names_is_ended_as_its_policy_says() -> None:
    judgement = judge(death(row(), "timeout", stack="in spin()"), 0.5)
    assert (judgement.how, judgement.exact, judgement.error_class) == ("ended", True, "TaskTimeout")
    assert judgement.ended == ("retry", 10_000, "timeout")
    last = judge(death(row(max_attempts=1), "timeout"), 0.5)
    assert last.ended == ("dead", 0, "timeout")


def test_an_execution_that_the_verdict_does_not_name_is_not_blamed() -> None:
    for kind in ("timeout", "stuck", "memory"):
        judgement = judge(death(row(seq=4), kind), 0.5)
        assert (judgement.how, judgement.exact, judgement.named) == ("crash", True, None)


def test_what_was_killed_for_its_memory_is_a_crash_and_its_error_says_how_much_that_was() -> None:
    killed = Death(0, 1, "w:0.1", row(), Verdict("memory", 3, 700, 512))
    judgement = judge(killed, 0.5)
    assert (judgement.how, judgement.exact, judgement.error_class) == ("crash", True, "ChildDied")
    assert judgement.named == row().execution
    assert "(it held more than --hard-memory-per-child: 700 of 512 bytes) while" in judgement.message


@pytest.mark.parametrize("kind", RELEASING)
@pytest.mark.parametrize("of", [row(), row(Phase.READY), None])
def test_kills_for_other_reasons_blame_nobody(kind: VerdictKind, of: Row | None) -> None:
    assert judge(death(of, kind), 0.5).how == "release"


@pytest.mark.parametrize(
    ("of", "facts", "how"),
    [
        (row(), {"signal": 9}, "crash"),
        (row(Phase.READY), {"signal": 11}, "crash"),
        (row(), {"exit_code": 0}, "crash"),
        (row(Phase.EXITING), {"exit_code": 0}, "release"),
        (row(Phase.CLAIMING), {"exit_code": 0}, "release"),
        (row(Phase.SETTLING), {"exit_code": 0}, "crash"),
        (row(Phase.READY), {"exit_code": 70}, "crash"),
        (None, {"signal": 9}, "crash"),
        (None, {"exit_code": 0}, "crash"),
    ],
)
def test_what_dies_by_itself(of: Row | None, facts: dict[str, Any], how: str) -> None:
    judgement = judge(death(of, **facts), 0.5)
    assert (judgement.how, judgement.exact) == (how, False)


def test_a_torn_row_blames_what_runs_only_where_a_task_may_be_to_blame() -> None:
    assert (judge(death(None, "timeout"), 0.5).how, judge(death(None, "stuck"), 0.5).how) == (
        "crash",
        "crash",
    )
    assert judge(death(None, "timeout"), 0.5).exact is False


@pytest.mark.parametrize(
    ("of", "facts", "message"),
    [
        (
            row(),
            {"signal": 9, "cause": {"signal": "SIGKILL"}},
            "child 0 (pid 4711) was killed by SIGKILL (unknown sender) while executing",
        ),
        (
            row(Phase.READY),
            {"signal": 6, "cause": {"signal": "SIGABRT", "killed_by": "itself"}},
            "child 0 (pid 4711) was killed by SIGABRT (itself) while idle",
        ),
        (
            row(Phase.CLAIMING),
            {"exit_code": 70},
            "child 0 (pid 4711) exited with code 70 while claiming",
        ),
        (None, {"signal": 40}, "child 0 was killed by signal 40 (unknown sender)"),
        (None, {}, "child 0 died"),
    ],
)
def test_the_message_says_who_how_and_doing_what(of: Row | None, facts: dict[str, Any], message: str) -> None:
    assert message_of(death(of, **facts)) == message


def test_our_own_kills_say_why() -> None:
    assert message_of(death(row(), "stuck", signal=9)) == (
        "child 0 (pid 4711) was killed by its supervisor "
        "(it could not settle its task although Redis answered) while executing"
    )


def bytes_of(word: object) -> bytes:
    assert isinstance(word, bytes)
    return word


def test_the_arguments_carry_the_token_and_the_stack_once() -> None:
    cause = {"signal": "SIGKILL", "stack": "in spin()", "max_rss_bytes": 12, "cpu_ms": 7}
    of = death(row(), signal=9, cause=cause, stack="in spin()", at=102.5)
    words = judge(of, 0.5).words(of, 0.5)
    assert words[:6] == ["crash", "0", "t1", "dtq:stream:default:p5", "1-1", 2]
    whole, brief, facts = (orjson.loads(bytes_of(word)) for word in words[9:12])
    assert whole == cause
    assert "stack" not in brief
    assert facts == {
        "pid": 4711,
        "duration_ms": 2500,
        "max_rss_bytes": 12,
        "cpu_ms": 7,
        "error": "ChildDied",
        "cause": brief,
    }
    assert words[LUA_ARGUMENTS_BEFORE_DELAYS:] == crash_delays(0.5)
    assert words[LUA_ARGUMENTS_BEFORE_DELAYS - 2 : LUA_ARGUMENTS_BEFORE_DELAYS] == [3, 3]


@given(
    st.floats(0, 1), st.sampled_from([*RELEASING, "timeout", "stuck", None]), st.sampled_from([None, *Phase])
)
def test_there_are_as_many_arguments_whatever_happened(
    random01: float, kind: VerdictKind | None, phase: Phase | None
) -> None:
    of = death(row(phase) if phase is not None else None, kind, signal=9)
    words = judge(of, random01).words(of, random01)
    assert len(words) == LUA_ARGUMENTS_BEFORE_DELAYS + len(crash_delays(random01))


def test_crash_delays_begin_after_the_second_and_end_at_the_cap() -> None:
    delays = crash_delays(0.5)
    assert delays[0] == crash_delay_ms(2, 0.5)
    assert delays[-1] == crash_delay_ms(1000, 0.5)
    assert delays == sorted(delays)
