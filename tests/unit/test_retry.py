"""Retry delays: bounded, growing, and never in need of more than their arguments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtq_child.errors import RetryTask
from dtq_child.retry import (
    DEFAULT_RETRY,
    MAX_DELAY_S,
    MAX_FACTOR,
    Backoff,
    RetryPolicy,
    crash_delay_ms,
    delay_ms,
    unknown_delay_ms,
)

MIDDLE = 0.5
"""The draw that leaves a delay as it is, whatever the jitter."""

chances = st.floats(0, 1)
attempts = st.one_of(st.integers(1, 100), st.integers(1, 10**12), st.just(10**9), st.just(10**400))


@st.composite
def policies(draw: st.DrawFn, jitter: st.SearchStrategy[float] = chances) -> RetryPolicy:
    base = draw(st.one_of(st.just(0.0), st.floats(0, MAX_DELAY_S)))
    cap = draw(st.floats(base, MAX_DELAY_S))
    return RetryPolicy(base, draw(st.floats(1, MAX_FACTOR)), cap, draw(jitter))


@given(policies(), attempts, chances)
def test_no_attempt_number_leads_out_of_the_bounds(policy: RetryPolicy, attempt: int, chance: float) -> None:
    delay = delay_ms(policy, attempt, chance)
    assert 0 <= delay <= policy.cap_s * 1000 * (1 + policy.jitter) * (1 + 1e-12)
    assert delay >= int(policy.base_s * 1000 * (1 - policy.jitter) * (1 - 1e-12))


@given(policies(), attempts, attempts)
def test_without_jitter_a_later_attempt_never_waits_less(policy: RetryPolicy, one: int, other: int) -> None:
    earlier, later = sorted((one, other))
    assert delay_ms(policy, earlier, MIDDLE) <= delay_ms(policy, later, MIDDLE)


@given(policies(), attempts, chances, chances)
def test_a_greater_chance_never_waits_less(
    policy: RetryPolicy, attempt: int, one: float, other: float
) -> None:
    lower, higher = sorted((one, other))
    assert delay_ms(policy, attempt, lower) <= delay_ms(policy, attempt, higher)


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(1, 10), (2, 40), (3, 160), (4, 640), (5, 2560), (6, 3600), (10**9, 3600)]
)
def test_the_delay_is_the_formula_up_to_the_cap(attempt: int, seconds: int) -> None:
    policy = Backoff(base=10, factor=4, cap=3600, jitter=0.25).policy
    assert delay_ms(policy, attempt, MIDDLE) == seconds * 1000
    assert delay_ms(policy, attempt, 0.0) == seconds * 750
    assert delay_ms(policy, attempt, 1.0) == seconds * 1250


def test_a_base_of_zero_never_waits_and_a_factor_of_one_never_grows() -> None:
    at_once, steady = Backoff(base=0).policy, Backoff(base=3, factor=1).policy
    for attempt in (1, 2, 5000, 10**9, 10**400):
        assert delay_ms(at_once, attempt, 1.0) == 0
        assert delay_ms(steady, attempt, MIDDLE) == 3000


def test_the_default_doubles_from_ten_seconds_to_an_hour_and_forbids_nothing() -> None:
    assert Backoff().policy == DEFAULT_RETRY
    seconds = [delay_ms(DEFAULT_RETRY, attempt, MIDDLE) // 1000 for attempt in (1, 2, 3, 9, 10, 11)]
    assert seconds == [10, 20, 40, 2560, 3600, 3600]
    assert not DEFAULT_RETRY.forbids(("ValueError", "Exception", "BaseException", "object"))


class BadInput(ValueError):
    """A class of the application's own."""


def test_never_takes_classes_and_names_and_knows_them_by_the_names_of_records() -> None:
    never = Backoff(
        never=(BadInput, KeyError, "builtins.OSError", "shop.errors.Sold", RetryTask)
    ).policy.never
    assert never == (f"{__name__}.BadInput", "KeyError", "OSError", "shop.errors.Sold", "RetryTask")


def test_a_forbidden_class_is_recognised_among_the_bases() -> None:
    policy = Backoff(never=(ValueError,)).policy
    assert policy.forbids((f"{__name__}.BadInput", "ValueError", "Exception", "BaseException", "object"))
    assert not policy.forbids(("TypeError", "Exception", "BaseException", "object"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"base": -1}, "base"),
        ({"base": float("nan")}, "base"),
        ({"base": 10.0, "cap": 5}, "cap"),
        ({"cap": float("inf")}, "cap"),
        ({"cap": MAX_DELAY_S + 1}, "cap"),
        ({"factor": 0.5}, "factor"),
        ({"factor": 10**400}, "factor"),
        ({"jitter": 1.1}, "jitter"),
        ({"jitter": -0.1}, "jitter"),
    ],
)
def test_impossible_numbers_are_refused_by_name(options: dict[str, float], names: str) -> None:
    with pytest.raises(ValueError, match=rf"Backoff\({names}="):
        Backoff(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"base": "10"},
        {"factor": None},
        {"jitter": True},
        {"never": ValueError},
        {"never": "ValueError"},
        {"never": (int,)},
        {"never": ("",)},
        {"never": (ValueError("an instance"),)},
    ],
)
def test_wrong_kinds_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="Backoff"):
        Backoff(**options)  # type: ignore[arg-type]


@given(policies(), st.lists(st.text(), max_size=3))
def test_a_policy_survives_the_record(policy: RetryPolicy, never: list[str]) -> None:
    policy = RetryPolicy(policy.base_s, policy.factor, policy.cap_s, policy.jitter, tuple(never))
    assert RetryPolicy.from_json(policy.to_json()) == policy
    assert RetryPolicy.from_json(policy.to_json().encode()) == policy


@pytest.mark.parametrize("text", [None, "", b"", "{", b"\xff", "null", "[1]", '"10"', "NaN", "{}"])
def test_a_policy_that_is_none_is_the_default(text: str | bytes | None) -> None:
    assert RetryPolicy.from_json(text) == DEFAULT_RETRY


def test_unknown_keys_are_ignored_and_impossible_numbers_are_the_defaults() -> None:
    written = {"base_s": 7, "factor": "4", "cap_s": 1e300, "jitter": -3, "never": ["A", 5, None], "colour": 1}
    assert RetryPolicy.from_json(json.dumps(written)) == RetryPolicy(7, 2, 3600, 0.25, ("A",))


json_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
json_values = st.one_of(json_scalars, st.lists(json_scalars, max_size=3))


@given(
    st.dictionaries(st.sampled_from(["base_s", "factor", "cap_s", "jitter", "never", "x"]), json_values),
    attempts,
    chances,
)
def test_whatever_a_record_says_a_delay_follows(
    written: dict[str, object], attempt: int, chance: float
) -> None:
    policy = RetryPolicy.from_json(json.dumps(written))
    assert 0 <= policy.base_s <= policy.cap_s <= MAX_DELAY_S
    assert 0 <= delay_ms(policy, attempt, chance) <= 2 * MAX_DELAY_S * 1000


def test_after_a_crash_the_first_redelivery_is_at_once_and_the_next_ones_back_off_to_a_minute() -> None:
    assert [crash_delay_ms(crashes, MIDDLE) for crashes in (0, 1, 2, 3, 4, 5, 6, 10**9)] == [
        *(0, 0),
        *(1000, 4000, 16000, 60000, 60000, 60000),
    ]
    assert crash_delay_ms(2, 0.0) == 750
    assert crash_delay_ms(2, 1.0) == 1250


def test_an_unknown_type_is_looked_for_after_five_seconds_then_half_as_often_each_time_to_once_a_minute() -> (
    None
):
    seen, delays = 0, []
    for _ in range(6):
        delay = unknown_delay_ms(seen, MIDDLE)
        delays.append(delay)
        seen += delay
    assert delays == [5000, 10000, 20000, 40000, 60000, 60000]


@given(st.integers(-(10**15), 10**15), chances)
def test_the_wait_for_an_unknown_type_is_bounded(seen_ms: int, chance: float) -> None:
    assert 3750 <= unknown_delay_ms(seen_ms, chance) <= 75000
