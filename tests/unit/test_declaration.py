"""Tasks as they are declared: names, signatures, what is bound at enqueue."""

from __future__ import annotations

import inspect
import pickle
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from dtq_child import App, Backoff, InvalidTask, PayloadError, PayloadTooLarge, Task
from dtq_child.payload import loads
from dtq_child.testing import inline

app = App()


@app.task
def resize(path: str, width: int = 128, *, crop: bool = False) -> str:
    """Makes it smaller.

    Much smaller."""
    return f"{path} {width} {crop}"


@app.task(
    name="named",
    queue="images",
    priority=9,
    timeout=2,
    max_attempts=5,
    retry=Backoff(base=1, never=(ValueError,)),
)
async def named(n: int, **rest: Any) -> int:
    return n + len(rest)


def payload_of(task: Task[..., Any], *args: Any, **kwargs: Any) -> Any:
    return loads(task.call(*args, **kwargs).payload)


# -- it stays the function that it was


def test_a_task_is_still_a_plain_function() -> None:
    assert resize("a.jpg", 64) == "a.jpg 64 False"
    assert resize.__doc__ is not None
    assert resize.__doc__.startswith("Makes it smaller.")
    assert inspect.signature(resize) == inspect.signature(resize.fn)
    assert inspect.unwrap(resize) is resize.fn


def test_a_task_travels_by_name_like_a_function() -> None:
    assert pickle.loads(pickle.dumps(resize)) is resize


# -- names


def test_a_task_is_called_after_its_module_and_function() -> None:
    assert resize.name == f"{__name__}.resize"
    assert app.find(resize.name) is resize
    assert app.find("named") is named
    assert app.find("other") is None


def test_what_has_no_name_of_its_own_needs_one() -> None:
    def local() -> None: ...

    main = types.FunctionType(local.__code__, {"__name__": "__main__"}, "main")
    main.__qualname__ = "main"
    for fn, reason in ((local, "inside a function"), (main, "__main__"), (lambda: None, "inside a function")):
        with pytest.raises(InvalidTask, match=reason) as caught:
            App().task(fn)
        assert "@app.task(name=" in str(caught.value)
    assert App().task(name="local")(local).name == "local"
    assert App().task(name="main")(main).name == "main"


@pytest.mark.parametrize("name", ["", "a" * 201, "new\nline", "é" * 101])
def test_a_name_outside_of_its_bounds_is_refused(name: str) -> None:
    def local() -> None: ...

    with pytest.raises(InvalidTask, match="task type"):
        App().task(name=name)(local)


def test_a_name_is_given_once() -> None:
    one = App()

    @one.task(name="twice")
    def first() -> None: ...

    with pytest.raises(InvalidTask) as caught:

        @one.task(name="twice")
        def second() -> None: ...

    assert "first" in str(caught.value)
    assert "second" in str(caught.value)
    assert one.find("twice") is first


def test_a_function_made_twice_is_two_functions() -> None:
    one = App()

    def make(greeting: str) -> Task[[], str]:
        @one.task(name="greet")
        def greet() -> str:
            return greeting

        return greet

    make("hello")
    with pytest.raises(InvalidTask, match="declared twice"):
        make("good bye")


def test_a_module_that_is_loaded_again_replaces_its_tasks() -> None:
    one = App()
    source = compile("@app.task\ndef again():\n    return {}\n", "/shop/tasks.py", "exec")
    again = compile("@app.task\ndef again():\n    return {1}\n", "/shop/tasks.py", "exec")
    for code in (source, again):
        exec(code, {"__name__": "shop.tasks", "app": one})
    assert one.tasks["shop.tasks.again"]() == {1}


# -- signatures


def test_what_cannot_be_given_by_name_is_refused() -> None:
    def starred(*paths: str) -> None: ...
    def positional(path: str, /) -> None: ...
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    class Shop:
        def method(self) -> None: ...

    wrong: list[tuple[Callable[..., Any], str]] = [
        (starred, "one list, like paths: list"),
        (positional, "remove the /"),
        (generator, "is a generator"),
        (async_generator, "is a generator"),
        (Shop.method, "is a method"),
        (Shop, "is no function"),
    ]
    for fn, fix in wrong:
        with pytest.raises(InvalidTask, match=fix):
            App().task(name="wrong")(fn)


def test_annotations_are_not_evaluated() -> None:
    def odd(path: NotImported) -> Missing: ...  # type: ignore[name-defined] # noqa: F821

    task = App().task(name="odd")(odd)
    assert task.declared()["params"][0]["type"] == "NotImported"


def test_what_tells_no_parameters_is_refused() -> None:
    with pytest.raises(InvalidTask, match="write a function that calls it"):
        App().task(name="wrong")(min)


# -- binding


def test_any_name_may_be_a_parameters() -> None:
    def handler(self: int, fn: int, args: int, kwargs: int, callable: int, task: int) -> None: ...  # noqa: A002

    task = App().task(name="names")(handler)
    given = {"self": 1, "fn": 2, "args": 3, "kwargs": 4, "callable": 5, "task": 6}
    assert loads(task.call(**given).payload) == given
    assert loads(task.options(priority=1).call(**given).payload) == given
    with inline(task.app):
        assert task.delay(**given).result(0) is None


def test_arguments_are_bound_to_their_names_and_defaults_left_out() -> None:
    assert payload_of(resize, "a.jpg") == {"path": "a.jpg"}
    assert payload_of(resize, "a.jpg", 64) == {"path": "a.jpg", "width": 64}
    assert payload_of(resize, width=64, path="a.jpg", crop=True) == {
        "path": "a.jpg",
        "width": 64,
        "crop": True,
    }
    assert payload_of(named, 1, a=2, rest=3) == {"n": 1, "a": 2, "rest": 3}


def test_the_order_of_the_names_is_the_signatures() -> None:
    one = resize.call(crop=True, width=1, path="a")
    two = resize.call("a", 1, crop=True)
    assert one.payload == two.payload, "or an idempotency key would see two payloads"


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((), {}, "missing a required argument: 'path'"),
        (("a", 1, True), {}, "too many positional arguments"),
        (("a",), {"path": "b"}, "multiple values for argument 'path'"),
        (("a",), {"hight": 1}, "unexpected keyword argument 'hight'"),
    ],
)
def test_a_wrong_call_is_a_type_error_that_names_the_task(
    args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> None:
    for call in (resize.call, resize.delay, resize.options(priority=1).call):
        with pytest.raises(TypeError) as caught:
            call(*args, **kwargs)
        assert str(caught.value) == f"{resize.name}(): {caught.value.args[0].partition('(): ')[2]}"
        assert reason in str(caught.value)


def test_what_json_cannot_carry_is_refused_with_its_place() -> None:
    with pytest.raises(PayloadError) as caught:
        named.call(1, prices=[1.0, float("nan")])
    assert caught.value.path == "$.prices[1]"


def test_a_payload_has_a_limit() -> None:
    small = App(payload_max_bytes=100)
    task = small.task(name="small")(resize.fn)
    task.call("a" * 80)
    with pytest.raises(PayloadTooLarge) as caught:
        task.call("a" * 100)
    assert (caught.value.size, caught.value.limit) == (111, 100)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "missing arguments: path"),
        ({"path": "a", "hight": 1}, "unknown arguments: hight; it takes path, width, crop"),
    ],
)
def test_a_worker_checks_what_others_enqueued(arguments: dict[str, Any], reason: str) -> None:
    resize.check_arguments({"path": "a", "crop": True})
    with pytest.raises(TypeError, match=reason):
        resize.check_arguments(arguments)


def test_a_worker_takes_any_name_where_the_handler_does() -> None:
    named.check_arguments({"n": 1, "anything": 2})
    with pytest.raises(TypeError, match="missing arguments: n"):
        named.check_arguments({"anything": 2})


# -- the declaration as others see it


def test_a_declaration_is_told_as_json() -> None:
    assert resize.declared() == {
        "queue": "default",
        "priority": 5,
        "timeout_ms": None,
        "soft_timeout_ms": None,
        "max_attempts": None,
        "max_crashes": None,
        "retry": None,
        "store_result": True,
        "params": [
            {"name": "path", "required": True, "type": "str"},
            {"name": "width", "required": False, "type": "int", "default": 128},
            {"name": "crop", "required": False, "type": "bool", "default": False},
        ],
        "doc": "Makes it smaller.",
    }
    told = named.declared()
    assert (told["queue"], told["priority"], told["timeout_ms"], told["max_attempts"]) == (
        "images",
        9,
        2000,
        5,
    )
    assert told["retry"]["base_s"] == 1
    assert told["params"][1] == {"name": "rest", "required": False, "any": True}
