"""The App on a real Redis: what producers enqueue, and what their handles tell until the end and after it.

Tasks are executed by the loop of a child inside the test process, `testing.work`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dtq_child import (
    App,
    Backoff,
    BrokerError,
    BrokerUnavailable,
    EnqueueManyError,
    IdempotencyConflict,
    QueueFull,
    RedisOutOfMemory,
    RejectTask,
    ResultError,
    ResultTimeout,
    ResultTruncated,
    ResultUnavailable,
    RetryTask,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskNotFound,
    current_task,
)
from dtq_child import settings as settings_module
from dtq_child.connection import connector
from dtq_child.fake import LocalBroker
from dtq_child.keys import Keys
from dtq_child.testing import work
from tests.support.servers import RedisServer
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.conftest import ServerStarter

KEYS = Keys()
MakeApp = Callable[..., App]


def on(server: RedisServer, **overrides: Any) -> App:
    """An App with the probe tasks below, on that server."""
    app = App()
    settings = settings_module.defaults(redis_url=server.url, **overrides)
    app.swap(settings, LocalBroker(settings, connector(server.url, settings.enqueue_timeout_s)))
    app.task(name="add", queue="sums", priority=7)(add)
    app.task(name="fail", max_attempts=1)(fail)
    app.task(name="fail_twice", max_attempts=3, retry=Backoff(base=60))(fail_twice)
    app.task(name="ask_again")(ask_again)
    app.task(name="large")(large)
    app.task(name="odd")(odd)
    app.task(name="who")(who)
    app.task(name="unstored", store_result=False)(unstored)
    app.task(name="slow_add", timeout=20)(add_async)
    return app


def add(a: int, b: int = 2) -> int:
    return a + b


async def add_async(a: int, b: int = 2) -> int:
    await asyncio.sleep(0)
    return a + b


def fail(message: str = "no") -> None:
    raise ValueError(message)


def fail_twice() -> int:
    if current_task().attempt < 3:
        raise OSError("not yet")
    return current_task().attempt


def ask_again(times: int) -> str:
    if current_task().attempt <= times:
        raise RetryTask(delay=3600, reason="not ready")
    raise RejectTask("never")


def large(size: int) -> str:
    return "x" * size


def odd() -> object:
    return {1, 2}


def who() -> dict[str, Any]:
    task = current_task()
    return {
        "id": task.id,
        "attempt": task.attempt,
        "max_attempts": task.max_attempts,
        "delivery": task.delivery,
        "redelivered": task.redelivered,
        "queue": task.queue,
        "metadata": dict(task.metadata),
        "remaining": task.remaining(),
    }


def unstored() -> int:
    return 1


@pytest.fixture
def app(any_redis: RedisServer) -> App:
    return on(any_redis)


def send(app: App, name: str, *args: Any, **kwargs: Any) -> Any:
    return app.tasks[name].delay(*args, **kwargs)


# -- from enqueue to result


def test_a_task_walks_from_enqueue_to_result(app: App, any_redis: RedisServer) -> None:
    handle = send(app, "add", 1, b=5)
    assert (handle.status(), handle.deduplicated) == ("queued", False)
    record = handle.record()
    assert record.get("task_type") == "add"
    assert record.fields["payload"] == b'{"a":1,"b":5}'
    [(entry_id, fields)] = any_redis.cli("XRANGE", KEYS.stream("sums", 7), "-", "+")
    assert record.get("entry_id") == entry_id.decode()
    assert b'{"a":1,"b":5}' in fields

    assert work(app) == 1
    assert (handle.status(), handle.result(timeout=0)) == ("succeeded", 6)
    assert handle.record().executions()[0]["outcome"] == "succeeded"
    assert any_redis.cli("XLEN", KEYS.stream("sums", 7)) == 0


def test_an_async_handler_is_run_like_any_other(app: App) -> None:
    handle = send(app, "slow_add", 1)
    assert work(app) == 1
    assert handle.result(0) == 3


def test_the_options_of_a_call_reach_the_handler(app: App) -> None:
    options = app.tasks["who"].options(
        queue="special",
        priority=0,
        timeout=5,
        max_attempts=9,
        metadata={"by": {"name": "ann"}},
        task_id="mine",
    )
    handle = options.delay()
    work(app)
    seen = handle.result(0)
    assert 0 < seen.pop("remaining") <= 5
    assert seen == {
        "id": "mine",
        "attempt": 1,
        "max_attempts": 9,
        "delivery": 1,
        "redelivered": False,
        "queue": "special",
        "metadata": {"by": {"name": "ann"}},
    }


def test_by_name_no_code_is_needed(app: App, any_redis: RedisServer) -> None:
    producer = App(redis_url=any_redis.url)
    handle = producer.enqueue("add", {"a": 1}, queue="elsewhere")
    assert work(app) == 1
    assert handle.result(timeout=5) == 3
    assert producer.handle(handle.id).status() == "succeeded"


def test_an_id_enqueued_again_is_the_same_task(app: App) -> None:
    call = app.call("add", {"a": 1})
    first, second = app.send(call), app.send(call)
    assert first == second
    assert work(app) == 1
    assert app.send(call).result(0) == 3


# -- ends without a value


def test_a_failed_task_tells_class_text_and_traceback(app: App) -> None:
    handle = send(app, "fail", message="no such picture")
    work(app)
    with pytest.raises(TaskFailed) as caught:
        handle.result(0)
    assert (caught.value.error_class, caught.value.message) == ("ValueError", "no such picture")
    assert caught.value.traceback.rstrip().endswith("ValueError: no such picture")
    assert "in fail" in caught.value.traceback
    assert handle.status() == "dead_lettered"


def test_wrong_arguments_from_elsewhere_fail_once(app: App, any_redis: RedisServer) -> None:
    handle = App(redis_url=any_redis.url).enqueue("add", {"c": 1})
    assert work(app, due=True) == 1
    with pytest.raises(TaskFailed, match=r"BadArguments: .*missing arguments: a"):
        handle.result(0)


def test_a_failing_task_is_tried_again_and_its_delays_can_be_passed(app: App) -> None:
    handle = send(app, "fail_twice")
    assert work(app) == 1
    assert handle.status() == "retry_scheduled"
    with pytest.raises(ResultTimeout):
        handle.result(timeout=0.05)
    assert work(app, due=True) == 2
    assert handle.result(0) == 3


def test_the_policy_of_a_call_replaces_the_declared_one(app: App, any_redis: RedisServer) -> None:
    soon = app.tasks["fail_twice"].options(retry=Backoff(base=5, jitter=0)).delay()
    never = app.tasks["fail_twice"].options(retry=Backoff(never=(OSError,))).delay()
    once = app.tasks["fail_twice"].options(max_attempts=1).delay()
    work(app)
    due = float(any_redis.cli("ZSCORE", KEYS.schedule, soon.id))
    ended = soon.record().number("updated_at_ms")
    assert ended is not None
    assert due == ended + 5000
    assert [never.status(), once.status()] == ["dead_lettered", "dead_lettered"]


def test_a_handler_decides_by_what_it_raises(app: App) -> None:
    handle = send(app, "ask_again", 1)
    assert work(app, due=True) == 2
    with pytest.raises(TaskFailed, match="RejectTask: never"):
        handle.result(0)


def test_a_cancelled_task_never_starts_and_its_result_says_so(app: App) -> None:
    queued, scheduled = send(app, "add", 1), app.tasks["add"].options(delay=60).delay(1)
    assert [queued.cancel(), scheduled.cancel(), queued.cancel()] == ["cancelled"] * 3
    assert work(app, due=True) == 0
    for handle in (queued, scheduled):
        with pytest.raises(TaskCancelled) as caught:
            handle.result(0)
        assert isinstance(caught.value, ResultError), "so that `except Exception` of a web framework sees it"


def test_cancel_answers_what_is_true(app: App) -> None:
    ended = send(app, "add", 1)
    work(app)
    assert ended.cancel() == "too_late"
    assert ended.result(0) == 3
    assert app.handle("nobody").cancel() == "unknown"


def test_a_task_that_was_not_started_in_time_expires(app: App) -> None:
    past = app.tasks["add"].options(expires=datetime.now(UTC) - timedelta(hours=1)).delay(1)
    later = app.tasks["add"].options(expires=3600).delay(1)
    assert work(app) == 1
    with pytest.raises(TaskExpired):
        past.result(0)
    assert later.result(0) == 3


def test_a_result_is_not_always_there(app: App, any_redis: RedisServer) -> None:
    large, odd, unstored, gone = (
        send(app, "large", 10_000),
        send(app, "odd"),
        send(app, "unstored"),
        send(app, "add", 1),
    )
    work(app)
    any_redis.cli("DEL", KEYS.result(gone.id))
    with pytest.raises(ResultTruncated) as caught:
        large.result(0)
    assert caught.value.size == 10_002
    assert caught.value.part == b'"' + b"x" * 8191
    for handle, reason in ((odd, "set"), (unstored, "store_result=False"), (gone, "DTQ_RESULT_RETENTION_S")):
        assert handle.status() == "succeeded"
        with pytest.raises(ResultUnavailable, match=reason):
            handle.result(0)


def test_a_task_without_a_record_is_not_found(app: App) -> None:
    handle = app.handle("nobody")
    for ask in (handle.status, handle.record, handle.result):
        with pytest.raises(TaskNotFound, match="nobody"):
            ask()


# -- waiting for it


def test_result_waits_for_the_end(app: App) -> None:
    handle = send(app, "add", 1)
    threading.Timer(0.2, work, [app]).start()
    assert handle.result(timeout=30) == 3


def test_result_keeps_its_time(app: App) -> None:
    handle = send(app, "add", 1)
    begun = time.monotonic()
    with pytest.raises(ResultTimeout, match=r"within 0\.3 s"):
        handle.result(timeout=0.3)
    assert 0.3 <= time.monotonic() - begun < 3
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    with pytest.raises(ValueError, match="timeout"):
        handle.result(timeout=float("nan"))


def test_many_await_results_while_the_loop_goes_on(app: App) -> None:
    async def producer() -> tuple[list[int], int]:
        handles = [await app.tasks["add"].adelay(n) for n in range(100)]
        waiting = [asyncio.create_task(handle.aresult(timeout=60)) for handle in handles]
        ticks, worker = 0, asyncio.create_task(asyncio.to_thread(work, app))
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0.001)
            ticks += 1
        await worker
        return [task.result() for task in waiting], ticks

    results, ticks = asyncio.run(producer())
    assert results == [n + 2 for n in range(100)]
    assert ticks > 10


def test_an_awaited_result_can_be_given_up(app: App) -> None:
    handle = send(app, "add", 1)

    async def impatient() -> None:
        async with asyncio.timeout(0.2):
            await handle.aresult()

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    with pytest.raises(ResultTimeout):
        asyncio.run(handle.aresult(timeout=0.1))


def test_a_task_does_not_wait_for_another_unless_it_says_so(app: App) -> None:
    seen: dict[str, Any] = {}

    @app.task(name="parent", max_attempts=1)
    def parent(allow: bool) -> Any:
        child = app.tasks["add"].delay(1)
        if allow:
            work(app, limit=1)  # another child's work, as it were
        seen["child"] = child.id
        return child.result(timeout=0, allow_in_task=allow)

    refused, allowed = parent.delay(False), None
    work(app)
    with pytest.raises(TaskFailed, match=r"ResultError: .*allow_in_task=True"):
        refused.result(0)
    allowed = parent.delay(True)
    work(app)
    assert allowed.result(0) == 3


# -- times


def test_a_delay_is_counted_by_the_clock_of_redis(app: App, any_redis: RedisServer) -> None:
    handle = app.tasks["add"].options(delay=timedelta(minutes=1)).delay(1)
    seconds, microseconds = any_redis.cli("TIME")
    now_ms = int(seconds) * 1000 + int(microseconds) // 1000
    due = float(any_redis.cli("ZSCORE", KEYS.schedule, handle.id))
    assert now_ms + 55_000 < due <= now_ms + 60_000
    assert (handle.status(), work(app)) == ("scheduled", 0)
    assert (work(app, due=True), handle.result(0)) == (1, 3)


def test_an_eta_is_exact_and_in_the_past_at_once(app: App, any_redis: RedisServer) -> None:
    moment = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    later = app.tasks["add"].options(eta=moment).delay(1)
    past = app.tasks["add"].options(eta=moment - timedelta(days=1)).delay(1)
    ancient = app.tasks["add"].options(eta=datetime(1, 1, 1, tzinfo=UTC)).delay(1)
    assert float(any_redis.cli("ZSCORE", KEYS.schedule, later.id)) == moment.timestamp() * 1000
    assert [later.status(), past.status(), ancient.status()] == ["scheduled", "queued", "queued"]


# -- idempotency, bounds


def test_one_unfinished_task_per_key(app: App) -> None:
    keyed = app.tasks["add"].options(idempotency_key="a")
    first, second = keyed.delay(1), keyed.delay(1)
    assert (first.id, first.deduplicated) == (second.id, False)
    assert second.deduplicated
    with pytest.raises(IdempotencyConflict) as caught:
        keyed.delay(2)
    assert caught.value.task_id == first.id
    assert work(app) == 1
    assert keyed.delay(1).result(0) == 3
    assert app.tasks["add"].options(idempotency_key="a", queue="other").delay(2).deduplicated is False


def test_a_key_is_free_again_after_a_failure(app: App) -> None:
    keyed = app.tasks["fail"].options(idempotency_key="a")
    first = keyed.delay()
    work(app)
    second = keyed.delay()
    assert (second.deduplicated, second.id != first.id) == (False, True)


def test_hundreds_are_enqueued_in_a_few_round_trips(app: App) -> None:
    handles = app.enqueue_many(app.tasks["add"].call(n) for n in range(450))
    assert work(app) == 450
    assert [handle.result(0) for handle in handles] == [n + 2 for n in range(450)]


def test_a_full_queue_takes_no_part_of_a_batch(any_redis: RedisServer) -> None:
    app = on(any_redis, queue_max_depth=5)
    with pytest.raises(EnqueueManyError) as caught:
        app.enqueue_many((app.tasks["add"].call(n) for n in range(9)), batch=3)
    assert isinstance(caught.value.cause, QueueFull)
    assert len(caught.value.accepted) == 3
    assert any_redis.cli("XLEN", KEYS.stream("sums", 7)) == 3
    send(app, "add", 1)
    send(app, "add", 1)
    with pytest.raises(QueueFull, match="sums holds 5 tasks, the limit is 5"):
        send(app, "add", 1)


# -- connections


def test_threads_share_an_app(any_redis: RedisServer) -> None:
    app = App(redis_url=any_redis.url)
    clients_before = len(any_redis.cli("CLIENT", "LIST").splitlines())
    barrier = threading.Barrier(8)
    made: list[Any] = []

    def produce() -> None:
        barrier.wait()
        made.extend(app.enqueue("add", {"a": n}, queue="sums", priority=7) for n in range(25))

    threads = [threading.Thread(target=produce) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({handle.id for handle in made}) == 200
    assert any_redis.cli("XLEN", KEYS.stream("sums", 7)) == 200
    assert len(any_redis.cli("CLIENT", "LIST").splitlines()) - clients_before <= 8


FORKING = """
    import os, sys
    from dtq_child import App
    app = App(redis_url=sys.argv[1])
    app.enqueue("from.parent")
    children = []
    for n in range(3):
        pid = os.fork()
        if pid == 0:
            for _ in range(20):
                app.enqueue("from.child", {"n": n})
            os._exit(0)
        children.append(pid)
    for _ in range(20):
        assert app.enqueue("from.parent").status() == "queued"
    assert all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in children)
    assert app.enqueue("from.parent").status() == "queued"
"""


def test_forked_processes_connect_anew(any_redis: RedisServer) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(FORKING), any_redis.url]
    subprocess.run(command, check=True, timeout=60)
    assert any_redis.cli("XLEN", KEYS.stream("default", 5)) == 82
    connected = any_redis.info("stats")["total_connections_received"]
    assert int(connected) >= 4


def test_a_redis_that_is_away_ends_the_call_in_time_and_is_used_when_back(start_redis: ServerStarter) -> None:
    server = start_redis(persist=True)
    app = App(redis_url=server.url, enqueue_timeout_s=0.5)
    first = app.enqueue("add", {"a": 1})
    server.stop()
    begun = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="DTQ_ENQUEUE_TIMEOUT_S"):
        app.enqueue("add", {"a": 2})
    with pytest.raises(BrokerUnavailable):
        first.result(timeout=10)
    assert time.monotonic() - begun < 3
    server.start()
    assert first.status() == "queued"
    assert app.enqueue("add", {"a": 3}).status() == "queued"


def test_a_short_outage_is_not_seen_by_who_waits_for_a_result(start_redis: ServerStarter) -> None:
    server = start_redis(persist=True)
    app = on(server)
    handle = send(app, "add", 1)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(handle.result(timeout=60)))
    waiting.start()
    server.stop()
    server.start()
    until(lambda: work(app) == 1, 10)
    waiting.join(30)
    assert got == [3]


def test_a_full_redis_refuses_producers(any_redis: RedisServer) -> None:
    app = App(redis_url=any_redis.url)
    app.enqueue("add", {"a": 1})
    any_redis.cli("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisOutOfMemory):
        app.enqueue("add", {"a": 2})
    assert issubclass(RedisOutOfMemory, BrokerError)
    any_redis.cli("CONFIG", "SET", "maxmemory", "0")
    assert any_redis.cli("XLEN", KEYS.stream("default", 5)) == 1
