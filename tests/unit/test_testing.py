"""What applications test with: inline execution, and an App on fakeredis."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import textwrap
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dtq_child import (
    App,
    Backoff,
    CurrentTask,
    DtqError,
    EnqueueManyError,
    Handle,
    IdempotencyConflict,
    PayloadError,
    RejectTask,
    ResultTruncated,
    ResultUnavailable,
    RetryTask,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskNotFound,
    current_task,
)
from dtq_child.testing import fake_app, faked, inline, work

app = App()
calls: list[Any] = []
mood: contextvars.ContextVar[str] = contextvars.ContextVar("mood", default="calm")


@app.task(name="add", queue="sums")
def add(a: int, b: int = 2) -> int:
    calls.append((a, b))
    return a + b


@app.task(name="add_async")
async def add_async(a: int, b: int = 2) -> int:
    await asyncio.sleep(0)
    return current_task().attempt + a + b


@app.task(name="flaky", max_attempts=5, retry=Backoff(base=600, never=(LookupError,)))
def flaky(failures: int, error: str = "OSError") -> int:
    attempt = current_task().attempt
    if attempt <= failures:
        raise {"OSError": OSError, "KeyError": KeyError, "SystemExit": SystemExit}[error](
            f"attempt {attempt}"
        )
    return attempt


@app.task(name="steer")
def steer(error: str) -> NoReturn:
    raise RejectTask("enough") if error == "reject" else RetryTask(delay=3600)


@app.task(name="echo")
def echo(value: Any) -> Any:
    calls.append(value)
    return value


@app.task(name="about")
def about() -> dict[str, Any]:
    task = current_task()
    mood.set("changed")
    return {"id": task.id, "queue": task.queue, "metadata": dict(task.metadata), "left": task.remaining()}


@app.task(name="countdown")
def countdown(n: int) -> int:
    calls.append(n)
    if n:
        countdown.delay(n - 1)
    return n


@app.task(name="cancel_itself")
def cancel_itself() -> str:
    return app.handle(current_task().id).cancel()


@pytest.fixture(autouse=True)
def _forget() -> None:
    calls.clear()


# -- inline


def test_inline_a_task_is_over_when_its_enqueue_returns() -> None:
    with inline(app) as broker:
        handle = add.delay(1)
        assert calls == [(1, 2)]
        assert (handle.status(), handle.result(timeout=0)) == ("succeeded", 3)
        assert [record.get("queue") for record in broker.records.values()] == ["sums"]
        assert handle.record().executions()[0]["outcome"] == "succeed"
    assert app.handle(handle.id) == handle


def test_inline_all_doors_lead_to_the_handler() -> None:
    async def produce() -> list[Handle]:
        handles = [
            await add.adelay(1),
            await add.options(priority=1).adelay(2),
            await app.aenqueue("add", {"a": 3}),
        ]
        return [*handles, *await app.aenqueue_many([add.call(4), app.call("add", {"a": 5})])]

    with inline(app):
        handles = [app.enqueue("add", {"a": 0}), *asyncio.run(produce()), *app.enqueue_many([add.call(6)])]
        assert [handle.result(0) for handle in handles] == [2, 3, 4, 5, 6, 7, 8]


def test_inline_values_go_through_json_both_ways() -> None:
    with inline(app):
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        handle = echo.delay({"pair": (1, 2), "at": moment})
        assert calls == [{"pair": [1, 2], "at": moment.isoformat()}]
        assert handle.result(0) == calls[0]
        with pytest.raises(PayloadError):
            echo.delay({1: 2})
        with pytest.raises(TypeError, match="missing a required argument"):
            echo.delay()  # type: ignore[call-arg]
        assert len(calls) == 1


@pytest.mark.parametrize("error", ["OSError", "SystemExit"])
def test_inline_attempts_are_made_as_the_policy_says(error: str) -> None:
    with inline(app):
        assert flaky.delay(3, error).result(0) == 4
        exhausted = flaky.delay(9, error)
        with pytest.raises(TaskFailed, match=f"{error}: attempt 5") as caught:
            exhausted.result(0)
        assert "in flaky" in caught.value.traceback
        assert "inline.py" not in caught.value.traceback
        delays = [execution["delay_ms"] for execution in exhausted.record().executions()]
        assert delays == [600_000, 1_200_000, 2_400_000, 3_600_000, 0]


def test_inline_some_failures_are_final() -> None:
    with inline(app):
        for handle in (
            flaky.delay(1, "KeyError"),
            steer.delay("reject"),
            flaky.options(max_attempts=1).delay(1),
        ):
            assert handle.status() == "dead_lettered"
            assert handle.record().number("attempt") == 1
        assert flaky.options(retry=Backoff()).delay(1, "KeyError").status() == "dead_lettered"
        assert flaky.options(retry=Backoff(never=(OSError,))).delay(1, "KeyError").result(0) == 2
        assert steer.delay("retry").record().number("attempt") == 3


def test_inline_what_never_ends_is_an_error_of_the_test() -> None:
    with inline(app), pytest.raises(DtqError, match="failed 100 times"):
        steer.options(max_attempts=1000).delay("retry")
    with inline(app), pytest.raises(DtqError, match=r"50 tasks enqueue one another"):
        countdown.options(max_attempts=1).delay(1000).result(0)
    with inline(app):
        assert countdown.delay(3).result(0) == 3
    assert calls[-4:] == [3, 2, 1, 0]


def test_inline_errors_can_be_raised_at_the_enqueue() -> None:
    with inline(app, propagate=True):
        assert flaky.delay(2).result(0) == 3
        with pytest.raises(KeyError, match="attempt 1"):
            flaky.delay(1, "KeyError")
        with pytest.raises(EnqueueManyError) as caught:
            app.enqueue_many([flaky.call(1, "KeyError")])
        assert isinstance(caught.value.cause, KeyError)


def test_inline_the_keyboard_and_the_test_itself_are_no_tasks_failures() -> None:
    @app.task(name="stop")
    def stop(how: str) -> None:
        if how == "keyboard":
            raise KeyboardInterrupt
        pytest.fail("an assertion in a handler")

    with inline(app):
        with pytest.raises(KeyboardInterrupt):
            stop.delay("keyboard")
        with pytest.raises(pytest.fail.Exception):
            stop.delay("test")


def test_inline_the_context_is_that_of_a_task() -> None:
    with inline(app):
        seen = about.options(metadata={"by": "ann"}, timeout=5, queue="special").delay().result(0)
        assert 0 < seen.pop("left") <= 5
        assert seen == {"id": seen["id"], "queue": "special", "metadata": {"by": "ann"}}
        assert mood.get() == "calm", "what a handler sets is gone after it"
        with pytest.raises(DtqError):
            current_task()


def test_inline_hooks_run_around_the_handler() -> None:
    hooked = App()
    seen: list[Any] = []

    @hooked.on_task_start
    def start(task: CurrentTask) -> None:
        seen.append((task.task_type, current_task() is task))

    @hooked.on_task_end
    def end(task: CurrentTask, error: BaseException | None) -> None:
        seen.append(type(error))
        raise ValueError("a hook changes nothing")

    hooked.task(name="good", max_attempts=1)(add.fn)
    hooked.task(name="bad", max_attempts=1)(steer.fn)
    with inline(hooked):
        assert hooked.enqueue("good", {"a": 1}).result(0) == 3
        assert hooked.enqueue("bad", {"error": "reject"}).status() == "dead_lettered"
    assert seen == [("good", True), type(None), ("bad", True), RejectTask]


def test_inline_async_handlers_run_also_inside_a_running_loop() -> None:
    async def test() -> list[int]:
        assert add_async.delay(1).result(0) == 4
        return [await (await add_async.adelay(n)).aresult(0) for n in range(3)]

    with inline(app):
        assert add_async.delay(1).result(0) == 4
        assert asyncio.run(test()) == [3, 4, 5]


def test_inline_times_pass_at_once_but_for_the_end() -> None:
    now = datetime.now(UTC)
    with inline(app):
        assert add.options(delay=3600).delay(1).result(0) == 3
        assert add.options(eta=now + timedelta(days=1), expires=7 * 86400).delay(1).result(0) == 3
        for options in (
            add.options(expires=now - timedelta(seconds=1)),
            add.options(eta=now + timedelta(hours=2), expires=3600),
            add.options(delay=7200, expires=now + timedelta(hours=1)),
        ):
            with pytest.raises(TaskExpired):
                options.delay(1).result(0)
    assert len(calls) == 2


def test_inline_keys_and_ids_deduplicate() -> None:
    with inline(app):
        keyed = add.options(idempotency_key="a")
        first, second = keyed.delay(1), keyed.delay(1)
        assert (first.id, second.deduplicated) == (second.id, True)
        with pytest.raises(IdempotencyConflict):
            keyed.delay(2)
        with pytest.raises(EnqueueManyError):
            app.enqueue_many([add.call(9), keyed.call(9)])
        call = add.call(5)
        assert app.send(call) == app.send(call)
        assert calls == [(1, 2), (5, 2)], "the refused batch was not begun"
        failing = flaky.options(idempotency_key="a")
        assert not failing.delay(9).deduplicated
        assert not failing.delay(9).deduplicated


def test_inline_results_may_be_missing_as_in_a_worker() -> None:
    with inline(app):
        with pytest.raises(ResultTruncated):
            echo.delay("x" * 9000).result(0)
        with pytest.raises(ResultUnavailable, match="store_result=False"):
            echo.options(store_result=False).delay(1).result(0)
        with pytest.raises(TaskFailed, match=r"UnknownTaskType: .*load_includes"):
            app.enqueue("of.others", {}).result(0)
        with pytest.raises(TaskNotFound):
            app.handle("nobody").result(0)
        assert app.handle("nobody").cancel() == "unknown"


def test_inline_a_task_that_is_cancelled_while_it_runs_has_no_result() -> None:
    with inline(app):
        handle = cancel_itself.delay()
        assert (handle.status(), handle.cancel()) == ("cancelled", "cancelled")
        with pytest.raises(TaskCancelled):
            handle.result(0)
        assert add.delay(1).cancel() == "too_late"


def test_inline_ends_with_the_block() -> None:
    with pytest.raises(ZeroDivisionError), inline(app):
        raise ZeroDivisionError
    with faked(app):
        with inline(app):
            assert add.delay(1).status() == "succeeded"
        assert add.delay(1).status() == "queued"


# -- fakeredis


def test_faked_tasks_wait_for_work() -> None:
    with faked(app):
        handle = add.delay(1)
        assert (handle.status(), calls) == ("queued", [])
        assert (work(app), work(app)) == (1, 0)
        assert (handle.result(0), calls) == (3, [(1, 2)])


def test_faked_work_stops_at_its_limit() -> None:
    with faked(app):
        first, second = countdown.delay(10**6), add.delay(1)
        assert work(app, limit=3) == 3
        assert work(app, limit=0) == 0
        assert [first.status(), second.status()] == ["succeeded", "succeeded"]


def test_faked_tasks_enqueued_meanwhile_are_executed_in_any_queue() -> None:
    with faked(app):
        app.enqueue("countdown", {"n": 3}, queue="new")
        assert work(app) == 4


def test_faked_priorities_are_strict() -> None:
    with faked(app):
        for priority in (0, 9, 5):
            echo.options(priority=priority).delay(priority)
        work(app)
        assert calls == [9, 5, 0]


def test_faked_what_is_due_later_waits_unless_it_is_said_to_be_due() -> None:
    with faked(app):
        later, failing = add.options(delay=3600).delay(1), flaky.delay(2)
        assert work(app) == 1
        assert [later.status(), failing.status()] == ["scheduled", "retry_scheduled"]
        assert work(app, due=True) == 3
        assert [later.result(0), failing.result(0)] == [3, 3]


def test_faked_a_type_that_nobody_knows_stays_scheduled() -> None:
    with faked(app):
        unknown = app.enqueue("of.others", {})
        assert work(app, due=True) == 1
        assert work(app, due=True) == 0
        assert unknown.status() == "retry_scheduled"


def test_faked_async_handlers_and_failures_are_as_in_a_worker() -> None:
    with faked(app, result_max_bytes=100):
        value, failed, long = add_async.delay(1), steer.delay("reject"), echo.delay("x" * 200)
        assert work(app) == 3
        assert value.result(0) == 4
        with pytest.raises(TaskFailed, match="RejectTask: enough"):
            failed.result(0)
        with pytest.raises(ResultTruncated):
            long.result(0)


def test_faked_apps_are_apart_and_work_in_any_thread() -> None:
    one, two = fake_app(), fake_app(key_prefix="two:")
    for each in (one, two):
        each.task(name="add")(add.fn)
    handles = [one.enqueue("add", {"a": 1}), two.enqueue("add", {"a": 2})]
    threads = [threading.Thread(target=work, args=[each]) for each in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [handle.result(0) for handle in handles] == [3, 4]
    with pytest.raises(TaskNotFound):
        one.handle(handles[1].id).status()


def test_work_is_only_for_fakes() -> None:
    with inline(app), pytest.raises(DtqError, match="fake_app"):
        work(app)


# -- pytest


TEST_OF_AN_APPLICATION = """
    import pytest
    from dtq_child import App
    from dtq_child.testing import work

    application = App()

    @application.task(name="add")
    def add(a, b): return a + b

    class TestMine:
        @pytest.fixture
        def dtq_application(self): return application

        def test_it(self, dtq_app):
            assert dtq_app is application
            handle = add.delay(1, 2)
            assert work(dtq_app) == 1
            assert handle.result(0) == 3

        def test_each_test_begins_empty(self, dtq_app):
            assert work(dtq_app) == 0

    def test_new(dtq_app):
        assert dtq_app is not application
        assert dtq_app.enqueue("x").status() == "queued"
"""


def test_the_plugin_has_a_fixture(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["dtq_child.testing"]\n')
    (tmp_path / "test_shop.py").write_text(textwrap.dedent(TEST_OF_AN_APPLICATION))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert "3 passed" in ran.stdout
