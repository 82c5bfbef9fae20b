"""`current_task()`, and the hooks around it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from dtq_child import App, CurrentTask, DtqError, SoftTimeout, current_task
from dtq_child.context import enter, inside_task, leave
from dtq_child.hooks import run

TASK = CurrentTask(id="01", task_type="shop.resize", queue="images", attempt=2, metadata={"by": "ann"})


def test_there_is_a_current_task_between_enter_and_leave() -> None:
    outer = CurrentTask(id="00", task_type="shop.all", queue="images")
    before = enter(outer)
    token = enter(TASK)
    assert current_task() is TASK
    leave(token)
    assert current_task() is outer
    leave(before)
    assert not inside_task()


def test_outside_of_a_task_there_is_none_and_the_error_says_so() -> None:
    with pytest.raises(DtqError, match="outside of a task"):
        current_task()


def test_coroutines_and_their_threads_see_it_plain_threads_do_not() -> None:
    seen: list[Any] = []

    async def handler() -> None:
        seen.append(current_task())
        seen.append(await asyncio.to_thread(current_task))
        plain = threading.Thread(target=lambda: seen.append(inside_task()))
        plain.start()
        plain.join()

    token = enter(TASK)
    asyncio.run(handler())
    leave(token)
    assert seen == [TASK, TASK, False]


def test_remaining_counts_down_to_zero() -> None:
    now = time.monotonic()
    soon = CurrentTask(id="01", task_type="t", queue="q", deadline=now + 60)
    assert 0 < soon.remaining() <= 60
    assert CurrentTask(id="01", task_type="t", queue="q", deadline=now - 1).remaining() == 0


def test_stopping_is_asked_anew_each_time() -> None:
    answers = iter([False, True])
    task = CurrentTask(id="01", task_type="t", queue="q", should_stop=lambda: next(answers))
    assert [task.stopping, task.stopping] == [False, True]


def test_its_logger_adds_the_task_to_each_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shop"):
        TASK.logger.info("%d pixels", 64, extra={"path": "a.jpg"})
    [line] = caplog.records
    assert (line.name, line.getMessage()) == ("shop.resize", "64 pixels")
    facts = {name: vars(line)[name] for name in ("task_id", "task_type", "queue", "attempt", "path")}
    assert facts == {
        "task_id": "01",
        "task_type": "shop.resize",
        "queue": "images",
        "attempt": 2,
        "path": "a.jpg",
    }


# -- hooks


def test_hooks_are_registered_by_decorators_and_called_in_order() -> None:
    app = App()
    called: list[tuple[str, object]] = []

    @app.on_task_start
    def first(task: CurrentTask) -> None:
        called.append(("first", task.id))

    @app.on_task_start
    def second(task: CurrentTask) -> None:
        called.append(("second", task.id))

    @app.on_task_end
    def end(task: CurrentTask, error: BaseException | None) -> None:
        called.append(("end", error))

    @app.on_child_start
    @app.on_child_stop
    def either() -> None:
        called.append(("child", None))

    run(app.hooks.task_start, TASK)
    run(app.hooks.task_end, TASK, None)
    run(app.hooks.child_start)
    run(app.hooks.child_stop)
    assert called == [("first", "01"), ("second", "01"), ("end", None), ("child", None), ("child", None)]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_a_failing_hook_is_logged_and_the_next_one_called(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def failing() -> None:
        raise error

    run([failing, lambda: called.append(1)])
    assert called == [1]
    [line] = caplog.records
    assert "failing" in line.getMessage()
    assert line.exc_info is not None
    assert line.exc_info[1] is error


def test_an_interruption_passes_through_a_hook() -> None:
    def interrupted() -> None:
        raise SoftTimeout

    with pytest.raises(SoftTimeout):
        run([interrupted])


def test_an_async_hook_is_refused() -> None:
    async def hook() -> None: ...

    with pytest.raises(TypeError, match="plain def"):
        App().on_child_start(hook)
