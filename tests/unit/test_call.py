"""The options of a call: what is accepted, in which units, and what is refused (SC-8)."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies

from dtq_child import App, Backoff, InvalidTask, PayloadError
from dtq_child.call import (
    CallOptions,
    Declared,
    Given,
    check_declared,
    check_options,
    make_call,
)
from dtq_child.retry import RetryPolicy
from dtq_child.times import MAX_DELAY_MS, check_moment

NOW = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)
PARIS = ZoneInfo("Europe/Paris")
TEN_YEARS = 3650 * 86400


def checked(**given: Any) -> CallOptions:
    return check_options(cast(Given, given), NOW_MS)


def beside(declared: Declared, **given: Any) -> CallOptions:
    return check_options(cast(Given, given), NOW_MS, declared)


# -- units


def test_options_come_out_in_the_units_of_the_record() -> None:
    options = checked(
        queue="images",
        priority=0,
        delay=1.5,
        expires=timedelta(minutes=1),
        timeout=timedelta(seconds=30),
        soft_timeout=20,
        max_attempts=5,
        max_crashes=1,
        retry=Backoff(base=1, never=(ValueError, "shop.Gone")),
        idempotency_key="a.jpg:64",
        store_result=False,
        metadata={"by": "ann"},
        task_id="abc",
    )
    assert options == CallOptions(
        queue="images",
        priority=0,
        delay_ms=1500,
        expires_ms=60_000,
        timeout_ms=30_000,
        soft_timeout_ms=20_000,
        max_attempts=5,
        max_crashes=1,
        retry=options.retry,
        idempotency_key="a.jpg:64",
        store_result=False,
        metadata='{"by":"ann"}',
        task_id="abc",
    )
    assert RetryPolicy.from_json(options.retry) == RetryPolicy(1, 2, 3600, 0.25, ("ValueError", "shop.Gone"))


def test_nothing_given_is_nothing_said() -> None:
    nothing = dict.fromkeys(("delay", "eta", "expires", "timeout", "retry", "metadata", "task_id"))
    assert checked(**nothing) == checked() == CallOptions()


def test_time_is_rounded_up_so_that_nothing_is_early() -> None:
    assert checked(delay=2.007).delay_ms == 2007
    assert checked(delay=0.0001).delay_ms == 1
    assert checked(delay=timedelta(microseconds=1)).delay_ms == 1
    assert checked(eta=NOW + timedelta(microseconds=1)).eta_ms == NOW_MS + 1


@given(strategies.timedeltas(min_value=timedelta(0), max_value=timedelta(days=3650)))
def test_a_timedelta_is_exact(delay: timedelta) -> None:
    milliseconds = checked(delay=delay).delay_ms
    assert milliseconds is not None
    assert timedelta(0) <= timedelta(milliseconds=milliseconds) - delay < timedelta(milliseconds=1)


# -- moments


def test_an_eta_is_exact_in_every_time_zone_and_on_both_sides_of_a_clock_change() -> None:
    hour = 3_600_000
    before = datetime(2026, 3, 29, 1, 59, tzinfo=PARIS)
    after = datetime(2026, 3, 29, 3, 0, tzinfo=PARIS)
    assert check_moment(after, "eta", NOW_MS) - check_moment(before, "eta", NOW_MS) == 60_000
    first = datetime(2026, 10, 25, 2, 30, tzinfo=PARIS, fold=0)
    second = datetime(2026, 10, 25, 2, 30, tzinfo=PARIS, fold=1)
    assert check_moment(second, "eta", NOW_MS) - check_moment(first, "eta", NOW_MS) == hour
    skipped = datetime(2026, 3, 29, 2, 30, tzinfo=PARIS)  # never on a clock: Python reads it as 1:30 UTC
    assert check_moment(skipped, "eta", NOW_MS) == NOW_MS + hour
    far_east = datetime(2026, 3, 29, 14, 30, tzinfo=timezone(timedelta(hours=14)))
    assert check_moment(far_east, "eta", NOW_MS) == NOW_MS


@given(strategies.datetimes(timezones=strategies.timezones()))
def test_any_aware_datetime_is_a_moment_or_refused(moment: datetime) -> None:
    try:
        milliseconds = check_moment(moment, "eta", NOW_MS)
    except InvalidTask:
        assert (moment - NOW) > timedelta(milliseconds=MAX_DELAY_MS)
    else:
        assert 0 <= milliseconds <= NOW_MS + MAX_DELAY_MS


def test_an_eta_in_the_past_is_taken() -> None:
    assert checked(eta=NOW - timedelta(days=1)).eta_ms == NOW_MS - 86_400_000
    assert checked(eta=datetime(1, 1, 1, tzinfo=UTC)).eta_ms == 0


@pytest.mark.parametrize(
    ("eta", "fix"),
    [
        (datetime(2026, 3, 29, 2, 30), "no time zone"),  # noqa: DTZ001
        (datetime.max.replace(tzinfo=UTC), "at most ten years"),
        (datetime.max.replace(tzinfo=timezone(-timedelta(hours=12))), "at most ten years"),
        (date(2026, 3, 29), "aware datetime"),
        (NOW_MS, "aware datetime"),
        (NOW.timestamp(), "aware datetime"),
        ("2026-03-29T00:30:00Z", "aware datetime"),
        (math.nan, "aware datetime"),
        (timedelta(1), "aware datetime"),
    ],
)
def test_an_eta_that_is_no_moment_is_refused(eta: object, fix: str) -> None:
    with pytest.raises(InvalidTask, match=fix) as caught:
        checked(eta=eta)
    assert str(caught.value).startswith("eta ")


# -- durations


@pytest.mark.parametrize("name", ["delay", "expires", "timeout", "soft_timeout"])
@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -1,
        -0.001,
        True,
        "30",
        b"30",
        [30],
        Decimal(30),
        10**400,
        1e300,
        TEN_YEARS + 1,
        NOW_MS,
        timedelta.max,
        timedelta.min,
        timedelta(microseconds=-1),
        date(2026, 3, 29),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_duration_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidTask) as caught:
        checked(**{name: value})
    assert str(caught.value).startswith(f"{name} {value!r}")


def test_durations_have_bounds_of_their_own() -> None:
    assert checked(delay=0, expires=TEN_YEARS).expires_ms == MAX_DELAY_MS
    assert checked(timeout=7 * 86400).timeout_ms == 604_800_000
    for name, value in (("timeout", 7 * 86400 + 1), ("timeout", 0), ("soft_timeout", 0.0), ("expires", 0)):
        with pytest.raises(InvalidTask, match=name):
            checked(**{name: value})


def test_expires_may_be_a_moment() -> None:
    options = checked(expires=NOW + timedelta(hours=1))
    assert (options.expires_ms, options.expires_at_ms) == (None, NOW_MS + 3_600_000)
    with pytest.raises(InvalidTask, match=r"expires .* no time zone"):
        checked(expires=datetime(2026, 3, 29))  # noqa: DTZ001


# -- what does not go together


@pytest.mark.parametrize(
    "given",
    [
        {"delay": 1, "eta": NOW},
        {"delay": 60, "expires": 60},
        {"eta": NOW + timedelta(hours=2), "expires": NOW + timedelta(hours=1)},
        {"timeout": 5, "soft_timeout": 5},
    ],
    ids=repr,
)
def test_options_that_exclude_one_another_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidTask):
        checked(**given)


def test_timeouts_are_compared_with_those_of_the_declaration() -> None:
    declared = Declared(timeout_ms=30_000, soft_timeout_ms=20_000)
    beside(declared, timeout=21)
    beside(declared, soft_timeout=29)
    for name, value in (("timeout", 20), ("soft_timeout", 30)):
        with pytest.raises(InvalidTask, match="soft one would never"):
            beside(declared, **{name: value})


# -- the other values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue", ""),
        ("queue", "a b"),
        ("queue", "a" * 65),
        ("queue", None),
        ("priority", 10),
        ("priority", -1),
        ("priority", True),
        ("priority", 5.0),
        ("priority", "5"),
        ("max_attempts", 0),
        ("max_attempts", 1.0),
        ("max_attempts", True),
        ("max_attempts", 10**9),
        ("max_crashes", 0),
        ("retry", 3),
        ("retry", RetryPolicy(1, 2, 3, 0)),
        ("idempotency_key", ""),
        ("idempotency_key", "é" * 129),
        ("idempotency_key", "\ud800"),
        ("idempotency_key", 7),
        ("store_result", 1),
        ("store_result", None),
        ("metadata", ["a"]),
        ("metadata", {"a": "x" * 9000}),
        ("task_id", ""),
        ("task_id", "a:b"),
        ("task_id", "a" * 65),
        ("task_id", 7),
    ],
)
def test_a_value_outside_of_its_bounds_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidTask):
        checked(**{name: value})


def test_metadata_is_json() -> None:
    with pytest.raises(PayloadError) as caught:
        checked(metadata={"when": math.inf})
    assert caught.value.path == "metadata.when"
    assert str(caught.value).startswith("metadata.when: JSON has no NaN")


def test_a_name_that_is_no_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"no such option: prioritty; there are queue, priority"):
        checked(prioritty=9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue", "no spaces"),
        ("priority", 10),
        ("timeout", 0),
        ("timeout", "30"),
        ("soft_timeout", math.nan),
        ("max_attempts", 0),
        ("max_crashes", 0),
        ("retry", 5),
        ("store_result", "no"),
    ],
)
def test_a_declaration_is_checked_alike(name: str, value: Any) -> None:
    with pytest.raises(InvalidTask, match=r"queue|priority|timeout|max_|retry|store_result"):
        App().task(**{name: value})
    with pytest.raises(InvalidTask, match="soft one would never"):
        App().task(timeout=3, soft_timeout=3)


# -- call > declaration > settings


def test_a_call_wins_over_the_declaration() -> None:
    declared = check_declared(
        queue="images",
        priority=9,
        timeout=30,
        soft_timeout=None,
        max_attempts=5,
        max_crashes=None,
        retry=Backoff(),
        store_result=False,
    )
    given = beside(declared, queue="urgent", priority=0, store_result=True, timeout=10, task_id="mine")
    call = make_call("t", "new", b"{}", given, declared)
    assert (call.task_id, call.queue, call.priority, call.store_result) == ("mine", "urgent", 0, True)
    assert call.timeout_ms == 10_000


def test_what_a_worker_can_look_up_itself_is_left_to_it() -> None:
    declared = Declared("images", 9, timeout_ms=1, max_attempts=5, retry=Backoff(), store_result=False)
    call = make_call("t", "new", b"{}", CallOptions(delay_ms=0), declared)
    assert (call.task_id, call.queue, call.priority, call.store_result) == ("new", "images", 9, False)
    assert (call.timeout_ms, call.max_attempts, call.retry, call.delay_ms) == (None, None, "", None)
