"""A declared task: its options, its signature, and what can be done with it besides calling it."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack

from dtq_child import payload
from dtq_child.call import NOTHING_GIVEN, CallOptions, Declared, Given, check_options, make_call
from dtq_child.errors import InvalidTask, PayloadError
from dtq_child.handle import Handle
from dtq_child.ids import new_task_id
from dtq_child.task import Call, check_task_type

if sys.version_info >= (3, 14):
    from annotationlib import Format

if TYPE_CHECKING:
    from dtq_child.app import App

P = ParamSpec("P")
R = TypeVar("R")
Parameter = inspect.Parameter

_MAIN = ("__main__", "__mp_main__")


class Task(Generic[P, R]):
    """What `@app.task` makes of a function. Calling it calls the function, here and now; `.delay()`
    enqueues it."""

    def __init__(self, app: App, fn: Callable[P, R], name: str | None, declared: Declared) -> None:
        _check_handler(fn)
        functools.update_wrapper(
            self, fn
        )  # first: it copies the function's own attributes, whatever their names
        self.app = app
        self.fn = fn
        self.name = check_task_type(name if name is not None else _default_name(fn))
        self.options_declared = declared
        self.signature = _signature(fn)
        self.is_async = inspect.iscoroutinefunction(fn)
        self._rest, self._required, self._known = _names(fn, self.signature)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def __reduce__(self) -> str:
        """Pickled by its name, as the function would be."""
        return self.fn.__qualname__

    def delay(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        """Enqueues one call. Raises TypeError if the arguments don't fit the function, EnqueueError,
        BrokerError."""
        return self.app.send(self.make_call(NOTHING_GIVEN, args, kwargs))

    async def adelay(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        """`delay()` in a thread, so that the event loop goes on."""
        return await self.app.asend(self.make_call(NOTHING_GIVEN, args, kwargs))

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call:
        """One call for `App.enqueue_many`, bound and checked, not sent."""
        return self.make_call(NOTHING_GIVEN, args, kwargs)

    def options(self, **given: Unpack[Given]) -> Bound[P, R]:
        """This task with options of the call (see `call.Given`), which win over the declaration's."""
        return Bound(self, check_options(given, time.time_ns() // 1_000_000, self.options_declared))

    def make_call(self, given: CallOptions, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        data = payload.dump_arguments(self.bind(args, kwargs), self.app.settings().payload_max_bytes)
        return make_call(self.name, new_task_id(), data, given, self.options_declared)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, in the order of the signature; defaults are left to the worker's own
        code."""
        try:
            arguments = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        if self._rest in arguments:
            arguments.update(arguments.pop(self._rest))
        return arguments

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raises TypeError if the function cannot be called with these names."""
        missing = self._required - arguments.keys()
        if missing:
            raise TypeError(f"{self.name}(): missing arguments: {', '.join(sorted(missing))}")
        unknown = () if self._rest else arguments.keys() - self._known
        if unknown:
            takes = ", ".join(self._known) or "none"
            raise TypeError(
                f"{self.name}(): unknown arguments: {', '.join(sorted(unknown))}; it takes {takes}"
            )

    def declared(self) -> dict[str, Any]:
        """The declaration as JSON carries it, for `dtq:task_types`; durations in milliseconds, None: by
        settings."""
        options = self.options_declared
        return {
            "queue": options.queue,
            "priority": options.priority,
            "timeout_ms": options.timeout_ms,
            "soft_timeout_ms": options.soft_timeout_ms,
            "max_attempts": options.max_attempts,
            "max_crashes": options.max_crashes,
            "retry": None
            if options.retry is None
            else payload.loads(options.retry.policy.to_json().encode()),
            "store_result": options.store_result,
            "params": [_described(parameter) for parameter in self.signature.parameters.values()],
            "doc": (inspect.getdoc(self.fn) or "").partition("\n")[0][:200],
        }


@dataclass(frozen=True, slots=True)
class Bound(Generic[P, R]):
    """A task with options of the call. May be used again: each use is a new task, unless `task_id` was
    given."""

    task: Task[P, R]
    given: CallOptions

    def delay(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        """As `Task.delay`."""
        return self.task.app.send(self.task.make_call(self.given, args, kwargs))

    async def adelay(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        """As `Task.adelay`."""
        return await self.task.app.asend(self.task.make_call(self.given, args, kwargs))

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call:
        """As `Task.call`."""
        return self.task.make_call(self.given, args, kwargs)


def same_source(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether `other` is the source of `one`, loaded again (importlib.reload, a module under a second
    name). A function made twice by a loop or a factory has one and the same code object, and is not."""
    code, again = getattr(one, "__code__", None), getattr(other, "__code__", None)
    return (
        code is not None
        and again is not None
        and code is not again
        and (code.co_filename, code.co_firstlineno, code.co_qualname)
        == (again.co_filename, again.co_firstlineno, again.co_qualname)
    )


def place_of(fn: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{fn.__module__}.{fn.__qualname__}{where}"


def _check_handler(fn: Callable[..., Any]) -> None:
    if isinstance(fn, type) or not callable(fn) or not hasattr(fn, "__qualname__"):
        raise InvalidTask(f"{fn!r} is no function: write one with def that calls it, and decorate that")
    plain = inspect.unwrap(fn)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise InvalidTask(
            f"{place_of(fn)} is a generator: calling it would run nothing; "
            "do the work in a plain loop and return a list"
        )


def _default_name(fn: Callable[..., Any]) -> str:
    if fn.__module__ in _MAIN:
        raise InvalidTask(
            f"{fn.__qualname__} is defined in __main__, which is another module in a worker: "
            f'move it to a module of its own, or name it, like @app.task(name="shop.{fn.__name__}")'
        )
    if "<" in fn.__qualname__:
        raise InvalidTask(
            f"{place_of(fn)} is defined inside a function, so its name says not which one it is: "
            'name it, like @app.task(name="shop.resize")'
        )
    return f"{fn.__module__}.{fn.__qualname__}"


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Annotations stay unread: they may name what is only imported for type checkers."""
    try:
        if sys.version_info >= (3, 14):
            return inspect.signature(fn, annotation_format=Format.STRING)
        return inspect.signature(fn)
    except ValueError as error:
        raise InvalidTask(
            f"{fn!r} tells nothing of its parameters: write a function that calls it"
        ) from error


def _names(
    fn: Callable[..., Any], signature: inspect.Signature
) -> tuple[str, frozenset[str], tuple[str, ...]]:
    """The name of **kwargs or "", the names needed, all names. Refuses what cannot be given by name."""
    rest, required, known = "", set(), []
    for name, parameter in signature.parameters.items():
        match parameter.kind:
            case Parameter.VAR_KEYWORD:
                rest = name
            case Parameter.VAR_POSITIONAL:
                raise InvalidTask(
                    f"{place_of(fn)}: *{name} has no names for its values, and a payload is an object of "
                    f"named arguments: take one list, like {name}: list"
                )
            case Parameter.POSITIONAL_ONLY:
                raise InvalidTask(
                    f"{place_of(fn)}: {name} is positional-only, and a payload is an object of named "
                    "arguments: remove the / from the signature"
                )
            case _:
                known.append(name)
                if parameter.default is Parameter.empty:
                    required.add(name)
    owner = fn.__qualname__.rpartition(".")[0]
    if known[:1] in (["self"], ["cls"]) and owner and not owner.endswith("<locals>"):
        raise InvalidTask(
            f"{place_of(fn)} is a method, and a worker has no {known[0]} for it: use a function of the module"
        )
    return rest, frozenset(required), tuple(known)


def _described(parameter: inspect.Parameter) -> dict[str, Any]:
    described: dict[str, Any] = {"name": parameter.name, "required": parameter.default is Parameter.empty}
    if parameter.kind is Parameter.VAR_KEYWORD:
        return {"name": parameter.name, "required": False, "any": True}
    if parameter.annotation is not Parameter.empty:
        said = parameter.annotation
        described["type"] = (said if isinstance(said, str) else inspect.formatannotation(said))[:100]
    if parameter.default is not Parameter.empty:
        try:
            described["default"] = payload.loads(payload.dumps(parameter.default))
        except PayloadError:
            # The default is the worker's own; here it is only shown.
            described["default_text"] = type(parameter.default).__name__
    return described
