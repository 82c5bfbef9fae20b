"""The App: the registry of an application's tasks, and its door to Redis (DESIGN §9)."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from dtq_child import discovery, hooks, payload
from dtq_child.app_settings import AppSettings
from dtq_child.call import UNDECLARED, Given, check_declared, check_options, make_call
from dtq_child.declaration import Task, place_of, same_source
from dtq_child.discovery import Discovery
from dtq_child.errors import EnqueueManyError, InvalidTask
from dtq_child.handle import Handle
from dtq_child.hooks import Hooks
from dtq_child.ids import new_task_id
from dtq_child.off_loop import in_thread
from dtq_child.refusal import describe
from dtq_child.retry import Backoff
from dtq_child.settings import Settings
from dtq_child.task import Call, Record, check_task_id, check_task_type
from dtq_child.times import Seconds

P = ParamSpec("P")
R = TypeVar("R")
ChildHook = TypeVar("ChildHook", bound=hooks.ChildHook)
StartHook = TypeVar("StartHook", bound=hooks.TaskStartHook)
EndHook = TypeVar("EndHook", bound=hooks.TaskEndHook)

BATCH, BATCH_MAX = 200, 500
BATCH_BYTES = 4 * 1024 * 1024
"""Payload bytes that end a batch early: Redis serves nobody else while it takes one in."""


class TaskBroker(Protocol):
    """What an App needs of `broker.Broker`; `testing` has another one."""

    def enqueue(self, calls: Sequence[Call], /) -> Sequence[Accepted]: ...
    def record(self, task_id: str, /) -> Record | None: ...
    def status(self, task_id: str, /) -> str: ...
    def result(self, task_id: str, /) -> bytes | None: ...
    def cancel(self, task_id: str, /) -> str: ...


class Accepted(Protocol):
    """What a broker answers for one call."""

    @property
    def task_id(self) -> str: ...
    @property
    def deduplicated(self) -> bool: ...


class App:
    """The tasks of an application and the way to enqueue them. Connects at first use, once per process.

    `include`: modules that declare tasks, imported by workers. `redis_url`, `key_prefix` and the overrides
    are settings that producers read, under their names in lower case; given here they win over the
    environment (`DTQ_…`). In a worker the supervisor's settings win over both. Raises BadConfiguration."""

    def __init__(
        self,
        include: Iterable[str] = (),
        redis_url: str | None = None,
        key_prefix: str | None = None,
        **overrides: Any,
    ) -> None:
        self._arguments = AppSettings(redis_url, key_prefix, overrides)
        self.include = (include,) if isinstance(include, str) else tuple(include)
        self.tasks: dict[str, Task[..., Any]] = {}
        self.hooks = Hooks()
        self._discoveries: list[Discovery] = []
        self._settings: Settings | None = None
        self._made: dict[str, TaskBroker] = {}

    # Declaring ----------------------------------------------------------------------------------------------

    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = ...,
        queue: str = ...,
        priority: int = ...,
        timeout: Seconds | None = ...,
        soft_timeout: Seconds | None = ...,
        max_attempts: int | None = ...,
        max_crashes: int | None = ...,
        retry: Backoff | None = ...,
        store_result: bool = ...,
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def task(
        self,
        fn: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = UNDECLARED.queue,
        priority: int = UNDECLARED.priority,
        timeout: Seconds | None = None,
        soft_timeout: Seconds | None = None,
        max_attempts: int | None = None,
        max_crashes: int | None = None,
        retry: Backoff | None = None,
        store_result: bool = True,
    ) -> Any:
        """Declares a function as a task: `@app.task` or `@app.task(queue="images", …)`. Times are seconds
        or timedeltas; None leaves a value to the worker's settings. The name is `<module>.<function>`
        unless given. Raises InvalidTask for an option, a signature or a name that cannot work."""
        declared = check_declared(
            queue=queue,
            priority=priority,
            timeout=timeout,
            soft_timeout=soft_timeout,
            max_attempts=max_attempts,
            max_crashes=max_crashes,
            retry=retry,
            store_result=store_result,
        )

        def declare(function: Callable[..., Any]) -> Task[..., Any]:
            return self._register(Task(self, function, name, declared))

        return declare if fn is None else declare(fn)

    def _register(self, task: Task[..., Any]) -> Task[..., Any]:
        known = self.tasks.get(task.name)
        if known is not None and not same_source(known.fn, task.fn):
            raise InvalidTask(
                f"task type {task.name!r} is declared twice: {place_of(known.fn)} and {place_of(task.fn)}; "
                "rename one, or give it a name=…"
            )
        self.tasks[task.name] = task
        return task

    def find(self, task_type: str) -> Task[..., Any] | None:
        return self.tasks.get(task_type)

    def on_child_start(self, hook: ChildHook) -> ChildHook:
        """`hook()` runs in each child before its first task."""
        self.hooks.child_start.append(hooks.checked(hook))
        return hook

    def on_child_stop(self, hook: ChildHook) -> ChildHook:
        """`hook()` runs in each child that ends by itself, after its last task."""
        self.hooks.child_stop.append(hooks.checked(hook))
        return hook

    def on_task_start(self, hook: StartHook) -> StartHook:
        """`hook(current_task)` runs before each handler, inside the task's deadline."""
        self.hooks.task_start.append(hooks.checked(hook))
        return hook

    def on_task_end(self, hook: EndHook) -> EndHook:
        """`hook(current_task, error)` runs after each handler; `error`: what it raised, or None."""
        self.hooks.task_end.append(hooks.checked(hook))
        return hook

    # Importing ----------------------------------------------------------------------------------------------

    def autodiscover(self, packages: Iterable[str] | None = None, related_name: str = "tasks") -> None:
        """Workers import `<package>.tasks` of each package that has one; without packages, of Django's
        installed apps. Nothing is imported now: Django's apps may be in the middle of loading."""
        named = None if packages is None else tuple(packages)
        self._discoveries.append(Discovery(named, related_name))

    def load_includes(self) -> None:
        """Imports what `include` and `autodiscover` name. What an import raises is not caught."""
        discovery.load(self.include)
        for found in self._discoveries:
            found.load()

    # Settings -----------------------------------------------------------------------------------------------

    def settings(self) -> Settings:
        """The settings in force, read at first use. Raises BadConfiguration."""
        if self._settings is None:
            self._settings = self._arguments.load(os.environ)
        return self._settings

    def configure(self, settings: Settings) -> None:
        """Makes `settings` the ones in force; the next use connects anew. Workers call it with the
        supervisor's."""
        self.swap(settings, None)

    def conflicts(self, settings: Settings) -> list[str]:
        """One line for each place where the App names other data than `settings`: its tasks would be enqueued
        where no worker looks."""
        return self._arguments.conflicts(settings)

    @property
    def broker(self) -> TaskBroker:
        """Made at first use; it connects by itself, once per process, whatever threads and forks there
        are."""
        broker = self._made.get("broker")
        if broker is None:
            # Not a lock, which a fork could copy while it is held: making one has no effect on the outside,
            # so two threads may make one each, and both use the first that was put here.
            broker = self._made.setdefault("broker", connect(self.settings()))
        return broker

    def swap(
        self, settings: Settings | None, broker: TaskBroker | None
    ) -> tuple[Settings | None, TaskBroker | None]:
        """Puts others in place and returns what was there. None: to be made at the next use, as at first."""
        was = self._settings, self._made.get("broker")
        self._settings, self._made = settings, {} if broker is None else {"broker": broker}
        return was

    # Enqueueing ---------------------------------------------------------------------------------------------

    def enqueue(
        self, task_type: str, arguments: Mapping[str, Any] | None = None, **given: Unpack[Given]
    ) -> Handle:
        """Enqueues by name, with options as `Task.options` takes them. A type that is declared here is
        bound to its signature and declaration; of any other, queue and priority are as given, else
        `default` and 5. Raises TypeError, EnqueueError, BrokerError."""
        return self.send(self.call(task_type, arguments, **given))

    async def aenqueue(
        self, task_type: str, arguments: Mapping[str, Any] | None = None, **given: Unpack[Given]
    ) -> Handle:
        """`enqueue()` in a thread, so that the event loop goes on."""
        return await self.asend(self.call(task_type, arguments, **given))

    def call(
        self, task_type: str, arguments: Mapping[str, Any] | None = None, **given: Unpack[Given]
    ) -> Call:
        """One call by name, for `enqueue_many`."""
        named = {} if arguments is None else arguments
        task = self.tasks.get(check_task_type(task_type))
        declared = UNDECLARED if task is None else task.options_declared
        options = check_options(given, time.time_ns() // 1_000_000, declared)
        if task is not None and isinstance(named, Mapping):
            named = task.bind((), named)
        data = payload.dump_arguments(named, self.settings().payload_max_bytes)
        return make_call(task_type, new_task_id(), data, options, declared)

    def enqueue_many(self, calls: Iterable[Call], batch: int = BATCH) -> list[Handle]:
        """Enqueues calls made by `.call(…)`, `batch` (at most 500) a round trip, each batch whole or not at
        all.

        Raises EnqueueManyError, also when `calls` itself fails: it carries the handles accepted before. If
        its cause is BrokerUnavailable the batch may have been accepted; sending the same Call objects again
        is safe. Raises TypeError for what is no Call, if nothing has been accepted yet."""
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= BATCH_MAX:
            raise InvalidTask(f"batch {batch!r}: a whole number from 1 to {BATCH_MAX} is needed")
        handles: list[Handle] = []
        try:
            for some in _batches(calls, batch):
                handles += self._accepted(self.broker.enqueue(some))
        except Exception as error:
            if isinstance(error, NoCall) and not handles:
                raise
            raise EnqueueManyError(handles, error) from error
        return handles

    async def aenqueue_many(self, calls: Iterable[Call], batch: int = BATCH) -> list[Handle]:
        """`enqueue_many()` in a thread; `calls` is iterated there, too."""
        return await in_thread(self.enqueue_many, calls, batch)

    def send(self, call: Call) -> Handle:
        """Enqueues one call made by `.call(…)`; sending it again is safe."""
        return self._accepted(self.broker.enqueue([call]))[0]

    async def asend(self, call: Call) -> Handle:
        return await in_thread(self.send, call)

    def handle(self, task_id: str) -> Handle:
        """The handle of a task by its id. Raises InvalidTask for what is no id."""
        return Handle(self, check_task_id(task_id))

    def _accepted(self, accepted: Sequence[Accepted]) -> list[Handle]:
        return [Handle(self, one.task_id, one.deduplicated) for one in accepted]


def connect(settings: Settings) -> TaskBroker:
    """The broker of a process. Imported here, because redis takes 200 ms to import, more than all the rest,
    and a process that only declares tasks needs none."""
    module = importlib.import_module("dtq_child.broker")
    return cast(TaskBroker, module.Broker(settings))


class NoCall(TypeError):
    """Something else among the calls to be enqueued."""


def _batches(calls: Iterable[Call], count: int) -> Iterator[list[Call]]:
    """Lists of at most `count` calls and, but for single ones, BATCH_BYTES of payload."""
    batch: list[Call] = []
    size = 0
    for call in calls:
        if not isinstance(call, Call):
            raise NoCall(f"{describe(call)} is no Call: make one by task.call(…) or app.call(…)")
        if batch and (len(batch) == count or size + len(call.payload) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(call)
        size += len(call.payload)
    if batch:
        yield batch
