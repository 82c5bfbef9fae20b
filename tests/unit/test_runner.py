"""One handler under its guards: whatever it does, and whenever a signal comes, there is exactly one
outcome."""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dtq_child import runner
from dtq_child.context import current_task
from dtq_child.errors import RejectTask, RetryTask, ShutdownRequested, SoftTimeout, TaskCancelled
from dtq_child.retry import Backoff, RetryPolicy
from dtq_child.scoreboard import Execution, Order, Phase
from dtq_child.signals import SOFT_SIGNAL
from tests.support.waiting import until
from tests.unit.runner_bench import DELIVERY, STREAM, Bench, runner_bench, value_of


@pytest.fixture
def bench() -> Iterator[Bench]:
    with runner_bench() as bench:
        yield bench


# -- what a handler may do


def test_a_return_value_is_json_in_hand_when_the_row_says_settling(bench: Bench) -> None:
    seen: list[Execution] = []

    def handler(path: str, width: int = 128) -> dict[str, Any]:
        seen.append(bench.now())
        return {"path": path, "width": width}

    before = time.monotonic()
    outcome = bench.run(handler, payload=b'{"path": "a.jpg"}')
    assert value_of(outcome) == {"path": "a.jpg", "width": 128}
    assert bench.row().phase is Phase.SETTLING
    assert outcome.token == DELIVERY.token
    assert outcome.max_attempts == 3
    execution = seen[0]
    assert (execution.task_id, execution.stream, execution.entry_id) == ("018f", STREAM, "1-0")
    assert execution.claim_sent == 1.5
    assert before <= execution.started <= time.monotonic()
    assert execution.hard_deadline == pytest.approx(execution.started + 300)
    assert execution.soft_deadline == 0.0


def test_each_execution_has_a_number_of_its_own(bench: Bench) -> None:
    seen: list[int] = []
    for _ in range(3):
        bench.run(lambda: seen.append(bench.now().seq))
    assert seen == [1, 2, 3]


def test_what_the_process_used_is_told(bench: Bench) -> None:
    def burn() -> None:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    execution = bench.run(burn).execution
    assert execution["pid"] == os.getpid()
    assert 20 <= execution["cpu_ms"] <= execution["duration_ms"] + 10
    assert execution["max_rss_bytes"] > 1 << 20


def test_a_task_that_stores_no_result_succeeds_without_one(bench: Bench) -> None:
    outcome = bench.run(lambda: 5, store_result=False)
    assert outcome.decision.kind == "succeed"
    assert outcome.result is None


def test_a_result_that_json_cannot_carry_does_not_fail_the_task(bench: Bench) -> None:
    def handler() -> object:
        return object()

    outcome = bench.run(handler)
    assert outcome.decision.kind == "succeed"
    assert outcome.result is not None
    assert "object" in (outcome.result.unavailable or "")


class Odd(Exception):
    def __init__(self, needed: int) -> None:
        self.needed = needed

    def __str__(self) -> str:
        raise SystemExit(3)


class Opaque(Exception):
    """Raises wherever Python asks the object, and not its type."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


class Masked(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise KeyboardInterrupt


class Posing(Exception):
    __class__ = TaskCancelled  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ValueError("no"), "ValueError"),
        (SystemExit(0), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError"),
        (BaseException("bare"), "BaseException"),
        (Odd(1), f"{__name__}.Odd"),
        pytest.param(Opaque(), f"{__name__}.Opaque", id="Opaque"),
        pytest.param(Masked(), f"{__name__}.Masked", id="Masked"),
        pytest.param(Posing(), f"{__name__}.Posing", id="Posing"),
        (SoftTimeout("made up"), "SoftTimeout"),
        (TaskCancelled("made up"), "TaskCancelled"),
        (ShutdownRequested("made up"), "ShutdownRequested"),
    ],
)
@pytest.mark.parametrize("how", ["plain", "async"])
def test_whatever_a_handler_raises_is_a_failure_of_that_attempt(
    bench: Bench, error: BaseException, name: str, how: str
) -> None:
    def plain() -> None:
        raise error

    async def not_plain() -> None:
        await asyncio.sleep(0)
        raise error

    decision = bench.run(plain if how == "plain" else not_plain).decision
    assert (decision.kind, decision.spend_attempt, decision.error_class) == ("retry", True, name)
    assert decision.reason == "raised"


def test_the_traceback_begins_and_ends_in_the_handler(bench: Bench) -> None:
    def inner() -> None:
        raise ValueError("deep")

    def handler() -> None:
        inner()

    traceback = bench.run(handler).decision.traceback
    assert traceback.count('File "') == 2
    assert "in handler" in traceback
    assert "in inner" in traceback
    assert "dtq_child" not in traceback


def test_a_handler_decides_its_own_outcome(bench: Bench) -> None:
    def again() -> None:
        raise RetryTask(delay=7, reason="not yet")

    def never() -> None:
        raise RejectTask("nonsense")

    decision = bench.run(again).decision
    assert (decision.kind, decision.delay_ms, decision.reason) == ("retry", 7000, "retry_asked")
    assert bench.run(never).decision.kind == "dead"


def test_a_retry_task_with_its_own_init_is_tried_again_by_the_policy(bench: Bench) -> None:
    class Mine(RetryTask):
        def __init__(self) -> None:
            pass

    def handler() -> None:
        raise Mine

    bench.handle(handler, retry=Backoff(base=5, factor=1, jitter=0))
    assert bench.run().decision.delay_ms == 5000


class RetryOfItsOwn(RetryTask):
    @property
    def delay(self) -> float:
        raise SystemExit("not now")

    @delay.setter
    def delay(self, _: float) -> None: ...


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RetryTask(delay="x"), "RetryTask(delay='x') is no time to wait"),  # type: ignore[arg-type]
        (RetryTask(delay=float("nan")), "RetryTask(delay=nan) is no time to wait"),
        (RetryOfItsOwn(delay=3), "cannot be read: SystemExit"),
    ],
)
def test_a_delay_that_is_no_time_to_wait_is_told_and_left_to_the_policy(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: RetryTask, told: str
) -> None:
    def handler() -> None:
        raise error

    bench.handle(handler, retry=Backoff(base=5, factor=1, jitter=0))
    decision = bench.run().decision
    assert (decision.kind, decision.delay_ms, decision.reason) == ("retry", 5000, "retry_asked")
    assert [record.getMessage() for record in caplog.records if told in record.getMessage()]


def test_the_last_attempt_is_dead_lettered(bench: Bench) -> None:
    def handler() -> None:
        raise ValueError

    assert bench.run(handler, attempt=3).decision.kind == "dead"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"[1]", "object"),
        (b"{", "not JSON"),
        (b'{"unknown": 1, "path": 2}', "unknown"),
        (b"{}", "path"),
    ],
)
def test_a_payload_that_does_not_bind_is_dead_lettered_and_the_handler_not_called(
    bench: Bench, payload: bytes, words: str
) -> None:
    called: list[object] = []

    def handler(path: object) -> None:
        called.append(path)

    decision = bench.run(handler, payload=payload).decision
    assert (decision.kind, decision.error_class) == ("dead", "BadArguments")
    assert words in decision.error_message
    assert called == []


def test_a_type_error_inside_the_handler_is_no_bad_argument(bench: Bench) -> None:
    def handler(path: str) -> int:
        return len(5)  # type: ignore[arg-type]

    decision = bench.run(handler, payload=b'{"path": "a"}').decision
    assert (decision.kind, decision.error_class) == ("retry", "TypeError")


def test_an_unknown_type_waits_and_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.handle(lambda: None, name="shop.resize")
    for _ in range(2):
        outcome = bench.run(task_type="shop.other")
        assert (outcome.decision.kind, outcome.decision.spend_attempt) == ("retry", False)
    bench.run(task_type="shop.third")
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert "shop.other" in warned[0]
    assert "shop.resize" in warned[0]
    assert "include=" in warned[0]
    assert bench.row().counters.unknown_types == 2


def test_an_unknown_type_met_long_ago_is_dead_lettered(bench: Bench) -> None:
    decision = bench.run(task_type="gone", first_unknown_ms=86_400_001).decision
    assert (decision.kind, decision.error_class) == ("dead", "UnknownTaskType")


# -- limits


def test_the_record_wins_over_the_declaration_and_that_over_the_settings(bench: Bench) -> None:
    seen: list[Execution] = []
    bench.handle(
        lambda: seen.append(bench.now()),
        timeout=60,
        soft_timeout=50,
        max_attempts=7,
        retry=Backoff(base=2, never=(ValueError,)),
    )
    bench.run()
    given = RetryPolicy(base_s=9, factor=1, cap_s=9, jitter=0).to_json().encode()
    bench.run(timeout_ms=10_000, max_attempts=2, max_crashes=1, retry=given)
    declared, stated = seen
    assert (declared.timeout_ms, declared.max_attempts, declared.max_crashes) == (60_000, 7, 3)
    assert declared.soft_deadline == pytest.approx(declared.started + 50)
    assert declared.policy.base_s == 2
    assert (stated.timeout_ms, stated.max_attempts, stated.max_crashes) == (10_000, 2, 1)
    assert stated.hard_deadline == pytest.approx(stated.started + 10)
    # A soft timeout that would come after the hard one is none.
    assert stated.soft_deadline == 0.0
    assert stated.policy.base_s == 9


def test_never_of_the_declaration_holds_under_a_policy_of_the_call(bench: Bench) -> None:
    def handler() -> None:
        raise ValueError

    bench.handle(handler, retry=Backoff(never=(ValueError,)))
    given = RetryPolicy(base_s=9, factor=1, cap_s=9, jitter=0).to_json().encode()
    assert bench.run(retry=given).decision.kind == "dead"


def test_numbers_of_another_program_are_brought_within_bounds(bench: Bench) -> None:
    seen: list[Execution] = []
    outcome = bench.run(
        lambda: seen.append(bench.now()),
        timeout_ms=-5,
        max_attempts=10**30,
        attempt=-1,
        crashes=2**40,
        max_crashes=0,
    )
    assert outcome.decision.kind == "succeed"
    assert seen[0].timeout_ms == 1
    assert (seen[0].attempt, seen[0].crashes, seen[0].max_crashes) == (0, 2**32 - 1, 1)


# -- current_task and hooks


def test_a_handler_knows_its_task(bench: Bench) -> None:
    def handler() -> list[Any]:
        task = current_task()
        bench.stopping = True
        return [
            task.id,
            task.task_type,
            task.attempt,
            task.crashes,
            task.delivery,
            task.redelivered,
            task.queue,
            dict(task.metadata),
            299 < task.remaining() <= 300,
            task.stopping,
        ]

    bench.handle(handler)
    value = value_of(bench.run(metadata=b'{"tenant": 4}', crashes=1, redelivered=True))
    assert value == ["018f", "handler", 1, 1, 1, True, "default", {"tenant": 4}, True, True]


def test_an_async_handler_knows_its_task_in_what_it_awaits(bench: Bench) -> None:
    async def inner() -> str:
        return current_task().id

    async def handler() -> list[str]:
        return [await inner(), await asyncio.create_task(inner()), await asyncio.to_thread(_current_id)]

    assert value_of(bench.run(handler)) == ["018f"] * 3


def _current_id() -> str:
    return current_task().id


def test_context_variables_do_not_reach_the_next_task(bench: Bench) -> None:
    variable = contextvars.ContextVar("variable", default="untouched")

    def handler() -> str:
        found = variable.get()
        variable.set("touched")
        return found

    assert [value_of(bench.run(handler)) for _ in range(2)] == ["untouched"] * 2


def test_hooks_run_inside_the_deadline_and_change_no_outcome(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []

    @bench.app.on_task_start
    def broken_start(task: Any) -> None:
        told.append(("start", task.id, bench.row().phase))
        raise SystemExit(1)

    @bench.app.on_task_end
    def broken_end(task: Any, error: BaseException | None) -> None:
        told.append(("end", current_task() is task, type(error), bench.row().phase))
        os.chdir("/")
        raise SoftTimeout("made up by a hook")

    here = os.getcwd()
    assert value_of(bench.run(lambda: 5)) == 5

    def failing() -> None:
        raise ValueError

    assert bench.run(failing).decision.error_class == "ValueError"
    assert told == [
        ("start", "018f", Phase.EXECUTING),
        ("end", True, type(None), Phase.EXECUTING),
        ("start", "018f", Phase.EXECUTING),
        ("end", True, ValueError, Phase.EXECUTING),
    ]
    assert os.getcwd() == here
    assert sum("hook" in record.getMessage() for record in caplog.records) == 4


def test_what_a_start_hook_sets_in_the_context_is_seen_by_the_handler(bench: Bench) -> None:
    variable = contextvars.ContextVar("variable", default="")
    bench.app.on_task_start(lambda task: variable.set(task.id))

    def handler() -> str:
        return variable.get()

    assert value_of(bench.run(handler)) == "018f"


# -- orders of the supervisor


def test_a_soft_timeout_that_leaves_the_handler_spends_an_attempt(bench: Bench) -> None:
    def handler() -> None:
        bench.order(Order.SOFT_TIMEOUT)
        time.sleep(10)

    decision = bench.run(handler).decision
    assert (decision.kind, decision.reason, decision.spend_attempt) == ("retry", "soft_timeout", True)
    assert decision.error_class == "SoftTimeout"
    assert "in handler" in decision.traceback
    assert "dtq_child" not in decision.traceback


def test_a_handler_may_clean_up_and_return_after_a_soft_timeout(bench: Bench) -> None:
    def handler() -> str:
        try:
            bench.order(Order.SOFT_TIMEOUT)
            time.sleep(10)
        except SoftTimeout:
            return "part"
        return "whole"

    assert value_of(bench.run(handler)) == "part"


def test_an_order_is_raised_once_however_often_the_signal_comes(bench: Bench) -> None:
    def handler() -> int:
        count = 0
        for _ in range(5):
            try:
                bench.order(Order.SOFT_TIMEOUT)
            except SoftTimeout:
                count += 1
        return count

    assert value_of(bench.run(handler)) == 1


def test_another_order_is_raised_after_the_first(bench: Bench) -> None:
    def handler() -> None:
        try:
            bench.order(Order.SOFT_TIMEOUT)
            time.sleep(10)
        except SoftTimeout:
            bench.order(Order.SHUTDOWN)
            time.sleep(10)

    decision = bench.run(handler).decision
    assert (decision.kind, decision.spend_attempt) == ("release", False)


def test_a_cancelled_handler_has_nothing_to_settle(bench: Bench) -> None:
    def handler() -> None:
        bench.order(Order.CANCELLED)
        time.sleep(10)

    assert bench.run(handler).decision.kind == "cancelled"


def test_an_order_for_another_execution_is_dropped(bench: Bench) -> None:
    def handler() -> str:
        seq = bench.now().seq
        for other in (seq - 1, seq + 1):
            bench.order(Order.CANCELLED, other)
        return "untouched"

    assert value_of(bench.run(handler)) == "untouched"


def test_a_signal_without_an_order_is_dropped(bench: Bench) -> None:
    def handler() -> str:
        os.kill(os.getpid(), SOFT_SIGNAL)
        return "untouched"

    assert value_of(bench.run(handler)) == "untouched"


def test_between_tasks_a_signal_does_nothing(bench: Bench) -> None:
    bench.run(lambda: None)
    for seq in (1, 2):
        bench.board.order(0, Order.SOFT_TIMEOUT, seq)
        os.kill(os.getpid(), SOFT_SIGNAL)


@pytest.mark.parametrize("how", ["plain", "async"])
def test_an_order_that_came_before_the_handler_started_is_found(bench: Bench, how: str) -> None:
    called: list[int] = []

    async def not_plain() -> None:
        called.append(1)

    # The next execution is the first.
    bench.board.order(0, Order.SOFT_TIMEOUT, 1)
    decision = bench.run((lambda: called.append(1)) if how == "plain" else not_plain).decision
    assert decision.reason == "soft_timeout"
    assert called == []


def test_a_start_hook_that_hangs_is_interrupted(bench: Bench) -> None:
    def hang(_task: Any) -> None:
        bench.order(Order.SOFT_TIMEOUT)
        time.sleep(10)

    bench.app.on_task_start(hang)
    assert bench.run(lambda: 5).decision.reason == "soft_timeout"


def test_an_interruption_that_a_start_hook_makes_up_changes_nothing(bench: Bench) -> None:
    def make_up(_task: Any) -> None:
        raise TaskCancelled

    bench.app.on_task_start(make_up)
    assert value_of(bench.run(lambda: 5)) == 5


def test_an_order_during_an_end_hook_is_dropped(bench: Bench) -> None:
    bench.app.on_task_end(lambda _task, _error: bench.order(Order.SOFT_TIMEOUT))
    assert value_of(bench.run(lambda: 5)) == 5


def test_an_order_while_the_result_is_written_is_dropped(bench: Bench) -> None:
    class Zone(datetime.tzinfo):
        def utcoffset(self, _when: object) -> datetime.timedelta:
            bench.order(Order.SOFT_TIMEOUT)
            return datetime.timedelta(0)

        def dst(self, _when: object) -> None:
            return None

        def tzname(self, _when: object) -> str:
            return "zone"

    def handler() -> datetime.datetime:
        return datetime.datetime(2026, 1, 1, tzinfo=Zone())

    assert value_of(bench.run(handler)) == "2026-01-01T00:00:00+00:00"


# -- async handlers


@pytest.mark.parametrize(
    ("order", "kind", "reason"),
    [
        (Order.SOFT_TIMEOUT, "retry", "soft_timeout"),
        (Order.CANCELLED, "cancelled", "cancelled"),
        (Order.SHUTDOWN, "release", "released"),
    ],
)
def test_an_order_reaches_an_async_handler_as_a_cancellation(
    bench: Bench, order: Order, kind: str, reason: str
) -> None:
    cleaned: list[str] = []

    async def handler() -> None:
        asyncio.get_running_loop().call_later(0.02, bench.order, order)
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError as cancelled:
            cleaned.append(str(cancelled))
            await asyncio.sleep(0)
            raise

    decision = bench.run(handler).decision
    assert (decision.kind, decision.reason) == (kind, reason)
    assert order.name.split("_")[0].lower() in cleaned[0].lower()


def test_the_selector_is_woken_from_a_long_wait(bench: Bench) -> None:
    async def handler() -> None:
        await asyncio.sleep(60)

    def send() -> None:
        time.sleep(0.05)
        bench.board.order(0, Order.SOFT_TIMEOUT, 1)
        os.kill(os.getpid(), SOFT_SIGNAL)

    sender = threading.Thread(target=send)
    sender.start()
    started = time.monotonic()
    assert bench.run(handler).decision.error_class == "SoftTimeout"
    assert time.monotonic() - started < 5
    sender.join()


def test_the_record_shows_where_an_async_handler_was(bench: Bench) -> None:
    async def handler() -> None:
        bench.order(Order.SOFT_TIMEOUT)
        await asyncio.sleep(10)

    decision = bench.run(handler).decision
    assert "in handler" in decision.traceback
    assert "dtq_child/" not in decision.traceback
    assert decision.error_class == "SoftTimeout"


def test_an_async_handler_may_return_what_it_has_after_a_cancellation(bench: Bench) -> None:
    async def handler() -> str:
        bench.order(Order.SOFT_TIMEOUT)
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return "part"
        return "whole"

    assert value_of(bench.run(handler)) == "part"


def test_an_order_after_the_last_await_does_not_take_the_place_of_the_value(bench: Bench) -> None:
    async def handler() -> str:
        await asyncio.sleep(0)
        bench.order(Order.SOFT_TIMEOUT)
        return "whole"

    assert value_of(bench.run(handler)) == "whole"
    assert value_of(bench.run(handler)) == "whole"


def test_a_task_group_passes_an_order_on_as_what_it_is(bench: Bench) -> None:
    ended: list[str] = []

    async def part(name: str) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(name)

    async def handler() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(part("a"))
            group.create_task(part("b"))
            await asyncio.sleep(0)
            bench.order(Order.CANCELLED)
            await asyncio.sleep(10)

    assert bench.run(handler).decision.kind == "cancelled"
    assert sorted(ended) == ["a", "b"]


def test_what_an_async_handler_leaves_running_is_cancelled(bench: Bench) -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("background")

    async def handler() -> int:
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        return 5 if not task.done() else 0

    assert value_of(bench.run(handler)) == 5
    assert ended == ["background"]


def test_leftovers_that_fail_or_end_the_process_change_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def background(error: BaseException) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise error

    async def handler() -> int:
        for error in (ValueError("left"), SystemExit(3)):
            asyncio.create_task(background(error), name=repr(error))  # noqa: RUF006
        await asyncio.sleep(0)
        return 5

    assert value_of(bench.run(handler)) == 5
    assert value_of(bench.run(lambda: 6)) == 6
    assert any("left" in record.getMessage() for record in caplog.records)


def test_system_exit_in_a_task_beside_the_handler_is_a_failure(bench: Bench) -> None:
    beside: list[asyncio.Task[None]] = []

    async def leave() -> None:
        raise SystemExit(3)

    async def handler() -> None:
        beside.append(asyncio.create_task(leave()))
        await asyncio.sleep(10)

    assert bench.run(handler).decision.error_class == "SystemExit"
    # Or asyncio would tell of it whenever the task is collected, in another test.
    assert isinstance(beside[0].exception(), SystemExit)
    assert value_of(bench.run(lambda: 6)) == 6


def test_one_loop_serves_all_async_handlers_of_a_child_also_after_it_was_stopped(bench: Bench) -> None:
    loops: list[Any] = []

    async def handler() -> None:
        loops.append(asyncio.get_running_loop())

    async def stopper() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(10)

    bench.run(handler)
    assert bench.run(stopper).decision.error_class == "RuntimeError"
    bench.run(handler)
    assert loops[0] is loops[1]


def test_a_plain_wrapper_around_an_async_handler_is_awaited(bench: Bench) -> None:
    async def inner() -> str:
        await asyncio.sleep(0)
        return current_task().id

    def decorated() -> Any:
        return inner()

    assert value_of(bench.run(decorated)) == "018f"


def test_an_order_reaches_an_async_handler_behind_a_plain_wrapper(bench: Bench) -> None:
    async def inner() -> None:
        bench.order(Order.CANCELLED)
        await asyncio.sleep(10)

    def decorated() -> Any:
        return inner()

    assert bench.run(decorated).decision.kind == "cancelled"


def test_a_plain_handler_may_run_a_loop_of_its_own(bench: Bench) -> None:
    async def inner() -> None:
        bench.order(Order.SOFT_TIMEOUT)
        await asyncio.sleep(10)

    assert bench.run(lambda: asyncio.run(inner())).decision.error_class == "SoftTimeout"


def test_what_comes_of_a_handler_at_its_deadline_does_not_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack dump ends waits in C code. Whoever has the mark stays `executing`, to be killed."""
    monkeypatch.setattr(runner, "_KILL_PATIENCE_S", 0.3)
    phases: list[Phase] = []

    def watch() -> None:
        until(lambda: phases.append(bench.row().phase) or len(phases) > 5, 5)

    def handler() -> str:
        bench.board.condemn(0, bench.row().seq)
        watching.start()
        return "value"

    watching = threading.Thread(target=watch)
    began = time.monotonic()
    bench.run(handler)
    assert time.monotonic() - began >= 0.3
    watching.join()
    assert set(phases) == {Phase.EXECUTING}
    assert bench.row().phase is Phase.SETTLING
    began = time.monotonic()
    assert value_of(bench.run(lambda: "next")) == "next"
    assert time.monotonic() - began < 0.2
