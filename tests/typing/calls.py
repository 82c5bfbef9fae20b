"""Checked by mypy, never run: an `# error:` comment names the code that mypy must report for its line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from dtq_child import App, Backoff, Call, CurrentTask, Handle

app = App(include=["shop.tasks"])


@app.task
def plain(path: str, width: int = 128) -> dict[str, int]:
    return {path: width}


@app.task(queue="images", priority=5, timeout=timedelta(seconds=30), retry=Backoff(never=(ValueError,)))
def configured(path: str, *, width: int) -> str:
    return path * width


@app.task(max_attempts=5)
async def asynchronous(n: int) -> list[int]:
    return [n]


@app.on_child_start
def started() -> None: ...


@app.on_task_end
def ended(task: CurrentTask, error: BaseException | None) -> None: ...


def right() -> None:
    value: dict[str, int] = plain("a.jpg", width=2)
    handle: Handle = plain.delay("a.jpg", 3)
    handle = configured.options(priority=9, delay=30, expires=timedelta(hours=1)).delay("a.jpg", width=64)
    call: Call = configured.options(eta=datetime.now(UTC), metadata={"by": ["me"]}).call("a.jpg", width=1)
    handles: list[Handle] = app.enqueue_many([call, plain.call("b.jpg")], batch=10)
    handle = app.enqueue("shop.tasks.resize", {"path": "a.jpg"}, queue="images", idempotency_key="a")
    print(value, handle, handles)


async def right_async() -> None:
    handle: Handle = await asynchronous.adelay(3)
    numbers: list[int] = await asynchronous(3)
    handle = await asynchronous.options(timeout=5).adelay(n=4)
    handle = await app.aenqueue("x")
    print(numbers, await handle.aresult(timeout=1))


def wrong() -> None:
    plain.delay()  # error: call-arg
    plain.delay(1)  # error: arg-type
    plain.delay("a.jpg", height=3)  # error: call-arg
    plain("a.jpg", "wide")  # error: arg-type
    configured.delay("a.jpg", 64)  # error: call-arg
    configured.options(priority=9).delay("a.jpg")  # error: call-arg
    configured.options(priority=9).call(width="1", path="a")  # error: arg-type
    configured.options(prio=9)  # error: call-arg
    configured.options(eta=3)  # error: arg-type
    app.enqueue("x", {}, retry=3)  # error: arg-type
    value: str = plain("a.jpg")  # error: assignment
    print(value)


async def wrong_async() -> None:
    await asynchronous.adelay("3")  # error: arg-type
    await asynchronous.options(delay=1).adelay()  # error: call-arg


@app.task(queues="images")  # error: call-overload untyped-decorator
def misspelt() -> None: ...


@app.on_task_end  # error: type-var
def deaf() -> None: ...
